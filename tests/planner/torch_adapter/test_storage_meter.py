"""Device and host have accounts of their own, though both are the same memory on a CPU."""

from __future__ import annotations

import torch

from planner.torch_adapter.meters.storage_meter import StorageMeter, counted_on_host


def test_storages_made_for_the_host_leave_the_device_account():
    with StorageMeter() as meter:
        device = torch.ones(100)
        with counted_on_host():
            host = torch.empty_like(device)
        host.copy_(device)
        assert (meter.live_bytes, meter.host_live_bytes) == (400, 400)
        seen = host.view(10, 10)
        del device, host
        assert (meter.live_bytes, meter.host_live_bytes) == (0, 400)
        with counted_on_host():
            small = torch.ones(10)
        del seen
        assert (meter.live_bytes, meter.host_live_bytes) == (0, 40)
        del small
    assert (meter.live_bytes, meter.host_live_bytes) == (0, 0)
    assert (meter.peak_bytes, meter.host_peak_bytes) == (400, 440)
