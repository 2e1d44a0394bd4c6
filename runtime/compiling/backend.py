"""A backend of ``torch.compile`` that keeps a training step within a number of bytes.

>>> backend = compile_backend(memory="20GiB", optimizer="adamw")
>>> step = torch.compile(loss_of, backend=backend, dynamic=False, fullgraph=True)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from planner.compiled.planning import CompiledStep
    from planner.machine.cluster import ClusterSpec
    from runtime.compiling.peak import MeasuredPlan

Engine = Literal["inductor", "eager"]


class CompileBackend:
    """Compiles graphs with a plan each; made by :func:`compile_backend`.

    Attributes
    ----------
    plans
        Plans of the graphs that were compiled, in order.
    """

    def __init__(
        self,
        memory: int,
        optimizer: str | None,
        cluster: ClusterSpec,
        time_limit: float,
        engine: Engine,
        quiet: bool,
    ) -> None:
        from planner.compiled.kernel_seconds import KernelSeconds
        from planner.compiled.planning import CompileRequest
        from planner.torch_adapter.joint_graph.backends import compile_eager, compile_inductor
        from runtime.compiling.progress import ProgressLines

        self.plans: list[CompiledStep] = []
        progress = None if quiet else ProgressLines()
        self._request = CompileRequest(memory, optimizer, time_limit, inlined=engine == "inductor", progress=progress)
        self._seconds, self._rates, self._quiet = KernelSeconds(cluster), cluster.name, quiet
        self._frame: int | None = None
        self._ran: list[CompiledStep] = []  # the plan of the graph that ran last, if one has
        self._compile = {"inductor": compile_inductor, "eager": compile_eager}[engine](self._partition)

    def __call__(self, module: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Compile a graph; ``torch.compile`` calls this."""
        known = len(self.plans)
        compiled: Callable[..., Any] = self._compile(module, inputs)
        if len(self.plans) == known:  # nothing in it has a gradient
            return compiled
        plan = self.plans[-1]

        def run(*args: Any) -> Any:
            self._ran[:] = [plan]
            return compiled(*args)

        return run

    def measure(self, step: Callable[[], object]) -> MeasuredPlan:
        """Run a step once and compare it with its plan.

        >>> print(backend.measure(lambda: step(batch).backward()))

        Parameters
        ----------
        step
            Forward and backward of the compiled function, without the optimizer's update. It should have run before
            with inputs of these shapes, and gradients should be None, as ``zero_grad`` leaves them.

        Returns
        -------
        MeasuredPlan
            On CPUs all allocations are recorded, which takes part of the time; on CUDA the statistics of peaks start
            anew.

        Raises
        ------
        RuntimeError
            The step ran nothing that this backend planned, or was compiled only now; or on CPUs, a profiler is on.
        """
        from runtime.compiling.peak import MeasuredPlan, measure_step

        known = len(self.plans)
        self._ran.clear()
        found = measure_step(step)
        if not self._ran:
            raise RuntimeError("the step ran no function that this backend compiled with gradients: measure one of it")
        if len(self.plans) > known:
            raise RuntimeError(
                "the step was compiled while it was measured, which needs memory as well: set the gradients to None "
                "and measure it again"
            )
        (plan,) = self._ran
        return MeasuredPlan(
            plan.limit, plan.peak, plan.resident + found.grown, plan.seconds, found.seconds, self._rates
        )

    def _partition(
        self, joint: GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[GraphModule, GraphModule]:
        from planner.compiled.planning import plan_cut
        from planner.graph.kernel_graph import CompileError
        from planner.torch_adapter.joint_graph.backends import frame_number

        frame = frame_number()
        if self._frame not in (None, frame):
            raise CompileError(
                "the function is compiled as several graphs, and a limit holds for one: compile with fullgraph=True, "
                "which names the line that breaks it, and give every compiled function a backend of its own"
            )
        self._frame = frame
        cut, plan = plan_cut(joint, inputs, options, self._request, self._seconds)
        self.plans.append(plan)
        if not self._quiet:
            print(f"meshwright: {plan}", file=sys.stderr)
        return cut.forward, cut.backward


def compile_backend(
    memory: int | str,
    *,
    optimizer: str | None = None,
    reserve: int | str = 0,
    cluster: str | None = None,
    time_limit: float = 10.0,
    engine: Engine = "inductor",
    quiet: bool = False,
) -> CompileBackend:
    """Make a backend of ``torch.compile`` whose training steps stay within a number of bytes.

    The step is compiled as torch would, but what is kept for the backward and what is computed again is decided under
    the limit: the fastest step that fits, with a proven bound. Compile a function that returns the loss, so that all
    of the step is in the graph.

    Parameters
    ----------
    memory
        Bytes, or text such as ``"20GiB"``: what parameters, inputs, activations, gradients and the optimizer's state
        may hold at any moment, and on CPUs what convolutions hold while they run.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS` whose state counts; None where it is part of ``reserve``.
    reserve
        Bytes of ``memory`` for everything else: the device's context, other workspaces of libraries, other tensors.
    cluster
        Name or file of a cluster, whose device gives the rates. The cluster ``local-cpu`` if None, or on CUDA
        ``local-cuda``, and the preset of the same device where it was not measured; where there is none, that of an
        H100.
    time_limit
        Seconds for the solver where torch's own choice does not fit.
    engine
        ``inductor`` generates code; ``eager`` runs torch's kernels one by one, each with its result in memory.
    quiet
        Whether plans are not printed.

    Returns
    -------
    CompileBackend

    Raises
    ------
    ValueError
        A size is none, the reserve uses the memory up, the optimizer or the cluster does not exist, the engine is
        unknown.

    Notes
    -----
    While it compiles, :class:`~planner.graph.kernel_graph.CompileError` says that nothing fits (and what would), that
    shapes are symbolic or that the function is more than one graph; torch wraps it in ``BackendCompilerFailed``.
    """
    from planner.common.units import bytes_in
    from planner.graph.optimizers import optimizer_named

    total, kept_free = bytes_in(memory, "memory"), bytes_in(reserve, "reserve") if reserve else 0
    if kept_free >= total:
        raise ValueError(f"reserve {reserve}: it uses the memory of {memory} up; give less than that")
    if engine not in ("inductor", "eager"):
        raise ValueError(f"engine {engine!r} is not known; choose inductor or eager")
    if optimizer is not None:
        optimizer_named(optimizer)
    return CompileBackend(total - kept_free, optimizer, _cluster(cluster), time_limit, engine, quiet)


def _cluster(name: str | None) -> ClusterSpec:
    from planner.machine.cluster import LOCAL_DEVICE_NAME, LOCAL_NAME, ClusterError, load_cluster, preset_names

    if name is not None:
        return load_cluster(name)
    if torch.cuda.is_available():
        with suppress(ClusterError):
            return load_cluster(LOCAL_DEVICE_NAME)
        device = torch.cuda.get_device_name().lower()
        fitting = [preset for preset in preset_names() if preset.split("-")[0] in device]
        return load_cluster(fitting[0] if fitting else "h100-8-nvlink")
    try:
        return load_cluster(LOCAL_NAME)
    except ClusterError:
        return load_cluster("h100-8-nvlink")
