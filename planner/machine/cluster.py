"""Clusters: devices, links, and the sources of their figures.

A :class:`ClusterSpec` is a versioned JSON file. Presets live in ``presets/`` beside this file; ``local-cpu`` is this
machine as ``meshwright calibrate`` measured it, one process per device, and ``local-cuda`` its CUDA devices.

Collectives are priced as rings with latency and bandwidth (alpha-beta), with ``n`` ranks and ``b`` bytes:
all-gather, reduce-scatter and all-to-all take ``(n - 1) * latency + (n - 1) / n * b / bandwidth``, an
all-reduce is a reduce-scatter and an all-gather (Thakur, Rabenseifner, Gropp 2005; NCCL's bus bandwidth).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic import ValidationError as PydanticError

from planner.machine.identity import MachineIdentity, cache_directory, current_machine
from planner.machine.known_costs import MeasuredCosts

PRESETS = Path(__file__).parent / "presets"
LOCAL_NAME, LOCAL_DEVICE_NAME = "local-cpu", "local-cuda"
LOCAL_NAMES = {"cpu": LOCAL_NAME, "cuda": LOCAL_DEVICE_NAME}
"""Clusters that ``meshwright calibrate`` measures, by kind of device."""


class ClusterError(ValueError):
    """A cluster, or a mesh on it, that cannot be used; the message names the remedy."""


class Collective(StrEnum):
    """Collectives that plans use."""

    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


class HostCopies(StrEnum):
    """Concurrency of copies between a device and its host; their order is in :mod:`planner.schedule.instructions`.

    BOTH_WAYS: outward and inward at once, each at the link's speed, beside the computation (PCIe is full duplex).
    TAKE_TURNS: beside the computation, one copy at a time in whichever direction.
    BLOCKING: the computation waits for each copy.
    """

    BOTH_WAYS = "both_ways"
    TAKE_TURNS = "take_turns"
    BLOCKING = "blocking"


FORMER_FIELD = "fresh_memory"
"""Of a device in cluster files of earlier versions."""


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DeviceSpec(_Spec):
    """One device.

    Parameters
    ----------
    name
        Its name.
    kind
        Torch's name of its kind; None in files of earlier versions, see :attr:`ClusterSpec.device_kind`.
    flops
        Achievable FLOP/s of a large matrix product per dtype (torch's name); ``float32`` stands in for
        dtypes that are not listed, so it must be.
    memory_bandwidth
        Achievable bytes/s, read plus written, of an elementwise kernel.
    launch_seconds
        Seconds that any kernel takes however little it does.
    memory_bytes, reserve_bytes
        Memory of the device, and how much of it torch's tensors cannot have (context, fragmentation,
        collective buffers).
    efficiency
        Per operator class of :mod:`planner.machine.costs`: achieved FLOP/s over :attr:`flops`; 1 where absent. A kernel
        of attention has its own key (``efficient_attention_backward``), which goes first; so have products of 16 bits
        whose rows are not multiples of 16 bytes (``unaligned_matmul``).
    bandwidth_by_class
        Per operator class, or per operator name (``tanh``), which goes first: achieved bytes/s;
        :attr:`memory_bandwidth` where absent.
    """

    name: str
    kind: Literal["cpu", "cuda"] | None = None
    flops: dict[str, PositiveFloat]
    memory_bandwidth: PositiveFloat
    launch_seconds: NonNegativeFloat
    memory_bytes: PositiveInt
    reserve_bytes: NonNegativeInt
    efficiency: dict[str, PositiveFloat] = Field(default_factory=dict)
    bandwidth_by_class: dict[str, PositiveFloat] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _without_fresh_memory(cls, fields: Any) -> Any:
        """Files of earlier versions have a cost of new pages, which ranks no longer pay: freed memory is kept."""
        if isinstance(fields, dict):
            fields = {name: value for name, value in fields.items() if name != FORMER_FIELD}
        return fields

    def model_post_init(self, context: object, /) -> None:
        """Check what single fields cannot."""
        if "float32" not in self.flops:
            raise ValueError("flops must give at least float32")
        if self.reserve_bytes >= self.memory_bytes:
            raise ValueError(f"reserve_bytes {self.reserve_bytes} must be below memory_bytes {self.memory_bytes}")

    def shared(self, share: float) -> DeviceSpec:
        """Device whose rates and memory are ``share`` times these."""

        def scaled(rates: dict[str, float]) -> dict[str, float]:
            return {name: rate * share for name, rate in rates.items()}

        return self.model_copy(
            update={
                "flops": scaled(self.flops),
                "memory_bandwidth": self.memory_bandwidth * share,
                "bandwidth_by_class": scaled(self.bandwidth_by_class),
                "memory_bytes": int(self.memory_bytes * share),
                "reserve_bytes": int(self.reserve_bytes * share),
            }
        )

    def flops_of(self, dtype: str) -> float:
        """Achievable FLOP/s of a matrix product in ``dtype``."""
        return self.flops.get(dtype, self.flops["float32"])


class LinkSpec(_Spec):
    """A link: seconds of latency per message and bytes/s in one direction.

    ``slowdown`` is the time of a collective over that of a ring, for implementations that are no ring (gloo's
    reduce-scatter); 1 where absent.
    """

    latency_seconds: NonNegativeFloat
    bandwidth: PositiveFloat
    slowdown: dict[Collective, PositiveFloat] = Field(default_factory=dict)

    def collective_seconds(self, collective: Collective, ranks: int, nbytes: int) -> float:
        """Seconds of one ring collective.

        Parameters
        ----------
        collective
            Which one.
        ranks
            Number of ranks in the ring.
        nbytes
            Bytes on one rank of the larger side: the result of an all-gather, the input of a
            reduce-scatter, either of an all-reduce or an all-to-all.
        """
        return self._times(collective) * ((ranks - 1) * self.latency_seconds + self._ring(ranks, nbytes))

    def transfer_seconds(self, collective: Collective, ranks: int, nbytes: int) -> float:
        """As :meth:`collective_seconds` without latency."""
        return self._times(collective) * self._ring(ranks, nbytes)

    def _times(self, collective: Collective) -> float:
        return (2 if collective is Collective.ALL_REDUCE else 1) * self.slowdown.get(collective, 1.0)

    def _ring(self, ranks: int, nbytes: int) -> float:
        return (ranks - 1) / ranks * nbytes / self.bandwidth

    def shared(self, share: float) -> LinkSpec:
        """Link with ``share`` times the speed."""
        return self.model_copy(
            update={"latency_seconds": self.latency_seconds / share, "bandwidth": self.bandwidth * share}
        )


class OverlapSpec(_Spec):
    """Slowdowns while the computation and overlapped collectives run at once; 1 is none.

    Parameters
    ----------
    computation
        Time of the computation beside a collective over its time alone.
    collectives
        Time of a collective beside the computation over its time alone.
    """

    computation: Annotated[float, Field(ge=1.0)] = 1.0
    collectives: Annotated[float, Field(ge=1.0)] = 1.0


METHOD = 2
"""Version of what ``meshwright calibrate`` measures: since 2 the optimizer's update is one kernel."""


class Measurement(_Spec):
    """Circumstances of a measurement: the machine, the number of processes that ran at once, and the method."""

    machine: MachineIdentity
    ranks: PositiveInt
    method: PositiveInt = 1

    @model_serializer(mode="wrap")
    def _without_the_first_method(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fingerprints of the first method stay."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if name != "method" or value != 1}

    def fingerprint(self) -> str:
        """SHA-256 of both, which plans carry."""
        return sha256(self.model_dump_json().encode()).hexdigest()


class ClusterSpec(_Spec):
    """A cluster of equal nodes of equal devices, ranks numbered node by node.

    Parameters
    ----------
    version
        Version of this file format.
    name, source
        Its name, and where its figures come from.
    device, devices_per_node, nodes
        The devices.
    intra_node
        Link inside a node; bandwidth per device.
    inter_node
        Network of one node, shared by all rings that leave the node; None with one node.
    host_link
        Link between a device and its host's memory; bandwidth per device and direction.
    host_link_shared
        Whether both directions of the host link share its bandwidth.
    overlap
        What computation and collectives that run at once take from each other.
    measured
        For measured machines: the circumstances of their measurement. If the devices are processes on one machine's
        CPU, a mesh of any size fits on it and its rates are shared among the processes.
    costs
        Costs of single instructions that were measured on it, see :mod:`planner.machine.known_costs`.
    """

    version: Literal[1] = 1
    name: str
    source: str
    device: DeviceSpec
    devices_per_node: PositiveInt
    nodes: PositiveInt
    intra_node: LinkSpec
    inter_node: LinkSpec | None = None
    host_link: LinkSpec
    host_link_shared: bool = False
    overlap: OverlapSpec = OverlapSpec()
    measured: Measurement | None = None
    costs: MeasuredCosts = Field(default_factory=dict)

    def model_post_init(self, context: object, /) -> None:
        """Check what single fields cannot."""
        if self.nodes > 1 and self.inter_node is None:
            raise ValueError(f"{self.nodes} nodes need an inter_node link")

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.devices_per_node * self.nodes

    @property
    def device_kind(self) -> Literal["cpu", "cuda"]:
        """Kind of the devices; where the file names none, CPU processes if they were measured, else CUDA."""
        return self.device.kind or ("cuda" if self.measured is None else "cpu")

    @property
    def is_shared(self) -> bool:
        """Whether its devices are processes that share the cores and the memory of one measured machine."""
        return self.nodes == 1 and self._are_processes

    @property
    def _are_processes(self) -> bool:
        return self.measured is not None and self.device_kind == "cpu"

    @property
    def host_copies(self) -> HostCopies:
        """Concurrency of copies to and from the host; a process copies within its machine's memory, and waits."""
        if self._are_processes:
            return HostCopies.BLOCKING
        return HostCopies.TAKE_TURNS if self.host_link_shared else HostCopies.BOTH_WAYS

    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON."""
        # What is as it was before these fields existed keeps its fingerprint.
        unused = {"costs": not self.costs, "overlap": self.overlap == OverlapSpec()}
        absent = {name for name, is_unused in unused.items() if is_unused}
        content = self.model_dump(mode="json", exclude=absent)
        if self.device.kind is None:
            del content["device"]["kind"]
        content["device"][FORMER_FIELD] = None
        return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def device_for(self, mesh: Sequence[int]) -> DeviceSpec:
        """Device as one rank of ``mesh`` finds it.

        On a measured machine the processes share cores and memory: what ``ranks`` measured processes
        reached together is divided among the processes of the mesh. Elsewhere it is :attr:`device`.
        """
        self._check(mesh)
        return self.device if (share := self._share(mesh)) == 1 else self.device.shared(share)

    def host_link_for(self, mesh: Sequence[int]) -> LinkSpec:
        """Host link as one rank of ``mesh`` finds it; processes of a measured machine share its memory."""
        self._check(mesh)
        return self.host_link if (share := self._share(mesh)) == 1 else self.host_link.shared(share)

    def _share(self, mesh: Sequence[int]) -> float:
        """Share of the rates of one measured process that one of a mesh has."""
        return self.measured.ranks / prod(mesh) if self.measured is not None and self.is_shared else 1.0

    def mesh_links(self, mesh: Sequence[int]) -> tuple[LinkSpec, ...]:
        """Link that a ring along each mesh axis gets.

        The ranks of a ring along an axis lie in an aligned block of ``stride * size`` ranks. Where every
        such block lies inside one node the axis has the intra-node link. Else ``stride`` interleaved rings
        (at most one per device) leave each node at once and share its network, and no ring is faster than
        the intra-node link that it also passes.

        Raises
        ------
        ClusterError
            The mesh is empty, has an axis below 1, or more devices than the cluster.
        """
        self._check(mesh)
        ranks = prod(mesh)
        if self.is_shared:
            link = self.intra_node.shared(min(1.0, self._share(mesh)))
            return (link,) * len(mesh)
        links = []
        for axis, size in enumerate(mesh):
            stride = prod(mesh[axis + 1 :])
            inside = ranks <= self.devices_per_node or self.devices_per_node % (stride * size) == 0
            links.append(self.intra_node if inside else self._crossing(stride))
        return tuple(links)

    def _crossing(self, stride: int) -> LinkSpec:
        assert self.inter_node is not None  # a mesh that fits on one node never leaves it
        per_ring = self.inter_node.bandwidth / min(stride, self.devices_per_node)
        return self.inter_node.model_copy(update={"bandwidth": min(per_ring, self.intra_node.bandwidth)})

    def _check(self, mesh: Sequence[int]) -> None:
        shape = "x".join(map(str, mesh))
        if not mesh or any(size < 1 for size in mesh):
            raise ClusterError(f"mesh {shape or '()'} is not a mesh: give one positive size per axis, such as 2x4")
        if not self.is_shared and prod(mesh) > self.devices:
            raise ClusterError(
                f"mesh {shape} has {prod(mesh)} devices but cluster {self.name} has {self.devices}: "
                "use a smaller mesh or another cluster"
            )


def preset_names() -> tuple[str, ...]:
    """Names of the clusters that come with the package."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.json")))


def local_cluster_path(kind: str = "cpu") -> Path:
    """File in which ``meshwright calibrate`` keeps this machine's devices of a kind of :data:`LOCAL_NAMES`."""
    return cache_directory() / f"{LOCAL_NAMES[kind]}.json"


def load_cluster(name_or_path: str) -> ClusterSpec:
    """Read a cluster by preset name, ``local-cpu``, ``local-cuda``, or path of a JSON file.

    Raises
    ------
    ClusterError
        Unknown name, unreadable or invalid file, or figures that were measured on another machine.
    """
    for kind, name in LOCAL_NAMES.items():
        if name_or_path == name:
            return _load_local(kind)
    if name_or_path in preset_names():
        return read_cluster(PRESETS / f"{name_or_path}.json")
    path = Path(name_or_path)
    if path.suffix == ".json" or path.exists():
        return read_cluster(path)
    known = ", ".join((*preset_names(), *LOCAL_NAMES.values()))
    raise ClusterError(f"no cluster is named {name_or_path!r}: give the path of a JSON file or one of {known}")


def read_cluster(path: Path) -> ClusterSpec:
    """Read and validate one cluster file.

    Raises
    ------
    ClusterError
        The file cannot be read or is not a cluster.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cluster file {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return ClusterSpec.model_validate_json(text)
    except PydanticError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ClusterError(f"cluster file {path} is not valid: {where}: {first['msg']}") from None


def _load_local(kind: str) -> ClusterSpec:
    path = local_cluster_path(kind)
    command = "meshwright calibrate" + (" --device cuda" if kind == "cuda" else "")
    if not path.exists():
        raise ClusterError(f"this machine has not been measured ({path} is missing): run `{command}`")
    cluster = read_cluster(path)
    here = current_machine(kind)
    if cluster.measured is None or cluster.measured.machine != here:
        measured = "no machine" if cluster.measured is None else cluster.measured.machine
        raise ClusterError(f"{path} was measured on {measured}, but this is {here}: run `{command}` again")
    if cluster.measured.method != METHOD:
        raise ClusterError(f"{path} was measured by an earlier version, in another way: run `{command}` again")
    return cluster
