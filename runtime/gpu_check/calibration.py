"""Check of the calibration of a device: a cluster comes of it, and is that of this machine."""

from __future__ import annotations

import os
import tempfile

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
    before = os.environ.get(CACHE_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="meshwright-check-") as folder:
        os.environ[CACHE_VARIABLE] = folder
        try:
            cluster = calibrate_devices()
            found = load_cluster(LOCAL_DEVICE_NAME)
        finally:
            os.environ.pop(CACHE_VARIABLE)
            if before is not None:
                os.environ[CACHE_VARIABLE] = before
    figures: Figures = {"cluster": cluster.model_dump(mode="json")}
    if found != cluster:
        raise FailedError("the cluster that was read is not the one that was measured", figures)
    return figures
