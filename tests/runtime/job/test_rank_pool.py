"""A rank whose process ends is named with how it ended."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist
from support.processes.rank_pool import RankPool

from runtime.job.process_group import LaunchError


def end_rank_one(code: int) -> None:
    """End the process of rank 1 with an exit code, or where it is negative by that signal."""
    if dist.get_rank() == 1:
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)


def rank() -> int:
    return int(dist.get_rank())


@pytest.mark.parametrize(("code", "said"), [(3, "died with exit code 3"), (-int(signal.SIGTERM), "died by SIGTERM")])
def test_how_the_process_of_a_rank_ended(code: int, said: str) -> None:
    ranks = RankPool(2)
    with pytest.raises(LaunchError, match=f"rank 1 of 2 failed: its process {said}"):
        ranks.run(end_rank_one, code)
    assert ranks.run(rank) == [0, 1], "the next call has new ranks"
    ranks.close()
