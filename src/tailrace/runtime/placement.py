"""Which machine runs which rank of the trainer, and where the ranks meet.

Ranks are on the controller's machine first, then on others in the order in which they joined, those of one machine side
by side. Ranks on one machine meet on its loopback. Ranks on several meet in the network that the user trusts
(`trainer.interface`), at the machine of rank 0, and are not placed without one.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.types import HostId
from tailrace.wire.interfaces import ON_LOOPBACK, Endpoint, find, interfaces, lacking

FIRST_PORT, PORTS = 20_000, 10_000  # below those that systems hand out by themselves


class Machine(NamedTuple):
    """Room for ranks: for each, the host to whose relay it publishes."""

    slots: tuple[HostId, ...]
    interfaces: Mapping[str, str]


class RankPlacement(NamedTuple):
    """By rank: its host, and where it is in the network of all ranks."""

    hosts: tuple[HostId, ...]
    endpoints: tuple[Endpoint, ...]


def own_machine(config: Config) -> Machine:
    """The controller's. Where it plays several hosts (`local.relays`), each has some of the ranks."""
    ranks, relays = config.local_ranks, config.local.relays
    return Machine(tuple([rank * relays // ranks for rank in range(ranks)]), interfaces() if ranks else {})


def place(wanted: int, machines: Sequence[Machine], interface: str) -> RankPlacement | None:
    """None if there is no room for so many."""
    able = machines if interface else [one for one in machines if len(one.slots) >= wanted]
    slots = [(machine, host) for machine in able for host in machine.slots][:wanted]
    if len(slots) < wanted:
        return None
    together = all(machine is slots[0][0] for machine, _ in slots)
    found = [ON_LOOPBACK if together else find(interface, machine.interfaces) for machine, _ in slots]
    endpoints = tuple([one for one in found if one])
    return RankPlacement(tuple([host for _, host in slots]), endpoints) if len(endpoints) == wanted else None


def missing(wanted: int, machines: Sequence[Machine], interface: str) -> int:
    """Ranks for which there is no room yet."""
    return max(0, wanted - sum(len(machine.slots) for machine in machines)) if interface else wanted


def meeting(placement: RankPlacement, is_here: bool) -> str:
    """Where rank 0 listens. On another machine it is not known whether a port is free: if not, the next start tries
    another one."""
    address = placement.endpoints[0].address
    port = _free_port(address) if is_here else FIRST_PORT + secrets.randbelow(PORTS)
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def refusal(config: Config, ranks: int, offered: Mapping[str, str]) -> str:
    """Why ranks on a machine with these interfaces cannot take part; nothing if they can."""
    interface = config.trainer.interface
    if interface:
        return "" if find(interface, offered) else lacking(interface, offered)
    if ranks >= config.trainer.ranks and not config.local_ranks:
        return ""
    return (
        "this run names no network for ranks on several machines, where gloo and NCCL neither authenticate nor "
        "encrypt; start it with trainer.interface, the interface or network of a network that you trust"
    )


def refuse_lacking_interface(config: Config) -> None:
    """Before a run starts: its own ranks may have to reach others."""
    if config.local_ranks and config.local.listen and config.trainer.interface:
        reason = refusal(config, config.local_ranks, interfaces())
        if reason:
            raise ConfigError(f'{reason}; write one of these, or a network such as "10.0.0.0/24"')


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
