"""The process of one replica: takes work from the controller, plays it on its engine, streams what comes of it.

Consumes `Generate`, `Evaluate`, `Release`, `Cancel` and `LoadWeights`; produces `ScoringStarted`, `GenerationResumed`,
`Finished`, `SampleFailed`, `Parked`, `WeightsLoaded` or `PullFailed`. Prompts and prefixes come from the sample store,
and tokens go there; what they say is reported to the controller only once it is durable. Waits only when there is
nothing to generate or to judge, or when the store is behind.
Weights for a GPU come there while generation goes on. So does generation while a controller is away: the next one is
told what is in hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tailrace.engines.base import EngineStats
from tailrace.protocol import (
    SCORING_S,
    Assignment,
    Cancel,
    CheckFailed,
    EngineWork,
    Evaluate,
    Finished,
    Generate,
    GenerationResumed,
    HandedIn,
    JudgedTurn,
    LoadWeights,
    Parked,
    Progressed,
    PullFailed,
    Release,
    ReplicaJoined,
    Request,
    SampleFailed,
    ScoringStarted,
    WeightsLoaded,
)
from tailrace.rollout.build import build_runner, build_stranger
from tailrace.rollout.checking import complaint_about
from tailrace.rollout.episode import Episode
from tailrace.rollout.runner import Key, Outcome
from tailrace.samples.client import Receipts, SampleClient
from tailrace.samples.messages import AssignmentLost, Fetched
from tailrace.samples.uploads import Growth
from tailrace.types import EVALUATION, Version, label
from tailrace.weights.fetch import RelayReaders
from tailrace.weights.pull import Puller
from tailrace.weights.region import MappedVersion, SharedMemoryError
from tailrace.wire.client import ControlClient
from tailrace.wire.messages import ComponentSpec, Ended, Introduce, Ordered, Receipt

IDLE_S = 0.05  # how long to wait for orders when there is nothing to generate
JUDGING_S = 0.001  # the same while only judges are at work, or weights are on their way


def run(spec: ComponentSpec) -> None:
    RolloutWorker(spec).run()


class RolloutWorker:
    def __init__(self, spec: ComponentSpec) -> None:
        self.spec = spec
        self.config = spec.config
        build = build_stranger if spec.worker else build_runner
        self.runner = build(spec.config, spec.memory, replica=spec.id)
        self.stats = EngineStats(0, 0, 0)
        self.samples = SampleClient(spec.name)
        self.controller = ControlClient(spec, self._report_stats, self.samples.find)
        self._fetching: dict[Key, Request] = {}  # whose prompt and prefix are on their way
        self._unstored: set[Key] = set()  # complete, but not durable yet
        self.totals: dict[str, float] = {}
        self._measured: dict[str, float] = {}  # the totals that were sent last
        self._cpu_s = self._cpu_seen = 0.0  # processor time while the engine worked, and in all at the last heartbeat
        staging = getattr(self.runner.engine, "staging", None)
        self._puller = Puller(staging) if staging is not None else None
        name = label("replica", self.spec.id)
        token, in_parallel = self.spec.token.encode(), self._puller is not None
        self._relays = RelayReaders(token, name, lambda: self.controller.ended, in_parallel)
        self._report_at = 0.0
        self.loads = 0
        self.load_s = 0.0
        self._actions: dict[type, Callable[[Any], None]] = {
            Generate: self._generate,
            Evaluate: self._generate,
            Release: self._release,
            Cancel: self._cancel,
            LoadWeights: self._load_weights,
        }

    def run(self) -> None:
        self.samples.open()
        self.controller.open()
        self._join()
        try:
            while self._obey(self._patience()):
                self._begin_fetched()
                self._advance()
        finally:
            self.samples.close()
            if self._puller is not None:
                self._puller.close()
            self._relays.close()
            self.runner.close()
            self.controller.close()

    def _join(self) -> None:
        """Say what is here, at the beginning and whenever there is a new controller."""
        engine = self.runner.engine
        keys = [*self._fetching, *[episode.key for episode in self.runner.episodes.values()], *list(self._unstored)]
        held = tuple([Assignment(*key) for key in keys])
        price = 0.0 if self.spec.worker else self.config.rollout.price(self.spec.id)
        room = (engine.kv_capacity, engine.roofline, held, price)
        self.controller.report(
            ReplicaJoined(self.spec.id, self.controller.incarnation, self.spec.host, engine.version, *room)
        )

    def _patience(self) -> float:
        """How long orders are worth waiting for."""
        if self.runner.busy and not self.samples.waiting_for:
            return 0.0
        soon = self.runner.episodes or self._fetching or (self._puller is not None and self._puller.busy)
        return JUDGING_S if soon else IDLE_S

    def _obey(self, timeout_s: float) -> bool:
        for message in self.controller.receive(timeout_s):
            if isinstance(message, Ended):
                return False
            if isinstance(message, Introduce):
                self._join()
            elif isinstance(message, Ordered):
                self._order = message
                self._actions[type(message.command)](message.command)
        return True

    def _begin_fetched(self) -> None:
        for found in self.samples.poll():
            key = found.trajectory, found.attempt
            request = self._fetching.pop(key, None)
            if isinstance(found, AssignmentLost):
                self._refused(key, found.reason)
            elif request is not None and not self._fails_its_check(request, found):
                prefix = found.prefix if request.resume else ()
                self.runner.add(Episode(request, found.row, prefix, self.runner.engine.version, self._temperature(key)))

    def _temperature(self, key: Key) -> float | None:
        return self.config.eval.temperature if key[0] >= EVALUATION else None

    def _fails_its_check(self, request: Request, found: Fetched) -> bool:
        """A stranger has generated it; then it is looked at before it is judged here."""
        if not request.check:
            return False
        engine: Any = self.runner.engine  # control gives checks to engines that can
        wrong = complaint_about(engine, engine.version, request, found, self.runner.max_completion_tokens)
        if wrong:
            key = (request.trajectory, request.attempt)
            self.samples.withdraw(*key)
            self.controller.report(CheckFailed(self.spec.id, *key, wrong))
        return bool(wrong)

    def _refused(self, key: Key, reason: str) -> None:
        """Somebody else has it by now, and control ignores this; or else it has to be generated again."""
        self._withdraw([key])
        if not self.spec.worker:  # a stranger cannot make a sample fail: that would give it other random numbers
            self.controller.report(SampleFailed(self.spec.id, *key, f"its sample store refused it: {reason}"))

    def _advance(self) -> None:
        if self._puller is not None:
            self._switch_when_pulled(self._puller)
        self.controller.waiting_for = self.samples.waiting_for
        if not self.runner.episodes or self.controller.waiting_for:
            return
        for outcome in self.runner.step():
            self._end(outcome)
        self._report_scoring()
        self._stream(self.config.rollout.stream_tokens)
        self._take_stock()

    # ------------------------------------------------------------------------------------------------------- orders

    def _generate(self, command: Generate | Evaluate) -> None:
        for request in command.requests:
            self._fetching[request.trajectory, request.attempt] = request
            self.samples.fetch(request.trajectory, request.attempt, request.store)

    def _release(self, command: Release) -> None:
        """Hand these, or everything, back; what its store has by then is where somebody else goes on. What is complete
        and being scored stays: its judge would have to begin anew elsewhere. So does what has not begun."""
        self._stream(1)
        asked = {one.trajectory for one in command.samples}
        ids = [id for id in self.runner.unfinished() if not asked or id in asked]
        leaving = {episode.key: episode for episode in self.runner.withdraw(ids)}
        self._take_stock()

        def park(receipts: Receipts) -> None:
            metas = tuple([episode.meta() for key, episode in leaving.items() if key in receipts])
            self.controller.report(Parked(self.spec.id, self.controller.incarnation, metas), tuple(receipts.values()))

        ends = [(key, episode.completion_tokens, episode.request.store) for key, episode in leaving.items()]
        self.samples.complete_all(ends, park)

    def _cancel(self, command: Cancel) -> None:
        self._withdraw([(one.trajectory, one.attempt) for one in command.samples])

    def _withdraw(self, keys: list[Key]) -> None:
        current = {episode.key for episode in self.runner.episodes.values()}
        self.runner.withdraw(key[0] for key in keys if key in current)
        for key in keys:
            self._fetching.pop(key, None)
            self._unstored.discard(key)
            self.samples.withdraw(*key)

    def _load_weights(self, command: LoadWeights) -> None:
        reader = self._relays.reader(self._order.arena, self._order.addresses.get(command.relay, ""))
        if self._puller is not None:
            self._puller.begin(command.version, reader)
            return
        began = time.monotonic()
        try:
            mapped = reader.open(command.version)
            self._switch(command.version, self._as_its_engine_wants(mapped), began)
        except (SharedMemoryError, ValueError) as error:
            self._pull_failed(command.version, error)

    def _as_its_engine_wants(self, mapped: MappedVersion) -> Any:
        """vLLM's processes map the file themselves."""
        forms = {"emulated": mapped.arrays, "native": mapped.tensors, "vllm": lambda: mapped}
        return forms[self.config.rollout.engine]()

    def _switch_when_pulled(self, puller: Puller) -> None:
        try:
            pulled = puller.poll()
            if pulled is not None:
                self._switch(pulled.version, pulled.weights, time.monotonic())
        except (SharedMemoryError, ValueError) as error:
            self._pull_failed(puller.version, error)

    def _switch(self, version: Version, weights: Any, began: float) -> None:
        """`began`: when generation stopped for it."""
        keep = self.config.schedule.in_flight_kv == "keep"
        self.runner.engine.load_weights(version, weights, keep_kv=keep)
        self.loads += 1
        self.load_s += time.monotonic() - began
        self.controller.report(WeightsLoaded(self.spec.id, self.controller.incarnation, version))

    def _pull_failed(self, version: Version, error: ValueError) -> None:
        damaged = isinstance(error, SharedMemoryError)
        self.controller.report(PullFailed(self.spec.id, self.controller.incarnation, version, str(error), damaged))

    # ------------------------------------------------------------------------------------------------------ reports

    def _end(self, outcome: Outcome) -> None:
        """Reported once its store has all of it, also of one that failed: people have to read what failed."""
        episode, failed = outcome.episode, outcome.reward is None
        key, ending = episode.key, self._ending(outcome)

        def report(receipt: Receipt | None) -> None:
            if receipt is not None:
                self.controller.report(ending, (receipt,))
            self._unstored.discard(key)

        self._unstored.add(key)
        self._store([episode])
        self.samples.complete(*key, episode.completion_tokens, report, episode.request.store, failed)

    def _ending(self, outcome: Outcome) -> Finished | HandedIn | SampleFailed:
        """A stranger's sample is not finished by that: others check and judge it."""
        meta = outcome.episode.meta(None if self.spec.worker else outcome.reward)
        if outcome.reward is None:
            return SampleFailed(self.spec.id, meta.id, meta.attempt, outcome.reason, meta)
        if self.spec.worker:
            return HandedIn(self.spec.id, (meta,))
        return Finished(self.spec.id, meta, outcome.parts or {})

    def _report_scoring(self) -> None:
        """Whose turn a judge has had for a while, and who goes on after that; a few times a second at most, so that
        many short calls of tools are few reports."""
        if time.monotonic() < self._report_at:
            return
        resumed, started = self.runner.take_resumed(), self.runner.take_started(SCORING_S)
        if resumed or started:
            self._report_at = time.monotonic() + SCORING_S
        if resumed:
            self.controller.report(GenerationResumed(self.spec.id, self.controller.incarnation, resumed))
        if started:
            self._report_started(started)

    def _report_started(self, started: tuple[JudgedTurn, ...]) -> None:
        """With all that there is of them: should this replica be lost, they need only another judge."""

        def report(durable: frozenset[Key]) -> None:
            stored = tuple([one for one in started if (one.trajectory, one.attempt) in durable])
            self.controller.report(ScoringStarted(self.spec.id, self.controller.incarnation, stored))

        self._store([self.runner.episodes[one.trajectory] for one in started])
        self.samples.then_all([(one.trajectory, one.attempt) for one in started], report)

    def _stream(self, at_least: int) -> None:
        """Bring to their stores what has grown by so many tokens."""
        self._store([one for one in self.runner.episodes.values() if one.unstored_tokens >= at_least])

    def _store(self, episodes: list[Episode]) -> None:
        growths: list[Growth] = []
        for episode in episodes:
            if episode.unstored_tokens:
                start = episode.completion_tokens - episode.unstored_tokens
                growths.append(Growth(episode.key, start, episode.take_growth(), episode.request.store))
        self.samples.append_all(growths)

    def _take_stock(self) -> None:
        """For the client of the controller, which asks in another thread and must not look into a working engine."""
        self.stats = self.runner.engine.stats()
        self.totals = self.runner.engine.counters()

    def _report_stats(self) -> Progressed:
        """Once per heartbeat, in that client's thread."""
        self._measure(self.totals)
        stats = self.stats
        load = (stats.kv_tokens, stats.running, stats.waiting)
        return Progressed(self.spec.id, self.controller.incarnation, *load, _engine_work(self.totals))

    def _measure(self, totals: dict[str, float]) -> None:
        """What the engine has done so far, unless it has done nothing since."""
        cpu_s = time.process_time()
        spent, self._cpu_seen = cpu_s - self._cpu_seen, cpu_s
        if totals != self._measured and not self.spec.worker:
            self._measured = totals
            self._cpu_s += spent
            own = {"cpu_s": self._cpu_s, "loads": float(self.loads), "load_s": self.load_s}
            self.controller.measure(-1, {f"engine/{name}": value for name, value in (totals | own).items()})


def _engine_work(totals: dict[str, float]) -> EngineWork | None:
    """What control learns the costs of generation from; nothing before the first step."""
    if not totals:
        return None
    counts = [int(totals[name]) for name in ("steps", "decoded", "kv_read", "prefilled")]
    return EngineWork(totals["busy_s"], *counts)
