"""``meshwright doctor``: this installation is complete, and what is taken away is found with a remedy."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from runtime.commands import doctor
from runtime.commands.doctor import State


def found_by(check):
    return {finding.name: finding for finding in check()}


@pytest.fixture
def required(monkeypatch):
    def give(*requirements, extras=()):
        monkeypatch.setattr(doctor, "requires", lambda name: list(requirements))
        monkeypatch.setattr(doctor, "_extras", lambda: tuple(extras))
        return found_by(doctor.packages)

    return give


def test_this_installation_has_what_is_needed(meshwright):
    outcome = meshwright("doctor", "--json")
    assert outcome.code == 0, outcome.out
    findings = {finding["name"]: finding for finding in json.loads(outcome.out)}
    for package in ("torch", "highspy", "ortools", "pyomo"):
        assert (findings[package]["state"], findings[package]["found"]) == ("ok", version(package))
    assert {findings[f"{package} loads"]["state"] for package in ("torch", "highspy", "ortools", "pyomo")} == {"ok"}
    assert {"processor", "memory", "gpu", "compiler", "calibration", "network namespaces"} <= findings.keys()
    assert all(finding["state"] == "ok" or finding["remedy"] for finding in findings.values())


def test_a_table_without_json_and_a_code_that_tells(meshwright, monkeypatch):
    missing = doctor.Finding("torch", State.MISSING, "not installed", "pip install torch")
    monkeypatch.setattr(doctor, "examine", lambda: iter([missing]))
    outcome = meshwright("doctor")
    assert outcome.code == 1
    assert "pip install torch" in outcome.out
    monkeypatch.setattr(doctor, "examine", lambda: iter([doctor.Finding("gpu", State.OPTIONAL, "none", "buy one")]))
    assert meshwright("doctor").code == 0


def test_no_path_is_wrapped(meshwright, monkeypatch):
    path = "/a/folder/with/a/name" * 8
    long = doctor.Finding("calibration", State.OPTIONAL, f"{path}: no such file", f"meshwright calibrate --out {path}")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(doctor, "examine", lambda: iter([long]))
    assert meshwright("doctor").out.splitlines() == [
        f"optional  calibration  {path}: no such file",
        f"                       to get it: meshwright calibrate --out {path}",
    ]


def test_absent_and_old_packages(required):
    found = required("no-such-package>=2", "numpy>=999", "torch")
    assert found["no-such-package"].state is State.MISSING
    assert found["no-such-package"].remedy == "pip install 'no-such-package>=2'"
    assert found["numpy"].state is State.MISSING
    assert found["numpy"].found == f"{version('numpy')} is not >=999"
    assert found["torch"].state is State.OK


def test_extras_are_optional_and_other_systems_do_not_count(required):
    found = required(
        'no-such-package; extra == "view"', 'numpy; extra == "dev"', 'winlib; sys_platform == "win32"',
        extras=("view", "dev"),
    )  # fmt: skip
    assert set(found) == {"extra view", "extra dev"}
    assert found["extra view"].state is State.OPTIONAL
    assert found["extra view"].found == "without no-such-package"
    assert found["extra view"].remedy == "pip install 'meshwright[view]'"
    assert found["extra dev"].state is State.OK


def test_a_solver_that_does_not_load(monkeypatch):
    monkeypatch.setattr(doctor, "SOLVER_MODULES", {"pyomo": "pyomo.no_such_module"})
    found = found_by(doctor.solvers)["pyomo loads"]
    assert found.state is State.MISSING
    assert "no_such_module" in found.found


def test_the_calibration_of_gpus_is_named_where_there_are_some(monkeypatch, tmp_path):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "gpu", lambda: doctor.Finding("gpu", doctor.State.OPTIONAL, "none", "none"))
    assert list(doctor.gpu_calibration()) == []
    monkeypatch.setattr(doctor, "gpu", lambda: doctor.Finding("gpu", doctor.State.OK, "a GPU"))
    (found,) = doctor.gpu_calibration()
    assert (found.name, found.state) == ("calibration of GPUs", doctor.State.OPTIONAL)
    assert found.remedy == "meshwright calibrate --device cuda"


def test_a_machine_without_compiler_calibration_and_tools(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    for check, words in (
        (doctor.compiler, "g++"),
        (doctor.calibration, "meshwright calibrate"),
        (doctor.network_namespaces, "two hosts"),
    ):
        assert check().state is State.OPTIONAL
        assert words in check().remedy
    compiler = tmp_path / "my-compiler"
    compiler.write_text("#!/bin/sh\necho mine 1.2\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert doctor.compiler().found.startswith("mine 1.2")
