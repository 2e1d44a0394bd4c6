"""Checks of copies between a device and its host: their rate alone, and beside the computation."""

from __future__ import annotations

import torch

from runtime.calibration.timing import waited_time
from runtime.gpu_check.outcomes import FailedError, Figures
from runtime.measure.host_copies import HostCopies

_BYTES = 2**28
_WIDTH = 8192
_SMALL = 2**14


def copies(device: torch.device) -> Figures:
    """Seconds of copies as the executor makes them, of products of matrices, and of both at once.

    Raises
    ------
    FailedError
        Copies do not run beside the computation, or what came back is not what was sent.
    """
    engine = HostCopies(device)
    tensor = torch.randint(255, (_BYTES,), dtype=torch.uint8, device=device)
    host, copied = engine.offload(tensor)
    engine.wait(tensor, copied)
    found, arrived = engine.prefetch(host, copied)
    engine.wait(found, arrived)
    different = int((found != tensor).sum())
    matrix = torch.randn(_WIDTH, _WIDTH, device=device, dtype=torch.bfloat16)
    product = waited_time(lambda: torch.mm(matrix, matrix), device)

    def outward() -> None:
        engine.wait(tensor, engine.offload(tensor)[1])

    products = max(2, round(2 * waited_time(outward, device) / product))

    def compute() -> None:
        for _ in range(products):
            torch.mm(matrix, matrix)

    def inward() -> None:
        found, arrived = engine.prefetch(host, copied)
        engine.wait(found, arrived)

    def out_beside() -> None:
        engine.let_go(tensor, engine.offload(tensor)[1])
        compute()

    def in_beside() -> None:
        found, arrived = engine.prefetch(host, copied)
        compute()
        engine.wait(found, arrived)

    small = tensor[:_SMALL].clone()
    figures: Figures = {
        "bytes": _BYTES,
        "different": different,
        "out_seconds": waited_time(outward, device),
        "in_seconds": waited_time(inward, device),
        "small_bytes": _SMALL,
        "small_out_seconds": waited_time(lambda: engine.wait(small, engine.offload(small)[1]), device),
        "computation_seconds": waited_time(compute, device),
        "out_beside_seconds": waited_time(out_beside, device),
        "in_beside_seconds": waited_time(in_beside, device),
    }
    engine.settle()
    for way in ("out", "in"):
        alone = figures["computation_seconds"] + figures[f"{way}_seconds"]
        figures[f"{way}_hidden"] = (alone - figures[f"{way}_beside_seconds"]) / figures[f"{way}_seconds"]
    if different:
        raise FailedError(f"{different} of {_BYTES} bytes came back changed", figures)
    if min(figures["out_hidden"], figures["in_hidden"]) < 0.5:
        raise FailedError("less than half of a copy's time passes beside the computation", figures)
    return figures
