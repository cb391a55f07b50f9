"""Several hosts on this machine: network namespaces that are joined by a switch which can be made slow, lossy or cut.

    with hosts(3) as network:
        network.set(rate_mbits=50, delay_s=0.1, loss=0.05)
        relay = subprocess.Popen([*network[0].inside, sys.executable, ...])      # listens on network[0].address
        network.cut((0, 1)); network.heal()
        network.place([1, 2], rate_mbits=20, delay_s=0.1, loss=0.01)             # a site of two, behind its own link

A host is a namespace with one interface, a TAP device, whose other end the switch holds: it reads every frame, loses
it, or hands it on when its time has come. So TCP sees real loss, delay and queues, and no module of the kernel is
needed but `tun`; `tc netem` is missing on many small kernels. What is lost follows from a seed.

`delay_s` is for each direction. A rate is that of each host's own link, in and out; a site's link is one that all of
its hosts share, and within a site frames do not pass it. Who creates hosts is root; without root, `ip` or /dev/net/tun,
tests skip with a word (`missing`).
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Lock, Thread

TUN = "/dev/net/tun"
TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x0002 | 0x1000
BROADCAST = b"\xff" * 6
QUEUE = 512 << 10  # bytes that wait before a link; what comes on top is lost
LATE_S = 0.05  # a switch that gets no processor for so long does not make its links slower
NUMBERS = count()


def missing() -> str:
    """What hosts need and this machine lacks, or nothing."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need `ip` (package iproute2)"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"the switch between hosts needs {TUN}"
    made = subprocess.run(["ip", "netns", "add", "tailrace-try"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", "tailrace-try"], capture_output=True, check=False)
    return f"no network namespace can be made: {made.stderr.strip()}" if made.returncode else ""


@dataclass
class Host:
    """One namespace. `inside` is what to put before a command so that it runs there."""

    number: int
    name: str
    address: str
    mac: bytes
    port: int  # the descriptor of its TAP device

    @property
    def inside(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]


@dataclass
class Wire:
    """A host's link in one direction. `free_at` is when all that was sent before is through."""

    free_at: float = 0.0

    def pass_through(self, now: float, size: int, rate: float) -> float | None:
        """When a frame is through; None if the queue before it is full."""
        if not rate:
            return now
        begin = max(now - LATE_S, self.free_at)
        if (begin - now) * rate > QUEUE:
            return None
        self.free_at = begin + size / rate
        return max(now, self.free_at)


@dataclass
class Conditions:
    rate: float = 0.0  # bytes per second; 0: as fast as it goes
    delay_s: float = 0.0
    loss: float = 0.0
    cuts: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])


@dataclass
class SiteLink:
    """Between the hosts of a site and all others. Bytes are those that were sent over it."""

    rate: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    wire_in: Wire = field(default_factory=Wire)
    wire_out: Wire = field(default_factory=Wire)


class Switch(Thread):
    """Carries frames between hosts until it is closed."""

    def __init__(self, hosts: list[Host], seed: int = 0) -> None:
        super().__init__(name="switch", daemon=True)
        self.conditions = Conditions()
        self.lost = 0
        self.received = {host.number: 0 for host in hosts}  # bytes, by host
        self.sites: dict[int, SiteLink] = {}  # by host
        self.busy_s = 0.0  # of its own processor time
        self._hosts = hosts
        self._by_port = {host.port: host for host in hosts}
        self._by_mac = {host.mac: host for host in hosts}
        self._out = {host.number: Wire() for host in hosts}
        self._in = {host.number: Wire() for host in hosts}
        self._draw = random.Random(seed)
        self._due: list[tuple[float, int, Host, bytes, SiteLink | None, bool]] = []  # the last: it is through all links
        self._order = count()
        self._ended, self._end = os.pipe()

    def run(self) -> None:
        poller = select.epoll()
        for port in (*self._by_port, self._ended):
            poller.register(port, select.EPOLLIN)
        while True:
            patience = max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0
            ready = poller.poll(min(patience, 1.0))
            if any(port == self._ended for port, _ in ready):
                return
            for port, _ in ready:
                self._empty(self._by_port[port])
            self._deliver()
            self.busy_s = time.thread_time()

    def close(self) -> None:
        os.write(self._end, b"!")
        self.join(5.0)
        for descriptor in (self._ended, self._end, *self._by_port):
            os.close(descriptor)

    def _empty(self, host: Host) -> None:
        """Take what a host has sent, up to a bound, so that others have their turn."""
        with suppress(BlockingIOError):
            for _ in range(32):
                self._take(host, os.read(host.port, 65536))

    def _take(self, sender: Host, frame: bytes) -> None:
        target = self._by_mac.get(frame[:6])
        if target is not None:
            self._carry(sender, target, frame)
        elif frame[:6] == BROADCAST:
            for other in self._hosts:
                if other is not sender:
                    self._carry(sender, other, frame)

    def _carry(self, sender: Host, target: Host, frame: bytes) -> None:
        """Onto the sender's link. The receiver's is taken when the frame gets there: until then others may pass it."""
        now, rules = time.monotonic(), self.conditions
        cut = (sender.number, target.number) in rules.cuts
        sent = self._out[sender.number].pass_through(now, len(frame), rules.rate)
        here, there = self.sites.get(sender.number), self.sites.get(target.number)
        far = here is not there
        if here is not None and far and sent is not None:
            here.bytes_out += len(frame)
            sent = here.wire_out.pass_through(sent, len(frame), here.rate)
        if cut or sent is None or self._is_lost(rules, *((here, there) if far else ())):
            self.lost += 1
            return
        delay_s = rules.delay_s + sum(link.delay_s for link in (here, there) if link is not None and far)
        self._later(sent + delay_s, target, frame, there if far else None)

    def _is_lost(self, *links: Conditions | SiteLink | None) -> bool:
        return any(link is not None and link.loss and self._draw.random() < link.loss for link in links)

    def _later(self, due: float, target: Host, frame: bytes, link: SiteLink | None) -> None:
        heapq.heappush(self._due, (due, next(self._order), target, frame, link, False))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            due, _, target, frame, link, is_through = heapq.heappop(self._due)
            if is_through:
                self._hand_over(target, frame)
            else:
                self._arrive(due, now, target, frame, link)

    def _arrive(self, due: float, now: float, target: Host, frame: bytes, link: SiteLink | None) -> None:
        """At the link of the receiver's site, and at its own."""
        through: float | None = due
        if link is not None:
            link.bytes_in += len(frame)
            through = link.wire_in.pass_through(due, len(frame), link.rate)
        if through is not None:
            through = self._in[target.number].pass_through(through, len(frame), self.conditions.rate)
        if through is None:
            self.lost += 1
        elif through <= now:
            self._hand_over(target, frame)
        else:
            heapq.heappush(self._due, (through, next(self._order), target, frame, link, True))

    def _hand_over(self, target: Host, frame: bytes) -> None:
        self.received[target.number] += len(frame)
        with suppress(OSError):  # its interface is gone, or full
            os.write(target.port, frame)


class Network:
    """The hosts and what lies between them."""

    def __init__(self, hosts: list[Host]) -> None:
        self._hosts = hosts
        self.switch = Switch(hosts)
        self._changing = Lock()
        self.switch.start()

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def set(self, rate_mbits: float = 0.0, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Of every link, from now on. Cuts stay."""
        cuts = self.switch.conditions.cuts
        self.switch.conditions = Conditions(rate_mbits * 1e6 / 8, delay_s, loss, cuts)

    def place(self, numbers: list[int], rate_mbits: float = 0.0, delay_s: float = 0.0, loss: float = 0.0) -> SiteLink:
        """These hosts are a site from now on."""
        link = SiteLink(rate_mbits * 1e6 / 8, delay_s, loss)
        self.switch.sites |= dict.fromkeys(numbers, link)
        return link

    def cut(self, *pairs: tuple[int, int]) -> None:
        """Nothing passes between these any more, in either direction, and nobody is told."""
        with self._changing:
            self.switch.conditions.cuts |= {*pairs, *((b, a) for a, b in pairs)}

    def isolate(self, number: int) -> None:
        self.cut(*((number, other.number) for other in self._hosts if other.number != number))

    def heal(self) -> None:
        with self._changing:
            self.switch.conditions.cuts = set()


@contextmanager
def hosts(number: int, mtu: int = 1500) -> Iterator[Network]:
    """So many hosts, which are gone at the end, with everything that runs in them."""
    prefix = f"tr{os.getpid()}-{next(NUMBERS)}"
    made: list[Host] = []
    network: Network | None = None
    try:
        made.extend(_make(each, f"{prefix}-{each}", mtu) for each in range(number))
        for host in made:
            _introduce(host, made)
        network = Network(made)
        yield network
    finally:
        if network is not None:
            network.switch.close()
        for host in made:
            _remove(host.name)


def _make(number: int, name: str, mtu: int) -> Host:
    mac = bytes([0x02, 0x54, 0x52, 0, 0, number + 1])
    host = Host(number, name, f"10.77.0.{number + 1}", mac, -1)
    _ip("netns", "add", name)
    try:
        device = f"t{os.getpid() % 100000}x{next(NUMBERS)}"
        host.port = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(host.port, TUNSETIFF, struct.pack("16sH", device.encode(), TAP_WITHOUT_HEADER))
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "link", "set", device, "name", "eth0", "address", mac.hex(":"), "mtu", str(mtu))
        _ip("-n", name, "link", "set", "eth0", "txqueuelen", "2000")
        _ip("-n", name, "address", "add", f"{host.address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", name, "link", "set", link, "up")
    except BaseException:
        _remove(name)
        raise
    return host


def _introduce(host: Host, others: list[Host]) -> None:
    """Addresses are known from the start: a question that is lost would be one more second of delay in a test."""
    for other in others:
        if other is not host:
            words = ("neigh", "replace", other.address, "lladdr", other.mac.hex(":"), "dev", "eth0")
            _ip("-n", host.name, *words, "nud", "permanent")


def _remove(name: str) -> None:
    """End whatever still runs in it, and forget it."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in found.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), 9)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def clear_abandoned() -> None:
    """Remove hosts whose makers are dead: what tests that were killed have left."""
    for line in subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=False
    ).stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        maker = name.removeprefix("tr").partition("-")[0]
        if name.startswith("tr") and maker.isdigit() and not Path(f"/proc/{maker}").exists():
            _remove(name)
