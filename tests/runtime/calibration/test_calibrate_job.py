"""Measuring the machines of a job that a launcher started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from planner.machine.calibration import CalibrationError
from planner.machine.cluster import load_cluster, read_cluster
from planner.machine.identity import current_machine
from runtime.calibration import job as module


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (["1"], "a job of one rank has no collectives to measure: start at least 2 ranks"),
        (["2", "2", "1"], "machines have 1 to 2 ranks: start as many on each"),
    ],
)
def test_jobs_that_no_cluster_describes_are_refused(counts, message, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", counts[0])
    monkeypatch.setattr(module, "gather_texts", lambda text: counts)
    with pytest.raises(CalibrationError, match=message):
        module._ranks_of_each_machine()


def test_ranks_of_each_machine_are_counted(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(module, "gather_texts", lambda text: [text] * 8)
    assert module._ranks_of_each_machine() == 4


def test_rank_0_alone_writes_and_prints(tmp_path, monkeypatch, meshwright):
    asked = []

    def measured(path, kind):
        asked.append((path, kind))
        return load_cluster("a100-2x8-nvlink")

    monkeypatch.setattr(module, "calibrate_job", measured)
    monkeypatch.setenv("WORLD_SIZE", "2")
    elsewhere = tmp_path / "absent" / "rack.json"
    monkeypatch.setenv("RANK", "1")
    outcome = meshwright("calibrate", "--out", elsewhere)
    assert (outcome.code, outcome.out, asked) == (0, "", [(elsewhere, "cpu")])
    refused = meshwright("calibrate", "--ranks", "2")
    assert refused.code == 2
    assert "--ranks: a job that a launcher started is measured as it is" in refused.err
    monkeypatch.setenv("RANK", "0")
    assert meshwright("calibrate", "--out", elsewhere).code == 2
    outcome = meshwright("calibrate", "--out", tmp_path / "rack.json")
    assert outcome.code == 0
    assert "between ranks" in outcome.out
    assert "between machines" in outcome.out


@pytest.mark.slow
def test_a_job_of_one_machine_measures_it(tmp_path):
    path = tmp_path / "here.json"
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    ended = subprocess.run(
        [*launcher, "-m", "runtime.commands.main", "calibrate", "--out", path],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("GFLOP/s") == 1  # rank 0 alone prints
    cluster = read_cluster(path)
    assert (cluster.name, cluster.devices, cluster.nodes) == ("local-cpu", 2, 1)
    assert cluster.measured.machine == current_machine()
    assert cluster.is_shared
