"""A Ray cluster of several machines on one: network namespaces on a bridge, each with its address
and a Ray node.

Needs root, and ip and tc of Debian's package iproute2. No packet leaves the namespaces. Machine 0
is the head, which offers no CPUs, as in production; the others offer one each.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
RAY = str(Path(sys.executable).parent / "ray")
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip
REPLICA = "ServeReplica:hf_slospec:Model"


def missing() -> str | None:
    """Return what keeps machines from being made here; None if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    return f"missing programs: {', '.join(absent)} (iproute2, util-linux)" if absent else None


def run(*command: str, check: bool = True) -> str:
    """Run a command and return its output."""
    return subprocess.run(command, check=check, capture_output=True, text=True, timeout=60).stdout


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Wait for a condition; raises TimeoutError."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.5)


class Machines:
    """Machines with a Ray node each; made by :func:`machines`."""

    def __init__(self, number: int, folder: Path, fronts: Sequence[int]):
        self.folder = folder
        self.fronts = fronts
        self.switch = f"slospec{os.getpid()}"
        self.names = [f"{self.switch}-{k}" for k in range(number)]
        self.addresses = [f"10.83.0.{k + 1}" for k in range(number)]

    def connect(self) -> None:
        """Make the namespaces and the bridge between them, which has a namespace of its own."""
        run("ip", "netns", "add", self.switch)
        run("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for k, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            run("ip", "netns", "add", name)
            run(
                "ip",
                "-n",
                self.switch,
                "link",
                "add",
                f"port{k}",
                "type",
                "veth",
                "peer",
                "eth0",
                "netns",
                name,
            )
            run("ip", "-n", self.switch, "link", "set", f"port{k}", "master", "bridge", "up")
            run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", name, "link", "set", device, "up")

    def start(self, k: int, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        """Start a command on machine ``k``, whose /tmp/ray is a folder of its own."""
        own = self.folder / str(k)
        own.mkdir(exist_ok=True)
        Path("/tmp/ray").mkdir(exist_ok=True)
        mount = ("unshare", "-m", "sh", "-c", 'mount --bind "$0" /tmp/ray && exec "$@"', str(own))
        environment = os.environ | ENVIRONMENT | {"RAY_ADDRESS": f"{self.addresses[0]}:6379"}
        with (self.folder / log).open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[k], *mount, *command], env=environment, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip

    def start_ray(self, k: int) -> None:
        """Start the Ray node of machine ``k``."""
        head = ("--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false")
        role = ("--address", f"{self.addresses[0]}:6379", "--num-cpus", "1") if k else head
        common = ("--node-ip-address", self.addresses[k], "--disable-usage-stats", "--block")
        store = (
            "--object-store-memory",
            str(100 * 2**20),
            "--resources",
            '{"front": 1}' if k in self.fronts else "{}",
        )
        self.start(k, (RAY, "start", *role, *common, *store), f"ray-{k}.log")

    def processes(self, k: int) -> list[int]:
        """Return the ids of the processes of machine ``k``."""
        return [int(pid) for pid in run("ip", "netns", "pids", self.names[k], check=False).split()]

    def commands(self, k: int) -> dict[int, str]:
        """Return the command lines of the processes of machine ``k``, by their ids."""
        found = {}
        for pid in self.processes(k):
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it has ended
                continue
        return found

    def signal(self, k: int, number: int, only: str = "") -> int:
        """Send a signal to the processes of machine ``k`` whose command contains ``only``; return
        their number.
        """
        pids = [pid for pid, command in self.commands(k).items() if only in command]
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        return len(pids)

    def link(self, k: int, state: str) -> None:
        """Set the link of machine ``k`` ``up`` or ``down``."""
        run("ip", "-n", self.switch, "link", "set", f"port{k}", state)

    def delay(self, setting: Sequence[str]) -> bool:
        """Delay and lose packets on all links, as ``tc netem`` says; empty: no longer.

        Returns:
            False if the kernel cannot (CONFIG_NET_SCH_NETEM).
        """
        for k in range(len(self.names)):
            run("tc", "-n", self.switch, "qdisc", "delete", "dev", f"port{k}", "root", check=False)
            if setting:
                add = (
                    "tc",
                    "-n",
                    self.switch,
                    "qdisc",
                    "add",
                    "dev",
                    f"port{k}",
                    "root",
                    "netem",
                    *setting,
                )
                if subprocess.run(add, capture_output=True, timeout=60).returncode != 0:
                    return False
        return True

    def remove(self) -> None:
        """End all processes and remove the namespaces."""
        for k in reversed(range(len(self.names))):
            for _ in range(10):
                if not self.signal(k, signal.SIGKILL):
                    break
                time.sleep(0.2)
        for name in (*self.names, self.switch):
            run("ip", "netns", "delete", name, check=False)


@contextmanager
def machines(number: int, fronts: Sequence[int] = ()) -> Iterator[Machines]:
    """Yield so many machines whose Ray nodes run, and remove them at the end.

    Args:
        fronts: machines with one unit of the resource ``front``.
    """
    folder = Path(tempfile.mkdtemp(prefix="machines-", dir="/var/tmp"))
    made = Machines(number, folder, fronts)
    try:
        made.connect()
        made.start_ray(0)
        wait_until(
            lambda: _accepts(made.names[0], made.addresses[0], 6379), 120.0, "the head's Ray"
        )
        for k in range(1, number):
            made.start_ray(k)
        yield made
    finally:
        made.remove()
        shutil.rmtree(folder, ignore_errors=True)


def _accepts(name: str, address: str, port: int) -> bool:
    code = f"import socket; socket.create_connection(({address!r}, {port}), 2)"
    command = ("ip", "netns", "exec", name, sys.executable, "-c", code)
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


def enter(name: str) -> None:
    """Move the calling thread into a network namespace; sockets that it makes from then on belong
    to it.
    """
    with open(f"/var/run/netns/{name}") as namespace:
        libc: Any = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
