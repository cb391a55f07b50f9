"""Heartbeats: what counts as a sign of life, and that a controller which could not listen declares nobody dead."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from played import Played
from tailrace.config import load
from tailrace.config.tree import Config, Health
from tailrace.obs.live import LiveRun
from tailrace.protocol import Cancel, Event, Progressed, ReplicaJoined, RunStarted
from tailrace.runtime import backpressure
from tailrace.runtime.backpressure import Backpressure
from tailrace.runtime.lag import KEPT, SAMPLE_S, LoopLag
from tailrace.wire import liveness as module
from tailrace.wire.client import ControlClient
from tailrace.wire.connection import Connection
from tailrace.wire.keys import Keyring
from tailrace.wire.liveness import LARGEST, LATE_S, ListeningClock, Liveness, datagram
from tailrace.wire.messages import Beat, BeatHere, ComponentSpec, Ended, Hello, Ordered, Reported
from tailrace.wire.server import ControlServer, ReceivedMessage

KEYS = Keyring(bytes(32), "ab" * 32)
NAME = "replica-3/1"
KEY, OTHER = b"k" * 32, b"o" * 32
DEADLINE_S = 20.0


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


@contextmanager
def listening() -> Iterator[tuple[Liveness, socket.socket]]:
    """With a socket from which a test sends whatever it likes."""
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        liveness = Liveness(tcp)
        sender.connect(tcp.getsockname())
        try:
            yield liveness, sender
        finally:
            liveness.close()


class Ear:
    """The controller's end without its thread, so that a test knows what was taken, and when."""

    def __init__(self, liveness: Liveness, clock: Clock) -> None:
        liveness.close()
        self.liveness, self._clock = liveness, clock
        liveness.admit(NAME, KEY)

    def counts(self, received: bytes) -> bool:
        """A second later."""
        self.pass_s(1.0)
        before = self.liveness.age_s(NAME)
        self.liveness._take(received)
        return self.liveness.age_s(NAME) < before

    def pass_s(self, seconds: float) -> None:
        """Both channels are listened to."""
        for _ in range(round(seconds / 0.1)):
            self._clock.now += 0.1
            self.liveness._beats.turn()
            self.liveness.loop_turns(reading=True)


@pytest.fixture
def ear(clock: Clock) -> Iterator[Ear]:
    with listening() as (liveness, _):
        yield Ear(liveness, clock)


def beat(counter: int, incarnation: int = 1, key: bytes = KEY, name: str = NAME, waiting_for: str = "") -> bytes:
    return datagram(key, name.encode(), counter, incarnation, waiting_for)


# ------------------------------------------------------------------------------------------------------ what counts


def test_a_heartbeat_counts_once_and_the_next_one_again(ear: Ear) -> None:
    assert ear.counts(beat(1))
    assert not ear.counts(beat(1)), "repeated"
    assert ear.counts(beat(5)), "some are lost on the way"
    assert not ear.counts(beat(4)), "it was overtaken"


@pytest.mark.parametrize(
    "forged",
    [
        beat(9, key=OTHER),
        beat(9, name="replica-4/1"),
        beat(9)[:-1],
        beat(9) + b"!",
        bytes([beat(9)[0] ^ 1]) + beat(9)[1:],
        beat(9)[:16] + beat(10)[16:],
        b"",
        b"\xff" * 17,
        b"\xff" * LARGEST,
        os.urandom(60),
    ],
    ids=["wrong key", "another name", "cut", "longer", "tag", "body", "empty", "short", "long", "noise"],
)
def test_what_is_forged_does_not_count_and_is_not_remembered(ear: Ear, forged: bytes) -> None:
    assert not ear.counts(forged)
    assert list(ear.liveness._records) == [NAME]
    assert ear.counts(beat(1)), "and leaves nothing behind"


def test_an_older_incarnation_does_not_count(ear: Ear) -> None:
    assert ear.counts(beat(1, incarnation=2))
    assert not ear.counts(beat(2, incarnation=1))
    assert ear.counts(beat(3, incarnation=3))


def test_what_was_recorded_on_an_earlier_connection_does_not_count(ear: Ear) -> None:
    """The counter begins anew with every connection, so it alone would not tell."""
    recorded = [beat(counter) for counter in range(1, 9)]
    ear.liveness.leave(NAME)
    assert not any(ear.counts(one) for one in recorded), "who cannot be told anything is not there"
    ear.liveness.admit(NAME, OTHER)
    assert not any(ear.counts(one) for one in recorded)
    assert ear.counts(beat(1, key=OTHER))


def test_no_key_is_no_key(ear: Ear) -> None:
    """Machines send no datagrams: an unkeyed hash must not do for one."""
    ear.liveness.admit("host-7/1", b"")
    ear.pass_s(1.0)
    ear.liveness._take(datagram(b"", b"host-7/1", 1, 1))
    assert ear.liveness.age_s("host-7/1") == pytest.approx(1.0)
    assert "host-7/1" not in ear.liveness.to_ask(0.5)


def test_two_connections_of_a_component_have_different_keys() -> None:
    async def scene() -> None:
        server = ControlServer(KEYS)
        keys: list[bytes] = []
        for _ in range(2):
            wire = await asyncio.to_thread(Connection, server.endpoint, NAME, KEYS.of(NAME))
            keys.append(wire._session.beat_key)
            assert server._peers[NAME].beat_key == keys[-1]
            wire.close()
        assert keys[0] != keys[1]
        await server.close()

    asyncio.run(scene())


def test_of_those_who_left_only_so_many_are_remembered(ear: Ear, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LEFT", 3)
    for number in range(9):
        ear.liveness.admit(f"replica-{number}/2", KEY)
        ear.liveness.leave(f"replica-{number}/2")
    assert set(ear.liveness._records) == {NAME, *[f"replica-{number}/2" for number in (6, 7, 8)]}


def test_datagrams_are_heard_by_the_thread(clock: Clock) -> None:
    with listening() as (liveness, sender):
        liveness.admit(NAME, KEY)
        for counter in range(1, 4):
            sender.send(beat(counter, waiting_for=f"store 0: {counter} MB not yet stored"))
        sender.send(b"noise")
        until(lambda: liveness._records[NAME].counter == 3)
        assert liveness.waiting == {NAME: "store 0: 3 MB not yet stored"}
        sender.send(beat(4))
        until(lambda: not liveness.waiting)


def until(what: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if what():
            return
        pause.wait(0.01)
    raise TimeoutError


def test_what_a_component_waits_for_is_short_and_printable(ear: Ear) -> None:
    ear.counts(beat(1, waiting_for="a\nb\x1b[2J" + "x" * 1000))
    assert ear.liveness.waiting[NAME].startswith("ab[2Jxxx")
    assert len(ear.liveness.waiting[NAME]) <= 200
    ear.liveness.leave(NAME)
    assert not ear.liveness.waiting


# ----------------------------------------------------------------------------------------------------------- clocks


def test_a_clock_stands_still_while_nobody_listens(clock: Clock) -> None:
    listened = ListeningClock()
    for _ in range(20):
        clock.now += 0.1
        listened.turn()
    assert listened.read() == pytest.approx(2.0)
    clock.now += 3600.0
    assert listened.read() == pytest.approx(2.0 + LATE_S)
    listened.turn()
    clock.now += 0.1
    assert listened.read() == pytest.approx(2.0 + LATE_S + 0.1)
    clock.now += 0.1
    listened.skip()
    assert listened.read() == pytest.approx(2.0 + LATE_S)


def test_a_component_is_as_old_as_its_last_sign_on_either_channel(ear: Ear) -> None:
    ear.pass_s(2.0)
    assert ear.liveness.age_s(NAME) == pytest.approx(2.0)
    ear.liveness.frame(NAME)
    ear.pass_s(1.0)
    assert ear.liveness.age_s(NAME) == pytest.approx(1.0)
    assert ear.counts(beat(1))
    assert ear.liveness.age_s(NAME) == 0.0
    ear.pass_s(5.0)
    ear.liveness.leave(NAME)
    assert ear.liveness.age_s(NAME) == pytest.approx(5.0), "a connection that ends is no sign of life"


def test_who_was_never_heard_is_as_old_as_the_controller(ear: Ear) -> None:
    ear.pass_s(7.0)
    assert ear.liveness.age_s("replica-4/1") == pytest.approx(7.0)


def test_nobody_grows_old_while_the_process_is_stopped_or_the_hub_does_not_read(ear: Ear, clock: Clock) -> None:
    clock.now += 3600.0
    assert ear.liveness.age_s(NAME) <= LATE_S
    ear.pass_s(0.5)
    for _ in range(100):  # frames are not read, and datagrams do not get through
        clock.now += 0.1
        ear.liveness._beats.turn()
        ear.liveness.loop_turns(reading=False)
    assert ear.liveness.age_s(NAME) <= 0.5 + 2 * LATE_S


# --------------------------------------------------------------------------------------------------- without datagrams


def test_whose_datagrams_do_not_come_is_asked_once_and_let_off_when_they_do(ear: Ear) -> None:
    assert ear.liveness.to_ask(1.2) == {}
    ear.pass_s(1.5)
    assert ear.liveness.to_ask(1.2) == {NAME: True}
    assert ear.liveness.to_ask(1.2) == {}
    assert ear.liveness.without_datagrams == [], "perhaps it is stopped"
    ear.pass_s(0.1)
    ear.liveness.frame(NAME)
    assert ear.liveness.without_datagrams == [NAME]
    assert ear.counts(beat(1))
    assert ear.liveness.to_ask(1.2) == {NAME: False}
    assert ear.liveness.without_datagrams == []


def config(heartbeat_s: float = 0.1) -> Config:
    emulated = ("--model.preset", "smollm2-135m", "--rollout.engine", "emulated", "--trainer.engine", "emulated")
    more = ("--costs.decode_step", "0.001", "--rollout.kv_tokens", "4000", "--health.heartbeat_s", f"{heartbeat_s}")
    return load([], [*emulated, *more])


@asynccontextmanager
async def playing(folder: Path) -> AsyncIterator[Played]:
    played = Played(folder, config())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await played.start()
            yield played
    finally:
        await played.close()


def test_the_log_says_once_that_datagrams_do_not_get_through(tmp_path: Path) -> None:
    async def scene() -> None:
        async with playing(tmp_path / "run") as played:
            controller, names = played.controller, [one.spec.name for one in played.processes("replica")]
            for name in names:
                controller.server.liveness.admit(name, KEY)
            await asyncio.sleep(0.2)
            for _ in range(3):
                controller._ask_for_frames()
                await played.turn()
                await asyncio.sleep(0.05)
                for name in names:
                    controller.server.liveness.frame(name)
            asked = [(name, message) for name, message in played.orders if isinstance(message, BeatHere)]
            assert asked == [(name, BeatHere(on=True)) for name in names]
            assert played.notes.count("UDP port") == 1

    asyncio.run(scene())


def test_who_is_held_up_is_named_when_that_begins_and_when_it_ends(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(backpressure, "CALM_S", 1e-9)

    async def scene() -> None:
        async with playing(tmp_path / "run") as played:
            controller, name = played.controller, played.process("replica", 1).spec.name
            for waiting_for in ("store 0: 8.0 MB not yet stored", "store 0: 8.1 MB not yet stored"):
                played.say(name, Beat(waiting_for))
                controller._note_waiting()
                assert controller.backpressure.waiting == {"r1": waiting_for}
            played.say(name, Beat())
            controller._note_waiting()
            assert controller.backpressure.waiting == {}
            await played.turn()
            notes = [line.partition(": ")[2] for line in played.notes.splitlines() if " for store" in line]
            assert notes == ["r1 waits for store 0: 8.0 MB not yet stored", "r1 no longer waits for store 0"]
            rows = played.store._database.execute(
                "SELECT source, value FROM metrics WHERE name = 'waiting_for/store 0'"
            )
            assert list(rows) == [("r1", 1.0), ("r1", 0.0)]

    asyncio.run(scene())


def test_many_who_wait_now_and_then_for_one_store_are_one_sentence() -> None:
    pressure, slow = Backpressure(), {f"r{id}": "store 0: 0.3 MB not yet stored" for id in range(8)}
    said = [str(one) for now in range(10) for one in pressure.look(now, {} if now % 2 or now > 4 else slow)]
    assert said == [
        "r0, r1, r2, r3, r4 and 3 more wait for store 0: 0.3 MB not yet stored",
        "r0, r1, r2, r3, r4 and 3 more no longer wait for store 0",
    ]
    moved = [str(one) for one in pressure.look(20, {"r1": "store 0: a"}) + pressure.look(21, {"r1": "store 1: b"})]
    assert moved == ["r1 waits for store 0: a", "r1 no longer waits for store 0", "r1 waits for store 1: b"]


def test_people_see_who_waits_and_for_which_store() -> None:
    live = LiveRun(Config())
    live.see(0.0, RunStarted(2, 1), [])
    for id in (0, 1):
        live.see(1.0, ReplicaJoined(id, 1, 0, -1, 1000, 8), [])
        live.measure(2.0, -1, f"r{id}", {"waiting_for/store 0": 1.0})
    assert [one.state for one in live.view().replicas] == ["waits for store 0"] * 2
    live.measure(3.0, -1, "r0", {"waiting_for/store 0": 0.0})
    live.measure(3.0, -1, "r1", {"waiting_for/store 0": 0.0})
    assert "waits for store 0" not in [one.state for one in live.view().replicas]
    assert [one.text for one in live.notices if "store 0" in one.text] == [
        "store 0 is slow: r0 waits for it, and others may",
        "nobody waits for store 0 any more",
    ]


# ---------------------------------------------------------------------------------------------------------- the client


def spec(endpoint: str) -> ComponentSpec:
    quick = Config(health=Health(heartbeat_s=0.05))
    return ComponentSpec("replica", 3, 1, endpoint, KEYS.token, "", quick, key=KEYS.of(NAME).hex())


@asynccontextmanager
async def linked(
    load: Callable[[], Event | None] = lambda: None, port: int = 0
) -> AsyncIterator[tuple[ControlServer, ControlClient]]:
    server = ControlServer(KEYS, port)
    client = ControlClient(spec(server.endpoint), load)
    client.open()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield server, client
    finally:
        await asyncio.to_thread(client.close)
        await server.close()


def counter(server: ControlServer) -> int:
    record = server.liveness._records.get(NAME)
    return record.counter if record is not None else 0


async def reached(what: Callable[[], bool]) -> None:
    while not what():
        await asyncio.sleep(0.01)


def test_a_component_that_computes_is_heard_and_nothing_of_that_is_a_message() -> None:
    async def scene() -> None:
        async with linked() as (server, client):
            client.waiting_for = "store 0: 8.0 MB not yet stored"
            await reached(lambda: counter(server) >= 3)
            assert [type(one.message) for one in await server.receive()] == [Hello]
            assert not server._received
            assert server.liveness.waiting == {NAME: "store 0: 8.0 MB not yet stored"}

    asyncio.run(scene())


def test_that_the_run_is_over_is_known_before_the_component_asks_for_orders() -> None:
    async def scene() -> None:
        async with linked() as (server, client):
            await server.receive()
            assert not client.ended
            await server.send(NAME, Ended(True))
            await reached(lambda: client.ended)
            assert [*client.receive(0.0)] == [Ended(True)]

    asyncio.run(scene())


def test_a_component_whose_loop_is_stuck_is_silent() -> None:
    async def scene() -> None:
        async with linked() as (server, client):
            await reached(lambda: counter(server) >= 1)
            client._watchdog.stuck = "stuck"
            client._watchdog._look = lambda now: None  # type: ignore[method-assign]
            await asyncio.sleep(0.2)
            silent = counter(server)
            await asyncio.sleep(0.2)
            assert counter(server) == silent

    asyncio.run(scene())


def test_where_datagrams_do_not_get_through_heartbeats_come_over_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They go to somebody else, who has the port and cannot do anything with them."""

    async def scene(taken: socket.socket) -> None:
        async with linked(port=taken.getsockname()[1]) as (server, client):
            client.waiting_for = "the firewall"
            await server.receive()
            record = server.liveness._records[NAME]
            assert server.liveness.to_ask(-1.0) == {NAME: True}
            frames: list[str] = []
            monkeypatch.setattr(server.liveness, "frame", frames.append)
            await server.send(NAME, BeatHere(on=True))
            await reached(lambda: len(frames) >= 3)
            assert server.liveness.waiting == {NAME: "the firewall"}
            assert record.counter == 0
            assert not server._received, "none of them is a message"
            await server.send(NAME, BeatHere(on=False))
            received = await asyncio.to_thread(taken.recv, LARGEST)
            assert NAME.encode() in received
            assert KEYS.of(NAME) not in received

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        with socket.create_server(("127.0.0.1", 0)) as free:  # the server needs the same port for its connections
            taken.bind(free.getsockname())
        asyncio.run(scene(taken))


def loads(letters: list[ReceivedMessage]) -> list[int]:
    events = [one.message.event for one in letters if isinstance(one.message, Reported)]
    return [event.kv_tokens for event in events if isinstance(event, Progressed)]


def test_a_load_is_reported_when_it_has_changed_and_after_an_order() -> None:
    kv = [5]

    async def scene() -> None:
        async with linked(lambda: Progressed(3, 1, kv[0], 0, 0)) as (server, _):
            assert loads(await some(server, 2)) == [5]
            quiet = counter(server)
            await reached(lambda: counter(server) >= quiet + 4)
            assert not server._received, "nothing has changed"
            kv[0] = 6
            assert loads(await some(server, 1)) == [6]
            await server.send(NAME, Ordered(Cancel(3, 1, ())))
            assert loads(await some(server, 1)) == [6], "control reckons with more since then"

    asyncio.run(scene())


async def some(server: ControlServer, count: int) -> list[ReceivedMessage]:
    letters: list[ReceivedMessage] = []
    while len(letters) < count:
        letters += await server.receive()
    return letters


# ------------------------------------------------------------------------------------------- real clocks and processes

CONTROLLER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {paths}
from played import Played
from test_liveness import config
from tailrace.protocol import GiveUp, SetTimer

async def main():
    played = Played(Path({folder!r}), config({heartbeat_s}))
    controller = played.controller
    handle = controller.plane.handle
    def watched(now, event):
        commands = handle(now, event)
        for one in commands:
            if isinstance(one, GiveUp):
                print("gave up", one.role, one.id, flush=True)
        return commands
    controller.plane.handle = watched
    await played.start()
    for process in played.processes("replica", "relay", "trainer", "store"):
        controller.server.liveness.admit(process.spec.name, b"k" * 32)
    print(controller.server.port, flush=True)
    while True:
        await asyncio.sleep(0.01)
        await played.turn()

asyncio.run(main())
"""


@contextmanager
def controller_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A controller with two replicas, a relay and a trainer, whose heartbeats come from the test."""
    here = Path(__file__).parent
    program = CONTROLLER.format(paths=[str(here.parent), str(here)], folder=str(folder), heartbeat_s=HEARTBEAT_S)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield child, int(child.stdout.readline())
    finally:
        child.kill()
        child.communicate()


HEARTBEAT_S = 0.4  # so silence may last for 1.2 s


class Hearts:
    """Beats for these names many times as often as they must come, in a thread; none while it is `suspended`."""

    def __init__(self, port: int) -> None:
        self.suspended = False
        self.names = {"replica-0/1", "replica-1/1", "relay-0/1", "trainer-0/1", "store-0/1"}
        self._port = port
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Hearts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        counter = 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            while not self._over.wait(0.01):
                counter += 1
                for name in () if self.suspended else list(self.names):
                    sender.sendto(beat(counter, name=name), ("127.0.0.1", self._port))


def test_a_stopped_controller_that_wakes_up_declares_nobody_dead_and_a_silent_one_is_found(tmp_path: Path) -> None:
    """First it alone is stopped; then the whole machine is suspended, and the others are back later than the
    controller: nothing that was said meanwhile tells it that they live. Then one of them is silent for real."""
    pause = threading.Event()
    with controller_process(tmp_path / "run") as (child, port), Hearts(port) as hearts:
        assert child.stdout is not None
        for whole_machine in (False, True):
            hearts.suspended = whole_machine
            child.send_signal(signal.SIGSTOP)
            pause.wait(2.5)
            child.send_signal(signal.SIGCONT)
            pause.wait(0.6)
            hearts.suspended = False
            pause.wait(0.6)
        hearts.names.remove("replica-1/1")
        assert child.stdout.readline() == "gave up replica 1\n", "the first to be given up is the silent one"


# ------------------------------------------------------------------------------------------------- a controller held up


def test_what_arrives_while_the_database_is_locked_waits_in_the_hub(tmp_path: Path, monkeypatch: Any) -> None:
    """One batch is taken out of it, and no more; the server has room for so much, then it stops reading."""
    monkeypatch.setattr("tailrace.wire.server.WAITING", 300)
    many = 2000

    async def scene() -> None:
        async with playing(tmp_path / "run") as played:
            controller, server = played.controller, played.controller.server
            listening = asyncio.create_task(controller._listen())
            name = played.process("replica", 0).spec.name
            server._heard.clear()  # its reports begin anew
            client = ControlClient(msgspec.structs.replace(spec(server.endpoint), id=0, key=KEYS.of(name).hex()))
            client.open()
            for number in range(many):
                client.measure(number, {"x" * 100: 0.0})
            await reached(lambda: not server.reads)
            await asyncio.sleep(0.3)
            assert not server.reads, "and so it stays"
            assert len(controller._arrived) <= 256
            assert server.liveness.age_s(name) < 1.0
            while count(played) < many:
                await played.turn()
                controller._taken_in.set()
                await asyncio.sleep(0)
            assert server.reads
            listening.cancel()
            client.close()

    def count(played: Played) -> int:
        return played.store._database.execute("SELECT count(*) FROM metrics WHERE source = 'r0'")[0][0]

    asyncio.run(scene())


# ------------------------------------------------------------------------------------------------------- event-loop lag


class Loop:
    """An event loop that runs what is due when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, action: Callable[[], None]) -> None:
        self.due, self.run = at, action


def test_a_block_of_the_loop_counts_as_all_the_samples_that_were_due_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    lag = LoopLag()
    assert lag.p99_s == 0.0
    for _ in range(99):
        loop.now = loop.due + 0.001
        loop.run()
    assert lag.p99_s == pytest.approx(0.001)
    loop.now = loop.due + 3.05
    loop.run()
    assert len(lag._lags) == 99 + 31
    assert lag.p99_s == pytest.approx(2.95, abs=0.11), "three seconds of thirteen are more than a hundredth"
    assert loop.now < loop.due <= loop.now + SAMPLE_S
    loop.now += 10 * KEPT * SAMPLE_S
    loop.run()
    assert len(lag._lags) == KEPT


def test_the_lag_of_the_loop_is_a_metric_of_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tailrace.runtime.controller.LAG_EVERY", 1)

    async def scene() -> None:
        async with playing(tmp_path / "run") as played:
            await reached(lambda: played.controller.lag.samples >= 1)
            await played.turn()
            rows = played.store._database.execute("SELECT DISTINCT source, name FROM metrics")
            assert list(rows) == [("controller", "controller/loop_lag_p99_s")]

    asyncio.run(scene())
