"""The command ``meshwright``: one file per group of commands, one place for errors.

Nothing heavy is imported here: torch and the solvers are imported by the commands that need them, so that
``--help`` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from runtime.commands.ablate import ablate
from runtime.commands.bench import bench
from runtime.commands.benchmark_set import benchmark_set
from runtime.commands.calibrate import calibrate
from runtime.commands.doctor import doctor
from runtime.commands.explore import best_mesh, compare, largest_batch, price, whatif
from runtime.commands.export import export
from runtime.commands.options import as_command
from runtime.commands.plan import explain, fits, plan, sweep
from runtime.commands.run import run
from runtime.commands.solve import solve
from runtime.commands.validate import validate
from runtime.commands.view import view

BAD_INPUT = 2
INTERRUPTED = 130
OUR_PACKAGES = ("formulations", "planner", "runtime")


class TwoWords(TyperGroup):
    """A group whose commands may have names of two words; the second one is else an argument of the first.

    ``--json`` without a file, at the end or before another option, stands for ``--json -``.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the first two words where there is one, else that of the first."""
        both = " ".join(args[:2])
        words = [both, *args[2:]] if both in self.commands else args
        bare = [word == "--json" and after.startswith("--") for word, after in pairwise([*words, "--"])]
        words = [
            part for word, is_bare in zip(words, bare, strict=True) for part in ([word, "-"] if is_bare else [word])
        ]
        return super().resolve_command(ctx, words)


app = typer.Typer(
    cls=TwoWords,
    name="meshwright",
    help="Plan the training step of a PyTorch model under a memory limit, with a proven bound, and run the plan.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
COMMANDS: dict[Callable[..., int | None], tuple[str, tuple[str, ...]]] = {
    plan: (
        "plan",
        (
            "hf:gpt2 --mesh 2 --memory 2GiB --batch 4 --dropout 0 --out plan.json",
            "my.module:step --mesh 2x4 --cluster a100-8-nvlink --memory 30GiB --out plan.json",
        ),
    ),
    run: ("run", ("plan.json --steps 3 --check", "plan.json --profile trace.json")),
    explain: ("explain", ("plan.json --json why.json",)),
    export: ("export", ("plan.json --out parallel.py", "plan.json --to torchtitan --out job.py")),
    view: ("view", ("plan.json", "plan.json other.json --out beside.html")),
    compare: ("compare", ("plan.json other.json", "plans/*.json --json -")),
    fits: ("fits", ("hf:llama --mesh 8 --cluster h100-8-nvlink --memory 80GB --batch 8",)),
    sweep: ("sweep", ("hf:gpt2 --mesh 2 --mesh 4 --memory 1GiB --memory 2GiB --out table.json --folder rows",)),
    best_mesh: ("best-mesh", ("hf:gpt2 --ranks 8 --cluster a100-8-nvlink --memory 30GiB --out plan.json",)),
    largest_batch: (
        "largest-batch",
        ("hf:gpt2 --mesh 2x4 --cluster a100-8-nvlink --memory 30GiB --out plan.json",),
    ),
    whatif: (
        "whatif",
        (
            "plan.json --bandwidth 2",
            "hf:gpt2 --mesh 8 --cluster a100-8-nvlink --pin '*.mlp=recompute' --bandwidth 2",
            "hf:gpt2 --mesh 2x4 --cluster a100-8-nvlink --memory 30GiB --to-memory 20GiB --to-mesh 4x2 --out then.json",
        ),
    ),
    price: (
        "price",
        (
            "plan.json",
            "hf:gpt2 --mesh 8 --cluster a100-8-nvlink --memory 10GiB",
            "hf:gpt2 --mesh 8 --cluster a100-8-nvlink --at 6GiB --at 8GiB --json prices.json",
        ),
    ),
    solve: (
        "solve",
        ("problem.json.gz --out solution.json", "problem.json --solver exe:./iopddl --out solution.json"),
    ),
    bench: (
        "bench",
        (
            "random --solvers portfolio,my.module:solve",
            "contest problems --solvers portfolio,exe:./iopddl --table table.tex --plot profile.pdf",
        ),
    ),
    ablate: ("bench ablate", ("--list --verdicts ablation.json", "--only highs --size small --json ablation.json")),
    benchmark_set: ("bench export", ("--only gpt2-4 --out set", "problem.json.gz --format mps --out .")),
    calibrate: ("calibrate", ("", "--model hf:gpt2 --mesh 2 --batch 4")),
    validate: ("validate", ("plan.json --plot scatter.png", "--sample 3 --model hf:gpt2 --mesh 2 --layers 2")),
    doctor: ("doctor", ("--json -", "--families --only llama,t5", "--families --out families.md")),
}
"""Every command with its name and examples of its arguments, which its help shows."""

for command, (name, examples) in COMMANDS.items():
    lines = [f"meshwright {name} {arguments}".strip() for arguments in examples]
    app.command(name, epilog="\n\n".join(["Examples:", *lines]))(as_command(command))


def print_version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(f"meshwright {version('meshwright')}")
        raise typer.Exit


@app.callback()
def common(
    show_version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Options before the command."""


def repeat_lost_interrupts() -> None:
    """Send Ctrl-C again where it came while a destructor ran, in which Python drops every exception."""
    former = sys.unraisablehook

    def again(lost: sys.UnraisableHookArgs) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            former(lost)

    sys.unraisablehook = again


def is_for_the_user(error: Exception) -> bool:
    """Whether an error is one of ours, with a message for the user, and no defect."""
    return type(error).__module__.partition(".")[0] in OUR_PACKAGES


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and leave with its exit code.

    0 is success; 1 a run whose check failed; 2 input that cannot be used, such as an infeasible limit, and files
    and solvers that fail, with a message in one line on stderr; 130 an interrupt.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is about weights, which plans never load
    repeat_lost_interrupts()
    try:
        code = app(arguments, prog_name="meshwright", standalone_mode=False)
    except typer.TyperException as error:
        code = complain(error.format_message(), BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        code = complain("interrupted", INTERRUPTED)
    except OSError as error:
        code = complain(f"{error.filename or 'file'}: {error.strerror or error}", BAD_INPUT)
    except (ValueError, RuntimeError) as error:
        if not is_for_the_user(error):
            raise
        code = complain("" if getattr(error, "printed", False) else str(error), BAD_INPUT)
    sys.exit(code)


def complain(message: str, code: int) -> int:
    """Print a message, unless it is empty, on one line of stderr, and return the exit code."""
    if message:  # without arguments typer has printed the help and the message is empty
        print("meshwright:", " ".join(message.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
