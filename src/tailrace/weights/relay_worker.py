"""The process of one relay: a `RelayNode` that moves weights, and a client of the controller that directs it.

Consumes `Route` and `Drop`; produces `VersionStored` and `LinkFailed`. Weights do not pass through this loop: threads
of the node receive them straight into shared memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import xxhash

from tailrace.config.tree import RelaySettings
from tailrace.protocol import Drop, LinkFailed, RelayJoined, Route, VersionStored
from tailrace.types import Version, label
from tailrace.weights.channel import Address
from tailrace.weights.nixl_transport import NixlAgent, NixlTransport, NixlUnavailableError
from tailrace.weights.relay_node import RelayNode, TransferFailure
from tailrace.weights.shared_memory import SharedMemory, shared_memory_path
from tailrace.wire.client import ControlClient
from tailrace.wire.messages import ComponentSpec, Ended, Introduce, Ordered

log = logging.getLogger(__name__)

PATIENCE_S = 1.0  # orders wake the loop; this only bounds how long it sleeps


def run(spec: ComponentSpec) -> None:
    controller = ControlClient(spec)

    def stored(version: Version) -> None:
        controller.report(VersionStored(spec.id, controller.incarnation, version))

    def failed(failure: TransferFailure) -> None:
        log.warning("%s", failure)
        if failure.persistent and failure.target is not None:
            controller.report(LinkFailed(spec.id, controller.incarnation, failure.target, failure.reason))

    def join() -> None:
        """Report the versions held here, at the start and to every new controller."""
        controller.report(RelayJoined(spec.id, controller.incarnation, node.versions()))

    relay = spec.config.relay
    memory = SharedMemory(_shared_memory_path(spec), quota=int(relay.quota_gbytes * 1e9))
    node = RelayNode(
        spec.id,
        memory,
        spec.token.encode(),
        spec.listen,
        on_stored=stored,
        on_failed=failed,
        chunk_mbytes=relay.chunk_mbytes,
        streams=relay.streams,
        nixl=_nixl(relay),
        full_every=relay.full_every,
        congestion=relay.congestion,
    )
    controller.open(address=str(node.address), arena=str(memory.path))
    join()
    try:
        while _obey(controller, node, join):
            pass
    finally:
        node.close()
        memory.remove()
        controller.close()


def _obey(controller: ControlClient, node: RelayNode, join: Callable[[], None]) -> bool:
    for message in controller.receive(PATIENCE_S):
        if isinstance(message, Ended):
            return False
        if isinstance(message, Introduce):
            join()
        elif isinstance(message, Ordered):
            _carry_out(message, node)
    return True


def _carry_out(order: Ordered, node: RelayNode) -> None:
    command = order.command
    if isinstance(command, Route):
        node.route(command.revision, {id: Address.read(text) for id, text in order.addresses.items()})
    elif isinstance(command, Drop):
        node.drop(command.version)


def _nixl(relay: RelaySettings) -> NixlTransport | None:
    if relay.transport != "nixl":
        return None
    try:
        return NixlTransport(NixlAgent(relay.interface))
    except NixlUnavailableError as error:
        log.warning("weights go over TCP: %s", error)
        return None


def _shared_memory_path(spec: ComponentSpec) -> Path:
    """One per run and host; the hash of the run's folder keeps runs of the same name apart."""
    run = Path(spec.folder)
    name = f"{run.name}-{xxhash.xxh3_64_hexdigest(str(run).encode())[:8]}"
    return shared_memory_path(name, label("relay", spec.id))
