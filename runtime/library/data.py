"""Order of a data set's rows in training, of which each rank reads its own."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

from runtime.library.errors import BatchError

if TYPE_CHECKING:
    from runtime.library.step import Step


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
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.epoch)
            order = torch.randperm(self._size, generator=generator)
        first, self.start = self.start, 0
        self.epoch += 1
        for batch in range(first, len(self)):
            begin = batch * self._batch_size
            yield order[begin + self._rows.start : begin + self._rows.stop].tolist()
