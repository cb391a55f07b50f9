"""The path of a weight version: from the trainer to the master relay, along the routes, into a replica that is free."""

from __future__ import annotations

from tailrace.control import health
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NONE
from tailrace.control.relays import Relay
from tailrace.control.state import Desk
from tailrace.protocol import (
    GiveUp,
    LinkFailed,
    LoadWeights,
    Publish,
    PublishFailed,
    RelayJoined,
    RelayLost,
    VersionStored,
)
from tailrace.types import Version


def publish(desk: Desk) -> None:
    """Push the newest publishable version, unless the master has it or one is already on its way."""
    training, relays = desk.training, desk.relays
    version = training.version - training.version % desk.config.schedule.publish_every
    if relays.master == NONE or not training.live or desk.state.pushing != NONE or training.step < version:
        return
    if relays.relays[relays.master].newest < version:
        desk.state.pushing = version
        desk.send(Publish(training.incarnation, version, relays.master))


def relay_joined(desk: Desk, event: RelayJoined) -> None:
    known = desk.relays.relays.get(event.relay)
    if known is not None and (known.departed or event.incarnation <= known.incarnation):
        return
    if known is not None and known.live:
        lose_relay(desk, known, "it connected anew")
    versions = tuple([version for version in event.versions if 0 <= version <= desk.training.version])
    desk.commands += desk.relays.join(desk.now, desk.config.relay, event.relay, event.incarnation, versions)
    _weights_changed(desk, desk.relays.relays[event.relay])


def relay_lost(desk: Desk, event: RelayLost) -> None:
    relay = desk.relays.relays.get(event.relay)
    if relay is None:
        return
    if relay.live and event.incarnation == relay.incarnation:
        lose_relay(desk, relay, event.reason)
    elif not relay.live and event.incarnation > relay.incarnation:
        health.start_failed(desk.config.health, desk.now, relay, event.incarnation, event.reason)


def link_failed(desk: Desk, event: LinkFailed) -> None:
    """Whom its predecessor cannot reach goes to the end, where another one feeds it; if that does not help, it is lost,
    and its replicas are served by the master."""
    sender, target = desk.relays.current(event.relay, event.incarnation), desk.relays.relays.get(event.target)
    if sender is None or target is None or not desk.relays.feeds(desk.config.relay, sender, event.target):
        return  # routes have changed since
    _unreachable(desk, target, f"relay {event.relay} cannot reach it: {event.reason}")


def publish_failed(desk: Desk, event: PublishFailed) -> None:
    """Another relay becomes the master, and gets the version from the trainer."""
    training, relays = desk.training, desk.relays
    awaited = desk.state.pushing != NONE and event.version >= desk.state.pushing
    if training.live and event.incarnation == training.incarnation and event.relay == relays.master and awaited:
        desk.state.pushing = NONE
        _unreachable(desk, relays.relays[event.relay], f"the trainer cannot reach it: {event.reason}")


def _unreachable(desk: Desk, target: Relay, reason: str) -> None:
    target.unreached += 1
    if target.unreached == 1 and not desk.relays.is_last(desk.config.relay, target):
        desk.commands += desk.relays.move_to_end(desk.config.relay, target)
        return
    give_up_relay(desk, target, reason)


def give_up_relay(desk: Desk, relay: Relay, reason: str) -> None:
    """It may well be alive: its process is ended before another one takes its place, and gets every version anew."""
    desk.send(GiveUp("relay", relay.id, relay.incarnation, reason))
    lose_relay(desk, relay, reason)


def lose_relay(desk: Desk, relay: Relay, reason: str) -> None:
    """Its neighbours are joined up; was it the master, the next one gets the newest version from the trainer again."""
    if relay.id == desk.relays.master:
        desk.state.pushing = NONE
    desk.commands += desk.relays.lose(desk.config.relay, relay, reason)
    health.plan_restart(desk.config.health, desk.now, relay)
    _weights_changed(desk, relay)


def version_stored(desk: Desk, event: VersionStored) -> None:
    relay = desk.relays.current(event.relay, event.incarnation)
    if relay is None or not 0 <= event.version <= desk.training.version:
        return
    relay.restarts = 0
    if relay.id == desk.relays.master and event.version >= desk.state.pushing:
        desk.state.pushing = NONE  # the trainer may have finished a newer one while the order was on its way
    if desk.relays.stored(relay, event.version):
        desk.commands += desk.relays.retire(desk.config.relay, relay, desk.config.model.weight_bytes)
        _weights_changed(desk, relay)


def _weights_changed(desk: Desk, relay: Relay) -> None:
    """A relay has more than before, or is gone so that others serve its replicas: who could pull now?"""
    for id in desk.fleet.on_host.get(relay.id, ()):
        desk.touch(desk.fleet.replicas[id])
    if desk.traits.interrupts and desk.relays.newest_everywhere > desk.fleet.offered:
        desk.fleet.offered = desk.relays.newest_everywhere
        for replica in desk.fleet.ready():
            desk.touch(replica)


def wanted(desk: Desk, replica: Replica) -> Version:
    """The version that a replica should generate under, seen from where it stands."""
    return desk.relays.newest_everywhere if desk.traits.interrupts else desk.relays.newest_for(replica.host)


def pull(desk: Desk, replica: Replica, version: Version) -> bool:
    """Order a pull; False if the version is not where this replica could get it."""
    source = desk.relays.source_for(replica.host, version)
    if source is None:
        return False
    desk.relays.begin_read(source, version)
    desk.fleet.hungry.pop(replica.id, None)
    desk.state.pulling += 1
    replica.target = version
    replica.source = source.id
    replica.enter("pulling", desk.now)
    desk.send(LoadWeights(replica.id, replica.incarnation, version, source.id))
    return True


def end_pull(desk: Desk, replica: Replica) -> None:
    if replica.state == "pulling":
        desk.state.pulling -= 1
        desk.relays.end_read(replica.source, replica.target)
        replica.enter("ready", desk.now)
