"""A step as it ran beside what its plan predicted, on the CPU and on a device played by doubles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import runtime
from runtime.compiling.backend import CompileBackend
from runtime.compiling.peak import MeasuredPlan

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
MIB = 2**20


class Steps:
    """An MLP compiled under 1 GiB, torch's kernels one by one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.module = nn.Sequential(*(each for _ in range(3) for each in (nn.Linear(64, 64), nn.GELU())))
        self.backend: CompileBackend = runtime.compile_backend("1GiB", engine="eager", quiet=True)
        self._loss: Callable[[Tensor], Tensor] = torch.compile(self._value, backend=self.backend, dynamic=False)

    def _value(self, batch: Tensor) -> Tensor:
        return self.module(batch).square().mean()

    def __call__(self, rows: int = 256) -> Callable[[], None]:
        """Gradients are None from here on; the step computes them from so many rows."""
        self.module.zero_grad(set_to_none=True)
        batch = torch.ones(rows, 64)

        def step() -> None:
            self._loss(batch).backward()  # type: ignore[no-untyped-call]

        return step


@pytest.fixture
def steps() -> Steps:
    return Steps()


def test_what_was_measured_is_beside_what_was_predicted(steps: Steps) -> None:
    steps()()
    found = steps.backend.measure(steps())
    (plan,) = steps.backend.plans
    assert (found.limit, found.predicted, found.predicted_seconds) == (2**30, plan.peak, plan.seconds)
    assert found.measured == pytest.approx(found.predicted, rel=0.01)
    assert found.seconds > 0
    assert all(parameter.grad is not None for parameter in steps.module.parameters())


def test_the_plan_is_that_of_the_graph_that_ran(steps: Steps) -> None:
    for rows in (256, 64):
        steps(rows)()
    few, many = (steps.backend.measure(steps(rows)) for rows in (64, 256))
    assert [many.predicted, few.predicted] == [plan.peak for plan in steps.backend.plans]
    for found in (few, many):
        assert found.measured == pytest.approx(found.predicted, rel=0.01)


def test_a_step_that_compiles_is_not_measured(steps: Steps) -> None:
    with pytest.raises(RuntimeError, match=r"compiled while it was measured.*set the gradients to None"):
        steps.backend.measure(steps())
    assert steps.backend.measure(steps()).measured > 0


def test_a_step_of_something_else_is_not_measured(steps: Steps) -> None:
    steps()()
    with pytest.raises(RuntimeError, match="no function that this backend compiled"):
        steps.backend.measure(lambda: torch.ones(4).sum())


def test_it_shows_itself() -> None:
    found = MeasuredPlan(3 * MIB, 2 * MIB, MIB, 0.25, 0.5, "a<b")
    assert str(found) == (
        "peak predicted 2.00 MiB, measured 1.00 MiB, limit 3.00 MiB; "
        "a step predicted 250 ms (rates of a<b), measured 500 ms"
    )
    assert "<td>peak</td><td>2.00 MiB</td><td>1.00 MiB</td><td>3.00 MiB</td>" in found._repr_html_()
    assert "a&lt;b" in found._repr_html_()


def test_on_a_device_its_allocator_says_what_was_held(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    steps()()
    step, calls = steps(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, answer in {
        "synchronize": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 60 * MIB,
        "max_memory_allocated": 100 * MIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda name=name, answer=answer: calls.append(name) or answer)
    found = steps.backend.measure(lambda: (calls.append("step"), step()))
    assert found.measured == steps.backend.plans[0].resident + 40 * MIB
    assert calls == [
        "synchronize", "reset_peak_memory_stats", "memory_allocated", "step", "synchronize", "max_memory_allocated",
    ]  # fmt: skip
