"""Check of the calibration of a device: a cluster comes of it, and is that of this machine."""

from __future__ import annotations

import os
import tempfile
from unittest.mock import patch

from planner.machine.cluster import LOCAL_DEVICE_NAME, load_cluster
from planner.machine.identity import CACHE_VARIABLE
from runtime.calibration.calibrate import calibrate_devices
from runtime.gpu_check.outcomes import FailedError, Figures


def calibrated() -> Figures:
    """The cluster ``local-cuda`` of this machine.

    Raises
    ------
    FailedError
        What was written is not read as it was measured.
    """
    folder = tempfile.TemporaryDirectory(prefix="meshwright-check-")
    with folder as cache, patch.dict(os.environ, {CACHE_VARIABLE: cache}):
        cluster = calibrate_devices()
        found = load_cluster(LOCAL_DEVICE_NAME)
    figures: Figures = {"cluster": cluster.model_dump(mode="json")}
    if found != cluster:
        raise FailedError("the cluster that was read is not the one that was measured", figures)
    return figures
