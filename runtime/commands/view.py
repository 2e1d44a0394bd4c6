"""The command ``view``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.commands.options import AllowCode, JsonFile
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import OptionError, readable_file, writable_file, write_json

if TYPE_CHECKING:
    from planner.layers.plan.document import LayerPlan
    from planner.view.opened import OpenedPlan

Paths = Annotated[list[Path], typer.Argument(metavar="PLAN [OTHER]", help="Plan files.", show_default=False)]


def view(
    plan_files: Paths,
    out: Annotated[
        Path | None, typer.Option(help="HTML file to write.", show_default="the name of PLAN with .html, here")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Cluster of the plans, where its name does not find it.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Chrome trace of the predicted schedule to write, for Perfetto.", show_default=False),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="Chrome trace, such as torch.profiler's, to put beside that of --trace.", show_default=False),
    ] = None,
    memory_snapshot: Annotated[
        Path | None,
        typer.Option(help="Pickle of the predicted memory to write, for pytorch.org/memory_viz.", show_default=False),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
    allow_code: AllowCode = False,
    json_file: JsonFile = None,
) -> None:
    """Write one HTML page about a plan, or about two side by side, and open it."""
    if len(plan_files) > 2:
        raise OptionError(f"PLAN: {len(plan_files)} plans are given; a page shows one or two side by side")
    for path in plan_files:
        readable_file(path, "PLAN")
    page_file = writable_file(out or Path(plan_files[0].with_suffix(".html").name), "--out")
    exports = Exports(trace, measured, memory_snapshot)
    exports.check(len(plan_files))

    from formulations.problem.files import write_text_atomically
    from planner.view.page import check_libraries, page

    check_libraries()
    with progress_line(f"tracing the step of {' and '.join(path.name for path in plan_files)}"):
        opened = _opened(plan_files, cluster, allow_code)
        text = page(opened)
        written = exports.write(opened[0])
    write_text_atomically(page_file, text)
    for path in (*written, page_file):
        typer.echo(f"wrote {path}")
    files = {"out": page_file, "trace": trace, "memory_snapshot": memory_snapshot}
    write_json(json_file, {name: None if path is None else str(path) for name, path in files.items()})
    if open_page:
        import webbrowser

        webbrowser.open(page_file.absolute().as_uri())


@dataclass(frozen=True, slots=True)
class Exports:
    """Files of other tools to write about the plan, and a measured trace to put beside its own."""

    trace: Path | None
    measured: Path | None
    memory_snapshot: Path | None

    def check(self, plans: int) -> None:
        """Check the files before anything is computed.

        Raises
        ------
        OptionError
            A file cannot be written or read, or there are two plans.
        """
        options = {"--trace": self.trace, "--memory-snapshot": self.memory_snapshot}
        for option, path in options.items():
            if path is not None:
                writable_file(path, option)
                if plans > 1:
                    raise OptionError(f"{option}: it is about one plan; leave the other plan out")
        if self.measured is not None:
            readable_file(self.measured, "--measured")
            if self.trace is None:
                raise OptionError("--measured: it is put beside the predicted schedule; give --trace as well")

    def write(self, opened: OpenedPlan | tuple[str, LayerPlan]) -> list[Path]:
        """Write the files and return their paths."""
        wanted = [path for path in (self.trace, self.memory_snapshot) if path is not None]
        if not wanted:
            return []
        from formulations.problem.files import write_bytes_atomically, write_text_atomically
        from planner.view.snapshot import snapshot_bytes
        from planner.view.trace import chrome_trace, predicted_events, read_trace, trace_beside

        if isinstance(opened, tuple):
            option = "--memory-snapshot" if self.trace is None else "--trace"
            raise OptionError(f"{option}: {opened[0]} is a plan of layers, which has no instructions; leave it out")
        step = opened.graph, opened.schedule, opened.time
        if self.trace is not None:
            made = chrome_trace(predicted_events(*step))
            if self.measured is not None:
                made = trace_beside(*step, read_trace(self.measured))
            write_text_atomically(self.trace, json.dumps(made) + "\n")
        if self.memory_snapshot is not None:
            write_bytes_atomically(self.memory_snapshot, snapshot_bytes(opened))
        return wanted


def _opened(plan_files: list[Path], cluster: str | None, allow_code: bool) -> list[OpenedPlan | tuple[str, LayerPlan]]:
    from planner import api
    from planner.layers.plan.document import LayerPlan
    from planner.models.references import check_code
    from planner.view.opened import open_plan

    opened: list[OpenedPlan | tuple[str, LayerPlan]] = []
    session = None
    for path in plan_files:
        made = api.load(path)
        if isinstance(made, LayerPlan):
            opened.append((path.name, made))
            continue
        check_code(made.decision.model.source, allow_code)
        found = open_plan(path.name, made, cluster, session)
        session = found.session
        opened.append(found)
    return opened
