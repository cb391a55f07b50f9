"""What sample stores report, written into the books, and what the loss of one costs.

A store that dies and comes back has lost nothing. With one that is lost for good the tokens of its samples are gone:
whatever of them is not trained yet is generated anew, for the same groups. What the trainer has to repeat after a
restart keeps the groups that are still there; the others are replaced by newly picked ones and counted as `lost`.
"""

from __future__ import annotations

from tailrace.control import groups, health
from tailrace.control.ledger import NONE, Sample
from tailrace.control.state import Desk
from tailrace.control.storage import FIRST, Store
from tailrace.protocol import Forget, SamplesLost, StoreJoined, StoreLost


def joined(desk: Desk, event: StoreJoined) -> None:
    store = desk.stores.stores.setdefault(event.store, Store(event.store))
    if store.departed or event.incarnation <= store.incarnation:
        return
    store.incarnation, store.live = event.incarnation, True
    store.last_seen, store.reason = desk.now, ""
    if store.id == FIRST:
        desk.state.fetching = False  # what an earlier one was asked for may be lost
    desk.more_work = True


def lost(desk: Desk, event: StoreLost) -> None:
    store = desk.stores.stores.get(event.store)
    if store is None or store.departed:
        return
    if store.live and event.incarnation == store.incarnation:
        lose(desk, store, event.reason)
    elif not store.live and event.incarnation > store.incarnation:
        health.start_failed(desk.config.health, desk.now, store, event.incarnation, event.reason)


def lose(desk: Desk, store: Store, reason: str) -> None:
    """It is started again on its file; until then whoever writes to it waits."""
    store.live, store.reason = False, reason
    health.plan_restart(desk.config.health, desk.now, store)


def depart(desk: Desk, store: Store) -> None:
    """It does not come back. What it had of samples that are not picked for training yet is generated anew."""
    store.live, store.departed = False, True
    samples, opened = desk.ledger.samples.values(), desk.ledger.groups
    begun = [one for one in samples if one.store == store.id and one.oldest != NONE and one.state != "failed"]
    _generate_anew(desk, [one for one in begun if opened[one.group].state != "training"])


def samples_lost(desk: Desk, event: SamplesLost) -> None:
    """Its file was replaced or is damaged: what was to be kept there is gone, though the store is not."""
    store = desk.stores.stores.get(event.store)
    if store is None or event.incarnation != store.incarnation:
        return
    known = [desk.ledger.samples[id] for id in event.trajectories if id in desk.ledger.samples]
    here = [one for one in known if one.store == store.id and _counts_on_store(one)]
    _generate_anew(desk, [one for one in here if desk.ledger.groups[one.group].state != "training"])
    desk.stores.missing |= dict.fromkeys(desk.training.all_picked().intersection(event.trajectories))


def _counts_on_store(sample: Sample) -> bool:
    """Whether it is lost without what its store had. A replica that has begun it from the prompt need not stop."""
    return sample.oldest != NONE and (sample.state in ("done", "waiting") or sample.began < sample.attempt)


def remove_lost(desk: Desk) -> None:
    """Take out of the mini-batch to train next what cannot be fetched any more. A group that is not trained yet is open
    again; the place of one that was trained in a history that is gone is free."""
    gone = [one for one in desk.training.picked if not desk.stores.has_group(one)]
    for one in gone:
        picked, group = desk.training.remove(one), desk.ledger.groups.get(one.group)
        if group is None:
            desk.ledger.lose_trained(picked.prompt)
            desk.stores.found_missing(picked.samples)
            desk.send(Forget(tuple(picked.samples), "lost"))
        else:
            desk.ledger.put_back(group)
            samples = [desk.ledger.samples[id] for id in one.trajectories]
            _generate_anew(desk, [one for one in samples if not desk.stores.has_sample(one.id, one.store)])


def _generate_anew(desk: Desk, samples: list[Sample]) -> None:
    if not samples:
        return
    groups.cancel(desk, samples)
    for sample in samples:
        desk.ledger.regenerate(sample)
    desk.stores.found_missing([sample.id for sample in samples])
    desk.send(Forget(tuple([one.id for one in samples]), "regenerate"))
    desk.more_work = True
