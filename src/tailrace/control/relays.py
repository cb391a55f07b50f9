"""Who holds which version, along which routes versions travel, who is the master, and what may be freed.

Relays form a chain, or a tree of a given fan-out, below the master, to which the trainer pushes. A relay forwards each
chunk while it receives it, so a broadcast takes little longer than one transfer. Routes are standing orders: `Route`
is sent only when a neighbour changes, which is a constant number of commands for any loss or arrival, and relays that
have a version do not receive it again.

Relays far away belong to a site. The master feeds the first relay of each site, and that one feeds a chain of the
others: so a version crosses the link to a site once, and a slow link holds up nobody elsewhere.

Owned by the plane. The methods return the commands that their change asks for.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tailrace.config.tree import RelaySettings
from tailrace.control.ledger import NONE
from tailrace.protocol import Command, Drop, Route
from tailrace.types import RelayId, Version


class Relay(msgspec.Struct):
    id: RelayId
    incarnation: int = 0
    live: bool = False
    departed: bool = False  # with its host
    site: str = ""  # where it is, if far away
    last_seen: float = 0.0
    versions: list[Version] = []  # ascending
    position: int = NONE  # in `Relays.order`
    readers: dict[Version, int] = {}  # pulls that are under way, from this or an earlier incarnation
    restarts: int = 0
    restart_at: float = 0.0
    reason: str = ""
    quarantined: bool = False  # it is not started again
    unreached: int = 0  # how often a predecessor could not reach it since it last got something

    @property
    def newest(self) -> Version:
        return self.versions[-1] if self.versions else NONE

    @property
    def given_up(self) -> bool:
        return self.quarantined or self.departed


class Relays(msgspec.Struct):
    """A tree is `order`, read as a heap, with the master first; a chain is `after` and `before`. `sites` have a chain
    each. The master is at home, unless nobody else is there."""

    relays: dict[RelayId, Relay] = {}
    order: list[RelayId] = []
    after: dict[RelayId, RelayId] = {}  # chain: its successor
    before: dict[RelayId, RelayId] = {}  # chain: its predecessor
    sites: dict[str, list[RelayId]] = {}  # live relays, in the order of the chain
    holders: dict[Version, int] = {}  # how many live relays hold a version
    live: int = 0
    revision: int = 0
    master: RelayId = NONE
    tail: RelayId = NONE
    newest_everywhere: Version = NONE
    publish_s: float = 0.0  # from the end of a step until a relay has its version, on average

    # --------------------------------------------------------------------------------------------------- members

    def join(
        self, now: float, config: RelaySettings, id: RelayId, incarnation: int, versions: tuple[Version, ...]
    ) -> list[Command]:
        relay = self.relays.setdefault(id, Relay(id))
        relay.incarnation = incarnation
        relay.live = True
        relay.last_seen = now
        relay.versions = sorted(set(versions))
        relay.reason = ""
        relay.quarantined = False
        relay.unreached = 0
        self.live += 1
        for version in relay.versions:
            self.holders[version] = self.holders.get(version, 0) + 1
        self._note_everywhere()
        return self._with_heads(config, lambda: self._attach(config, relay))

    def current(self, id: RelayId, incarnation: int) -> Relay | None:
        relay = self.relays.get(id)
        return relay if relay is not None and relay.live and relay.incarnation == incarnation else None

    def lose(self, config: RelaySettings, relay: Relay, reason: str) -> list[Command]:
        relay.live = False
        relay.reason = reason
        self.live -= 1
        for version in relay.versions:
            self._forget_holder(version)
        relay.versions = []
        commands = self._with_heads(config, lambda: self._detach(config, relay))
        self._note_everywhere()
        return commands

    # ---------------------------------------------------------------------------------------------------- routes

    def feeds(self, config: RelaySettings, relay: Relay, target: RelayId) -> bool:
        """Whether this is one of those it forwards to."""
        return target in self.targets(config, relay)

    def targets(self, config: RelaySettings, relay: Relay) -> tuple[RelayId, ...]:
        """Those of its own site, and from the master the first ones of the others."""
        if relay.site:
            chain = self.sites[relay.site]
            own = tuple(chain[chain.index(relay.id) + 1 :][:1])
        elif config.topology == "chain":
            own = (self.after[relay.id],) if relay.id in self.after else ()
        else:
            own = self._children(config, relay.position)
        return own + tuple([chain[0] for chain in self.sites.values() if relay.id == self.master != chain[0]])

    def is_last(self, config: RelaySettings, relay: Relay) -> bool:
        if relay.site:
            return relay.id == self.sites[relay.site][-1]
        return relay.id == (self.tail if config.topology == "chain" else self.order[-1])

    def move_to_end(self, config: RelaySettings, relay: Relay) -> list[Command]:
        """Somebody else feeds it from now on. Nobody is told twice."""
        return self._with_heads(config, lambda: self._detach(config, relay) + self._attach(config, relay))

    def _with_heads(self, config: RelaySettings, change: Callable[[], list[RelayId]]) -> list[Command]:
        """The routes that a change asks for; with new ones of the masters, if they feed other sites than before."""
        previous, heads = self.master, self._heads()
        changed = change()
        self._elect()
        if self.sites and (self.master, self._heads()) != (previous, heads):
            changed += [previous, self.master]
        live = [self.relays[id] for id in dict.fromkeys(changed) if id != NONE and self.relays[id].live]
        return [self._route(config, relay) for relay in live]

    def _heads(self) -> list[RelayId]:
        return [chain[0] for chain in self.sites.values()]

    def _elect(self) -> None:
        """While nobody is at home, the trainer pushes to the first relay elsewhere."""
        if self.master == NONE and self.sites:
            self.master = self._heads()[0]

    def _attach(self, config: RelaySettings, relay: Relay) -> list[RelayId]:
        """A new member goes to the end, where only one other relay has to know of it. Returns who has a new route."""
        if relay.site:
            chain = self.sites.setdefault(relay.site, [])
            chain.append(relay.id)
            return chain[-2:]
        if config.topology == "tree":
            relay.position = len(self.order)
            self.order.append(relay.id)
            self.master = self.order[0]
            parent = self.order[(relay.position - 1) // config.fan_out]
            return [relay.id] if relay.position == 0 else [parent, relay.id]
        previous, self.tail = self.tail, relay.id
        if previous == NONE:
            self.master = relay.id
            return [relay.id]
        self.after[previous] = relay.id
        self.before[relay.id] = previous
        return [previous, relay.id]

    def _detach(self, config: RelaySettings, relay: Relay) -> list[RelayId]:
        """Returns who has a new route."""
        if relay.site:
            return self._leave_site(relay)
        return self._splice(relay) if config.topology == "chain" else self._replace_in_tree(config, relay)

    def _leave_site(self, relay: Relay) -> list[RelayId]:
        chain = self.sites[relay.site]
        place = chain.index(relay.id)
        chain.remove(relay.id)
        if not chain:
            del self.sites[relay.site]
        if self.master == relay.id:
            self.master = NONE
        return chain[place - 1 : place] if place else []

    def _splice(self, relay: Relay) -> list[RelayId]:
        """Chain: its predecessor forwards to its successor from now on."""
        previous, following = self.before.pop(relay.id, NONE), self.after.pop(relay.id, NONE)
        if following != NONE:
            self.before.pop(following)
            if previous != NONE:
                self.before[following] = previous
        if previous != NONE:
            self.after.pop(previous)
            if following != NONE:
                self.after[previous] = following
        if self.master == relay.id:
            self.master = following
        if self.tail == relay.id:
            self.tail = previous
        return [] if previous == NONE else [previous]

    def _replace_in_tree(self, config: RelaySettings, relay: Relay) -> list[RelayId]:
        """Tree: the last leaf takes the free position, so that at most three relays learn something new."""
        hole, relay.position = relay.position, NONE
        last = self.order.pop()
        changed = [self.order[(len(self.order) - 1) // config.fan_out]] if self.order else []
        if last != relay.id:
            self.order[hole] = last
            self.relays[last].position = hole
            changed += [last] if hole == 0 else [self.order[(hole - 1) // config.fan_out], last]
        self.master = self.order[0] if self.order else NONE
        return changed

    def _children(self, config: RelaySettings, index: int) -> tuple[RelayId, ...]:
        first = index * config.fan_out + 1
        return tuple(self.order[first : first + config.fan_out])

    def _route(self, config: RelaySettings, relay: Relay) -> Command:
        self.revision += 1
        return Route(relay.id, relay.incarnation, self.revision, self.targets(config, relay))

    # -------------------------------------------------------------------------------------------------- versions

    def stored(self, relay: Relay, version: Version) -> bool:
        """Record that a relay holds a version; False if that was known."""
        if version in relay.versions:
            return False
        relay.versions.append(version)
        relay.versions.sort()
        relay.unreached = 0
        self.holders[version] = self.holders.get(version, 0) + 1
        self._note_everywhere()
        return True

    def retire(self, config: RelaySettings, relay: Relay, version_bytes: float) -> list[Command]:
        """Free the oldest versions beyond the quota; never the newest, never one that is being read."""
        keep = config.keep_versions
        if config.quota_gbytes:
            keep = max(1, min(keep, int(config.quota_gbytes * 1e9 / max(version_bytes, 1.0))))
        surplus = relay.versions[: max(0, len(relay.versions) - keep)]
        freed = [version for version in surplus if not relay.readers.get(version)]
        for version in freed:
            relay.versions.remove(version)
            self._forget_holder(version)
        return [Drop(relay.id, relay.incarnation, version) for version in freed]

    def source_for(self, host: RelayId, version: Version) -> Relay | None:
        """Where a replica on `host` gets a version."""
        source = self._serving(host)
        return source if source is not None and version in source.versions else None

    def newest_for(self, host: RelayId) -> Version:
        source = self._serving(host)
        return source.newest if source is not None else NONE

    def _serving(self, host: RelayId) -> Relay | None:
        """Its own relay; while that one is gone the first of its site, or the master."""
        own = self.relays.get(host)
        if own is not None and own.live:
            return own
        near = self.sites.get(own.site, []) if own is not None else []
        return self.relays.get(near[0] if near else self.master)

    def begin_read(self, relay: Relay, version: Version) -> None:
        relay.readers[version] = relay.readers.get(version, 0) + 1

    def end_read(self, id: RelayId, version: Version) -> None:
        """A pull has ended, one way or the other."""
        readers = self.relays[id].readers
        readers[version] -= 1
        if not readers[version]:
            del readers[version]

    def _forget_holder(self, version: Version) -> None:
        self.holders[version] -= 1
        if not self.holders[version]:
            del self.holders[version]

    def _note_everywhere(self) -> None:
        complete = [version for version, count in self.holders.items() if count == self.live]
        if complete:
            self.newest_everywhere = max(self.newest_everywhere, *complete)
