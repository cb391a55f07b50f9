"""Whoever has proven its name and then says what it must not is dropped with a reason; the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from played import Played
from tailrace import __version__
from tailrace.config import Config, load
from tailrace.protocol import (
    AnyEvent,
    Checkpointed,
    ControllerRestarted,
    EngineWork,
    EvalSetsOpened,
    Finished,
    Heartbeats,
    HostJoined,
    HostLeft,
    Late,
    LinkFailed,
    Parked,
    PriceChanged,
    Progressed,
    PromptsAdded,
    RelayJoined,
    RelayLost,
    ReplicaJoined,
    ReplicaLost,
    RunStarted,
    SampleFailed,
    SamplesLost,
    SettingsChanged,
    StoreJoined,
    StoreLost,
    TimerFired,
    Trained,
    TrainerJoined,
    TrainerLost,
    TrainerWaits,
    TrajectoryMeta,
    VersionStored,
    WeightsLoaded,
    WorkerRefused,
    WorkerRevoked,
)
from tailrace.runtime.validation import MESSAGES
from tailrace.store.journal import Journal
from tailrace.types import Prompt, id_bytes
from tailrace.wire.messages import (
    Accused,
    Beat,
    Collapsed,
    Dismissed,
    FromComponent,
    Hello,
    Measured,
    Offer,
    Receipt,
    Reported,
)

LONGEST = 64  # tokens of a completion
LOST = {"replica": ReplicaLost, "relay": RelayLost, "store": StoreLost, "trainer": TrainerLost}


def config(*more: str) -> Config:
    words = {
        "model.preset": "smollm2-135m",
        "rollout.engine": "emulated",
        "rollout.kv_tokens": "4000",
        "trainer.engine": "emulated",
        "trainer.mini_batches": "2",
        "costs.decode_step": "0.001",
        "workload.prompts_per_step": "2",
        "workload.group_size": "2",
        "workload.max_completion_tokens": str(LONGEST),
        "local.listen": "127.0.0.1",
        "local.relays": "2",
        "groups.max_failures": "50",
        "run.steps": "100000",
    }
    return load([], [*[word for name, value in words.items() for word in (f"--{name}", value)], *more])


def play(folder: Path, scene: Callable[[Played], Awaitable[None]], chosen: Config | None = None) -> None:
    async def whole() -> None:
        played = Played(folder, chosen or config())
        try:
            await played.start()
            await scene(played)
        finally:
            await played.close()

    asyncio.run(whole())


def meta(trajectory: int, attempt: int = 1, tokens: int = 0, **fields: Any) -> TrajectoryMeta:
    return TrajectoryMeta(trajectory, attempt, tokens, **{"oldest": 0, "newest": 0, "reward": 1.0, **fields})


ADDED = Reported(PromptsAdded(8, (Prompt(8, 10),)))
NEITHER = [  # is for any part to say
    Reported(RunStarted(1, 1)),
    Reported(HostJoined(7, (8,))),
    Reported(HostLeft(0, "I say so")),
    ADDED,
    Reported(TimerFired("health")),
    Reported(ControllerRestarted()),
    Reported(Heartbeats()),
    Reported(Heartbeats((Late("trainer", 0, 1, 1e6),))),
    Reported(ReplicaLost(0, 1, "I say so")),
    Reported(RelayLost(0, 1, "I say so")),
    Reported(TrainerLost(1, "I say so")),
    Offer(__version__, 3),
    b"\xc1",
    b"",
    msgspec.msgpack.encode({"kind": "Reported", "event": {"kind": "HostLeft", "host": -9, "reason": ""}}),
]
# t0 and t1 are replica 0's, t2 and t3 replica 1's; version 0 is the newest, and the trainer has nothing to do
LIES: dict[str, list[Any]] = {
    "replica": [
        *NEITHER,
        Reported(Trained(1, 0, 0)),
        Reported(Checkpointed(1, 0)),
        Reported(TrainerJoined(2, 0)),
        Reported(VersionStored(0, 1, 0)),
        Reported(Progressed(1, 1, 0, 0, 0)),
        Reported(Progressed(0, 1, 0, 0, 0, EngineWork(float("inf"), 1, 1, 1, 1))),  # JSON has no word for it
        Reported(Progressed(0, 1, 0, 0, 0, EngineWork(1e170, 1, 1, 1, 1))),
        Reported(ReplicaJoined(1, 2, 1, 0, 4000, 64)),
        Reported(ReplicaJoined(0, 2, 1, 0, 4000, 64)),  # on another host
        Reported(ReplicaJoined(0, 2, 0, 5, 4000, 64)),  # with a version that nobody has made
        Reported(ReplicaJoined(0, 2**40, 0, 0, 4000, 64)),
        Reported(ReplicaJoined(0, 2, 0, 0, 0, 64)),
        Reported(ReplicaJoined(0, 2, 0, 0, 2**60, 64)),
        Reported(WeightsLoaded(1, 1, 0)),
        Reported(WeightsLoaded(0, 1, 2**31)),
        Reported(Finished(1, meta(2))),
        Reported(Finished(0, meta(2))),  # which replica 1 has
        Reported(Finished(0, meta(0, tokens=LONGEST + 1))),
        Reported(Finished(0, meta(0, tokens=2**62))),
        Reported(Finished(0, meta(0, reward=float("nan")))),
        Reported(Finished(0, meta(0, reward=float("inf")))),
        Reported(Finished(0, meta(0, reward=None))),
        Reported(Finished(0, meta(0, oldest=1, newest=0))),
        Reported(Finished(0, meta(0, newest=7))),
        Reported(Finished(0, meta(0, finish="x" * 1000))),
        Reported(SampleFailed(0, 3, 1, "it raised")),
        Reported(SampleFailed(1, 3, 1, "it raised")),
        Reported(Parked(0, 1, (meta(0), meta(2)))),
        Reported(Parked(1, 1, ())),
        Measured(-1, {"engine/steps": float("nan")}),
        Measured(-1, {"x" * 101: 1.0}),
        Measured(-1, {"\n": 1.0}),
        Measured(2**60, {"engine/steps": 1.0}),
        Measured(-1, {str(number): 1.0 for number in range(1000)}),
        Hello("127.0.0.1:1", "/dev/shm/x"),
    ],
    "relay": [
        *NEITHER,
        Reported(VersionStored(1, 1, 0)),
        Reported(VersionStored(0, 1, 2**40)),
        Reported(LinkFailed(1, 1, 0, "I say so")),
        Reported(RelayJoined(1, 2)),
        Reported(RelayJoined(0, 2**40)),
        Reported(Finished(0, meta(0))),
        Reported(Trained(1, 0, 0)),
        Measured(-1, {"x": 1.0}),
        Hello("nowhere", "/dev/shm/x"),
        Hello("127.0.0.1:99999", "/dev/shm/x"),
        Hello("127.0.0.1:1#x", "/dev/shm/x"),
        Hello("127.0.0.1:1", "x"),
        Hello("x" * 500, ""),
    ],
    "store": [
        *[lie for lie in NEITHER if lie != ADDED],
        Reported(PromptsAdded(8, (Prompt(9, 10),))),
        Reported(StoreJoined(1, 2)),
        Reported(StoreJoined(0, 2**40)),
        Reported(SamplesLost(1, 1, (0,))),
        Reported(StoreLost(0, 1, "I say so")),
        Reported(Finished(0, meta(0))),
        Reported(Trained(1, 0, 0)),
        Hello("127.0.0.1:1", "/dev/shm/x"),
        Hello("nowhere"),
        Measured(-1, {"x": float("nan")}),
    ],
    "trainer": [
        *NEITHER,
        Accused("replica-0/1", "I say so"),
        Reported(TrainerJoined(2, 50)),
        Reported(TrainerJoined(2, 0, 1)),
        Reported(TrainerJoined(2**40, 0)),
        Reported(Trained(1, 0, 1)),
        Reported(Trained(1, 7, 0)),
        Reported(Checkpointed(1, 5)),
        Reported(Checkpointed(1, 2**60)),
        Reported(Finished(0, meta(0))),
        Measured(0, {"\0": 1.0}),
        Hello("127.0.0.1:1", "/dev/shm/x"),
    ],
}


def speak(played: Played, name: str, lie: Any) -> None:
    if isinstance(lie, bytes):
        played.say_bytes(name, lie)
    else:
        played.say(name, lie)


@pytest.mark.parametrize("role", LIES)
def test_who_says_what_it_must_not_is_dropped_with_the_reason_and_nobody_else(tmp_path: Path, role: str) -> None:
    """All lies of a role, each to a run of its own in which everybody is at work."""
    for number, lie in enumerate(LIES[role]):

        async def scene(played: Played, lie: Any = lie) -> None:
            liar = played.process(role, 0)
            speak(played, liar.spec.name, lie)
            await played.turn()
            await played.turn()
            assert liar.refused, lie
            assert played.goes_on, lie
            assert [one for one in played.processes("store", "relay", "trainer", "replica") if one.refused] == [liar]
            assert f"{liar.title} is dropped: it sent" in played.notes
            played.controller.plane.check()

        play(tmp_path / f"{role}{number}", scene)
        lost = [entry.event for entry in Journal(tmp_path / f"{role}{number}").entries()]
        (loss,) = [event for event in lost if isinstance(event, ReplicaLost | RelayLost | StoreLost | TrainerLost)]
        assert (type(loss), "it was dropped, because it sent" in loss.reason) == (LOST[role], True)


TRUTHS: dict[str, list[Any]] = {
    "replica": [
        Hello(),
        Reported(Progressed(0, 1, 10, 2, 0)),
        Reported(Progressed(0, 2, 10, 2, 0)),  # its load is reported before it has joined anew
        Reported(Finished(0, meta(0, attempt=9))),
        Reported(SampleFailed(0, 0, 1, "x" * 100_000)),
        Measured(-1, {"engine/steps": 1.0}),
    ],
    "relay": [Hello("10.0.0.1:4242#" + "a" * 64, "/dev/shm/x"), Reported(LinkFailed(0, 1, 1, "cut"))],
    "store": [
        Reported(PromptsAdded(0, (Prompt(0, 10),))),
        Reported(StoreJoined(0, 2)),
        Reported(SamplesLost(0, 1, (5,))),
        Accused("replica-17/1", "it is gone"),
    ],
    "trainer": [
        Measured(0, {"loss": float("nan")}),
        Reported(Checkpointed(1, 0)),
        Reported(TrainerJoined(2, 0)),
        Reported(Trained(1, 0, 0)),
    ],
}


@pytest.mark.parametrize("role", TRUTHS)
def test_what_honest_components_say_is_heard(tmp_path: Path, role: str) -> None:
    async def scene(played: Played) -> None:
        for truth in TRUTHS[role]:
            speak(played, played.process(role, 0).spec.name, truth)
            await played.turn()
            assert not played.process(role, 0).refused, f"{truth}: {played.notes}"

    play(tmp_path / "run", scene)


CLAIM = meta(0, tokens=40)
UNPROVEN: dict[str, tuple[Callable[[Played], list[Receipt]], str]] = {
    "none": (lambda _: [], "t0 without a receipt of store 0"),
    "of another sample": (lambda p: [p.receipt(meta(1, tokens=40))], "t0 without a receipt of store 0"),
    "of another attempt": (lambda p: [p.receipt(meta(0, 2, tokens=40))], "t0 without a receipt of store 0"),
    "of another store": (lambda p: [p.receipt(CLAIM, "store-7/1")], "t0 without a receipt of store 0"),
    "of a replica": (lambda p: [p.receipt(CLAIM, "replica-0/1")], "t0 without a receipt of store 0"),
    "forged": (lambda p: [replace(p.receipt(CLAIM), tokens=41)], "t0 without a receipt of store 0"),
    "with fewer tokens": (lambda p: [p.receipt(CLAIM, tokens=30)], "t0 with 40 tokens, where store 0 has 30"),
    "with older tokens": (
        lambda p: [p.receipt(CLAIM, oldest=0, newest=1)],
        "t0 of versions 0 to 0, where store 0 has 0 to 1",
    ),
}


@pytest.mark.parametrize("proof", UNPROVEN)
def test_who_claims_what_its_store_does_not_have_is_dropped_with_the_reason(tmp_path: Path, proof: str) -> None:
    receipts, sentence = UNPROVEN[proof]
    claims = (Finished(0, CLAIM), Parked(0, 1, (CLAIM,)), SampleFailed(0, 0, 1, "it raised", CLAIM))
    for number, event in enumerate(claims):

        async def scene(played: Played, event: Any = event) -> None:
            liar = played.process("replica", 0)
            played.report(liar.spec.name, event, *receipts(played))
            await played.turn()
            assert liar.refused
            assert f"it sent {sentence}" in played.notes
            assert played.goes_on
            played.controller.plane.check()

        play(tmp_path / f"run{number}", scene)


def test_what_a_store_has_signed_counts_whatever_process_it_is_by_now(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        name, nothing = played.process("replica", 0).spec.name, meta(1, tokens=0)
        played.report(name, Finished(0, CLAIM), played.receipt(CLAIM, "store-0/9"))
        played.report(name, Finished(0, nothing), played.receipt(nothing, oldest=-1, newest=-1))
        await played.turn()
        states = [played.controller.state.ledger.samples[id].state for id in (0, 1)]
        assert states == ["done", "done"], played.notes

    play(tmp_path / "run", scene)


def test_what_is_not_its_own_does_not_reach_the_journal(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        (own, attempt), _ = played.running(1)
        name = played.process("replica", 0).spec.name
        played.report(name, Finished(0, meta(own, attempt, tokens=5)))
        played.report(name, Progressed(0, 1, 1, 1, 1))
        await played.turn()
        assert played.controller.state.ledger.samples[own].state == "running"

    play(tmp_path / "run", scene)
    kinds = [type(entry.event) for entry in Journal(tmp_path / "run").entries()]
    assert Finished not in kinds
    assert Progressed not in kinds


def test_failures_that_another_machine_reports_do_not_end_the_run(tmp_path: Path) -> None:
    """A machine on which every sample fails is its own loss; what it was never given does not count at all."""

    async def scene(played: Played) -> None:
        await played.welcome()
        for _ in range(40):
            guest = played.process("replica", 2)
            running = [s for s in played.controller.state.ledger.samples.values() if s.replica == 2]
            for sample in running:
                played.report(guest.spec.name, SampleFailed(2, sample.id, sample.attempt, "I say so"))
            for trajectory in range(5):
                played.report(guest.spec.name, SampleFailed(2, trajectory, 99, "I say so"))
            await played.settle(2)
        assert played.goes_on, played.controller.error

    play(tmp_path / "run", scene, config("--groups.max_failures", "2"))


def test_a_component_of_another_machine_cannot_end_the_run_by_giving_up(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        await played.welcome()
        for role, id in (("replica", 2), ("relay", 2)):
            played.say(played.process(role, id).spec.name, Collapsed("x" * 100_000, expected=True))
            await played.turn()
        assert played.goes_on

    play(tmp_path / "run", scene)


def test_a_store_of_another_machine_is_not_believed_about_those_of_this_one(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        await played.welcome(store=True)
        guest, neighbour = played.process("store", 2), played.process("replica", 2)
        played.say(guest.spec.name, Accused(neighbour.spec.name, "tokens of t0, which it was not given"))
        await played.turn()
        assert (neighbour.refused, guest.refused) == (True, False)
        played.say(guest.spec.name, Accused(played.process("trainer", 0).spec.name, "nonsense"))
        await played.turn()
        assert (played.process("trainer", 0).refused, guest.refused) == (False, True)
        assert "what cannot be true of the trainer: that it sent nonsense" in played.notes

    play(tmp_path / "run", scene)


def test_for_every_event_it_is_said_who_may_report_it(tmp_path: Path) -> None:
    """A new one has to be entered in the table, or parts that report it are dropped."""
    noticed_here = {
        *(RunStarted, EvalSetsOpened, HostJoined, HostLeft, PriceChanged, Heartbeats, TimerFired),
        *(ControllerRestarted, SettingsChanged),
        *(ReplicaLost, RelayLost, StoreLost, TrainerLost, TrainerWaits, WorkerRevoked, WorkerRefused),
    }

    async def scene(played: Played) -> None:
        reported = {kind for table in played.controller._validation._events.values() for kind in table}
        assert reported | noticed_here == {each.cls for each in msgspec.inspect.type_info(AnyEvent).types}  # type: ignore[attr-defined]
        assert not reported & noticed_here
        heard = {kind for kinds in MESSAGES.values() for kind in kinds}
        assert heard == set(FromComponent.__args__) - {Beat}, "heartbeats go no further than to the server"

    play(tmp_path / "run", scene)


# ------------------------------------------------------------------------------------------------------------- machines


def dismissals(played: Played) -> dict[str, str]:
    return {name: message.reason for name, message in played.orders if isinstance(message, Dismissed)}


def test_a_machine_says_at_which_site_it_is(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        played.say("host-5/1", Hello())
        played.say("host-5/1", Offer(__version__, 1, site="oslo"))
        await played.turn()
        sites = [relay.site for relay in played.controller.state.relays.relays.values()]
        assert sites[-1] == "oslo"
        assert not any(sites[:-1])

    play(tmp_path / "run", scene)


def test_many_machines_with_many_replicas_are_taken_up_to_a_number(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        played.say("host-0/1", Hello())
        played.say("host-0/1", Offer(__version__, 24))
        await played.turn()
        for number in range(1, 200):
            played.say(f"host-{number}/1", Hello())
            played.say(f"host-{number}/1", Offer(__version__, 1024))
            await played.turn()
        assert len(played.controller.state.fleet.replicas) == 2 + 24
        assert set(dismissals(played)) == {f"host-{number}/1" for number in range(1, 200)}
        assert (
            "takes 1,024 replicas of other machines, so there is room for 1,000 more" in dismissals(played)["host-7/1"]
        )
        assert played.goes_on

    play(tmp_path / "run", scene)


def test_machines_that_come_and_go_do_not_make_the_run_remember_without_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tailrace.runtime.admission.EVER", 50)

    async def scene(played: Played) -> None:
        for number in range(20):
            played.say(f"host-{number}/1", Hello())
            for replicas in (10, 0):
                played.say(f"host-{number}/1", Offer(__version__, replicas))
                await played.turn()
        assert len(played.controller.state.fleet.replicas) == 2 + 40
        assert "takes no more" in dismissals(played)["host-19/1"]
        assert played.goes_on

    play(tmp_path / "run", scene)


def test_a_machine_on_which_something_cannot_start_is_sent_away_for_good(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        played.say("host-5/1", Hello())
        for components in ({}, {"relay-2/1": "was killed"}, {}):  # the last was on its way when it was sent away
            played.say("host-5/1", Offer(__version__, 1, components=components))
            for _ in range(3):
                await played.turn()
                await asyncio.sleep(0)  # whoever waits for a process hears that it ended
        assert "relay 2 was killed before it was up" in dismissals(played)["host-5/1"]
        assert not played.controller.components._hosts.present
        assert played.goes_on

    play(tmp_path / "run", scene)


@pytest.mark.parametrize(
    "lie", [Reported(HostLeft(0, "I say so")), Hello("127.0.0.1:1", "/x"), Collapsed("no", True), b"\xc1"]
)
def test_a_machine_that_says_what_it_must_not_is_sent_away_with_its_parts(tmp_path: Path, lie: Any) -> None:
    async def scene(played: Played) -> None:
        await played.welcome("host-5/1")
        speak(played, "host-5/1", lie)
        await played.turn()
        assert "because it sent" in dismissals(played)["host-5/1"]
        assert not played.controller.components._hosts.present
        played.say("host-5/1", Offer(__version__, 1))
        await played.turn()
        assert not played.controller.components._hosts.present, "it stays away"
        assert played.goes_on

    play(tmp_path / "run", scene)
    left = [entry.event for entry in Journal(tmp_path / "run").entries() if isinstance(entry.event, HostLeft)]
    assert [event.host for event in left] == [2]


def test_an_offer_beyond_reason_is_refused_before_anything_is_made_of_it(tmp_path: Path) -> None:
    async def scene(played: Played) -> None:
        for number, offer in enumerate(
            [
                {"release": __version__, "replicas": 10**6},
                {"release": __version__, "replicas": -1},
                {"release": "x" * 1000, "replicas": 1},
                {"release": __version__, "replicas": 1, "components": {str(one): "" for one in range(5000)}},
            ]
        ):
            name = f"host-{number}/1"
            played.say(name, Hello())
            played.say_bytes(name, msgspec.msgpack.encode({"kind": "Offer", **offer}))
            await played.turn()
            assert "because it sent" in dismissals(played)[name]
        assert len(played.controller.state.fleet.replicas) == 2

    play(tmp_path / "run", scene)


# ------------------------------------------------------------------------------------------------------------- anything

NUMBERS = st.one_of(
    st.integers(0, 6), st.integers(-2, 100), st.sampled_from([2**31 - 1, 2**31, 2**40, 2**53, 2**63 - 1, 2**64 - 1])
)
FLOATS = st.one_of(st.floats(-2, 0), st.sampled_from([0.0, 1.0, float("nan"), float("inf"), -1e308, 1e308]))
WORDS = st.sampled_from(["", "stop", "x" * 300, "health", "127.0.0.1:1", "/dev/shm/x", "replica-0/1", "\0", "é"])
BUFFERS = st.one_of(
    st.lists(st.integers(0, 120), max_size=3).map(id_bytes),
    st.lists(st.floats(-2, 0), max_size=3).map(lambda values: np.array(values, "<f4").tobytes()),
    st.sampled_from([b"\1", bytes(7), b"\xff" * 8, np.array([np.nan, np.inf], "<f4").tobytes()]),
)


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Values of the right structure, as plain trees, and of any size."""
    match kind:
        case msgspec.inspect.StructType():
            fields = {field.encode_name: anything(field.type) for field in kind.fields}
            tag = {kind.tag_field: st.just(kind.tag)} if kind.tag_field else {}
            return st.fixed_dictionaries({**tag, **fields})
        case msgspec.inspect.UnionType():
            return st.one_of([anything(each) for each in kind.types])
        case msgspec.inspect.LiteralType():
            return st.sampled_from(kind.values)
        case msgspec.inspect.IntType():
            return NUMBERS
        case msgspec.inspect.FloatType():
            return FLOATS
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.StrType():
            return WORDS
        case msgspec.inspect.BytesType():
            return BUFFERS
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.VarTupleType():
            return st.lists(anything(kind.item_type), max_size=3)
        case msgspec.inspect.DictType():
            return st.dictionaries(anything(kind.key_type), anything(kind.value_type), max_size=3)
        case _:
            raise AssertionError(kind)


MESSAGE = anything(msgspec.inspect.type_info(FromComponent))
SENDERS = ["store 0", "replica 0", "replica 1", "replica 2", "relay 0", "relay 1", "relay 2", "trainer 0", "host"]
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@given(st.lists(st.tuples(st.sampled_from(SENDERS), MESSAGE), min_size=10, max_size=60))
@QUICK
def test_nothing_that_anybody_says_raises_or_ends_the_run(tmp_path_factory: Any, said: list[tuple[str, Any]]) -> None:
    """Of all roles, here and on a machine that has joined. Only that a component which this run itself has started
    cannot go on, and why, is believed."""

    async def scene(played: Played) -> None:
        await played.welcome("host-5/1")
        for who, tree in said:
            role, _, number = who.partition(" ")
            if tree["kind"] == "Collapsed" and who not in ("replica 2", "relay 2", "host"):
                tree["expected"] = False
            process = played.controller.components.get(role, int(number)) if number else None
            name = process.spec.name if process is not None else "host-5/1"
            played.say_bytes(name, msgspec.msgpack.encode(tree))
            await played.turn()
            assert played.goes_on, (who, tree, played.controller.error, played.controller.state.stopped)
            played.controller.plane.check()
            await played.revive()
        await played.settle()
        for replica in (0, 1):
            for trajectory, attempt in played.running(replica):
                played.finish(replica, trajectory, attempt, 5)
        await played.settle()
        assert played.goes_on

    play(tmp_path_factory.mktemp("said") / "run", scene)
