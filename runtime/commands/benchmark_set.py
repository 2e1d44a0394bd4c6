"""The command ``bench export``: training steps of real models, and problem files, in the formats of solvers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from runtime.commands.bench import INTERRUPTED
from runtime.commands.options import JsonFile
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import OptionError, listed, readable_file, stem_of, write_json

FORMATS = ("json", "lp", "mps")


def benchmark_set(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PROBLEM", help="Contest files to write as --format.", show_default=False),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")] = Path("benchmark-set"),
    only: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Instances that begin so, such as gpt2 or vit-4-sharding; models are gpt2, llama, t5, vit, moe, unet.",
            show_default="all",
        ),
    ] = None,
    formats: Annotated[
        str,
        typer.Option(
            "--format", metavar="json,lp,mps", help="json is the contest's; .lp keeps large integers, .mps 17 digits."
        ),
    ] = "json",
    time_limit: Annotated[
        float, typer.Option(min=0.0, help="Seconds to look for better costs and bounds of each; 0 solves nothing.")
    ] = 60.0,
    json_file: JsonFile = None,
) -> int:
    """Write the public benchmark set: problems of real models with the best costs and bounds known.

    With PROBLEM only those files are written, in another format. The set is README.md with a table, the folder
    problems, and best_known.json for `meshwright bench contest DIR/problems --best DIR/best_known.json`. The same
    command goes on where an interrupt ended it.
    """
    chosen = listed(formats, "--format")
    if unknown := [name for name in chosen if name not in FORMATS]:
        raise OptionError(f"--format: {unknown[0]!r} is no format; use {', '.join(FORMATS)}")
    if paths and only is not None:
        raise OptionError("--only: names instances of our own set; leave it out where PROBLEM files are given")
    for path in paths or ():
        readable_file(path, "PROBLEM")
    if paths:
        write_json(json_file, {"out": str(out), "files": [str(path) for path in _convert(paths, out, chosen)]})
        return 0

    from planner.benchmarks.real_steps import export_steps, known_table, load_known

    names, interrupted = None if only is None else listed(only, "--only"), False
    with progress_line("export") as line:

        def begins(what: str) -> None:
            line.begin(what)
            typer.echo(what, err=True)

        try:
            known = export_steps(out, names, time_limit, chosen, begins, line)
        except KeyboardInterrupt:
            known, interrupted = load_known(out / "known.json"), True
    typer.echo(known_table(known))
    if known:
        typer.echo(f"wrote {out}")
    write_json(json_file, {"out": str(out), "instances": {name: asdict(facts) for name, facts in known.items()}})
    if interrupted:
        typer.echo(f"meshwright: interrupted; {len(known)} instances are known, the same command goes on", err=True)
    return INTERRUPTED if interrupted else 0


def _convert(paths: list[Path], out: Path, formats: list[str]) -> list[Path]:
    """Write problem files in other formats and return what was written."""
    from formulations.instances.contest import read_contest_problem
    from formulations.instances.contest_form import contest_form, write_contest_problem
    from formulations.solvers.reference.pyomo_mirror import export_model

    out.mkdir(parents=True, exist_ok=True)
    written = []
    for path in paths:
        problem = read_contest_problem(path)
        for name in formats:
            target = out / f"{stem_of(path)}.{name}"
            if target.resolve() == path.resolve():
                raise OptionError(f"--out: {target} is the problem itself; name another folder or format")
            if name == "json":
                write_contest_problem(target, contest_form(problem).problem)
            else:
                export_model(problem, target)
            typer.echo(f"wrote {target}")
            written.append(target)
    return written
