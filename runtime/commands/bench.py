"""The command ``bench``: solvers side by side, rows into a file, a table on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from runtime.commands.options import JsonFile
from runtime.commands.values import (
    STANDARD_OUTPUT,
    OptionError,
    figure_file,
    json_path,
    listed,
    readable_file,
    writable_file,
    write_json,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from formulations.instances.random_families import Size
    from planner.benchmarks import BenchResult, Suite

CHECK_FAILED = 1
INTERRUPTED = 130
SUITES = ("random", "contest", "kiwi-mlp", "kiwi-transformer", "papers")
WITH_PARTS = ("kiwi-transformer", "papers")
TABLES = (".tex", ".md")
PAPER_FOLDER = Path("paper-results")


def bench(
    suite: Annotated[
        str,
        typer.Argument(metavar="SUITE", help=", ".join(SUITES) + ".", show_default=False),
    ],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Of contest: problem files, or folders of them.", show_default=False),
    ] = None,
    json_file: JsonFile = None,
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Table for a paper: LaTeX (.tex) or Markdown (.md).")
    ] = None,
    all_columns: Annotated[
        bool,
        typer.Option("--all-columns", help="Proofs, processor time, memory and ratios in the tables too."),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Figure of gaps over time and of performance profiles (PDF, PNG, SVG)."),
    ] = None,
    solvers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Built-in names, exe:PATH for an executable of the contest, module:function, or entry points of the "
            "group meshwright.solvers.",
            show_default="portfolio,lagrangian,highs; branch_and_bound for kiwi-mlp; portfolio for kiwi-transformer",
        ),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Seconds for one instance and solver; of contest, reading the file included.",
            show_default="2 for random, 1 to 30 for kiwi-transformer, else 60",
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="small,middle,large", help="Of random: which sizes.", show_default="small,middle"),
    ] = None,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Of kiwi-transformer: encoder,decoder,layers,recompute,llama. Of papers: names of tables of one "
            "paper. Only where named are there runs on this machine (one_model_runs of each, of osdp baseline_runs, of "
            "galvatron baseline_runs, figure_5, of capture figure_7_local_KIND, KIND pipelines_gpipe, pipelines_1f1b, "
            "mixed_gpipe, mixed_1f1b) and tables beyond the hour: of kiwi llama_recompute, table_1_published_long, of "
            "osdp losses, search_limits, search_limits_long, second_opinion, of galvatron table_5, restated, "
            "stages_restated, of h3t figure_6_free, canonical, free_restated.",
            show_default="all (half an hour for kiwi-transformer)",
        ),
    ] = None,
    paper: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Of papers: kiwi,osdp,galvatron,h3t,capture.", show_default="all, an hour"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Of papers: results, one file per paper, and the claims. Tables that are there are not run again.",
            show_default=str(PAPER_FOLDER),
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated problems and of the solvers.")] = 0,
    best: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON, instance -> best known cost, printed beside ours."),
    ] = None,
) -> int:
    """Run solvers side by side: on generated problems, contest files, or KIWI's problems.

    `papers` computes the tables of the five papers, and prints each of their claims beside ours.

    Every result is checked. Small generated problems are enumerated beside. The exit code is 1 where solvers
    contradict the checks. `meshwright bench ablate` leaves out techniques of the engine, one at a time.
    """
    if suite not in SUITES:
        raise OptionError(f"SUITE: {suite!r} is no suite; use {' or '.join(SUITES)}")
    if suite != "contest" and paths:
        raise OptionError(f"PATH: the suite {suite} reads no files, got {str(paths[0])!r}; use contest for files")
    if suite != "random" and size is not None:
        raise OptionError(f"--size: {size!r} belongs to the suite random; leave it out")
    if suite not in WITH_PARTS and part is not None:
        raise OptionError(f"--part: {part!r} belongs to the suites {' and '.join(WITH_PARTS)}; leave it out")
    if suite != "papers" and (paper is not None or out is not None):
        option = "--out" if paper is None else "--paper"
        raise OptionError(f"{option}: belongs to the suite papers; leave it out")
    names = None if solvers is None else listed(solvers, "--solvers")
    sizes = None if size is None else listed(size, "--size")
    parts = None if part is None else listed(part, "--part")
    if table is not None:
        if table.suffix not in TABLES:
            raise OptionError(f"--table: {str(table)!r} must end in {' or '.join(TABLES)}")
        writable_file(table, "--table")
    if plot is not None:
        figure_file(plot, "--plot")
    if best is not None:
        readable_file(best, "--best")
    if suite == "papers":
        return _papers(None if paper is None else listed(paper, "--paper"), out or PAPER_FOLDER, parts, json_file)

    from planner import benchmarks, papers
    from runtime.commands.tables.bench import live_rows, print_result

    if suite == "kiwi-transformer":
        chosen = papers.kiwi_transformer_suite(parts, names)
    else:
        chosen = _suite(suite, paths or [], sizes, seed)
    for note in chosen.notes:
        typer.echo(note)
    with live_rows(chosen) as observer:
        result = benchmarks.bench(
            chosen,
            names,
            time_limit=time_limit,
            seed=seed,
            best_known=None if best is None else benchmarks.load_best_known(best),
            json_path=json_path(json_file),
            observer=observer,
        )
    if result.rows:
        print_result(result, all_columns)
        for row in result.rows[: -1 if result.interrupted else None]:
            if row.objective is None and row.message:
                typer.echo(f"meshwright: {row.instance}, {row.solver}: {row.message}", err=True)
        for line in [] if chosen.summarize is None else chosen.summarize(result.rows):
            typer.echo(line)
        if table is not None:
            result.save_table(table, all_columns)
        if plot is not None:
            _save_plot(result, plot)
        for written in (json_path(json_file), table, plot):
            if written is not None:
                typer.echo(f"wrote {written}")
    if json_file == STANDARD_OUTPUT:
        write_json(json_file, [row.as_document() for row in result.rows])
    if result.interrupted:
        typer.echo(f"meshwright: interrupted after {len(result.rows)} rows", err=True)
        return INTERRUPTED
    contradictions = result.contradictions()
    for contradiction in contradictions:
        typer.echo(f"meshwright: contradiction: {contradiction}", err=True)
    return CHECK_FAILED if contradictions else 0


def _save_plot(result: BenchResult, path: Path) -> None:
    """Write the gaps over time to ``path`` and the ratios of times beside it, each as its own figure."""
    from planner.plots import performance_profile, time_ratios

    performance_profile(result.rows).savefig(path, dpi=150)
    time_ratios(result.rows).savefig(path.with_name(f"{path.stem}-ratios{path.suffix}"), dpi=150)


def _papers(papers: Sequence[str] | None, folder: Path, tables: Sequence[str] | None, json_file: Path | None) -> int:
    from planner.papers.claims.claim import PAPERS
    from planner.papers.claims.report import write_report
    from planner.papers.claims.results import load_results, paper_claims, run_paper
    from runtime.commands.tables.bench import paper_progress, print_claims
    from runtime.prediction.local_tables.registry import local_tables

    chosen = PAPERS if papers is None else papers
    unknown = [name for name in chosen if name not in PAPERS]
    if unknown:
        raise OptionError(f"--paper: {unknown[0]!r} is no paper; use {', '.join(PAPERS)}")
    if tables is not None and len(chosen) != 1:
        raise OptionError("--part: tables belong to one paper; name it with --paper")
    for name in chosen:  # a file that cannot be used is found before hours of work
        load_results(folder / f"{name}.json", name)
    with paper_progress() as observer:
        results = [run_paper(name, folder, observer, tables, local_tables(name)) for name in chosen]
    rows = [row for each in results for row in paper_claims(each)]
    print_claims(rows)
    names = ("paper", "claim", "printed", "ours", "verdict", "reason")
    write_json(json_file, [dict(zip(names, row.cells(), strict=True)) for row in rows])
    # The pages have all papers of the folder, those of earlier runs too.
    everything = [load_results(path, name) for name in PAPERS if (path := folder / f"{name}.json").exists()]
    typer.echo(f"wrote {write_report(folder, everything)} and a page for each paper")
    return 0


def _suite(name: str, paths: Sequence[Path], sizes: Sequence[str] | None, seed: int) -> Suite:
    from formulations.instances.random_families import SIZES
    from planner import benchmarks, papers

    if name == "contest":
        return benchmarks.contest_suite(paths)
    if name == "kiwi-mlp":
        return papers.kiwi_mlp_suite()
    unknown = [size for size in sizes or () if size not in SIZES]
    if unknown:
        raise OptionError(f"--size: {unknown[0]!r} is no size; use {', '.join(SIZES)}")
    chosen = benchmarks.DEFAULT_SIZES if sizes is None else [cast("Size", size) for size in sizes]
    return benchmarks.random_suite(chosen, seed)
