"""What sample stores report, written into the books, and what the loss of one costs.

A store that dies and comes back has lost nothing. With one that is lost for good the tokens of its samples are gone:
whatever of them is not trained yet is generated anew, for the same groups. What the trainer has to repeat after a
restart keeps the groups that are still there; the others are replaced by newly picked ones and counted as `lost`.
"""

from __future__ import annotations

from tailrace.control import evaluation, groups, health
from tailrace.control.ledger import NONE, Sample
from tailrace.control.state import Context
from tailrace.control.storage import FIRST, Store
from tailrace.protocol import Forget, SamplesLost, StoreJoined, StoreLost


def joined(context: Context, event: StoreJoined) -> None:
    store = context.stores.stores.setdefault(event.store, Store(event.store))
    if store.departed or event.incarnation <= store.incarnation:
        return
    store.incarnation, store.live = event.incarnation, True
    store.last_seen, store.reason = context.now, ""
    if store.id == FIRST:
        context.state.fetching = False  # what an earlier one was asked for may be lost
    context.more_work = True


def lost(context: Context, event: StoreLost) -> None:
    store = context.stores.stores.get(event.store)
    if store is None or store.departed:
        return
    if store.live and event.incarnation == store.incarnation:
        lose(context, store, event.reason)
    elif not store.live and event.incarnation > store.incarnation:
        health.start_failed(context.config.health, context.now, store, event.incarnation, event.reason)


def lose(context: Context, store: Store, reason: str) -> None:
    """It is started again on its file; until then whoever writes to it waits."""
    store.live, store.reason = False, reason
    health.plan_restart(context.config.health, context.now, store)


def depart(context: Context, store: Store) -> None:
    """It does not come back. What it had of samples that are not picked for training yet is generated anew."""
    store.live, store.departed = False, True
    evaluation.store_departed(context, store.id)
    samples, opened = context.ledger.samples.values(), context.ledger.groups
    begun = [one for one in samples if one.store == store.id and one.oldest != NONE and one.state != "failed"]
    generate_anew(context, [one for one in begun if opened[one.group].state != "training"])


def samples_lost(context: Context, event: SamplesLost) -> None:
    """Its file was replaced or is damaged: what was to be kept there is gone, though the store is not."""
    store = context.stores.stores.get(event.store)
    if store is None or event.incarnation != store.incarnation:
        return
    known = [context.ledger.samples[id] for id in event.trajectories if id in context.ledger.samples]
    here = [one for one in known if one.store == store.id and _counts_on_store(one)]
    generate_anew(context, [one for one in here if context.ledger.groups[one.group].state != "training"])
    context.stores.missing |= dict.fromkeys(context.training.all_picked().intersection(event.trajectories))


def _counts_on_store(sample: Sample) -> bool:
    """Whether it is lost without what its store had. A replica that has begun it from the prompt need not stop."""
    return sample.oldest != NONE and (sample.state in ("done", "waiting", "handed_in") or sample.began < sample.attempt)


def remove_lost(context: Context) -> None:
    """Take out of the mini-batch to train next what cannot be fetched any more. A group that is not trained yet is open
    again; the place of one that was trained in a history that is gone is free."""
    gone = [one for one in context.training.picked if not context.stores.has_group(one)]
    for one in gone:
        picked, group = context.training.remove(one), context.ledger.groups.get(one.group)
        if group is None:
            context.ledger.lose_trained(picked.prompt)
            context.stores.found_missing(picked.samples)
            context.send(Forget(tuple(picked.samples), "lost"))
            context.lose_place()
        else:
            context.ledger.put_back(group)
            samples = [context.ledger.samples[id] for id in context.ledger.survivors(group)]
            generate_anew(context, [one for one in samples if not context.stores.has_sample(one.id, one.store)])


def generate_anew(context: Context, samples: list[Sample]) -> None:
    if not samples:
        return
    groups.cancel(context, samples)
    for sample in samples:
        context.ledger.regenerate(sample)
    context.stores.found_missing([sample.id for sample in samples])
    context.send(Forget(tuple([one.id for one in samples]), "regenerate"))
    context.more_work = True
