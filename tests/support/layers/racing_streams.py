"""Streams and events of CUDA on the CPU: nothing runs beside anything, but whatever could is noticed.

Every stream has a vector clock, as data race detectors have (Flanagan and Freund, *FastTrack*, PLDI 2009): waiting for
an event takes over the clock with which it was recorded. An access to memory is a race if the stream does not know,
by its clock, of every earlier access that it must come after. The allocator gives memory that is freed to the stream
that allocated it, so freeing is an access as well.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WITHOUT_VALUES = ("aten::empty_like", "aten::empty", "aten::empty_strided", "aten::new_empty_strided")
"""Operators that neither read nor write what their tensors hold."""


class Stream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, device: torch.device | None = None, name: str = "side") -> None:
        self.name = name
        self.clock: dict[Stream, int] = defaultdict(int)

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock)

    def learn(self, clock: dict[Stream, int]) -> None:
        for stream, time in clock.items():
            self.clock[stream] = max(self.clock[stream], time)

    def record_event(self) -> Event:
        return Event(dict(self.clock))


@dataclass(frozen=True)
class Event:
    """As ``torch.cuda.Event``: the clock of a stream."""

    clock: dict[Stream, int]


@dataclass
class Memory:
    """Who wrote a storage last, and who read it since; each a stream and its time."""

    written: tuple[Stream, int]
    read: list[tuple[Stream, int]] = field(default_factory=list)
    finalizer: object = None


class RacingStreams(TorchDispatchMode):
    """Notices races between streams while it is on.

    Attributes
    ----------
    races
        One line for each.
    copies
        Copies beside the computation.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.races: list[str] = []
        self.copies = 0
        self._compute = self._current = Stream(name="compute")
        self._memory: dict[int, Memory] = {}
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self._current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        is_pinned = bool(kwargs.pop("pin_memory", False))
        written, read = [], []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            alias = argument.alias_info
            if alias is None or alias.is_write:  # else it is a view of the argument
                (written if alias is not None else read).extend(tree_leaves(value))
        self._access(read if func._schema.name not in WITHOUT_VALUES else [], self._read)
        self._access(written, self._write)
        self.copies += self._current is not self._compute
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._memory_of(leaf, self._now(), is_pinned)
        return result

    def _access(self, leaves, access) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                access(self._memory_of(leaf, (self._compute, 0)))

    def _memory_of(self, tensor: torch.Tensor, first: tuple[Stream, int], is_pinned: bool = False) -> Memory:
        """Memory of a tensor; where it is new, it was written first then."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            made = Memory(first)
            self._memory[key] = made
            made.finalizer = weakref.ref(storage, lambda _: self._free(key, is_pinned))
        return self._memory[key]

    def _now(self) -> tuple[Stream, int]:
        self._current.clock[self._current] += 1
        return self._current, self._current.clock[self._current]

    def _read(self, memory: Memory) -> None:
        self._check("read", memory.written)
        memory.read.append(self._now())

    def _write(self, memory: Memory) -> None:
        self._check("written", memory.written, *memory.read)
        memory.written, memory.read = self._now(), []

    def _free(self, key: int, is_pinned: bool) -> None:
        memory = self._memory.pop(key)
        if not is_pinned:  # torch's allocator of pinned memory has events of its own
            self._check("freed", memory.written, *memory.read)

    def _check(self, what: str, *earlier: tuple[Stream, int]) -> None:
        present = self._compute if what == "freed" else self._current
        for stream, time in earlier:
            if present.clock[stream] < time and stream is not present:
                self.races.append(f"{what} on {present.name}, which did not wait for {stream.name}")
