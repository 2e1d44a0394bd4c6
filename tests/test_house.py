"""The rules of the house, so that a change that breaks one is told by name."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("formulations", "planner", "runtime")
TOP_LEVEL = {*FLOORS, "notebooks", "tests", ".ci"}
LONGEST_FILE = 500
# Without networkx, which torch itself needs.
NOT_FOR_EXECUTION = (
    "highspy", "ortools", "pyomo", "scipy", "numba", "transformers", "typer", "rich", "matplotlib", "pandas",
)  # fmt: skip
EXECUTION_ROOMS = ("planner.graph", "planner.plan", "planner.replay", "planner.schedule", "planner.torch_adapter")
"""Rooms of ``planner`` that a rank imports; of ``runtime`` it is all but the commands."""
MOST_FILES = 18
NEEDS_A_GUIDE = 5
"""Files of a room up to which its names alone are guide enough."""
MOST_README_BYTES = 8_192
MOST_GUIDE_LINES = {"formulations/solvers/README.md": 125}
MOST_LINES_OF_A_GUIDE = 60
WHOLLY_SLOW = {
    "test_planning.py": "timings of planning, for `make bench` alone",
    "test_overhead.py": "timings of the library's steps, for `make bench` alone",
}
"""Files of tests of which `make test` runs none, and why."""


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"


def attribute_names(path: Path) -> Iterator[tuple[int, str]]:
    """Dotted names in the code, with what the file calls a module by put back to the module's own name."""
    tree = tree_of(path)
    aliases = {a.asname: a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names if a.asname} | {
        a.asname or a.name: f"{n.module}.{a.name}"
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module
        for a in n.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            yield node.lineno, f"{aliases.get(first, first)}.{rest}"


def is_private(name: str) -> bool:
    return is_under(name, "torch") and any(p.startswith("_") and not p.startswith("__") for p in name.split("."))


def is_under(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def in_a_new_process(code: str) -> str:
    finished = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_imports_run_downwards() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for floor, package in enumerate(FLOORS)
        for path in sources(package)
        for line, name in imported_names(path)
        if is_under(name, *FLOORS[floor + 1 :])
    ]
    assert wrong == []


def test_the_mathematics_never_imports_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources("formulations")
        for line, name in imported_names(path)
        if is_under(name, "torch", "transformers")
    ]
    assert wrong == []


def test_private_torch_is_touched_in_the_adapter_only() -> None:
    adapter = ROOT / "planner" / "torch_adapter"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} uses {name}"
        for path in sources("planner", "runtime", "notebooks")
        if adapter not in path.parents
        for line, name in (*imported_names(path), *attribute_names(path))
        if is_private(name)
    ]
    assert wrong == []


def test_methods_for_huge_tables_are_entered_through_the_registry() -> None:
    """It names them as text, so that nothing else needs to know the room."""
    room = "formulations.solvers.huge_tables"
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(*FLOORS)
        if path.parent != ROOT / room.replace(".", "/")
        for line, name in imported_names(path)
        if is_under(name, room)
    ]
    assert wrong == []


def test_solver_libraries_are_imported_where_they_are_used() -> None:
    """At the top of a module, highspy or ortools would reach a process that has the other already."""
    wrong = []
    for path in sources(*FLOORS):
        for node in tree_of(path).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                wrong += [f"{path.relative_to(ROOT)}: {n}" for n in names if is_under(n, "highspy", "ortools", "pyomo")]
    assert wrong == []


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(*FLOORS, "tests")}
    assert [f"{path.relative_to(ROOT)}: {count}" for path, count in lengths.items() if count > LONGEST_FILE] == []


def test_tests_are_no_packages_and_have_names_of_their_own() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_make_test_runs_some_of_every_file(fast_tests: dict[Path, int]) -> None:
    """A whole run collects every file; where one file is run, it is judged alone."""
    assert [path.name for path, count in fast_tests.items() if not count and path.name not in WHOLLY_SLOW] == []
    assert [path.name for path, count in fast_tests.items() if count and path.name in WHOLLY_SLOW] == []


def test_top_level_folders_are_the_agreed_ones() -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        folders = {line.split("/", 1)[0] for line in listed.stdout.splitlines() if "/" in line}
    else:  # an unpacked sdist has no git, and no ignored folders either
        folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    assert folders <= TOP_LEVEL


@pytest.mark.parametrize("package", FLOORS)
def test_packages_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").exists()


def modules_below(*packages: str) -> list[str]:
    paths = [path.relative_to(ROOT) for package in packages for path in sources(package.replace(".", "/"))]
    return [".".join(path.with_suffix("").parts) for path in paths if path.stem != "__init__"]


def test_execution_needs_torch_numpy_and_pydantic_alone() -> None:
    planning = ("runtime.commands", "runtime.prediction")
    running = [name for name in modules_below("runtime") if not any(is_under(name, room) for room in planning)]
    in_a_new_process(f"""
import importlib, sys
# None makes every import fail and lets torch find out that an optional package is absent.
sys.modules.update(dict.fromkeys({NOT_FOR_EXECUTION!r}))
for module in {[*modules_below(*EXECUTION_ROOMS), *running]!r}:
    importlib.import_module(module)
""")


def rooms() -> dict[str, list[Path]]:
    """Folders with code, as dotted names, and their files."""
    found: dict[str, list[Path]] = {}
    for path in sources(*FLOORS):
        if path.stem != "__init__":
            found.setdefault(".".join(path.parent.relative_to(ROOT).parts), []).append(path)
    return found


def test_rooms_are_small() -> None:
    tests = {str(path.parent.relative_to(ROOT)): len(list(path.parent.glob("*.py"))) for path in sources("tests")}
    counts = {room: len(files) for room, files in rooms().items()} | tests
    assert {room: count for room, count in counts.items() if count > MOST_FILES} == {}


def test_rooms_have_guides() -> None:
    missing = [
        room
        for room, files in rooms().items()
        if len(files) > NEEDS_A_GUIDE and not (ROOT / room.replace(".", "/") / "README.md").exists()
    ]
    assert missing == []


def guides() -> list[Path]:
    """The pages of the project: one per larger room, results, and those at the top."""
    return sorted(path for folder in FLOORS for path in (ROOT / folder).rglob("*.md")) + sorted(ROOT.glob("*.md"))


def test_guides_are_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= MOST_README_BYTES
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in guides()
        if path.name == "README.md" and path.parent != ROOT
    }
    too_long = {
        name: count for name, count in lengths.items() if count > MOST_GUIDE_LINES.get(name, MOST_LINES_OF_A_GUIDE)
    }
    assert too_long == {}


def mentioned_paths(text: str) -> Iterator[str]:
    """Relative paths of files and folders in backticks, outside of blocks of code."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for quoted in re.findall(r"`([^`\n]+)`", prose):
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", quoted) and ("/" in quoted or quoted.endswith(".py")):
            yield quoted


def test_guides_mention_what_exists() -> None:
    missing = [
        f"{guide.relative_to(ROOT)}: {path}"
        for guide in guides()
        for path in mentioned_paths(guide.read_text(encoding="utf-8"))
        if not (guide.parent / path).exists() and not (ROOT / path).exists()
    ]
    assert missing == []


def test_files_do_not_repeat_the_name_of_their_room() -> None:
    repeating = []
    for room, files in rooms().items():
        name = room.rpartition(".")[2]
        prefixes = (f"{name}_", f"{name.removesuffix('s')}_")
        repeating += [str(path.relative_to(ROOT)) for path in files if path.stem.startswith(prefixes)]
    assert repeating == []


def test_imports_between_rooms_have_no_circle() -> None:
    """Imports inside functions and those of type checkers count as well."""
    modules = set(modules_below(*FLOORS))
    graph: nx.DiGraph[str] = nx.DiGraph()
    for room, files in rooms().items():
        for path in files:
            for _, name in imported_names(path):
                module = name if name in modules else name.rpartition(".")[0]
                if module in modules and module.rpartition(".")[0] != room:
                    graph.add_edge(room, module.rpartition(".")[0])
    assert graph.number_of_edges() > 100
    assert [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1] == []


def test_help_imports_neither_torch_nor_solvers() -> None:
    heavy = ("torch", "numpy", "highspy", "ortools", "pyomo", "networkx", "numba", "transformers", "pydantic")
    loaded = json.loads(
        in_a_new_process(f"""
import contextlib, io, json, sys
from runtime.commands.main import main
text = io.StringIO()
with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
    main(["--help"])
assert "calibrate" in text.getvalue()
print(json.dumps([name for name in {heavy!r} if name in sys.modules]))
""")
    )
    assert loaded == []
