"""Slurm's variables and job script; a double of ``srun`` starts the processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.job.process_group import LaunchError
from runtime.job.slurm import adopt_slurm, first_host, launcher_variables, tasks_per_node

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "runtime" / "job" / "slurm.sh"

SRUN = '''#!{python}
"""Starts two tasks on each of two machines, dealt out as by --distribution=cyclic; a failed one ends the others."""
import itertools, os, pathlib, subprocess, sys, time
command = list(itertools.dropwhile(lambda entry: entry.startswith("--"), sys.argv[1:]))
steps = pathlib.Path("{folder}/steps")
step = len(steps.read_text()) if steps.exists() else 0
steps.write_text("." * (step + 1))
tasks = []
for number in range(4):
    slurm = {{
        "SLURM_JOB_ID": "{job}", "SLURM_STEP_ID": str(step), "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": str(number),
        "SLURM_NODEID": str(number % 2), "SLURM_LOCALID": str(number // 2), "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "localhost,gpu[12-13]",
    }}
    tasks.append(subprocess.Popen(command, env={{**os.environ, **slurm}}))
while any(task.poll() is None for task in tasks) and not any(task.poll() for task in tasks):
    time.sleep(0.05)
time.sleep(0.2)
for task in tasks:
    task.kill()
sys.exit(max(task.wait() != 0 for task in tasks))
'''

RANK = """#!{python}
import os, sys, torch
import torch.distributed as dist
from pathlib import Path
from runtime.job.layout import device_mesh
from runtime.job.membership import joined
from runtime.job.slurm import adopt_slurm

first = Path("{folder}/attempt")
adopt_slurm()
with joined(torch.device("cpu")):
    if not first.exists():
        dist.barrier()
        if dist.get_rank() == 3:
            first.touch()
            raise ValueError("the first attempt fails")
    mesh = device_mesh("cpu", (2, 2))
    inner = dist.get_process_group_ranks(mesh.get_group(1))
    machines = [None] * 4
    dist.all_gather_object(machines, os.environ["SLURM_NODEID"])
    if dist.get_rank() == 0:
        print(sys.argv[1:], machines, inner)
"""


def test_counts_and_names_of_machines():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("8") == [8]
    assert first_host("gpu[007-009,12]-ib,login1") == "gpu007-ib"
    assert first_host("node3,node[4-5]") == "node3"
    with pytest.raises(LaunchError, match=r"SLURM_STEP_TASKS_PER_NODE '2\(y3\)'"):
        tasks_per_node("2(y3)")


def slurm(node: int, local: int) -> dict[str, str]:
    found = {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1", "SLURM_STEP_NODELIST": "a[1-3]"}
    return {**found, "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "1"}


def test_ranks_are_numbered_machine_by_machine():
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    found = [launcher_variables(slurm(*place)) for place in places]
    assert [entry["RANK"] for entry in found] == list("01234")
    assert {entry["WORLD_SIZE"] for entry in found} == {"5"}
    assert [entry["LOCAL_WORLD_SIZE"] for entry in found] == ["2", "2", "2", "2", "1"]
    assert {entry["MASTER_ADDR"] for entry in found} == {"a1"}
    assert len({entry["MASTER_PORT"] for entry in found}) == 1
    ports = [
        launcher_variables(slurm(0, 0) | {"SLURM_JOB_ID": str(job)})["MASTER_PORT"] for job in range(0, 10**6, 997)
    ]
    assert 1024 < min(map(int, ports)) <= max(map(int, ports)) < 32768, "a port of outgoing connections may be taken"


def test_other_launchers_and_single_tasks_are_left_alone():
    by_torchrun = {**slurm(1, 0), "RANK": "9"}
    adopt_slurm(by_torchrun)
    assert "WORLD_SIZE" not in by_torchrun
    alone = {**slurm(0, 0), "SLURM_STEP_NUM_TASKS": "1"}
    adopt_slurm(alone)
    assert "RANK" not in alone
    with pytest.raises(LaunchError, match="SLURM_NODEID: not set in this step"):
        adopt_slurm({key: value for key, value in slurm(0, 0).items() if key != "SLURM_NODEID"})
    with pytest.raises(LaunchError, match="no task 5 on 0"):
        adopt_slurm(slurm(0, 5))


def test_the_script_is_bash():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


@pytest.mark.slow
def test_the_script_runs_tasks_as_ranks_and_again_after_a_fault(tmp_path):
    for name, text in {"srun": SRUN, "python": RANK}.items():
        path = tmp_path / name
        path.write_text(text.format(python=sys.executable, folder=tmp_path, job=os.getpid()))
        path.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "RANK", "MASTER"))}
    environment |= {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "MESHWRIGHT_PYTHON": str(tmp_path / "python"),
    }  # fmt: skip
    ended = subprocess.run(
        ["bash", str(SCRIPT), "plan.json", "--steps", "3"], env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stderr.count("meshwright: rank 3 of 4 failed: ValueError: the first attempt fails") == 1
    assert ended.stderr.count("meshwright: restart 1 of 3") == 1
    assert ended.stdout.splitlines() == [
        "['-m', 'runtime.train_main', 'plan.json', '--steps', '3'] ['0', '0', '1', '1'] [0, 1]"
    ]
