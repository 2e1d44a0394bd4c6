"""Steps whose loading fails on one rank of a job, as a broken machine or an exhausted memory would."""

from __future__ import annotations

import os
import signal
import time

from support.models import Step, mlp


def raises_on_rank_one(batch: int = 4) -> Step:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("the disk of this rank is on fire")
    return mlp(batch)


def killed_on_rank_one(batch: int = 4) -> Step:
    if os.environ.get("RANK") == "1":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return mlp(batch)
