"""The command ``export``: a plan as code of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from runtime.commands.options import AllowCode, JsonFile, PlanFile
from runtime.commands.values import OptionError, readable_file, writable_file, write_json

ENGINES = ("torch", "torchtitan")


def export(
    plan_file: PlanFile,
    out: Annotated[Path, typer.Option(metavar="FILE.py", help="Python file to write.", show_default=False)],
    to: Annotated[
        str,
        typer.Option(
            metavar="torch|torchtitan",
            help="torch: FSDP2, tensor parallelism and checkpoints, with a training loop; torchtitan: a job of its.",
        ),
    ] = "torch",
    flavor: Annotated[
        str | None,
        typer.Option(help="Model of torchtitan's llama3, where none has the plan's sizes.", show_default=False),
    ] = None,
    allow_code: AllowCode = False,
    json_file: JsonFile = None,
) -> None:
    """Write a plan of layers as Python code that runs without meshwright; what has no words there is named."""
    if to not in ENGINES:
        raise OptionError(f"--to: {to!r} is unknown; choose {' or '.join(ENGINES)}")
    if flavor is not None and to != "torchtitan":
        raise OptionError(f"--flavor: {flavor} is torchtitan's; add --to torchtitan or leave it out")
    if out.suffix != ".py" or not out.stem.isidentifier():
        raise OptionError(f"--out: {out.name!r} cannot be imported; name a Python file, such as parallel.py")
    readable_file(plan_file, "PLAN")
    writable_file(out, "--out")

    from formulations.problem.files import write_text_atomically
    from runtime.export.plans import exported

    found = exported(plan_file, "torch" if to == "torch" else "torchtitan", out.name, flavor, allow_code)
    write_text_atomically(out, found.text)
    typer.echo(f"wrote {out}")
    for words in found.left_out:
        typer.echo(f"note: not in it: {words}", err=True)
    write_json(json_file, {"out": str(out), "engine": to, "left_out": list(found.left_out)})
