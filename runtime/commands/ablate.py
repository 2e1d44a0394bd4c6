"""The command ``bench ablate``: what each technique and tunable of the engine is worth."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.commands.bench import INTERRUPTED
from runtime.commands.values import STANDARD_OUTPUT, OptionError, json_path, listed, readable_file, write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from rich.table import Table

    from formulations.tuning.inventory import Constant
    from planner.benchmarks.ablation import Summary, Variant
    from planner.benchmarks.ablation.results import Pair

SUITES = ("random", "contest", "kiwi-mlp", "kiwi-transformer")
WIDTH_WITHOUT_TERMINAL = 220


def ablate(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Contest files, or folders of them.", show_default=False),
    ] = None,
    only: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="What is changed: techniques, tunables, a constant, a member such as highs, a variant, or a pattern "
            "with *.",
        ),
    ] = "techniques",
    at_once: Annotated[
        bool, typer.Option("--together", help="Halve all tunables of --only at once, then double them.")
    ] = False,
    suite: Annotated[
        str | None,
        typer.Option(metavar="A,B", help=", ".join(SUITES) + ".", show_default="random, and contest with PATH"),
    ] = None,
    size: Annotated[str, typer.Option(metavar="small,middle,large", help="Of random: which sizes.")] = "small",
    part: Annotated[str, typer.Option(metavar="A,B", help="Of kiwi-transformer.")] = "encoder,decoder,llama",
    instances: Annotated[
        str | None, typer.Option(metavar="A,B", help="Instances by name.", show_default="all of the suites")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Solves of each instance; medians count.")] = 1,
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds for one solve.", show_default="that of the suite")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated problems and of the solver.")] = 0,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Result to write: pairs and summaries, or the list; - is standard output. Pairs that it holds already "
            "are not solved again.",
        ),
    ] = None,
    list_only: Annotated[
        bool, typer.Option("--list", help="Print all techniques and tunables; solve nothing.")
    ] = False,
    verdicts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --list: a result of --json, whose verdicts stand beside the list."),
    ] = None,
) -> int:
    """Leave out one technique of the engine, or halve and double one tunable, and report what that loses.

    Every instance is solved with and without the change, a few changes in turn. A change loses nothing where objective
    and bound lose less than 0.02 % and the time grows by less than 5 %, on every instance.
    """
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)
    if list_only:
        _list(console, None if verdicts is None else readable_file(verdicts, "--verdicts"), json_file)
        return 0
    if verdicts is not None:
        raise OptionError(f"--verdicts: {verdicts} stands beside the list alone; add --list")
    suites = listed(suite, "--suite") if suite else ["random", *(["contest"] if paths else [])]
    if unknown := [name for name in suites if name not in SUITES]:
        raise OptionError(f"--suite: {unknown[0]!r} is no suite of an ablation; use {', '.join(SUITES)}")
    if ("contest" in suites) != bool(paths):
        raise OptionError("PATH: the suite contest needs files, and only it reads them")

    from planner.benchmarks.ablation import AblationRun, Instances, ablate, all_variants, selected, together

    variants = (together if at_once else selected)(all_variants(), listed(only, "--only"))
    wanted = Instances(
        suites=tuple(suites),
        sizes=tuple(listed(size, "--size")),
        paths=tuple(map(str, paths or [])),
        parts=tuple(listed(part, "--part")),
        only=tuple(listed(instances, "--instances")) if instances else (),
        time_limit=time_limit,
        seed=seed,
    )
    wanted.check()
    typer.echo(f"{len(variants) - 1} variants beside the control")
    with _progress(variants) as observe:
        result = ablate(variants, AblationRun(wanted, repeats, json_path(json_file), observe))
    names = {variant.name for variant in variants}
    console.print(_summary_table([summary for summary in result.summaries() if summary.variant in names]))
    if json_file == STANDARD_OUTPUT:
        write_json(json_file, json.loads(result.to_json()))
    elif json_file is not None:
        typer.echo(f"wrote {json_file}")
    if result.interrupted:
        typer.echo(f"meshwright: interrupted after {len(result.pairs)} pairs", err=True)
        return INTERRUPTED
    return 0


@contextmanager
def _progress(variants: Sequence[Variant]) -> Iterator[Callable[[Variant, Pair], None]]:
    """Draw the variant and instance that were finished last on stderr; nothing where that is no terminal."""
    from rich.console import Console

    order = {variant.name: k for k, variant in enumerate(variants, start=1)}
    with Console(stderr=True).status("starting") as status:
        yield lambda variant, pair: status.update(
            f"{order[variant.name]}/{len(order)}  {variant.name}  {pair.instance}  {pair.changed.seconds:.1f} s"
        )


def _list(console: Console, verdicts_file: Path | None, json_file: Path | None) -> None:
    """Print all constants of the engine, with what an ablation found of each where there is a file of one."""
    from formulations.tuning.inventory import inventory
    from planner.benchmarks.ablation import load_verdicts, verdicts_of

    verdicts = {} if verdicts_file is None else load_verdicts(verdicts_file)
    found = [(constant, verdicts_of(constant, verdicts) if verdicts else ()) for constant in inventory()]
    console.print(_inventory_table(found, with_verdicts=bool(verdicts)))
    write_json(json_file, [asdict(constant) | {"verdicts": list(said)} for constant, said in found])


def _inventory_table(entries: Sequence[tuple[Constant, Sequence[str]]], *, with_verdicts: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    from formulations.tuning.inventory import Kind

    found = [constant for constant, _ in entries]
    counts = {kind: sum(constant.kind is kind for constant in found) for kind in Kind}
    techniques = sum(1 if c.value is True else len(c.value) for c in found if c.kind is Kind.TECHNIQUE)
    title = (
        f"{techniques} techniques in {counts[Kind.TECHNIQUE]} constants, {counts[Kind.TUNABLE]} tunables, "
        f"{counts[Kind.FACT]} numbers that are none"
    )
    table = Table(title=title, show_edge=False, pad_edge=False)
    for heading in ("kind", "module", "constant", "value", "what it does", *(["ablation"] if with_verdicts else [])):
        table.add_column(heading, overflow="fold")
    for constant, said in entries:
        place = constant.module.removeprefix("formulations.")
        value = ", ".join(constant.value) if _is_names(constant.value) else f"{constant.value}"
        beside = [Text("\n".join(said))] if with_verdicts else []
        table.add_row(constant.kind, place, constant.name, Text(value), Text(constant.text), *beside)
    return table


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(each, str) for each in value)


def _summary_table(summaries: Sequence[Summary]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("variant", overflow="fold")
    for heading in ("instances", "objective %", "bound %", "time, median", "time, worst"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for each in summaries:
        losses = f"{each.objective_percent:+.3f}", f"{each.bound_percent:+.3f}"
        times = f"{each.time_median:.2f}", f"{each.time_worst:.2f}"
        table.add_row(each.variant, str(each.instances), *losses, *times, Text(each.verdict))
    return table
