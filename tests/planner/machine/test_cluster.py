"""Cluster files: presets, links of meshes, the machine they were measured on, and every refusal."""

from __future__ import annotations

import json

import pytest

from planner.machine import cluster as module
from planner.machine.calibration import save_cluster
from planner.machine.cluster import (
    METHOD,
    ClusterError,
    ClusterSpec,
    Collective,
    DeviceSpec,
    HostCopies,
    LinkSpec,
    Measurement,
    load_cluster,
    local_cluster_path,
    preset_names,
)
from planner.machine.identity import CACHE_VARIABLE, MachineIdentity, current_machine

V100_FINGERPRINT = "3545f8e568a70d59ecf045fbd7c089d293ee8289d30134a925bab33ac32e45e8"
"""Of the preset, in plans of every version."""

FAST = LinkSpec(latency_seconds=1e-6, bandwidth=1e11)
NETWORK = LinkSpec(latency_seconds=1e-5, bandwidth=1.6e10)
DEVICE = DeviceSpec(
    name="test", flops={"float32": 1e12}, memory_bandwidth=1e11, launch_seconds=1e-6, memory_bytes=2**30,
    reserve_bytes=2**20, bandwidth_by_class={"copy": 5e10},
)  # fmt: skip
EXPECTED = {
    "v100-8-nvlink": 8, "v100-2x4-gcp": 8, "v100-4x2-gcp": 8, "titan-rtx-8-pcie": 8, "titan-rtx-2x8-pcie": 16,
    "rtx-2080ti-8-pcie": 8, "a100-8-nvlink": 8, "a100-2x8-nvlink": 16, "a100-8x8-nvlink": 64,
    "a100-4x4-infiniband": 16, "h100-8-nvlink": 8, "h200-8-nvlink": 8,
}  # fmt: skip


def spec(per_node=8, nodes=2, **options):
    figures = {
        "name": "test", "source": "test", "device": DEVICE, "devices_per_node": per_node, "nodes": nodes,
        "intra_node": FAST, "inter_node": NETWORK, "host_link": FAST,
    } | options  # fmt: skip
    return ClusterSpec(**figures)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_presets_say_what_they_are_and_where_from(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.devices == EXPECTED[name]
    assert len(cluster.source) > 200
    assert cluster.measured is None
    assert (cluster.inter_node is not None) == (cluster.nodes > 1)
    assert cluster.device.reserve_bytes < 0.15 * cluster.device.memory_bytes
    assert cluster.mesh_links((cluster.devices,))[0].bandwidth <= cluster.intra_node.bandwidth


def test_no_preset_is_forgotten():
    assert set(preset_names()) == set(EXPECTED)


def test_bandwidths_that_papers_print_are_used():
    assert load_cluster("rtx-2080ti-8-pcie").host_link.bandwidth == pytest.approx(15.8e9 * 0.8)
    assert load_cluster("a100-8-nvlink").host_link.bandwidth == pytest.approx(31.5e9 * 0.8)
    for name in ("a100-2x8-nvlink", "a100-4x4-infiniband", "titan-rtx-2x8-pcie"):
        assert load_cluster(name).inter_node.bandwidth == pytest.approx(100e9 / 8 * 0.9)


def test_copies_to_the_host_run_as_the_machine_allows():
    assert spec().host_copies is HostCopies.BOTH_WAYS
    assert spec(host_link_shared=True).host_copies is HostCopies.TAKE_TURNS
    measured = spec(nodes=1, inter_node=None, measured=Measurement(machine=current_machine(), ranks=2))
    assert measured.host_copies is HostCopies.BLOCKING
    assert spec().host_link_for((2, 4)) == measured.host_link_for((2,)) == FAST
    assert measured.host_link_for((4,)).bandwidth == FAST.bandwidth / 2
    with pytest.raises(ClusterError, match="has 32 devices"):
        spec().host_link_for((32,))


def test_rings_inside_a_node_have_its_link():
    assert spec().mesh_links((2, 4)) == (FAST, FAST)
    assert spec().mesh_links((8,)) == (FAST,)
    assert spec().mesh_links((2, 8))[1] == FAST
    assert spec().mesh_links((2, 2, 4))[1:] == (FAST, FAST)


@pytest.mark.parametrize(
    ("mesh", "axis", "rings"), [((2, 8), 0, 8), ((16,), 0, 1), ((8, 2), 0, 2), ((4, 2, 2), 0, 4), ((2, 2, 4), 0, 8)]
)
def test_rings_that_leave_a_node_share_its_network(mesh, axis, rings):
    link = spec().mesh_links(mesh)[axis]
    assert link.latency_seconds == NETWORK.latency_seconds
    assert link.bandwidth == NETWORK.bandwidth / rings


def test_a_node_sends_at_most_one_ring_per_device():
    assert spec(per_node=2, nodes=4).mesh_links((2, 4))[0].bandwidth == NETWORK.bandwidth / 2


def test_a_ring_that_straddles_nodes_has_the_network():
    assert spec(per_node=4).mesh_links((2, 3))[1].latency_seconds == NETWORK.latency_seconds
    assert spec(per_node=3).mesh_links((2, 3))[1] == FAST


def test_no_ring_is_faster_than_the_links_inside():
    wide = LinkSpec(latency_seconds=1e-5, bandwidth=1e12)
    assert spec(inter_node=wide).mesh_links((16,))[0].bandwidth == FAST.bandwidth


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ((4, 8), "mesh 4x8 has 32 devices but cluster test has 16: use a smaller mesh or another cluster"),
        ((), "mesh () is not a mesh: give one positive size per axis, such as 2x4"),
        ((2, 0), "mesh 2x0 is not a mesh: give one positive size per axis, such as 2x4"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(mesh, message):
    for ask in (spec().mesh_links, spec().device_for):
        with pytest.raises(ClusterError) as error:
            ask(mesh)
        assert str(error.value) == message


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        (Collective.ALL_GATHER, 1), (Collective.REDUCE_SCATTER, 1), (Collective.ALL_TO_ALL, 1),
        (Collective.ALL_REDUCE, 2),
    ],
)  # fmt: skip
def test_rings_by_hand(collective, factor):
    link = LinkSpec(latency_seconds=2.0, bandwidth=10.0)
    assert link.collective_seconds(collective, 4, 400) == factor * (3 * 2.0 + 0.75 * 40)
    assert link.collective_seconds(collective, 1, 400) == 0
    slow = link.model_copy(update={"slowdown": {collective: 3.0}})
    assert slow.collective_seconds(collective, 4, 400) == 3 * factor * 36.0


def test_a_measured_machine_is_shared_by_any_number_of_ranks():
    measured = Measurement(machine=current_machine(), ranks=2)
    cluster = spec(per_node=2, nodes=1, inter_node=None, measured=measured)
    assert cluster.device_for((2,)) == DEVICE
    four = cluster.device_for((2, 2))
    assert four.flops == {"float32": 5e11}
    assert (four.memory_bandwidth, four.bandwidth_by_class) == (5e10, {"copy": 2.5e10})
    assert (four.memory_bytes, four.reserve_bytes) == (2**29, 2**19)
    assert cluster.mesh_links((2, 2)) == (LinkSpec(latency_seconds=2e-6, bandwidth=5e10),) * 2
    assert cluster.mesh_links((1,)) == (FAST,)


def test_measured_processes_of_several_machines_are_as_many_as_were_measured():
    cluster = spec(per_node=2, nodes=2, measured=Measurement(machine=current_machine(), ranks=4))
    assert (cluster.is_shared, cluster.host_copies) == (False, HostCopies.BLOCKING)
    assert cluster.device_for((2, 2)) == cluster.device_for((2,)) == DEVICE
    across, inside = cluster.mesh_links((2, 2))
    assert inside == FAST
    assert across.bandwidth == NETWORK.bandwidth / 2
    with pytest.raises(ClusterError, match="mesh 8 has 8 devices but cluster test has 4"):
        cluster.device_for((8,))


def test_a_fingerprint_follows_every_figure():
    same, other = spec(), spec(device=DEVICE.model_copy(update={"launch_seconds": 2e-6}))
    assert spec().fingerprint() == same.fingerprint() != other.fingerprint()
    assert len(same.fingerprint()) == 64


def test_a_file_is_read_as_it_was_written(tmp_path):
    save_cluster(spec(), tmp_path / "mine.json")
    assert load_cluster(str(tmp_path / "mine.json")) == spec()


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ClusterError, match=r"no cluster is named 'tpu': .*a100-8-nvlink, .*local-cpu, local-cuda$"):
        load_cluster("tpu")


def rewritten(change):
    data = spec().model_dump(mode="json")
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff\xfe", "cannot be read"),
        ("{", "is not valid: file: Invalid JSON"),
        (rewritten(lambda d: d.update(version=2)), "is not valid: version: Input should be 1"),
        (rewritten(lambda d: d.update(nodess=1)), "is not valid: nodess: Extra inputs are not permitted"),
        (rewritten(lambda d: d["device"].pop("memory_bytes")), "is not valid: device.memory_bytes: Field required"),
        (rewritten(lambda d: d["device"].update(flops={"float16": 1.0})), "flops must give at least float32"),
        (rewritten(lambda d: d["device"].update(reserve_bytes=2**30)), "must be below memory_bytes 1073741824"),
        (rewritten(lambda d: d.update(inter_node=None)), "2 nodes need an inter_node link"),
        (rewritten(lambda d: d["intra_node"].update(bandwidth=0)), "is not valid: intra_node.bandwidth: Input should"),
    ],
)
def test_files_that_are_no_cluster_are_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ClusterError) as error:
        load_cluster(str(path))
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unmeasured_machine_is_told_to_calibrate(cache):
    with pytest.raises(ClusterError, match=r"has not been measured .*run `meshwright calibrate`"):
        load_cluster("local-cpu")


def test_the_measured_machine_is_found_in_the_cache(cache):
    measured = spec(measured=Measurement(machine=current_machine(), ranks=2, method=METHOD))
    save_cluster(measured, local_cluster_path())
    assert local_cluster_path().parent == cache
    assert load_cluster("local-cpu") == measured


@pytest.mark.parametrize(
    "measured",
    [
        None,
        Measurement(machine=current_machine(), ranks=2),  # by the method of an earlier version
        Measurement(machine=MachineIdentity(processor="abacus", cores=10, torch_version="0.1"), ranks=2),
        Measurement(machine=current_machine().model_copy(update={"torch_version": "0.1"}), ranks=2),
    ],
)
def test_figures_of_another_machine_are_refused(cache, measured):
    save_cluster(spec(measured=measured), local_cluster_path())
    with pytest.raises(ClusterError, match="run `meshwright calibrate` again"):
        load_cluster("local-cpu")


def test_the_cache_is_in_the_home_folder_unless_told(monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    assert module.local_cluster_path().as_posix().endswith("/.cache/meshwright/local-cpu.json")


def test_a_cluster_file_of_an_earlier_version_is_read_and_keeps_its_fingerprint(tmp_path):
    """Its device may have the cost of new pages, which nothing pays any more; presets had none."""
    known = load_cluster("v100-8-nvlink")
    former = json.loads(known.model_dump_json())
    former["device"]["fresh_memory"] = {"threshold_bytes": 2**25, "bandwidth": 1e9}
    (tmp_path / "former.json").write_text(json.dumps(former))
    read = load_cluster(str(tmp_path / "former.json"))
    assert read == known
    assert read.fingerprint() == known.fingerprint() == V100_FINGERPRINT
