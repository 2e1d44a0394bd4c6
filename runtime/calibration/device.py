"""What a CUDA device has beside its kernels: memory, copies to and from the host, and the host's part of a launch."""

from __future__ import annotations

import torch

from planner.machine.calibration import FoundDevice, HostSample
from runtime.calibration.timing import dispatch_seconds, waited_time
from runtime.measure.host_copies import HostCopies

COPIED_BYTES, SMALL_BYTES = 2**28, 2**14
_LEAST_SECONDS = 1e-6


def host_sample(device: torch.device) -> HostSample:
    """Seconds of copies as the executor makes them."""
    engine = HostCopies(device)
    tensor = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
    small = tensor[:SMALL_BYTES].clone()
    host, copied = engine.offload(tensor)
    engine.wait(tensor, copied)

    def outward() -> None:
        engine.wait(tensor, engine.offload(tensor)[1])

    def inward() -> None:
        found, arrived = engine.prefetch(host, copied)
        engine.wait(found, arrived)

    def both() -> None:
        leaving = engine.offload(tensor)[1]
        found, arrived = engine.prefetch(host, copied)
        engine.wait(tensor, leaving)
        engine.wait(found, arrived)

    def copied_out() -> None:
        engine.wait(small, engine.offload(small)[1])

    def nothing() -> None:
        """What is left of the time of a small copy is not the wait for the device."""

    times = [waited_time(call, device) for call in (outward, inward, both)]
    return HostSample(
        nbytes=COPIED_BYTES,
        out_seconds=times[0],
        in_seconds=times[1],
        both_seconds=times[2],
        small_seconds=max(waited_time(copied_out, device) - waited_time(nothing, device), _LEAST_SECONDS),
    )


def found_device(device: torch.device) -> FoundDevice:
    """The device; call it after the kernels, whose libraries take memory as well."""
    free, total = torch.cuda.mem_get_info(device)
    return FoundDevice(
        name=torch.cuda.get_device_name(device),
        memory_bytes=total,
        outside_bytes=max(0, total - free - torch.cuda.memory_reserved(device)),
        dispatch_seconds=dispatch_seconds(device),
    )
