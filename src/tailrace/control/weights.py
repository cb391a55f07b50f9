"""The path of a weight version: from the trainer to the master relay, along the routes, into a replica that is free."""

from __future__ import annotations

from tailrace.control import health
from tailrace.control.fleet import Replica
from tailrace.control.ledger import NONE
from tailrace.control.relays import Relay
from tailrace.control.state import Context
from tailrace.protocol import (
    Command,
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

PUBLISHED = 0.25  # weight of the newest version in how long one takes to a relay


def publish(context: Context) -> None:
    """Push the newest publishable version, unless the master has it or one is already on its way. A trainer that waits
    for data of a step that it repeats cannot make that version before it has some: it pushes what it is at."""
    training, relays = context.training, context.relays
    if context.state.pushing != NONE or relays.master == NONE or not training.live:
        return
    version = context.next_step - context.next_step % context.config.schedule.publish_every
    if relays.relays[relays.master].newest < version <= training.step:
        context.state.pushing = version
        context.send(Publish(training.incarnation, version, relays.master))


def relay_joined(context: Context, event: RelayJoined) -> None:
    known = context.relays.relays.get(event.relay)
    if known is not None and (known.departed or event.incarnation <= known.incarnation):
        return
    if known is not None and known.live:
        lose_relay(context, known, "it connected anew")
    versions = tuple([version for version in event.versions if 0 <= version <= context.training.version])
    context.commands += context.relays.join(context.now, context.config.relay, event.relay, event.incarnation, versions)
    _weights_changed(context, context.relays.relays[event.relay])


def relay_lost(context: Context, event: RelayLost) -> None:
    relay = context.relays.relays.get(event.relay)
    if relay is None:
        return
    if relay.live and event.incarnation == relay.incarnation:
        lose_relay(context, relay, event.reason)
    elif not relay.live and event.incarnation > relay.incarnation:
        health.start_failed(context.config.health, context.now, relay, event.incarnation, event.reason)


def link_failed(context: Context, event: LinkFailed) -> None:
    """Whom its predecessor cannot reach goes to the end, where another one feeds it; if that does not help, it is lost,
    and its replicas are served by the master."""
    sender, target = context.relays.current(event.relay, event.incarnation), context.relays.relays.get(event.target)
    if sender is None or target is None or not context.relays.feeds(context.config.relay, sender, event.target):
        return  # routes have changed since
    _unreachable(context, target, f"relay {event.relay} cannot reach it: {event.reason}")


def publish_failed(context: Context, event: PublishFailed) -> None:
    """Another relay becomes the master, and gets the version from the trainer."""
    training, relays = context.training, context.relays
    awaited = context.state.pushing != NONE and event.version >= context.state.pushing
    if training.live and event.incarnation == training.incarnation and event.relay == relays.master and awaited:
        context.state.pushing = NONE
        _unreachable(context, relays.relays[event.relay], f"the trainer cannot reach it: {event.reason}")


def _unreachable(context: Context, target: Relay, reason: str) -> None:
    target.unreached += 1
    if target.unreached == 1 and not context.relays.is_last(context.config.relay, target):
        context.commands += context.relays.move_to_end(context.config.relay, target)
        return
    give_up_relay(context, target, reason)


def give_up_relay(context: Context, relay: Relay, reason: str) -> None:
    """It may well be alive: its process is ended before another one takes its place, and gets every version anew."""
    context.send(GiveUp("relay", relay.id, relay.incarnation, reason))
    lose_relay(context, relay, reason)


def lose_relay(context: Context, relay: Relay, reason: str) -> None:
    """Its neighbours are joined up; was it the master, the next one gets the newest version from the trainer again."""
    if relay.id == context.relays.master:
        context.state.pushing = NONE
    context.commands += context.relays.lose(context.config.relay, relay, reason)
    health.plan_restart(context.config.health, context.now, relay)
    _weights_changed(context, relay)


def version_stored(context: Context, event: VersionStored) -> None:
    relay = context.relays.current(event.relay, event.incarnation)
    if relay is None or not 0 <= event.version <= context.training.version:
        return
    relay.restarts = 0
    if relay.id == context.relays.master and event.version >= context.state.pushing:
        context.state.pushing = NONE  # the trainer may have finished a newer one while the order was on its way
    if context.relays.stored(relay, event.version):
        if event.version == context.training.version and not relay.foreign:
            context.relays.publish_s += PUBLISHED * (context.now - context.training.made_at - context.relays.publish_s)
        context.commands += _retire(context, relay)
        _weights_changed(context, relay)


def _retire(context: Context, relay: Relay) -> list[Command]:
    """What is evaluated stays, and what strangers may hand in; but nothing evaluated is generated by strangers."""
    kept = () if relay.foreign else context.evaluation.kept
    size, least = context.config.model.weight_bytes, _needed_for_checks(context, relay)
    return context.relays.retire(context.config.relay, relay, size, kept, least)


def _needed_for_checks(context: Context, relay: Relay) -> int:
    """Versions that strangers may hand in work of: with fewer it could not be scored again."""
    checks = any(context.fleet.replicas[id].checks for id in context.fleet.on_host.get(relay.id, ()))
    return context.config.schedule.max_staleness + 1 if checks and context.state.strangers.admitted else 0


def _weights_changed(context: Context, relay: Relay) -> None:
    """A relay has more than before, or is gone so that others serve its replicas: who could pull now?"""
    for id in context.fleet.on_host.get(relay.id, ()):
        context.touch(context.fleet.replicas[id])
    if context.traits.interrupts and context.relays.newest_everywhere > context.fleet.offered:
        context.fleet.offered = context.relays.newest_everywhere
        for replica in context.fleet.ready():
            context.touch(replica)


def wanted(context: Context, replica: Replica) -> Version:
    """The version that a replica should generate under, seen from where it stands."""
    together = context.traits.interrupts and not replica.worker
    newest = newest_together(context, replica) if together else context.relays.newest_for(replica.host)
    return newest if context.evaluation.version == NONE else on_the_way(context, replica, newest)


def newest_together(context: Context, replica: Replica) -> Version:
    """Where all replicas pull the same version. While a step is repeated it may be that nobody has that one any more;
    then each takes what it can get."""
    return context.relays.newest_for(replica.host) if context.repeats_short else context.relays.newest_everywhere


def on_the_way(context: Context, replica: Replica, version: Version) -> Version:
    """The version that is evaluated, if it is older than this one and this replica can still help with it."""
    evaluation = context.evaluation
    wanted = replica.own and replica.version < evaluation.version < version
    if wanted and evaluation.left:
        helps = context.relays.source_for(replica.host, evaluation.version) is not None
        return evaluation.version if helps else version
    return version


def pull(context: Context, replica: Replica, version: Version) -> bool:
    """Order a pull; False if the version is not where this replica could get it."""
    source = context.relays.source_for(replica.host, version)
    if source is None:
        return False
    context.relays.begin_read(source, version)
    context.fleet.hungry.pop(replica.id, None)
    context.state.pulling += 1
    replica.target = version
    replica.source, replica.source_incarnation = source.id, source.incarnation
    replica.enter("pulling", context.now)
    context.send(LoadWeights(replica.id, replica.incarnation, version, source.id))
    return True


def end_pull(context: Context, replica: Replica) -> None:
    if replica.state == "pulling":
        context.state.pulling -= 1
        context.relays.end_read(replica.source, replica.target)
        replica.enter("ready", context.now)
