"""The command ``view``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.commands.progress import progress_line
from runtime.commands.values import OptionError, readable_file, writable_file

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
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Write one HTML page about a plan, or about two side by side, and open it."""
    if len(plan_files) > 2:
        raise OptionError(f"PLAN: {len(plan_files)} plans are given; a page shows one or two side by side")
    for path in plan_files:
        readable_file(path, "PLAN")
    page_file = writable_file(out or Path(plan_files[0].with_suffix(".html").name), "--out")

    from formulations.problem.files import write_text_atomically
    from planner.view.page import page

    with progress_line(f"tracing the step of {' and '.join(path.name for path in plan_files)}"):
        opened = _opened(plan_files, cluster)
        text = page(opened)
    write_text_atomically(page_file, text)
    typer.echo(f"wrote {page_file}")
    if open_page:
        import webbrowser

        webbrowser.open(page_file.absolute().as_uri())


def _opened(plan_files: list[Path], cluster: str | None) -> list[OpenedPlan | tuple[str, LayerPlan]]:
    from planner import api
    from planner.layers.plan.document import LayerPlan
    from planner.view.opened import open_plan

    opened: list[OpenedPlan | tuple[str, LayerPlan]] = []
    session = None
    for path in plan_files:
        made = api.load(path)
        if isinstance(made, LayerPlan):
            opened.append((path.name, made))
            continue
        found = open_plan(path.name, made, cluster, session)
        session = found.session
        opened.append(found)
    return opened
