"""The conservation laws, as code. `ControlPlane.check()` runs them; the tests do so after every event."""

from __future__ import annotations

from collections import Counter

from tailrace.config.tree import Config
from tailrace.control.fleet import Fleet
from tailrace.control.ledger import NONE, NOWHERE, Group, Ledger
from tailrace.control.relays import Relays
from tailrace.control.state import State
from tailrace.control.training import Training


def check_all(config: Config, state: State) -> None:
    _groups_balance(state.ledger)
    _samples_balance(state.ledger)
    _every_sample_has_one_place(state.ledger, state.fleet)
    _staleness_is_bounded(config, state.ledger, state.training)
    _history_agrees(config, state.ledger, state.training)
    _relays_agree(config, state.relays)
    _replicas_agree(state)
    _the_cheapest_generate(state)
    _somebody_is_left(config, state)
    _stores_agree(state)
    _strangers_are_apart(config, state)
    _evaluation_balances(state)


def _groups_balance(ledger: Ledger) -> None:
    tally = ledger.tally
    assert tally.started == tally.ended + len(ledger.groups), "groups started == ended + in flight"
    assert tally.started == ledger.next_group, "every group number was used once"
    pooled_again = tally.dropped_stale + tally.lost
    assert ledger.received + pooled_again == ledger.skipped + tally.started + len(ledger.pool), (
        "a prompt is skipped, pooled or opened"
    )
    rows = [group.prompt.row for group in ledger.groups.values()]
    assert ledger.rows == Counter(row for row in rows if row >= 0), "groups of every row are counted"
    states = [group.state for group in ledger.groups.values()]
    assert states.count("open") == ledger.open_groups, "open groups are counted"
    ready = [group.id for group in ledger.groups.values() if group.state == "ready"]
    assert sorted(ready) == sorted(ledger.ready), "the buffer holds exactly the ready groups"
    indexed = {id: oldest for oldest, ids in ledger.open_by_oldest.items() for id in ids}
    started = {g.id: g.oldest for g in ledger.groups.values() if g.state == "open" and g.oldest != NONE}
    assert indexed == started, "the index by oldest version holds exactly the open groups"


def _samples_balance(ledger: Ledger) -> None:
    assert len(ledger.samples) == sum(len(group.samples) for group in ledger.groups.values()), "no sample without group"
    assert ledger.unfinished == sum(group.unfinished for group in ledger.groups.values()), (
        "unfinished samples are counted"
    )
    scoring = [sample for sample in ledger.samples.values() if sample.state == "scoring"]
    assert ledger.scoring == len(scoring), "samples that judges have are counted"
    assert ledger.final == sum(sample.final for sample in ledger.samples.values()), "and those that they have for good"
    assert all(sample.final <= (sample.state == "scoring") for sample in ledger.samples.values()), (
        "while they have them"
    )
    assert all(sample.began <= sample.attempt for sample in ledger.samples.values()), "what was begun was assigned"
    for group in ledger.groups.values():
        _check_group(ledger, group)


def _check_group(ledger: Ledger, group: Group) -> None:
    states = [ledger.samples[id].state for id in group.samples]
    unfinished = sum(states.count(state) for state in ("waiting", "running", "scoring", "handed_in"))
    assert len(states) <= max(group.size, 1), f"group {group.id} has no more samples than it may"
    assert unfinished == group.unfinished, f"group {group.id} counts its unfinished samples"
    if group.state != "open":
        assert not unfinished, f"group {group.id} is {group.state} with unfinished samples"
    else:
        assert unfinished, f"group {group.id} is open without unfinished samples"


def _every_sample_has_one_place(ledger: Ledger, fleet: Fleet) -> None:
    replicas, samples = fleet.replicas.values(), ledger.samples.values()
    generated = {id: replica.id for replica in replicas for id in replica.assigned}
    scored = {id: replica.id for replica in replicas for id in replica.scoring}
    finals = {id: final for replica in replicas for id, final in replica.scoring.items()}
    assert finals == {s.id: s.final for s in samples if s.state == "scoring"}, "both books say what is final"
    assert generated == {s.id: s.replica for s in samples if s.state == "running"}, "they generate what is running"
    assert scored == {s.id: s.replica for s in samples if s.state == "scoring"}, "their judges have what is scored"
    held = sum(len(replica.assigned) + len(replica.scoring) for replica in replicas)
    assert held == len(generated) + len(scored), "no sample is on two replicas"
    waiting = {s.id for s in samples if s.state == "waiting"}
    assert waiting == set(ledger.waiting), "the waiting list holds exactly the waiting samples"
    assert all(ledger.samples[id].replica == NOWHERE for id in waiting), "who waits has no replica"
    assert all(r.live or not (r.assigned or r.scoring) for r in replicas), "the dead hold nothing"
    assert fleet.live == sum(r.live for r in replicas), "live replicas are counted"
    away = [r for r in replicas if r.state == "away"]
    assert fleet.away == len(away), "and those that are cut off"
    assert all(r.leased and r.id not in fleet.hungry for r in away), "which are given nothing more"


def _staleness_is_bounded(config: Config, ledger: Ledger, training: Training) -> None:
    for step, past in training.past.items():
        for group in [ledger.groups[one] for one in past.picked if one in ledger.groups]:
            late = step - group.oldest
            assert late <= config.schedule.max_staleness, f"group {group.id} is trained {late} versions late"


def _history_agrees(config: Config, ledger: Ledger, training: Training) -> None:
    assert training.durable <= training.step <= training.version, "the trainer is between its checkpoint and the newest"
    assert training.durable <= training.saved <= training.step, "a step is in its checkpoint once it is trained"
    assert set(training.past) <= set(range(training.durable, training.version + 1)), "what is durable is not kept"
    now = training.past.get(training.version)
    mini_batches = now.mini_batches if now else []
    assert training.taken == sum(len(groups) for groups in mini_batches), "groups of the current step are counted"
    assert len(mini_batches) <= config.trainer.mini_batches, "a step has no more mini_batches than it should"
    picked = {one.group for past in training.past.values() for groups in past.mini_batches for one in groups}
    under_way = {group.id for group in ledger.groups.values() if group.state == "training"}
    assert under_way <= picked, "what is being trained belongs to a step that may have to be repeated"


def _replicas_agree(state: State) -> None:
    pulling = [replica for replica in state.fleet.replicas.values() if replica.state == "pulling"]
    assert state.pulling == len(pulling), "pulls are counted"
    readers = {(relay.id, v): count for relay in state.relays.relays.values() for v, count in relay.readers.items()}
    assert readers == Counter((one.source, one.target) for one in pulling), "a version that is being read is known"
    releasing = {replica.id for replica in state.fleet.replicas.values() if replica.state == "releasing"}
    assert set(state.fleet.moves) == releasing, "who hands back its work has somewhere to send it"


def _the_cheapest_generate(state: State) -> None:
    """Whoever is sent home has a price, gets nothing, and leaves somebody at work."""
    live = [one for one in state.fleet.replicas.values() if one.live]
    own = [one for one in live if one.own and one.state != "away"]
    resting = [one for one in state.fleet.replicas.values() if one.resting]
    assert all(one.live and one.own for one in resting), "only the living are sent home, neither strangers nor checkers"
    assert not any(one.resting and one.id in state.fleet.hungry for one in live), "nothing is kept for who is at home"
    assert state.stopped or not own or not all(one.resting for one in own), "somebody generates"
    working = sum(one.works for one in live)
    assert sum(kind.members for kind in state.fleet.kinds) == working, "kinds count whoever generates"
    assert all(one.kind < len(state.fleet.kinds) for one in live), "every replica is of a kind"


def _somebody_is_left(config: Config, state: State) -> None:
    """But for replicas that only other machines bring: others may come."""
    replicas = state.fleet.replicas if config.local.replicas else {}
    for kind in (replicas, state.relays.relays):
        lost = bool(kind) and all(one.given_up for one in kind.values())
        assert state.stopped or not lost, "a run without any replica or any relay is stopped"


def _relays_agree(config: Config, relays: Relays) -> None:
    live = [relay for relay in relays.relays.values() if relay.live and not relay.foreign]
    assert relays.live == len(live), "live relays are counted"
    holders: dict[int, int] = {}
    for relay in live:
        for version in relay.versions:
            holders[version] = holders.get(version, 0) + 1
    assert holders == relays.holders, "holders of versions are counted"
    if live:
        reached = _reachable(config, relays)
        assert sorted(reached) == sorted(relay.id for relay in live), "the routes reach every live relay once"


def _reachable(config: Config, relays: Relays) -> list[int]:
    reached = [relays.master]
    for id in reached:  # which grows meanwhile
        if len(reached) <= relays.live:
            reached += relays.targets(config.relay, relays.relays[id])
    return reached


def _evaluation_balances(state: State) -> None:
    evaluation, replicas = state.evaluation, state.fleet.replicas.values()
    ended = sum(score.samples for score in evaluation.scores)
    if evaluation.version != NONE:
        assert evaluation.begun == ended + len(evaluation.samples), "samples given out == ended + under way"
        assert evaluation.begun <= evaluation.total, "no more than there are"
    else:
        assert not evaluation.samples, "samples belong to an evaluation"
    given = {id: replica.id for replica in replicas for id in replica.evaluating}
    assert len(given) == sum(len(replica.evaluating) for replica in replicas), "no evaluation sample is on two replicas"
    known = {one.id: one.replica for one in evaluation.samples.values()}
    assert given == {id: replica for id, replica in known.items() if replica != NOWHERE}, "both books say who has what"
    assert set(evaluation.waiting) == known.keys() - given.keys(), "who has no replica waits"
    for replica in replicas:
        if replica.evaluating:
            assert replica.own, "neither strangers nor checkers evaluate"
            assert replica.live, "the dead evaluate nothing"
            assert replica.version == evaluation.version, "an evaluation sample is generated under its version"
            assert replica.state != "pulling", "and under no other"


def _stores_agree(state: State) -> None:
    begun = [sample for sample in state.ledger.samples.values() if sample.oldest != NONE and sample.state != "failed"]
    untrained = [one for one in begun if state.ledger.groups[one.group].state != "training"]
    assert all(state.stores.has(one.store) for one in untrained), "what was lost with its store is generated anew"


def _strangers_are_apart(config: Config, state: State) -> None:
    """Nobody trains on, goes on from, or is served by what a stranger has, unless it was handed in and looked at."""
    replicas, samples = state.fleet.replicas, state.ledger.samples.values()
    handed_in = {one.id for one in samples if one.state == "handed_in"}
    assert handed_in == set(state.ledger.handed_in), "what was handed in waits for a checker"
    assert all(bool(one.check) == (one.stranger != NOWHERE) for one in samples), "it is known who handed it in"
    foreign = [one for one in samples if one.replica != NOWHERE and replicas[one.replica].worker]
    assert all(one.began == one.attempt and not one.check for one in foreign), "a stranger begins what it has itself"
    due = {id: one.id for one in replicas.values() for id in one.due}
    assert due == {one.id: one.replica for one in foreign}, "and has a time for it"
    checking = [one for one in samples if one.check and one.replica != NOWHERE]
    assert all(replicas[one.replica].checks for one in checking), "checkers, and nobody else, look at it"
    own = [one for one in samples if one.replica != NOWHERE and replicas[one.replica].checks]
    assert all(one.check for one in own), "and do nothing else"
    excluded = {name for name, worker in state.strangers.workers.items() if worker.excluded}
    gone = {one.id for one in replicas.values() if one.worker in excluded}
    assert all(not replicas[id].live for id in gone), "who is excluded is gone"
    left = [one for one in samples if one.stranger in gone and one.state != "failed"]
    assert all(state.ledger.groups[one.group].state == "training" for one in left), (
        "and so is its work, unless it is being trained on"
    )
    ours = {one.id for one in state.relays.relays.values() if one.live and not one.foreign}
    fed = {one.id for one in state.relays.relays.values() if one.live and one.foreign}
    assert set(state.relays.feeders) == fed, "a stranger's relay is fed"
    assert all(feeder in ours or not ours for feeder in state.relays.feeders.values()), "by one of ours"
    assert state.relays.master not in fed, "and feeds nobody"
