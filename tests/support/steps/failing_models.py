"""Steps that fail on one rank of a job, as a broken machine or an exhausted memory would, or that a check finds out."""

from __future__ import annotations

import os
import signal
import time

import torch
from support.steps.models import Step, mean_square, mlp
from torch import Tensor


def raises_on_rank_one(batch: int = 4) -> Step:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("the disk of this rank is on fire")
    return mlp(batch)


def killed_on_rank_one(batch: int = 4) -> Step:
    if os.environ.get("RANK") == "1":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    return mlp(batch)


def doubled_outside_of_the_plan(batch: int = 4) -> Step:
    def loss(output: Tensor) -> Tensor:
        return mean_square(output) if torch.compiler.is_compiling() else 2 * mean_square(output)

    model, args, kwargs, _ = mlp(batch)
    return model, args, kwargs, loss
