"""The public benchmark set: training steps of real models as problem files, with the best costs and bounds known.

A step's problem is brought into the form of the solver contest (:mod:`formulations.instances.contest_form`), so every
solver of the contest can read it. The cluster is a preset, so the files depend on no measurement; a later version of
torch may trace another graph, which changes the file's digest, and then what is known of the old one does not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from formulations.instances.contest_form import ContestForm, contest_form, write_contest_problem
from formulations.problem.checker import check
from formulations.problem.files import write_text_atomically
from formulations.problem.solution import Progress, SolveOptions, Status, relative_gap
from formulations.problem.strategy_problem import StrategyProblem
from formulations.problem.time_limit import noticing_interrupts
from formulations.solvers import SolverPool, solve
from formulations.solvers.reference.pyomo_mirror import export_model
from formulations.step.sharding import within
from planner.benchmarks.suites import SuiteError, check_names
from planner.common.units import format_bytes, format_gap
from planner.models.references import ModelReference
from planner.session.planning import PlanningSession
from planner.session.request import PlanRequest

CLUSTER = "a100-8-nvlink"
SOLVER = "portfolio"
FORMATS = ("json", "lp", "mps")
PUBLISHED = Path(__file__).with_name("real_steps.json")
"""What was known of the set when this version was made; ``known.json`` of a later export, as it was written."""
_OWN = "planner.benchmarks.real_models:"
_FREE_SECONDS = 600.0

MODELS: dict[str, ModelReference] = {
    "gpt2": ModelReference("hf:gpt2", batch=16, sequence=512, dropout=0.0),
    "llama": ModelReference("hf:llama", batch=8, sequence=512, layers=2),
    "t5": ModelReference("hf:t5", batch=16, sequence=256, dropout=0.0),
    "vit": ModelReference("hf:vit", batch=32, dropout=0.0),
    "moe": ModelReference(_OWN + "mixture_of_experts", batch=8, sequence=256),
    "unet": ModelReference(_OWN + "u_net", batch=16),
}
"""Training steps by the names that instances begin with."""


@dataclass(frozen=True, slots=True)
class RealStep:
    """A training step on a mesh under a limit.

    Parameters
    ----------
    model, mesh
        Name of the model and size of each mesh axis.
    formulation
        What is decided, by the names of :data:`planner.session.formulations.FORMULATIONS`.
    share
        Limit in per cent of the peak of the best layouts without a limit.
    """

    model: str
    mesh: tuple[int, ...]
    formulation: str
    share: int

    @property
    def name(self) -> str:
        """Name of the instance and of its file."""
        return f"{self.model}-{'x'.join(map(str, self.mesh))}-{self.formulation.replace('_', '-')}-{self.share}"


FORMULATIONS = ("sharding", "kiwi_reduced", "kiwi_chain")
SHARES: dict[str, tuple[int, int, int]] = dict.fromkeys(MODELS, (90, 75, 60)) | {"llama": (95, 87, 82)}
"""Limits of these formulations; most memory of a Llama of two layers is its vocabulary's, and less does not fit."""

STEPS: tuple[RealStep, ...] = tuple(
    RealStep(model, mesh, formulation, share)
    for model in MODELS
    for mesh in ((4,), (2, 2))
    for formulation, share in zip(FORMULATIONS, SHARES[model], strict=True)
)
"""All instances, those of one model and mesh together."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an instance.

    Parameters
    ----------
    sha256
        Digest of the uncompressed file; figures belong to it.
    nodes, edges, decisions
        Size of the file, and how many of its nodes are decisions; the others follow.
    limit
        Bytes that torch's tensors may hold on one device.
    seconds_per_cost
        Seconds of one unit of cost.
    best, bound, proof, solver
        Cheapest assignment known, highest bound proven on any, how it is proven, and who found both.
    seconds
        Seconds of the solve that found them.
    """

    sha256: str
    nodes: int
    edges: int
    decisions: int
    limit: int
    seconds_per_cost: float | None
    best: int | None = None
    bound: int | None = None
    proof: str | None = None
    solver: str = ""
    seconds: float = 0.0


def export_steps(
    folder: Path,
    names: Sequence[str] | None = None,
    seconds: float = 60.0,
    formats: Sequence[str] = ("json",),
    begins: Callable[[str], None] = lambda _: None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Known]:
    """Write instances into a folder, solve them, and keep what is known of each.

    The folder gets ``problems/NAME.json.gz``, ``known.json``, ``best_known.json`` for ``meshwright bench contest
    --best``, and ``README.md`` with the table. Each is written after every instance, and what ``known.json`` has of an
    unchanged file is kept where a solve finds nothing better; so an interrupted export goes on. At Ctrl-C the solve
    ends with what it has, which is kept too, and no other begins.

    Parameters
    ----------
    folder
        Made where missing. Costs and bounds that this package knows of the same files are there from the start.
    names
        Names of instances or their beginnings, such as ``gpt2`` or ``gpt2-4``; all if None.
    seconds
        Time limit of each solve; 0 solves nothing.
    formats
        Of :data:`FORMATS`.
    begins, progress
        Called with what begins, and with every improvement of a solve.

    Raises
    ------
    SuiteError
        A name is the beginning of none, or ``known.json`` is damaged.
    KeyboardInterrupt
        After Ctrl-C; the files are there.
    """
    check_names("export", "format", formats, FORMATS)
    chosen = [step for step in STEPS if names is None or any(step.name.startswith(name) for name in names)]
    for name in names or ():
        if not any(step.name.startswith(name) for step in STEPS):
            raise SuiteError(f"export: no instance begins with {name!r}; models are {', '.join(MODELS)}")
    known, published = load_known(folder / "known.json"), load_known(PUBLISHED)
    with SolverPool() as pool, noticing_interrupts() as noticed:
        for step, problem in _problems(chosen, pool, begins, progress):
            begins(f"{step.name}: writing")
            form = contest_form(replace(problem, name=step.name))
            facts = _written(folder / "problems" / step.name, form, problem, formats)
            before = known.get(step.name, published.get(step.name))
            if before is not None and before.sha256 == facts.sha256:
                facts = before
            if seconds > 0 and not (facts.best is not None and facts.best == facts.bound):
                begins(f"{step.name}: solving")
                facts = _solved(problem, form, facts, seconds, pool, progress)
            known[step.name] = facts
            _keep(folder, known)
            if noticed.is_set():  # the solve itself returns its best without an error
                raise KeyboardInterrupt
    return known


def load_known(path: Path) -> dict[str, Known]:
    """Read ``known.json``; nothing where there is no file.

    Raises
    ------
    SuiteError
        The file holds anything else.
    """
    if not path.exists():
        return {}
    try:
        return {name: Known(**facts) for name, facts in json.loads(path.read_bytes()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise SuiteError(f"{path}: holds no known costs ({error}); remove it") from None


def known_table(known: dict[str, Known]) -> str:
    """Return the table of best known costs and proven bounds, in Markdown."""
    lines = ["| instance | nodes | edges | decisions | limit | best known | proven bound | gap | by |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---:|---|")
    for name, facts in sorted(known.items()):
        best, bound = ("-" if value is None else f"{value:,}" for value in (facts.best, facts.bound))
        by = f"{facts.solver}, {facts.seconds:.0f} s" if facts.solver else "-"
        cells = [name, f"{facts.nodes:,}", f"{facts.edges:,}", f"{facts.decisions:,}", format_bytes(facts.limit)]
        lines.append(
            "| " + " | ".join([*cells, best, bound, format_gap(relative_gap(facts.best, facts.bound)), by]) + " |"
        )
    return "\n".join(lines)


def _problems(
    steps: Sequence[RealStep],
    pool: SolverPool,
    begins: Callable[[str], None],
    progress: Callable[[Progress], None] | None,
) -> Iterator[tuple[RealStep, StrategyProblem]]:
    """Yield the problem of every step, tracing each model and mesh once."""
    session, of, peak = None, None, 0
    for step in steps:
        if session is None or of != (step.model, step.mesh):
            begins(f"{step.name}: tracing")
            session, of = PlanningSession(MODELS[step.model], CLUSTER, step.mesh), (step.model, step.mesh)
            begins(f"{step.name}: looking for the peak of the best layouts")
            peak = free_peak(session, pool, progress)
        yield step, limited_problem(session, step.formulation, peak * step.share // 100)


def free_peak(session: PlanningSession, pool: SolverPool, progress: Callable[[Progress], None] | None = None) -> int:
    """Peak in bytes of the best layouts without a limit: the same on every machine.

    Raises
    ------
    SuiteError
        They were not found in ten minutes.
    KeyboardInterrupt
        After Ctrl-C.
    """
    problem = within(session.problem(PlanRequest(formulation="sharding"), pool).problem, None)
    for solver in ("tree_dp", SOLVER):  # graphs that are too wide for dynamic programming are left to the engine
        with noticing_interrupts() as noticed:
            free = solve(problem, solver, SolveOptions(time_limit=_FREE_SECONDS, workers=1), progress, pool)
        if noticed.is_set():
            raise KeyboardInterrupt
        if free.status is Status.OPTIMAL:
            return free.peak_usage[0]
    raise SuiteError(f"export: the best layouts of {session.reference.source} were not found ({free.message})")


def limited_problem(session: PlanningSession, formulation: str, limit: int) -> StrategyProblem:
    """Problem of a step whose tensors may hold ``limit`` bytes on one device."""
    reserve = session.cluster.device.reserve_bytes
    return session.problem(PlanRequest(memory=limit + reserve, formulation=formulation)).problem


def _written(stem: Path, form: ContestForm, problem: StrategyProblem, formats: Sequence[str]) -> Known:
    file = stem.with_name(stem.name + ".json")
    write_contest_problem(file, form.problem)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.unlink()
    if "json" in formats:
        write_contest_problem(stem.with_name(stem.name + ".json.gz"), form.problem)
    for suffix in formats:
        if suffix != "json":
            export_model(form.problem, stem.with_name(f"{stem.name}.{suffix}"))
    limit = problem.resources[0].limit
    assert limit is not None
    sizes = len(form.problem.nodes), len(form.problem.factors), form.decisions
    return Known(digest, *sizes, limit, problem.seconds_per_cost)


def _solved(
    problem: StrategyProblem,
    form: ContestForm,
    facts: Known,
    seconds: float,
    pool: SolverPool,
    progress: Callable[[Progress], None] | None,
) -> Known:
    """Solve the problem as the planner has it, and keep what is better of its assignment in the contest's form."""
    result = solve(problem, SOLVER, SolveOptions(time_limit=seconds), progress, pool)
    better: dict[str, object] = {}
    if result.choices is not None:
        report = check(form.problem, form.extend(result.choices))
        assert report.ok, report.violations[0].message
        assert report.objective is not None
        if facts.best is None or report.objective < facts.best:
            better["best"] = report.objective
    if result.bound is not None and (facts.bound is None or result.bound - form.offset > facts.bound):
        better |= {"bound": result.bound - form.offset, "proof": str(result.proof)}
    if better:
        better |= {"solver": result.solver, "seconds": round(result.seconds, 1)}
    return replace(facts, **better)  # type: ignore[arg-type]  # values of the fields' own types


def _keep(folder: Path, known: dict[str, Known]) -> None:
    ordered = dict(sorted(known.items()))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(asdict(facts))}" for name, facts in ordered.items())
    write_text_atomically(folder / "known.json", "{\n" + lines + "\n}\n")
    best = {name: facts.best for name, facts in ordered.items() if facts.best is not None}
    write_text_atomically(folder / "best_known.json", json.dumps(best, indent=1) + "\n")
    write_text_atomically(folder / "README.md", _PAGE.format(table=known_table(ordered)))


_PAGE = f"""# Training steps as problems of the solver contest

Operator graphs of real models with strategies, costs (ns) and memory (bytes) of {CLUSTER}, in the JSON of the ASPLOS
/ EuroSys 2025 contest on intra-operator parallelism, pairs of nodes only. `meshwright bench export` makes the files,
`meshwright bench contest problems --solvers exe:PATH --best best_known.json` runs a solver on them. The name of an
instance says model, mesh, what is decided, and the limit in per cent of the peak of the best layouts without one.
The bound is proven in exact integers or by two kinds of solver.

{{table}}
"""
