"""No order, duplication or loss of messages, and no nonsense, breaks an invariant of the control plane.

`Fleet` is a little honest world: it answers every command as the components would. Hypothesis decides which answer
arrives when, twice or never, who dies meanwhile, and which messages nobody should ever have sent.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from audit import Audit
from tailrace.config.tree import (
    SCHEDULES,
    Config,
    Difficulty,
    EvalSettings,
    Faults,
    Filters,
    Groups,
    Health,
    Lengths,
    Model,
    RelaySettings,
    Run,
    Schedule,
    Trainer,
    Workload,
)
from tailrace.control.plane import ControlPlane
from tailrace.control.speed import FEWEST
from tailrace.protocol import (
    Assignment,
    Checkpointed,
    Command,
    ControllerRestarted,
    EngineWork,
    EvalSetsOpened,
    Evaluate,
    Event,
    FetchPrompts,
    Finished,
    Generate,
    GenerationResumed,
    Heartbeats,
    HostJoined,
    HostLeft,
    JudgedTurn,
    Late,
    LinkFailed,
    LoadWeights,
    Parked,
    PriceChanged,
    Progressed,
    PromptsAdded,
    Publish,
    PublishFailed,
    PullFailed,
    RelayJoined,
    RelayLost,
    Release,
    ReplicaJoined,
    ReplicaLost,
    Route,
    RunStarted,
    SampleFailed,
    ScoringStarted,
    Start,
    Stop,
    StoreJoined,
    StoreLost,
    TimerFired,
    Train,
    Trained,
    TrainerJoined,
    TrainerLost,
    TrainFailed,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
)
from tailrace.scoring import EvalSet
from tailrace.sim.simulation import Simulation
from tailrace.types import Prompt

REPLICAS, RELAYS = 3, 2
ROWS = 5  # of the data: one too hard, one too easy, three useful
GUEST = RELAYS  # the number of a machine that joins with one replica, a relay and a sample store


def small(seed: int) -> Config:
    """Every second one leaves out what teaches nothing, in one way or the other."""
    config, draw = unfiltered(seed), random.Random(f"filters {seed}")
    chosen = draw.choice(["none", "none", "zero_advantage", "all"])
    workload = msgspec.structs.replace(config.workload, group_size=4 if chosen == "all" else 2)
    groups = msgspec.structs.replace(config.groups, filter=chosen)
    filters = Filters(target=draw.choice([0.0, 1.0]), rate=0.1, first_samples=draw.choice([0, 1, 3]), add_samples=1)
    return msgspec.structs.replace(config, workload=workload, groups=groups, filters=filters)


def evaluated(seed: int) -> Config:
    """The last of few steps is evaluated too."""
    config = small(seed)
    evaluation = EvalSettings(every=1 + seed % 2, samples=1 + seed // 2 % 2, keep_best=seed % 3)
    run = msgspec.structs.replace(config.run, steps=2 + seed % 4)
    return msgspec.structs.replace(config, eval=evaluation, run=run)


def unfiltered(seed: int) -> Config:
    draw = random.Random(seed)
    return Config(
        workload=Workload(prompts_per_step=2, group_size=2, prompt_tokens=10),
        schedule=Schedule(
            kind=draw.choice(SCHEDULES),
            max_staleness=draw.choice([1, 2]),
            staleness_policy=draw.choice(["drop", "wait"]),
            order=draw.choice(["fifo", "freshest"]),
            steps_ahead=draw.choice([None, 1]),
            mixed_share=draw.choice([0.0, 0.3, 1.0]),
        ),
        relay=RelaySettings(topology=draw.choice(["chain", "tree"])),
        groups=Groups(deadline_s=draw.choice([20.0, 1e9]), min_survivors=1, max_failures=2),
        health=Health(max_restarts=50, backoff_s=0.5, backoff_max_s=2.0, pull_deadline_s=10.0),
        trainer=Trainer(mini_batches=draw.choice([1, 2]), checkpoint_every=2),
        run=Run(steps=50, seed=seed),
    )


class Fleet:
    """Components that do what they are told, and the answers that are on their way."""

    guest = HostJoined(GUEST, (REPLICAS,), store=True)

    def __init__(self, config: Config) -> None:
        self.plane = ControlPlane(config)
        self.audit = Audit(config)
        self.now = 0.0
        self.answers: list[Event] = []
        self.incarnations: dict[tuple[str, int], int] = {}
        self.versions = dict.fromkeys(range(REPLICAS + 1), -1)
        self.stored: dict[int, dict[int, None]] = {id: {} for id in range(RELAYS + 1)}
        self.routes: dict[int, tuple[int, ...]] = {}  # standing orders of the relays
        self.held: dict[int, dict[int, TrajectoryMeta]] = {id: {} for id in range(REPLICAS + 1)}
        self.departed = False  # the machine that joined
        self.scored: set[tuple[int, int]] = set()  # complete, and with a judge: trajectory and attempt
        self.oldest: dict[int, int] = {}
        self.position = (0, 0)
        self.saved = 0
        self.over = False
        self.price = config.run.seed % 3  # of some replicas; in every third world all are free
        # decode steps of each replica, and the seconds that they took
        self.work: dict[int, tuple[int, float]] = dict.fromkeys(range(REPLICAS + 1), (0, 0.0))
        self.hear(RunStarted(REPLICAS, RELAYS, 1))
        self.hear(self.guest)
        if config.eval.every:
            self.hear(EvalSetsOpened((EvalSet("easy", 2), EvalSet("hard", 3))))

    def hear(self, event: Event) -> None:
        commands = self.plane.handle(self.now, event)
        self.audit.listen(self.now, event, commands)
        self.plane.check()
        for command in commands:
            self.obey(command)

    def obey(self, command: Command) -> None:
        answers = self.answers
        match command:
            case FetchPrompts(start=start, count=count):
                answers.append(
                    PromptsAdded(start, tuple(Prompt(id, 10, id % ROWS) for id in range(start, start + count)))
                )
            case Generate() | Evaluate():
                self.generate(command)
            case Release(replica=id, incarnation=incarnation, samples=samples):
                if self.is_current("replica", id, incarnation):
                    asked = {one.trajectory for one in samples} or self.held[id].keys()
                    kept = {t for t, meta in self.held[id].items() if (t, meta.attempt) in self.scored}
                    leaving = {t: meta for t, meta in self.held[id].items() if t in asked and t not in kept}
                    answers.append(Parked(id, incarnation, tuple(leaving.values())))
                    self.held[id] = {t: meta for t, meta in self.held[id].items() if t not in leaving}
            case LoadWeights(replica=id, incarnation=incarnation, version=version):
                if self.is_current("replica", id, incarnation):
                    self.versions[id] = version
                    answers.append(WeightsLoaded(id, incarnation, version))
            case Publish(version=version, relay=relay):
                self.store(relay, version)
            case Route(relay=relay, targets=targets):
                self.routes[relay] = targets
                for version in list(self.stored[relay]):
                    self.forward(relay, version)
            case Train():
                self.train(command)
            case Start(role=role, id=id):
                self.start(role, id)
            case Stop():
                self.over = True

    def is_current(self, role: str, id: int, incarnation: int) -> bool:
        return self.incarnations.get((role, id)) == incarnation

    def generate(self, command: Generate | Evaluate) -> None:
        id = command.replica
        if not self.is_current("replica", id, command.incarnation):
            return
        for request in command.requests:
            version = self.versions[id]
            oldest = self.oldest.get(request.trajectory, version) if request.resume else version
            self.oldest[request.trajectory] = oldest
            reward = float(request.prompt % ROWS if request.prompt % ROWS < 2 else request.trajectory % 2)
            meta = TrajectoryMeta(request.trajectory, request.attempt, 50, oldest, version, reward=reward)
            self.held[id][request.trajectory] = meta
            self.judge(command, meta)
            if request.trajectory % 11 == 5 and request.attempt % 2:
                self.answers.append(SampleFailed(id, request.trajectory, request.attempt, "the tool hung"))
            else:
                self.answers.append(Finished(id, meta))
        self.progress(command, len(self.held[id]))

    def progress(self, command: Generate | Evaluate, running: int) -> None:
        """Every second replica is four times as slow as the others."""
        for _ in range(FEWEST):
            steps, seconds = self.work[command.replica]
            steps, seconds = self.work[command.replica] = steps + 10, seconds + (0.4 if command.replica % 2 else 0.1)
            work = EngineWork(seconds, steps, steps * 2, steps * 100, steps)
            self.hear(Progressed(command.replica, command.incarnation, 60 * running, running, 0, work))

    def judge(self, command: Generate | Evaluate, meta: TrajectoryMeta) -> None:
        """Some samples are with judges for long, once or after several turns. The reports may come in any order."""
        who, turns = (command.replica, command.incarnation), (meta.id + meta.attempt) % 4
        for turn in range(turns):
            final = turn + 1 == turns and meta.id % 2 == 0
            self.answers.append(ScoringStarted(*who, (JudgedTurn(meta.id, meta.attempt, turn, final),)))
            if final:
                self.scored.add((meta.id, meta.attempt))
            else:
                self.answers.append(GenerationResumed(*who, (JudgedTurn(meta.id, meta.attempt, turn + 1),)))

    def store(self, relay: int, version: int) -> None:
        """It says so even if it had it before: what it said then may be lost."""
        if relay in self.stored:
            known = version in self.stored[relay]
            self.stored[relay][version] = None
            self.answers.append(VersionStored(relay, self.incarnations[("relay", relay)], version))
            if not known:
                self.forward(relay, version)

    def forward(self, relay: int, version: int) -> None:
        for target in self.routes.get(relay, ()):
            self.store(target, version)

    def train(self, command: Train) -> None:
        if not self.is_current("trainer", 0, command.incarnation):
            return
        if self.departed and any(GUEST in group.stores for group in command.groups):
            self.answers.append(TrainFailed(command.incarnation, command.step, command.mini_batch, "no such store"))
            return
        if (command.step, command.mini_batch) == self.position:
            self.position = (command.step + 1, 0) if command.last else (command.step, command.mini_batch + 1)
            if command.last and command.step % 2:
                self.saved = command.step + 1
                self.answers.append(Checkpointed(command.incarnation, self.saved))
        self.answers.append(Trained(command.incarnation, command.step, command.mini_batch))

    def start(self, role: str, id: int) -> None:
        """It has lost its memory; what it sent before may still arrive."""
        if role == "replica":
            self.versions[id], self.held[id] = -1, {}
        elif role == "relay":
            self.stored[id], self.routes[id] = {}, ()
        elif role == "trainer":
            self.position = (self.saved, 0)
        self.introduce(role, id)

    def introduce(self, role: str, id: int) -> None:
        if self.departed and (role, id) in (("replica", REPLICAS), ("relay", GUEST), ("store", GUEST)):
            return
        self.incarnations[role, id] = incarnation = self.incarnations.get((role, id), 0) + 1
        if role == "replica":
            held = tuple(Assignment(meta.id, meta.attempt) for meta in self.held[id].values())
            self.answers.append(
                ReplicaJoined(
                    id,
                    incarnation,
                    GUEST if id == REPLICAS else id % RELAYS,
                    self.versions[id],
                    1000 * (1 + id % 2),
                    8,
                    held,
                    id * self.price,
                )
            )
        elif role == "relay":
            self.answers.append(RelayJoined(id, incarnation, tuple(self.stored[id])))
        elif role == "store":
            self.answers.append(StoreJoined(id, incarnation))
        else:
            self.answers.append(TrainerJoined(incarnation, *self.position))

    # ------------------------------------------------------------------------------------------ what hypothesis chooses

    def act(self, choice: int, number: int) -> None:
        if choice < 10 and self.answers:
            place = number % len(self.answers) if choice < 6 else 0
            event = self.answers[place] if choice == 0 else self.answers.pop(place)
            if choice != 1:  # else it is lost
                self.hear(event)
        elif choice == 10:
            self.now += number % 5
            if number % 3:
                self.hear(Heartbeats())
            self.hear(TimerFired("health" if number % 2 else "repack"))
        elif choice == 11:
            self.hear(self.death(number))
        elif choice == 12:
            components = list(self.incarnations)
            self.introduce(*components[number % len(components)])
        elif choice == 13:
            self.plane = ControlPlane.restore(self.plane.config, self.plane.snapshot())
            self.hear(ControllerRestarted())
            for component in list(self.incarnations):
                self.introduce(*component)
        else:
            self.hear(nonsense(random.Random(number)))

    def death(self, number: int) -> Event:
        kind, id = number % 8, number // 8
        if kind == 7:
            self.departed = True
            return HostLeft(GUEST, "it was switched off")
        if kind == 6:
            store = id % 2 * GUEST
            return StoreLost(store, self.incarnations.get(("store", store), 0), "it died")
        kind %= 3
        if kind == 0:
            return ReplicaLost(id % REPLICAS, self.incarnations.get(("replica", id % REPLICAS), 0), "it died")
        if kind == 1:
            return RelayLost(id % RELAYS, self.incarnations.get(("relay", id % RELAYS), 0), "it died")
        return TrainerLost(self.incarnations.get(("trainer", 0), 0), "it died")


def nonsense(draw: random.Random) -> Event:
    """A well-formed message with any small numbers: some of them hit, most of them should be ignored."""

    def n(most: int = 4) -> int:
        return draw.randint(-1, most)

    def meta() -> TrajectoryMeta:
        oldest = max(0, n(3))
        return TrajectoryMeta(n(40), n(3), draw.randint(0, 500), oldest, oldest + draw.randint(0, 2))

    def turns() -> tuple[JudgedTurn, ...]:
        return tuple(JudgedTurn(n(40), n(3), n(3), draw.random() < 0.5) for _ in range(n(3)))

    def late() -> Late:
        return Late(draw.choice(["replica", "relay", "trainer"]), n(), n(), draw.uniform(0.0, 9.0))

    def work() -> EngineWork:
        return EngineWork(draw.uniform(0.0, 9.0), *[draw.randint(0, 10 ** draw.randint(0, 6)) for _ in range(4)])

    makers = [
        lambda: ScoringStarted(n(), n(), turns()),
        lambda: GenerationResumed(n(), n(), turns()),
        lambda: PriceChanged(tuple(n() for _ in range(n(3))), float(max(0, n()))),
        lambda: PromptsAdded(n(8), ()),
        lambda: ReplicaLost(n(), n(), "?"),
        lambda: Progressed(n(), n(), draw.randint(0, 2000), n(9), n(9), work()),
        lambda: Finished(n(), meta()),
        lambda: SampleFailed(n(), n(40), n(3), "?"),
        lambda: Parked(n(), n(), tuple(meta() for _ in range(n(3)))),
        lambda: WeightsLoaded(n(), n(), n()),
        lambda: PullFailed(n(), n(), n(), "?", n() % 2 == 0),
        lambda: RelayLost(n(), n(), "?"),
        lambda: LinkFailed(n(), n(), n(), "?"),
        lambda: PublishFailed(n(), n(9), n(), "?"),
        lambda: VersionStored(n(), n(), n(90)),
        lambda: TrainerLost(n(), "?"),
        lambda: Trained(n(), n(), n(2)),
        lambda: TrainFailed(n(), n(), n(2), "?"),
        lambda: StoreLost(max(0, n(2)), n(), "?"),
        lambda: StoreJoined(0, n(2)),
        lambda: Checkpointed(n(), n(9)),
        lambda: Heartbeats(tuple(late() for _ in range(n(3)))),
        lambda: TimerFired(draw.choice(["health", "repack", "lunch"])),
        lambda: RelayJoined(max(0, n(1)), n(2), tuple(n(9) for _ in range(n(4)))),
        lambda: ReplicaJoined(
            max(0, n(2)), n(2), max(0, n(1)), n(0), 1000, 8, tuple(Assignment(n(40), n(2)) for _ in range(n()))
        ),
    ]
    return draw.choice(makers)()


ACTIONS = st.lists(st.tuples(st.integers(0, 15), st.integers(0, 10**6)), min_size=40, max_size=250)
World = TypeVar("World", bound=Fleet)
QUICK = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
LONG = settings(QUICK, max_examples=5000)


def keep_promises(seed: int, actions: list[tuple[int, int]], made: Callable[[int], Config] = small) -> Fleet:
    return play(Fleet(made(seed)), actions)


def play(fleet: World, actions: list[tuple[int, int]]) -> World:
    for choice, number in actions:
        if fleet.over:
            break
        fleet.act(choice, number)
    fleet.audit.finish(fleet.plane)
    return fleet


A_HOST_LEAVES_WHILE_ITS_SAMPLES_ARE_JUDGED = [
    *[(2, 0), (0, 0), (1, 0), (1, 2), (2, 0), (2, 0), (1, 0), (2, 0), *[(0, 0)] * 7, (0, 698526), *[(1, 0)] * 7],
    *[(10, 100483), (10, 1), (2, 0), (2, 0), (2, 0), (2, 2), (1, 0), (1, 0), (2, 0), (2, 0), (2, 0), *[(0, 0)] * 4],
    *[(0, 7), (11, 7)],
]


@given(st.integers(0, 200), ACTIONS)
@example(3, A_HOST_LEAVES_WHILE_ITS_SAMPLES_ARE_JUDGED)
@QUICK
def test_no_order_duplication_or_loss_of_messages_breaks_an_invariant(seed, actions):
    keep_promises(seed, actions)


@given(st.integers(0, 200), ACTIONS)
@settings(QUICK, max_examples=60)
def test_nor_where_replicas_evaluate_as_well(seed, actions):
    keep_promises(seed, actions, evaluated)


@pytest.mark.soak
@given(st.integers(0, 10**6), ACTIONS)
@LONG
def test_no_order_duplication_or_loss_of_messages_breaks_an_invariant_at_length(seed, actions):
    keep_promises(seed, actions, evaluated if seed % 2 else small)


def test_the_little_world_really_trains():
    """Else the tests above would say little."""
    fleets = [keep_promises(seed, troubled(seed)) for seed in range(24)]
    states = [fleet.plane.state for fleet in fleets]
    assert sum(state.training.version > 2 for state in states) > 8
    ledgers = [state.ledger for state in states]
    assert sum(len(state.fleet.kinds) > 1 for state in states) > 8
    assert sum(fleet.audit.sent_home for fleet in fleets) > 8
    counts = [(one.skipped, one.tally.stopped, one.tally.filtered) for one in ledgers]
    assert all(sum(each) > 5 for each in zip(*counts, strict=True))


def test_the_little_world_really_evaluates():
    fleets = [less_troubled(Fleet(evaluated(seed)), random.Random(seed)) for seed in range(24)]
    ended = [fleet for fleet in fleets if fleet.over]
    assert len(ended) > 12
    for fleet in ended:
        assert fleet.audit.recorded[-1].version == fleet.plane.config.run.steps, "the last version is evaluated too"
    assert sum(len(fleet.audit.recorded) for fleet in ended) > 2 * len(ended)


def less_troubled(fleet: Fleet, draw: random.Random) -> Fleet:
    """Everybody is heard of in time, and few die."""
    for _ in range(3000):
        choice = draw.choice([*range(2, 10)] * 8 + [10, 10, 10, 11, 12])
        if choice == 10:
            fleet.hear(Heartbeats())
        if not fleet.over:
            fleet.act(choice, draw.randrange(10**6))
    fleet.audit.finish(fleet.plane)
    return fleet


class Forgetful(Fleet):
    """No checkpoint is ever written, and the machine that joined stays until everything breaks down at once."""

    def train(self, command: Train) -> None:
        super().train(command)
        self.saved = 0
        self.answers = [one for one in self.answers if not isinstance(one, Checkpointed)]

    def death(self, number: int) -> Event:
        return super().death(number - (number % 8 == 7))

    def break_down(self, draw: random.Random) -> None:
        """With the machine that joined its store is lost; of all others but one, at most, the memory."""
        self.departed = True
        self.hear(HostLeft(GUEST, "it was switched off"))
        lost = [("trainer", 0), *[("relay", id) for id in range(RELAYS)], *[("replica", id) for id in range(REPLICAS)]]
        for role, id in draw.sample(lost, draw.randint(len(lost) - 1, len(lost))):
            self.hear(self.loss(role, id))
            self.now += 3.0
            if not self.over:
                self.start(role, id)
        for component in list(self.incarnations):
            self.introduce(*component)

    def loss(self, role: str, id: int) -> Event:
        incarnation = self.incarnations.get((role, id), 0)
        if role == "trainer":
            return TrainerLost(incarnation, "it died")
        return (RelayLost if role == "relay" else ReplicaLost)(id, incarnation, "it died")

    def goes_on(self) -> bool:
        """Whether another step is trained, if nobody is hurt any more and everything arrives."""
        before, training = self.audit.trained_until, self.plane.state.training
        for _ in range(200):
            while self.answers and not self.over:
                self.hear(self.answers.pop(0))
            if self.over or (self.audit.trained_until > before and training.step == training.version):
                return True
            self.now += 3.0
            self.hear(Heartbeats())
            self.hear(TimerFired("health"))
        return False


@given(st.integers(0, 10**6))
@settings(QUICK, max_examples=40)
def test_whatever_has_happened_the_run_goes_on_once_nobody_is_hurt_any_more(seed):
    fleet, draw = Forgetful((evaluated if seed % 2 else small)(seed)), random.Random(seed)
    for _ in range(draw.choice([100, 300])):
        if not fleet.over:
            fleet.act(draw.choice([*range(2, 10), *range(2, 13)]), draw.randrange(10**6))
    if not fleet.over:
        fleet.break_down(draw)
    assert fleet.over or fleet.goes_on()
    fleet.audit.finish(fleet.plane)


def troubled(seed: int) -> list[tuple[int, int]]:
    draw = random.Random(seed)
    choices = [0, 2, 3, 4, 7, 8, 9, 10, 10, 11, 12, 15]
    return [(draw.choice(choices), draw.randrange(10**6)) for _ in range(1500)]


# --------------------------------------------------------------------------------------------------------------- purity

REPLAY = """
import sys, msgspec
from tailrace.config.tree import Config
from tailrace.control.plane import ControlPlane
from tailrace.protocol import AnyEvent
lines = sys.stdin.buffer.read().splitlines()
plane = ControlPlane(msgspec.json.decode(lines[0], type=Config))
decoder = msgspec.json.Decoder(tuple[float, AnyEvent])
for line in lines[1:]:
    sys.stdout.buffer.write(msgspec.json.encode(plane.handle(*decoder.decode(line))) + b"\\n")
sys.stdout.buffer.write(plane.snapshot())
"""


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_same_events_give_the_same_commands_whatever_the_hash_seed(kind):
    config = Config(
        model=Model(parameters=494e6, layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64),
        workload=Workload(
            prompts_per_step=16, group_size=4, lengths=Lengths(median=500, sigma=1.0), difficulty=Difficulty(rows=48)
        ),
        schedule=Schedule(kind=kind, steps_ahead=1 if kind == "stream" else None),
        groups=Groups(filter="all"),
        faults=Faults(
            replica_per_hour=300, relay_per_hour=100, trainer_per_hour=50, controller_per_hour=50, restart_s=1
        ),
        run=Run(steps=3, seed=5),
    )
    events, commands = [msgspec.json.encode(config)], []

    def listen(now: float, event: Event, answer: list[Command]) -> None:
        events.append(msgspec.json.encode((now, event)))
        commands.append(msgspec.json.encode(answer))

    simulation = Simulation(config, listen)
    simulation.run()
    expected = b"\n".join([*commands, simulation.plane.snapshot()])
    assert len(commands) > 200
    assert simulation.plane.state.ledger.skipped
    for hash_seed in ("1", "2"):
        assert replay(b"\n".join(events), hash_seed) == expected


def replay(journal: bytes, hash_seed: str) -> bytes:
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", REPLAY], input=journal, env=environment, capture_output=True, check=True, timeout=60
    )
    return done.stdout
