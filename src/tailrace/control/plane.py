"""The control plane: `handle(now, event) -> [Command]`, and nothing else gets in or out.

It decides what starts where, who pulls which weights and when, what moves, what trains next, and what happens when
something dies. It reads no clock, draws no random number and does no I/O: time is an argument, a timer is a command
answered by an event, so the same events always give the same commands. Two drivers run it: `runtime` with real
processes, `sim` in virtual time.

An event is handled in two steps. Its handler brings the books up to date (`ledger`, `fleet`, `relays`, `training`) and
leaves notes; then `_decide` starts, always in the same order, whatever has become possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tailrace.config.tree import Config
from tailrace.control import (
    activation,
    checks,
    evaluation,
    moves,
    replicas,
    rounds,
    steps,
    stores,
    watch,
    weights,
    work,
)
from tailrace.control.invariants import check_all
from tailrace.control.state import Context, State
from tailrace.protocol import (
    CheckFailed,
    Checkpointed,
    Command,
    ControllerRestarted,
    EvalSetsOpened,
    Event,
    Finished,
    GenerationResumed,
    HandedIn,
    Heartbeats,
    HostJoined,
    HostLeft,
    LinkFailed,
    Parked,
    PriceChanged,
    Progressed,
    PromptsAdded,
    PublishFailed,
    PullFailed,
    RelayJoined,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    Role,
    RunStarted,
    SampleFailed,
    SamplesLost,
    ScoringStarted,
    SettingsChanged,
    StoreJoined,
    StoreLost,
    TimerFired,
    Trained,
    TrainerJoined,
    TrainerLost,
    TrainerWaits,
    TrainFailed,
    VersionStored,
    WeightsLoaded,
    WorkerRefused,
    WorkerRevoked,
)


def _prompts_added(context: Context, event: PromptsAdded) -> None:
    if event.start == context.ledger.received:
        context.state.fetching = False
        context.state.exhausted = event.last
        context.ledger.add_prompts(event.prompts, longest_first=not context.traits.rounds)
        context.more_work = True


HANDLERS: dict[type[Event], Callable[[Context, Any], None]] = {
    RunStarted: watch.run_started,
    HostJoined: watch.host_joined,
    HostLeft: watch.host_left,
    WorkerRevoked: checks.revoked,
    WorkerRefused: checks.refused,
    PromptsAdded: _prompts_added,
    EvalSetsOpened: evaluation.opened,
    ReplicaJoined: replicas.joined,
    PriceChanged: activation.price_changed,
    ReplicaLost: replicas.lost,
    Progressed: replicas.progressed,
    ScoringStarted: replicas.scoring_started,
    GenerationResumed: replicas.generation_resumed,
    Finished: replicas.finished,
    SampleFailed: replicas.sample_failed,
    WeightsLoaded: replicas.weights_loaded,
    PullFailed: replicas.pull_failed,
    Parked: moves.parked,
    HandedIn: checks.handed_in,
    CheckFailed: checks.check_failed,
    RelayJoined: weights.relay_joined,
    RelayLost: weights.relay_lost,
    LinkFailed: weights.link_failed,
    PublishFailed: weights.publish_failed,
    VersionStored: weights.version_stored,
    StoreJoined: stores.joined,
    StoreLost: stores.lost,
    SamplesLost: stores.samples_lost,
    TrainerJoined: steps.joined,
    TrainerLost: steps.lost,
    TrainerWaits: steps.waits,
    Trained: steps.trained,
    TrainFailed: steps.train_failed,
    Checkpointed: steps.checkpointed,
    Heartbeats: watch.heartbeats,
    TimerFired: watch.timer_fired,
    ControllerRestarted: watch.controller_restarted,
    SettingsChanged: steps.settings_changed,
}
AFTER_THE_END = (ControllerRestarted, SettingsChanged)  # the last order may not have been sent; there may be more to do
INFORMING = (Progressed, Heartbeats)  # nothing is decided after them


class ControlPlane:
    """`config`: what the run was begun with. What has changed since is in the state, and in the journal."""

    def __init__(self, config: Config, state: State | None = None) -> None:
        self.state = state or State()
        self._context = Context(config, self.state)

    @property
    def config(self) -> Config:
        """As it is now."""
        return self._context.config

    def handle(self, now: float, event: Event) -> list[Command]:
        context = self._context
        context.clear(now)
        if not self.state.stopped or type(event) in AFTER_THE_END:
            HANDLERS[type(event)](context, event)
        if not self.state.stopped and type(event) not in INFORMING:
            self._decide(context)
        return context.commands

    def _decide(self, context: Context) -> None:
        """The weights that the trainer made and its next step first, then who is to generate, then work for these, and
        moves between them."""
        weights.publish(context)
        if not self.state.stopped:
            steps.train(context)
            weights.publish(context)  # again: that step may lack data for which nobody has weights
        if not self.state.stopped and context.fleet_changed:
            activation.decide(context)
        if not self.state.stopped and (reason := evaluation.advance(context)):
            steps.stop(context, reason)
        if self.state.stopped or (self.state.evaluation.ending and not context.repeats_short):
            return
        if context.traits.rounds:
            rounds.advance(context)
        else:
            self._give_work(context)
        work.fetch_prompts(context)
        if context.repack_due and (context.repacks or context.relieves):
            moves.consider(context)

    def _give_work(self, context: Context) -> None:
        if context.more_work:
            if context.ledger.waiting:
                work.assign_waiting(context)
            if context.ledger.handed_in:
                checks.touch_checkers(context)
            for id in context.fleet.hungry:
                context.touch(context.fleet.replicas[id])
        for replica in context.fleet.fastest_first(context.touched.values()):
            work.settle(context, replica)

    def heartbeats(self, age_s: Callable[[Role, int], float]) -> Heartbeats:
        """What a driver has to tell just before each timer `health`, from how long ago it last heard whom."""
        return watch.find_late(self.config, self.state, age_s)

    def learned(self) -> dict[str, float]:
        """What control has found out about this run, as metrics."""
        ledger, lengths = self.state.ledger, self.state.ledger.lengths
        return {
            "lengths/error": lengths.error,
            "lengths/error_of_mean": lengths.error_of_mean,
            "lengths/correlation": lengths.correlation,
            "control/mixed_share": ledger.mixed / max(1, ledger.next_sample),
            "control/groups_limit": self.state.pacing.limit,
            "filters/easy_base": self.state.history.easy_base,
            "filters/hard_base": self.state.history.hard_base,
            "filters/useful_share": self.state.history.useful_share,
        }

    def snapshot(self) -> bytes:
        return msgspec.msgpack.encode(self.state)

    @classmethod
    def restore(cls, config: Config, snapshot: bytes) -> ControlPlane:
        return cls(config, msgspec.msgpack.decode(snapshot, type=State))

    def check(self) -> None:
        """Raise AssertionError if any conservation law or invariant is broken."""
        check_all(self.config, self.state)
