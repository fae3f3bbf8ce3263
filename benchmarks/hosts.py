"""Test hosts on one machine: network namespaces joined by a bridge, each behind a link of a given rate.

Needs root and iproute2. The rate is that of `tc`'s token bucket filter and holds both ways.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_counter = itertools.count()


class Unavailable(Exception):
    """Test hosts cannot be made here; says why."""


class Hosts:
    """``count`` hosts that reach each other, gone when the context ends; raises ``Unavailable`` where none can be made.

    Names are of this process, so runs side by side do not meet. Addresses may be alike: every run has a bridge of its
    own, that of the machine itself is not used.
    """

    def __init__(self, count: int, rate_mbit: float | None = None) -> None:
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise Unavailable(f"needs the command {tool!r} (package iproute2)")
        if os.geteuid() != 0:
            raise Unavailable("needs root to make network namespaces")
        self.count, self.rate_mbit = count, rate_mbit
        self._name = f"gs{os.getpid():x}.{next(_counter):x}"

    def __enter__(self) -> Self:
        try:
            _run(f"ip link add {self._name} type bridge")
            _run(f"ip link set {self._name} up")
            for host in range(self.count):
                self._add(host)
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise Unavailable(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from None
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(self.count):
            subprocess.run(["ip", "netns", "del", self.name(host)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._name], capture_output=True)

    def name(self, host: int) -> str:
        return f"{self._name}n{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def prefix(self, host: int) -> list[str]:
        """What makes a command run on a host, before it."""
        return ["ip", "netns", "exec", self.name(host)]

    def cut(self, one: int, other: int) -> None:
        """Let nothing pass between two hosts, in either direction; both reach all others, and get no error."""
        for here, there in ((one, other), (other, one)):
            # An address of hardware that nobody has.
            nowhere = f"{self.address(there)} lladdr 02:00:00:00:00:ff dev eth0 nud permanent"
            _run(f"ip -n {self.name(here)} neigh replace {nowhere}")

    def heal(self, one: int, other: int) -> None:
        for here, there in ((one, other), (other, one)):
            _run(f"ip -n {self.name(here)} neigh del {self.address(there)} dev eth0")

    def isolate(self, host: int) -> None:
        """Take a host off the network: nobody is told."""
        _run(f"ip link set {self._link(host)} nomaster")

    def reconnect(self, host: int) -> None:
        """Put a host back on the network."""
        _run(f"ip link set {self._link(host)} master {self._name}")

    def sent_bytes(self, host: int) -> int:
        """What has left a host over its link."""
        return int(Path(f"/sys/class/net/{self._link(host)}/statistics/rx_bytes").read_text())

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], output: int | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a host, with these variables beside our own."""
        return subprocess.Popen(
            [*self.prefix(host), *command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment},
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            text=True,
        )

    def _link(self, host: int) -> str:
        return f"{self._name}v{host}"

    def _add(self, host: int) -> None:
        space, link = self.name(host), self._link(host)
        _run(f"ip netns add {space}")
        _run(f"ip link add {link} type veth peer name eth0 netns {space}")
        _run(f"ip link set {link} master {self._name} up")
        _run(f"ip -n {space} addr add {self.address(host)}/24 dev eth0")
        _run(f"ip -n {space} link set eth0 up")
        _run(f"ip -n {space} link set lo up")
        if self.rate_mbit is not None:
            bucket = f"root tbf rate {self.rate_mbit}mbit burst 256kb latency 50ms"
            _run(f"tc -n {space} qdisc add dev eth0 {bucket}")
            _run(f"tc qdisc add dev {link} {bucket}")


def enter(name: str) -> None:
    """Move the calling thread, and the threads that it starts from now on, to the host with this name."""
    with open(f"/run/netns/{name}") as space:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(space.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
