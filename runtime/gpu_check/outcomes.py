"""Outcomes of checks: passed, failed, or not run and why, with figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from runtime.job.device_memory import DeviceMemoryError

Figures = dict[str, Any]
"""Plain values by name; bytes and seconds are numbers."""


class Status(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not_run"


class NotRunError(Exception):
    """A check that cannot run here; the message says why."""


class Outcome(BaseModel):
    """Outcome of one check.

    Parameters
    ----------
    name, status
        Which check, and how it ended.
    reason
        Why it failed or was not run.
    figures
        What it measured.
    seconds
        How long it took.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    name: str
    status: Status
    reason: str = ""
    figures: Figures = Field(default_factory=dict)
    seconds: float = 0.0


class FailedError(Exception):
    """A check that found a wrong result; ``figures`` are what it measured."""

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.figures = figures or {}


def outcome_of(name: str, check: Callable[[], Figures]) -> Outcome:
    """Run a check; whatever it raises is its outcome, and the checks after it run all the same."""
    started, status, reason = time.perf_counter(), Status.PASSED, ""
    figures: Figures = {}
    try:
        figures = check()
    except NotRunError as error:
        status, reason = Status.NOT_RUN, str(error)
    except FailedError as error:
        status, reason, figures = Status.FAILED, str(error), error.figures
    except (DeviceMemoryError, torch.OutOfMemoryError) as error:
        status, reason = Status.NOT_RUN, str(error)
    except Exception as error:  # one broken check must not hide the others
        status, reason = Status.FAILED, f"{type(error).__name__}: {error}"
    return Outcome(name=name, status=status, reason=reason, figures=figures, seconds=time.perf_counter() - started)
