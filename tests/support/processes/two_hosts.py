"""Two machines on one: network namespaces joined by a link of limited speed, and jobs of one rank on each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PORT = "29511"
NETWORK = "10.77.0"


class NoNamespacesError(RuntimeError):
    """This machine does not let us make network namespaces; the message says why."""


@dataclass(frozen=True)
class TwoHosts:
    """Names of the two namespaces, of their ends of the link, and a folder of temporary files for each."""

    names: tuple[str, str]
    links: tuple[str, str]
    folders: tuple[Path, Path]

    def torchrun(
        self, module: str, *arguments: object, folder: Path | None = None, timeout: float = 180.0, ranks: int = 1
    ) -> list[subprocess.CompletedProcess]:
        """Run a module as a job of two nodes with some ranks each; the end of each node's launcher.

        With ``folder`` both have it for their temporary files, as where they share a file system.
        Each has half of the cores, so that a rank computes with the threads that it has beside the other on
        one machine: the order of a sum depends on their number.
        """
        cores = sorted(os.sched_getaffinity(0))
        folders = self.folders if folder is None else (folder, folder)
        launched = [
            subprocess.Popen(
                [
                    *("taskset", "--cpu-list", ",".join(map(str, cores[rank::2] or cores))),
                    *("ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"),
                    *("--nnodes", "2", "--node-rank", str(rank), "--nproc-per-node", str(ranks)),
                    *("--master-addr", f"{NETWORK}.1", "--master-port", PORT, "-m", module, *map(str, arguments)),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    "TMPDIR": str(place),
                    "GLOO_SOCKET_IFNAME": link,
                    "TP_SOCKET_IFNAME": link,
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank, (name, link, place) in enumerate(zip(self.names, self.links, folders, strict=True))
        ]
        ended = []
        try:
            for process in launched:
                out, err = process.communicate(timeout=timeout)
                ended.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        finally:
            for process in launched:
                process.kill()
        return ended


@contextmanager
def two_hosts(folder: Path, rate: str = "1gbit") -> Iterator[TwoHosts]:
    """Two namespaces joined by a link of a rate (as ``tc`` writes it); they are gone at the end.

    Raises
    ------
    NoNamespacesError
        The programs are missing, or this user may not use them.
    """
    if any(shutil.which(program) is None for program in ("ip", "tc", "taskset")):
        raise NoNamespacesError("the programs ip and tc (iproute2) or taskset (util-linux) are not installed")
    tag = f"mw{os.getpid() % 100000}"
    names, links = (f"{tag}a", f"{tag}b"), (f"{tag}u", f"{tag}v")
    folders = folder / names[0], folder / names[1]
    try:
        for name in names:
            _configure("ip", "netns", "add", name)
        _configure("ip", "link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for k, (name, link) in enumerate(zip(names, links, strict=True)):
            folders[k].mkdir()
            _configure("ip", "link", "set", link, "netns", name)
            _configure("ip", "-n", name, "addr", "add", f"{NETWORK}.{k + 1}/24", "dev", link)
            for interface in (link, "lo"):
                _configure("ip", "-n", name, "link", "set", interface, "up")
            limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _configure("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, *limit)
        yield TwoHosts(names, links, folders)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", links[0]], check=False, capture_output=True)


def _configure(*command: str) -> None:
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    if ended.returncode:
        raise NoNamespacesError(f"{' '.join(command[:4])}: {ended.stderr.strip() or ended.returncode}")
