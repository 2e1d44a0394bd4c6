"""Order of a data set's rows in training, of which each rank reads its own: the same in every job that goes on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from runtime.job.process_group import gather_texts
from runtime.library.batch import Batch
from runtime.library.errors import BatchError
from runtime.library.saved_state import random_state, set_random_state

if TYPE_CHECKING:
    from runtime.library.step import Step

_EPOCH_STRIDE = 1_000_003
"""Between the seeds of two passes over data, or of two seeds' first passes."""


class ShareSampler(Sampler[list[int]]):
    """The indices of this rank's rows, batch by batch: a ``batch_sampler`` of :class:`torch.utils.data.DataLoader`.

    All ranks draw one order from the seed and the epoch, so together they read each global batch once, whatever the
    mesh. The last incomplete batch is left out.

    Parameters
    ----------
    step
        Whose batches they are.
    data
        A data set with a length, or that length.
    shuffle
        Whether each epoch has another order.
    seed
        Of the orders.

    Attributes
    ----------
    epoch
        Number of the next pass, from 0; it counts itself.
    start
        Batch with which the next pass begins; 0 afterwards.

    Raises
    ------
    BatchError
        The data has less rows than a batch, or the step's tensors have no rows in common.
    """

    def __init__(self, step: Step, data: Sized | int, *, shuffle: bool = True, seed: int = 0) -> None:
        self._size = data if isinstance(data, int) else len(data)
        self._rows, self._batch_size = step.shares.rows, step.shares.batch_size
        if not self._batch_size:
            raise BatchError("the tensors of a batch differ in their first dimension: make the batches yourself")
        if self._size < self._batch_size:
            raise BatchError(f"the data has {self._size} rows, a batch has {self._batch_size}: give more rows")
        self._shuffle, self._seed = shuffle, seed
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self._size // self._batch_size

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.arange(self._size)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed * _EPOCH_STRIDE + self.epoch)
            order = torch.randperm(self._size, generator=generator)
        first, self.start = self.start, 0
        self.epoch += 1
        for batch in range(first, len(self)):
            begin = batch * self._batch_size
            yield order[begin + self._rows.start : begin + self._rows.stop].tolist()


class TrainingData:
    """Passes over a user's data, in an order that depends on the number of the pass alone, the same on all ranks.

    A loader that draws rows by torch's own samplers, or in order, is replaced by one with a :class:`ShareSampler`, so
    that each rank reads its rows alone; rows that do not fill a batch are left out, with a warning. Another loader's
    sampler gets a seeded generator in every pass, anything with ``set_epoch`` the number of the pass. The first
    batch of a pass is compared between ranks.

    Parameters
    ----------
    step
        Whose batches they are.
    data
        As :class:`runtime.Trainer` takes it.

    Raises
    ------
    BatchError
        A loader makes batches of another size than the plan's.
    """

    def __init__(self, step: Step, data: Iterable[Batch]) -> None:
        self._step = step
        self._data = _shared_loader(step, data)
        sampler = getattr(self._data, "sampler", None)
        generator = getattr(sampler, "generator", None)
        self._seed = generator.initial_seed() if isinstance(generator, torch.Generator) else 0
        self._generates = isinstance(sampler, Sampler) and hasattr(sampler, "generator")

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of a pass from a number on. A collective of all ranks.

        Raises
        ------
        BatchError
            The ranks read different global batches.
        """
        shares = getattr(self._data, "batch_sampler", None)
        before = random_state()
        if isinstance(shares, ShareSampler):
            shares.epoch, shares.start = epoch, start
            found = iter(self._data)
            if start:
                set_random_state(before)
            yield from found
            return
        data: Any = self._data
        shuffled: Any
        for shuffled in (data, getattr(data, "sampler", None), shares):
            if hasattr(shuffled, "set_epoch"):
                shuffled.set_epoch(epoch)
        if self._generates:
            data.sampler.generator = torch.Generator().manual_seed(self._seed + epoch * _EPOCH_STRIDE)
        found = iter(data)
        if start:
            next(islice(found, start - 1, start), None)
            set_random_state(before)  # a job that goes on draws what it would have drawn, whatever the way here drew
        for number, batch in enumerate(found):
            if number == 0:
                self._check_same(batch, epoch)
            yield batch

    def _check_same(self, batch: Batch, epoch: int) -> None:
        seen = set(gather_texts(self._digest(batch))) - {""}
        if len(seen) > 1:
            raise BatchError(
                f"the ranks read different global batches in pass {epoch + 1} of the data: give the same ones on "
                "every rank (seed what shuffles or augments them; set_epoch gets the number of the pass), or each rank "
                "its rows, with runtime.ShareSampler as the loader's batch_sampler"
            )

    def _digest(self, batch: Batch) -> str:
        """What identifies a global batch; empty for a rank's own rows, and for what the step refuses."""
        named = self._step.shares.global_tensors(batch)
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(named):
            digest.update(named[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest() if named else ""


def _shared_loader(step: Step, data: Iterable[Batch]) -> Iterable[Batch]:
    """The loader with a :class:`ShareSampler`, where it draws each row once by torch's samplers; else the data."""
    if not isinstance(data, DataLoader) or type(data.batch_sampler) is not BatchSampler:
        return data
    rows: Any = data.dataset
    sampler, size = data.sampler, step.shares.batch_size
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(rows)
    if not size or not (shuffled or type(sampler) is SequentialSampler):
        return data
    if data.batch_size != size:
        raise BatchError(
            f"the loader makes batches of {data.batch_size} rows, the plan's have {size}: give batch_size={size}, of "
            "which each rank reads its part, or runtime.ShareSampler as the batch_sampler"
        )
    if len(rows) % size and not data.drop_last and dist.get_rank() == 0:
        warnings.warn(
            f"each pass leaves {len(rows) % size} of {len(rows)} rows out: they do not fill a batch of {size}, and a "
            "plan has batches of one size (drop_last=True in the loader says so)",
            stacklevel=2,
        )
    generator = getattr(sampler, "generator", None)
    seed = generator.initial_seed() if isinstance(generator, torch.Generator) else 0
    return DataLoader(
        rows,
        batch_sampler=ShareSampler(step, rows, shuffle=shuffled, seed=seed),
        **{name: getattr(data, name) for name in _KEPT},
    )


_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)
"""Settings of a loader that do not say which rows are read."""
