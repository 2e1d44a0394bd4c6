"""Plans with pins, one after the other, and what each change of the pins costs."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from formulations.problem.time_limit import noticing_interrupts
from planner.explore.errors import ExploreError
from planner.explore.memory_prices import SHARES, MemoryPrice, MemoryPrices
from planner.explore.tables import AnyPlan, Table, plan_row, seconds_of, signed_bytes, signed_seconds, without_unused
from planner.machine.cluster import DeviceSpec
from planner.plan.decision import Pin

_WIDE_GAP = 0.01


@dataclass(frozen=True, repr=False)
class PinChange(Table):
    """What a change of the pins costs.

    Parameters
    ----------
    changed
        The pins that were added or taken away.
    pins
        The pins after the change.
    before, after
        The plans before and after the change.
    elapsed_seconds
        Time of the plan after it.
    first_seconds
        Time of the first plan of the exploration, loading and tracing included.
    """

    changed: tuple[Pin, ...]
    pins: tuple[Pin, ...]
    before: AnyPlan
    after: AnyPlan
    elapsed_seconds: float
    first_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds that a step takes longer than before."""
        return seconds_of(self.after) - seconds_of(self.before)

    @property
    def least_seconds(self) -> float | None:
        """What is proven of the change between the two optima: at least this; None where a bound is missing.

        More pins never lower the optimum, so that it is 0 or more where none was taken away.
        """
        bound = self.after.bound_seconds
        if bound is None:
            return None
        least = bound - seconds_of(self.before)
        return max(0.0, least) if set(self.changed) <= set(self.pins) else least

    @property
    def most_seconds(self) -> float | None:
        """What is proven of the change between the two optima: at most this; None where a bound is missing.

        Fewer pins never raise the optimum, so that it is 0 or less where none was added.
        """
        bound = self.before.bound_seconds
        if bound is None:
            return None
        most = seconds_of(self.after) - bound
        return most if set(self.changed) & set(self.pins) else min(0.0, most)

    @property
    def bytes(self) -> int:
        """Bytes by which the peak of a device is higher than before."""
        return self.after.peak_bytes - self.before.peak_bytes

    def title(self) -> str:
        """What changed, and what it costs."""
        return f"{_changed(self)}: {signed_seconds(self.seconds)} a step, peak {signed_bytes(self.bytes)}"

    def rows(self) -> list[dict[str, Any]]:
        """The plans before and after."""
        return without_unused([plan_row("before", self.before), plan_row("after", self.after)])

    def notes(self) -> Sequence[str]:
        """What is proven of the cost, and how long the plan took."""
        lines = []
        if self.changed and self.least_seconds is not None and self.most_seconds is not None:
            least, most = signed_seconds(self.least_seconds), signed_seconds(self.most_seconds)
            lines.append(f"between the optima: from {least} to {most} a step, proven")
        share = self.elapsed_seconds / self.first_seconds if self.first_seconds else 0.0
        lines.append(f"planned in {self.elapsed_seconds:.2f} s, {share:.0%} of the time of the first plan")
        if self.after.gap is not None and self.after.gap > _WIDE_GAP:
            lines.append(f"its gap is {self.after.gap:.2%}: improve(time_limit=...) searches on from it")
        return lines


def _changed(change: PinChange) -> str:
    words = (str(pin) if pin in change.pins else f"no longer {pin}" for pin in change.changed)
    return ", ".join(words) or "the same pins"


class PinnedPlans(Table):
    """The present plan of a step with its pins; each change of the pins gives another one.

    As a table it has a row for every plan that the pins led to, and asks for none.
    """

    def __init__(self) -> None:
        self.pins: tuple[Pin, ...] = ()
        """Decisions of the user that the present plan keeps, in the order in which they came."""
        self.history: list[PinChange] = []
        """Changes of pins so far."""
        self.first_seconds = 0.0
        """Time of the first plan, loading and tracing included; 0 before it."""

    def title(self) -> str:
        """What is explored, and the present plan."""
        return repr(self)

    def rows(self) -> list[dict[str, Any]]:
        """The plan before the first change of pins, and the one after each."""
        if not self.history:
            return []
        first = plan_row("at first", self.history[0].before)
        return without_unused([first, *(plan_row(_changed(change), change.after) for change in self.history)])

    def __str__(self) -> str:
        return super().__str__() if self.history else repr(self)

    @abstractmethod
    def _pin_of(self, target: str, decision: str | Sequence[str], forbids: bool) -> Pin:
        """Pin of what a user wrote; refuses what the step does not have."""

    @abstractmethod
    def _planned_with(self, pins: tuple[Pin, ...]) -> AnyPlan:
        """The plan with other pins, in the time limit of the first one."""

    @abstractmethod
    def _replanned(self, pins: tuple[Pin, ...], time_limit: float | None) -> tuple[AnyPlan, AnyPlan, float]:
        """The plan with the present pins, the one with others, and the seconds that it took."""

    @abstractmethod
    def _reach(self) -> tuple[int, DeviceSpec]:
        """Bytes of tensors that the present plan needs or is limited to, and the device."""

    @abstractmethod
    def _prices(
        self, limits: Sequence[int], time_limit: float | None, noticed: threading.Event
    ) -> Iterator[MemoryPrice]:
        """What is known within each limit, ascending; once the event is set no other search is begun."""

    def price_of_memory(self, limits: Sequence[int] | None = None, time_limit: float | None = None) -> MemoryPrices:
        """What memory is worth around the present limit, under the present pins.

        Parameters
        ----------
        limits
            Bytes of one device, the reserve included; some around what the present plan needs if None.
        time_limit
            Seconds for the search at each limit; that of the first plan if None.

        Raises
        ------
        ExploreError
            There are no limits.
        InfeasibleError
            There is no plan within the present limit.
        """
        with noticing_interrupts() as noticed:
            now, device = self._reach()
            if limits is None:
                limits = [min(device.memory_bytes, int(share * now) + device.reserve_bytes) for share in SHARES]
            if not limits:
                raise ExploreError("limits: give at least one, in bytes of a device")
            prices = tuple(self._prices(sorted(set(limits)), time_limit, noticed))
        return MemoryPrices(prices, now + device.reserve_bytes, device.reserve_bytes)

    def with_pins(self, pins: Sequence[tuple[str, str]] = (), forbidden: Sequence[tuple[str, str]] = ()) -> AnyPlan:
        """Add pins and plan once, in the time limit of the first plan; none without the pins is made before.

        Parameters
        ----------
        pins, forbidden
            Targets and decisions, as for :meth:`pin` and :meth:`forbid`.

        Raises
        ------
        ValueError, InfeasibleError
            As for :meth:`pin`.
        """
        found = self._pins_with(pins, forbidden)
        plan = self._planned_with(found)
        self.pins = found
        return plan

    def pin_all(
        self,
        pins: Sequence[tuple[str, str]] = (),
        forbidden: Sequence[tuple[str, str]] = (),
        time_limit: float | None = None,
        unpinned: Sequence[str] = (),
    ) -> PinChange:
        """Add several pins at once, or take some back, and plan again.

        Parameters
        ----------
        pins, forbidden
            Targets and decisions, as for :meth:`pin` and :meth:`forbid`, whose errors are raised here too.
        time_limit
            As for :meth:`pin`.
        unpinned
            Targets of pins to take back, as for :meth:`unpin`, whose errors are raised here too.
        """
        left = self.pins
        for target in unpinned:
            left = self._without(target, left)
        wanted = self._pins_with(pins, forbidden)
        return self._change(tuple(pin for pin in wanted if pin in left or pin not in self.pins), time_limit)

    def _pins_with(self, pins: Sequence[tuple[str, str]], forbidden: Sequence[tuple[str, str]]) -> tuple[Pin, ...]:
        wanted = (self._pin_of(target, decision, False) for target, decision in pins)
        unwanted = (self._pin_of(target, decision, True) for target, decision in forbidden)
        return tuple(dict.fromkeys((*self.pins, *wanted, *unwanted)))

    def pin(self, target: str, decision: str | Sequence[str], time_limit: float | None = None) -> PinChange:
        """Make the plan decide something, and plan again.

        Parameters
        ----------
        target
            An operator, a module (all of its forward operators), a parameter, or a pattern such as ``*.mlp``; in a plan
            of layers a layer, a module around several, or a pattern.
        decision
            ``keep``, ``recompute`` or ``offload`` the outputs, or a placement with an entry per mesh axis (``S0``,
            ``R``, ``Psum``; ``*`` for any), of an operator's first output. Of a module, ``recompute`` and ``offload``
            are for the outputs that backward reads. Of a layer, in place of placements, a setting such as
            ``sharding=zero3`` or ``tensor_parallel=2``.
        time_limit
            Seconds for the search; a tenth of the time of the first plan if None, and for plans of layers that of the
            request. What was searched for that long, and not interrupted, is not searched again.

        Returns
        -------
        PinChange
            What it costs.

        Raises
        ------
        ValueError
            Nothing has the name, or nothing is left to an operator or layer. The pins stay as they were.
        InfeasibleError
            No plan within the limit keeps the pin. The pins stay as they were.
        """
        return self._change((*self.pins, self._pin_of(target, decision, False)), time_limit)

    def forbid(self, target: str, decision: str | Sequence[str], time_limit: float | None = None) -> PinChange:
        """Keep the plan from deciding something, and plan again; parameters and errors as for :meth:`pin`."""
        return self._change((*self.pins, self._pin_of(target, decision, True)), time_limit)

    def unpin(self, target: str | None = None, time_limit: float | None = None) -> PinChange:
        """Take pins back, and plan again.

        Parameters
        ----------
        target
            The target of the pins as it was given; None for all pins.
        time_limit
            As for :meth:`pin`; if None, a plan that was made before and not interrupted is taken as it is.

        Raises
        ------
        ExploreError
            There is no such pin.
        """
        return self._change(() if target is None else self._without(target, self.pins), time_limit)

    def _without(self, target: str, pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
        """Pins without those of a target."""
        left = tuple(pin for pin in pins if pin.target != target)
        if len(left) == len(pins):
            known = ", ".join(repr(pin.target) for pin in self.pins) or "none"
            raise ExploreError(f"{target!r} is not pinned; pinned are: {known}")
        return left

    def improve(self, time_limit: float) -> PinChange:
        """Search on for a better plan with the present pins, from the present one, which stays where none is found.

        Parameters
        ----------
        time_limit
            Seconds for the search. A plan whose search had as much before and was not interrupted stays as it is.

        Returns
        -------
        PinChange
            The plans before and after.
        """
        return self._change(self.pins, time_limit)

    def _change(self, pins: tuple[Pin, ...], time_limit: float | None) -> PinChange:
        pins = tuple(dict.fromkeys(pins))
        before, after, elapsed = self._replanned(pins, time_limit)
        changed = tuple(pin for pin in (*self.pins, *pins) if (pin in self.pins) != (pin in pins))
        self.pins = pins
        change = PinChange(changed, pins, before, after, elapsed, self.first_seconds)
        self.history.append(change)
        return change
