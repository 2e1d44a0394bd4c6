from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.common.units import UNITS
from runtime.commands.values import (
    OptionError,
    parse_bytes,
    parse_mesh,
    readable_file,
    writable_file,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GiB", 4 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("1.5GB", 1_500_000_000),
        ("0.1KiB", 102),
        (" 7 b ", 7),
        ("1tib", 1024**4),
        ("123456789", 123_456_789),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--memory") == expected


@pytest.mark.parametrize("text", ["", "GiB", "4G", "-1GiB", "4 gigabytes", "1e9", "nan", "0", "0.1B", "1,5GB", "٣GiB"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(OptionError, match="--memory") as raised:
        parse_bytes(text, "--memory")
    assert repr(text) in str(raised.value)


@given(st.integers(1, 10**6), st.sampled_from(sorted(UNITS)))
def test_whole_numbers_of_a_unit_are_exact(count: int, unit: str) -> None:
    assert parse_bytes(f"{count}{unit}", "--memory") == count * UNITS[unit]


@pytest.mark.parametrize(("text", "expected"), [("2", (2,)), ("2x4", (2, 4)), ("10x1x3", (10, 1, 3))])
def test_meshes(text: str, expected: tuple[int, ...]) -> None:
    assert parse_mesh(text, "--mesh") == expected


@pytest.mark.parametrize("text", ["", "x", "2x", "0x2", "2*4", "2X4", "-2", "2x4.0", "two"])
def test_what_is_no_mesh_is_refused_by_name(text: str) -> None:
    with pytest.raises(OptionError, match="--mesh"):
        parse_mesh(text, "--mesh")


def test_a_folder_that_takes_no_files_is_refused() -> None:
    with pytest.raises(OptionError, match=r"--out: no file can be written in the folder '/proc'"):
        writable_file(Path("/proc/solution.json"), "--out")


def test_files(tmp_path: Path) -> None:
    existing = tmp_path / "plan.json"
    existing.write_text("{}")
    assert readable_file(existing, "PLAN") == existing
    assert writable_file(tmp_path / "new.json", "--out") == tmp_path / "new.json"
    for path in (tmp_path, tmp_path / "absent.json"):
        with pytest.raises(OptionError, match="PLAN: there is no file"):
            readable_file(path, "PLAN")
    with pytest.raises(OptionError, match="is a folder"):
        writable_file(tmp_path, "--out")
    with pytest.raises(OptionError, match="does not exist; create it"):
        writable_file(tmp_path / "absent" / "plan.json", "--out")
