"""The network interfaces of this machine, and which of them is in the network that a person has named as trusted.

Gloo and NCCL take the first address of an interface, so no other one counts here. Every machine with trainer ranks says
what it has (`Offer.interfaces`), and the controller chooses (`runtime.placement`).
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tailrace.wire.messages import LOOPBACK

SIOCGIFCONF = 0x8912
ENTRY, NAME = 40, 16  # bytes of one answer, and of the name that it begins with
MOST_BYTES = 64 << 10
IPV6 = Path("/proc/net/if_inet6")
GLOBAL = "00"  # in its column of scopes


class Endpoint(NamedTuple):
    """Where this machine is in a network."""

    interface: str
    address: str


ON_LOOPBACK = Endpoint("lo", LOOPBACK)


def interfaces() -> dict[str, str]:
    """The first address of each interface that has one; one of IPv4 if there is any."""
    found: dict[str, str] = {}
    for name, address in (*_ipv4(), *_ipv6()):
        found.setdefault(name, address)
    return found


def find(wanted: str, offered: Mapping[str, str]) -> Endpoint | None:
    """The interface that is called so, or the first whose address is in that network; None if there is none."""
    if wanted in offered:
        return Endpoint(wanted, offered[wanted])
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        return None
    there = [Endpoint(name, address) for name, address in offered.items() if _is_in(address, network)]
    return there[0] if there else None


def lacking(wanted: str, offered: Mapping[str, str], setting: str = "trainer.interface") -> str:
    """What to tell a person whose machine is not in the network."""
    has = ", ".join(f"{name} ({address})" for name, address in offered.items()) or "none at all"
    return f'{setting} is "{wanted}", where this machine has no address; its interfaces are {has}'


def _is_in(address: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False


def _ipv4() -> list[tuple[str, str]]:
    """In the order of the kernel, the first address of an interface before its others."""
    room = array.array("B", bytes(MOST_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        answer = fcntl.ioctl(asking, SIOCGIFCONF, struct.pack("iL", MOST_BYTES, room.buffer_info()[0]))
    entries = room.tobytes()[: struct.unpack("iL", answer)[0]]
    return [_entry(entries[start : start + ENTRY]) for start in range(0, len(entries), ENTRY)]


def _entry(entry: bytes) -> tuple[str, str]:
    name = entry[:NAME].partition(b"\0")[0].decode(errors="replace").partition(":")[0]
    return name, socket.inet_ntoa(entry[NAME + 4 : NAME + 8])


def _ipv6() -> list[tuple[str, str]]:
    """Those that are valid beyond their link."""
    lines = IPV6.read_text().splitlines() if IPV6.exists() else []
    rows = [line.split() for line in lines]
    return [(row[-1], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows if row[3] == GLOBAL]
