"""Main program of ranks that write on which machine each rank of a mesh is: FILE SIZE SIZE..."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.job.layout import device_mesh
from runtime.job.membership import joined

with joined(torch.device("cpu")):
    mesh = device_mesh("cpu", tuple(map(int, sys.argv[2:])))
    machines: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(machines, os.readlink("/proc/self/ns/net"))
    summed = [torch.tensor(float(dist.get_rank())) for _ in range(mesh.ndim)]
    for axis, tensor in enumerate(summed):
        dist.all_reduce(tensor, group=mesh.get_group(axis))
    if dist.get_rank() == 0:
        on = [machines[rank] for rank in mesh.mesh.flatten().tolist()]
        Path(sys.argv[1]).write_text(json.dumps({"machines": on, "sums": [tensor.item() for tensor in summed]}))
