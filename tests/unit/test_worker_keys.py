"""A stranger's key: what it opens, how it is withdrawn, and that only prompts and trajectories go through it."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_validation import config, meta, play

from played import KEYS, Played
from tailrace.cli import main
from tailrace.errors import UsageError
from tailrace.protocol import (
    Assignment,
    CheckFailed,
    Dismiss,
    Finished,
    GenerationResumed,
    HandedIn,
    JudgedTurn,
    LinkFailed,
    Parked,
    Progressed,
    RelayJoined,
    ReplicaJoined,
    SampleFailed,
    ScoringStarted,
    VersionStored,
    WorkerRefused,
)
from tailrace.runtime.admission import OF_A_STRANGER
from tailrace.runtime.allowance import BURST, REMEMBERED, Allowance
from tailrace.runtime.worker_keys import WorkerKeys
from tailrace.store.journal import Journal
from tailrace.store.run import RunStore
from tailrace.wire.connection import Connection
from tailrace.wire.keys import JOIN_KEY, JoinKey, host_key, stranger_token, worker_of
from tailrace.wire.messages import (
    UNNUMBERED,
    Beat,
    Collapsed,
    Dismissed,
    Garbled,
    Hello,
    Measured,
    Offer,
    Reported,
    StoreAddresses,
    Wanted,
    WireError,
    encode,
)
from tailrace.wire.server import LONGEST_OF_STRANGER, ControlServer
from tailrace.wire.session import StrangerError
from tailrace.wire.tls import Identity

FINGERPRINT = "ab" * 32
STRANGER = "host-5/1@alice"
REPLICA = 2  # its number: after the two of our own


def keys(folder: Path) -> WorkerKeys:
    (folder / JOIN_KEY).write_text(f"{JoinKey(FINGERPRINT, 'cd' * 32)}\n")
    return WorkerKeys(folder)


# ------------------------------------------------------------------------------------------------------------- the keys


def test_a_key_is_made_for_one_worker_and_withdrawn_with_a_reason(tmp_path: Path):
    made = keys(tmp_path)
    path = made.invite("alice")
    key = JoinKey.read(path.read_text())
    assert (key.fingerprint, key.worker, key.token) == (FINGERPRINT, "alice", made.token("alice"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    made.invite("bob")
    made.revoke("alice", "lost laptop")
    assert (made.token("alice"), made.names(), list(made.revoked())) == ("", ["bob"], [("alice", "lost laptop")])
    with pytest.raises(UsageError, match="another name"):
        made.invite("alice")


def test_a_new_certificate_is_written_into_every_key_and_the_tokens_stay(tmp_path: Path):
    made = keys(tmp_path)
    token = JoinKey.read(made.invite("alice").read_text()).token
    made.renew("ef" * 32)
    assert made.token("alice") == token
    assert JoinKey.read((tmp_path / "workers" / "alice.key").read_text()).fingerprint == "ef" * 32


@pytest.mark.parametrize("name", ["", "Alice", "a/b", "../x", "a@b", "a" * 25, "a b"])
def test_a_name_that_is_none_is_refused_and_opens_nothing(tmp_path: Path, name: str):
    assert keys(tmp_path).token(name) == ""
    with pytest.raises(UsageError):
        keys(tmp_path).invite(name)


def test_the_command_makes_lists_and_withdraws(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = str(tmp_path / "run")
    RunStore.create(tmp_path / "run", settings()).close(complete=False)
    keys(tmp_path / "run")
    assert main(["workers", run, "--invite", "alice"]) == 0
    assert main(["workers", run, "--revoke", "alice", "--reason", "gone"]) == 0
    assert main(["workers", run]) == 0
    assert "alice: revoked, gone" in capsys.readouterr().out
    assert main(["workers", run, "--revoke", "bob"]) == 2
    for nowhere in (tmp_path, tmp_path / "nowhere"):
        assert main(["workers", str(nowhere), "--invite", "bob"]) == 2
        assert main(["workers", str(nowhere)]) == 2, "it is no run"


def test_a_strangers_token_proves_its_own_names_and_no_others(tmp_path: Path):
    made = keys(tmp_path)
    made.invite("alice")
    made.invite("bob")

    async def scene() -> None:
        identity = Identity(KEYS.identity)
        server = ControlServer(KEYS, identity=identity, worker_token=made.token)

        async def opens(name: str, key: bytes) -> bool:
            try:
                call = await asyncio.to_thread(Connection, server.endpoint, name, key, identity.fingerprint)
            except (StrangerError, WireError, OSError):
                return False
            call.close()
            return True

        token = made.token("alice")
        assert await opens(STRANGER, host_key(token, STRANGER))
        for name in ("host-5/1", "host-5/1@bob", "replica-0/1", "replica-2/1@alice", "relay-0/1", "store-0/1"):
            assert not await opens(name, host_key(token, name)), name
            assert not await opens(name, host_key(stranger_token(KEYS.token, "alice"), name)), name
        made.revoke("alice", "")
        assert not await opens(STRANGER, host_key(token, STRANGER))
        assert not await opens("replica-2/1@alice", KEYS.of("replica-2/1@alice")), "nor its components"
        await server.close()

    asyncio.run(scene())


# -------------------------------------------------------------------------------------------------- what it is told


def settings() -> Any:
    return config("--strangers.checkers", "1", "--schedule.kind", "trajectory", "--local.replicas", "2")


def test_its_components_are_told_no_secret_of_the_run_and_of_one_store_only(tmp_path: Path):
    async def scene(played: Played) -> None:
        told: list[Any] = []
        send = played._sent

        async def note(name: str, message: Any) -> None:
            told.append((name, message))
            await send(name, message)

        played.controller.server.send = note  # type: ignore[method-assign]
        await played.welcome("host-6/1", store=True)
        await played.welcome(STRANGER)
        specs = [spec for name, one in told if name == STRANGER and isinstance(one, Wanted) for spec in one.specs]
        assert {spec.role for spec in specs} == {"relay", "replica"}
        assert KEYS.token not in repr(specs)
        assert KEYS.secret.hex() not in repr(specs)
        mine = [one for name, one in told if worker_of(name) and isinstance(one, StoreAddresses)]
        assert {each.store for one in mine for each in one.addresses} == {0}

    play(tmp_path / "run", scene, settings())


@pytest.mark.parametrize("offer", [{"ranks": 1}, {"store": True}])
def test_it_may_generate_and_nothing_else(tmp_path: Path, offer: dict[str, Any]):
    async def scene(played: Played) -> None:
        from tailrace import __version__

        played.say(STRANGER, Hello())
        played.say(STRANGER, Offer(__version__, 1, **offer))
        await played.turn()
        (reason,) = [one.reason for _, one in played.orders if isinstance(one, Dismissed)]
        assert "generates and nothing else" in reason

    play(tmp_path / "run", scene, settings())


def test_it_may_bring_so_many_replicas_and_come_so_often(tmp_path: Path):
    async def scene(played: Played) -> None:
        from tailrace import __version__

        for name, count in ((STRANGER, OF_A_STRANGER), ("host-6/1@alice", 1), ("host-7/1@bob", 1)):
            played.say(name, Hello())
            played.say(name, Offer(__version__, count))
            await played.turn()
        dismissed = [name for name, one in played.orders if isinstance(one, Dismissed)]
        assert dismissed == ["host-6/1@alice"]

    play(tmp_path / "run", scene, settings())


def test_a_run_without_checkers_takes_no_stranger(tmp_path: Path):
    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        assert played.controller.components.get("replica", REPLICA) is None

    play(tmp_path / "run", scene)


# ---------------------------------------------------------------------------------------------------- what it may say


def given(played: Played) -> Any:
    """Something that it was given, as it would hand it in."""
    trajectory, attempt = played.running(REPLICA)[0]
    return meta(trajectory, attempt, 5, reward=None)


LIES: dict[str, Any] = {
    "a reward": lambda p: Finished(REPLICA, meta(given(p).id, given(p).attempt, 5)),
    "a failure, for other random numbers": lambda p: SampleFailed(REPLICA, given(p).id, given(p).attempt, "?"),
    "a prefix for somebody else": lambda p: Parked(REPLICA, 1, (given(p),)),
    "a judge": lambda p: ScoringStarted(REPLICA, 1, (JudgedTurn(given(p).id, given(p).attempt, 0),)),
    "a judge's answer": lambda p: GenerationResumed(REPLICA, 1, (JudgedTurn(given(p).id, given(p).attempt, 1),)),
    "a check": lambda p: CheckFailed(REPLICA, given(p).id, given(p).attempt, "?"),
    "another's sample": lambda p: HandedIn(REPLICA, (meta(p.running(1)[0][0], p.running(1)[0][1], 5, reward=None),)),
    "in another's name": lambda p: HandedIn(1, (given(p),)),
    "a reward with what it hands in": lambda p: HandedIn(REPLICA, (msgspec.structs.replace(given(p), reward=1.0),)),
    "very many samples at once": lambda p: HandedIn(REPLICA, tuple(meta(10**6 + id, 1, 5) for id in range(2 * BURST))),
    "that it holds very much": lambda p: ReplicaJoined(
        REPLICA, 2, p.controller.state.fleet.replicas[REPLICA].host, 0, 9, 9, (Assignment(0, 1),) * (2 * BURST)
    ),
    "without a receipt": lambda p: HandedIn(REPLICA, (given(p),)),
    "figures": lambda p: Measured(0, {"engine/steps": 1.0}),
    "a price": lambda p: ReplicaJoined(REPLICA, 2, p.controller.state.fleet.replicas[REPLICA].host, 0, 9, 9, price=0.1),
    "garbage": lambda p: b"\xc1",
}
RELAY_LIES: dict[str, Any] = {
    "that another is unreachable": lambda relay: LinkFailed(relay, 1, 0, "?"),
    "in another's name": lambda relay: VersionStored(0, 1, 0),
    "as another": lambda relay: RelayJoined(0, 9),
}


async def refused(played: Played, name: str, lie: Any) -> None:
    if isinstance(lie, bytes):
        played.say_bytes(name, lie)
    else:
        played.say(name, lie if isinstance(lie, Measured | Collapsed) else Reported(lie))
    for _ in range(3):
        await played.turn()
    assert played.goes_on
    played.controller.plane.check()
    worker = played.controller.state.strangers.workers["alice"]
    assert worker.excluded, lie
    assert played.controller.components.get("replica", REPLICA) is None
    assert [one for who, one in played.orders if who == STRANGER and isinstance(one, Dismissed)]


@pytest.mark.parametrize("lie", LIES)
def test_whatever_else_it_says_sends_it_away(tmp_path: Path, lie: str):
    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        await refused(played, f"replica-{REPLICA}/1@alice", LIES[lie](played))

    play(tmp_path / "run", scene, settings())
    entries = list(Journal(tmp_path / "run").entries())
    assert any(isinstance(entry.event, WorkerRefused) for entry in entries)
    assert [c.worker for entry in entries for c in entry.commands if isinstance(c, Dismiss)] == ["alice"]


@pytest.mark.parametrize("lie", RELAY_LIES)
def test_so_does_what_its_relay_must_not_say(tmp_path: Path, lie: str):
    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        relay = played.controller.state.fleet.replicas[REPLICA].host
        await refused(played, f"relay-{relay}/1@alice", RELAY_LIES[lie](relay))

    play(tmp_path / "run", scene, settings())


def test_who_speaks_too_often_is_sent_away(tmp_path: Path):
    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        for number in range(BURST + 200):
            played.report(f"replica-{REPLICA}/1@alice", Progressed(REPLICA, 1, number, 0, 0))
        await played.turn()
        await played.turn()
        worker = played.controller.state.strangers.workers["alice"]
        assert worker.excluded == "it sent more messages than a stranger may"

    play(tmp_path / "run", scene, settings())


def test_so_is_a_machine_of_its_that_offers_itself_too_often_and_it_is_hung_up_on(tmp_path: Path):
    from tailrace import __version__

    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        hung_up: list[str] = []
        played.controller.server.hang_up = hung_up.append  # type: ignore[method-assign]
        for _ in range(BURST + 200):
            played.say(STRANGER, Offer(__version__, 1))
        await played.turn()
        await played.turn()
        worker = played.controller.state.strangers.workers["alice"]
        assert worker.excluded == "it sent more messages than a stranger may"
        assert STRANGER in hung_up

    play(tmp_path / "run", scene, settings())


UNHEARD: dict[str, Any] = {  # how somebody speaks to whom nobody listens
    "signs of life": lambda p: p.say(f"replica-{REPLICA}/1@alice", Beat()),
    "what it has said before": lambda p: p.say_bytes(f"replica-{REPLICA}/1@alice", encode(Beat()), number=1),
    "without an introduction": lambda p: p.say(f"replica-{REPLICA}/2@alice", Beat()),
    "in the name of one that is gone": lambda p: p.say(f"replica-{REPLICA}/0@alice", Hello()),
}


@pytest.mark.parametrize("way", UNHEARD)
def test_what_a_stranger_says_is_counted_where_nobody_listens_too(tmp_path: Path, way: str):
    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        for _ in range(BURST + 200):
            UNHEARD[way](played)
        await played.turn()
        await played.turn()
        assert played.goes_on
        worker = played.controller.state.strangers.workers["alice"]
        assert worker.excluded == "it sent more messages than a stranger may"

    play(tmp_path / "run", scene, settings())
    events = [entry.event for entry in Journal(tmp_path / "run").entries()]
    assert [type(one) for one in events].count(WorkerRefused) == 1


def test_what_a_stranger_says_it_waits_for_is_no_figure(tmp_path: Path):
    """It would be the name of a metric."""

    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        for name in (f"replica-{REPLICA}/1@alice", played.process("replica", 1).spec.name):
            played.say(name, Hello())
            played.say(name, Beat(f"{name} says so"))
        played.controller._note_waiting()
        assert list(played.controller.backpressure.waiting) == ["r1"]

    play(tmp_path / "run", scene, settings())


def test_who_is_given_many_samples_may_say_as_much_of_them():
    allowance = Allowance()
    for second in range(60):
        allowance.give("replica-3@alice", float(second), samples=1000)
        assert all(allowance.spend("replica-3@alice", float(second)) for _ in range(2000))
    assert not all(allowance.spend("replica-3@alice", 60.0, messages=BURST) for _ in range(100))
    assert not all(allowance.spend("replica-4@alice", 60.0) for _ in range(BURST + 1))


def test_no_more_names_are_remembered_than_have_something_to_be_remembered():
    allowance = Allowance()
    for number in range(3 * REMEMBERED):
        assert allowance.spend(f"host-{number}/1@alice", now=float(number))
    assert len(allowance._left) <= REMEMBERED


def test_a_long_message_of_a_stranger_is_not_even_read(tmp_path: Path):
    """That of others may be longer."""
    made = keys(tmp_path)
    made.invite("alice")

    async def scene() -> list[Any]:
        identity = Identity(KEYS.identity)
        server = ControlServer(KEYS, identity=identity, worker_token=made.token)
        heard: list[Any] = []
        for name in ("replica-2/1@alice", "replica-0/1"):
            call = await asyncio.to_thread(Connection, server.endpoint, name, KEYS.of(name), identity.fingerprint)
            for content in (encode(Hello()), encode(Collapsed("x" * (LONGEST_OF_STRANGER + 1)))):
                call.send(UNNUMBERED, content)
            while call.has_unsent:
                call.flush()
                await asyncio.sleep(0.001)
            while not heard or heard[-1].sender != name or isinstance(heard[-1].message, Hello):
                heard += await server.receive()
            call.close()
        await server.close()
        return [one.message for one in heard if not isinstance(one.message, Hello)]

    garbled, collapsed = asyncio.run(scene())
    assert isinstance(garbled, Garbled)
    assert "a message of 1,0" in garbled.what
    assert isinstance(collapsed, Collapsed)


def test_what_it_hands_in_counts_once_with_a_receipt_and_a_replay_changes_nothing(tmp_path: Path):
    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        handed = given(played)
        for _ in range(3):
            played.report(f"replica-{REPLICA}/1@alice", HandedIn(REPLICA, (handed,)), played.receipt(handed))
            await played.turn()
        worker = played.controller.state.strangers.workers["alice"]
        assert (worker.handed_in, worker.excluded) == (1, "")
        sample = played.controller.state.ledger.samples[handed.id]
        assert played.controller.state.fleet.replicas[sample.replica].checks

    play(tmp_path / "run", scene, settings())


@pytest.mark.parametrize("other", [{"tokens": 6}, {"oldest": 1, "newest": 1}])
def test_a_receipt_of_something_else_is_no_receipt(tmp_path: Path, other: dict[str, Any]):
    async def scene(played: Played) -> None:
        await played.welcome(STRANGER)
        handed = given(played)
        name = f"replica-{REPLICA}/1@alice"
        played.report(name, HandedIn(REPLICA, (handed,)), played.receipt(handed, **other))
        await played.turn()
        await played.turn()
        assert played.controller.state.strangers.workers["alice"].excluded

    play(tmp_path / "run", scene, settings())
