"""Hostile input against all that decodes: wire, judges, relays, journal, run.db, checkpoints, settings, datasets, HTTP.

    python benchmarks/fuzz.py                  # a million inputs in all, always the same ones
    python benchmarks/fuzz.py --inputs 20000   # the short form that the tests run

Inputs are valid messages and files with something done to them: bits flipped, pieces cut, doubled or taken from another
one, lengths changed, values replaced by huge, negative, empty, foreign and deeply nested ones. A decoder may accept an
input or refuse it with its own documented error. Anything else counts: an exception of another kind or a dead process
is a crash, ten seconds without an answer a hang. Each decoder runs in a process of its own; `peak MB` is what its
memory grew by over all its inputs. Writes benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from tailrace.types import MALFORMED

ROOT = Path(__file__).parents[1]
HANG_S = 10.0
BROKEN = 3  # the status of a process in which this program itself failed
ROOM = 2 << 30  # bytes of address space on top of what a decoder's process has: beyond that it counts as a crash
VALUES = 0.5  # share of inputs in which a value is changed; in the rest it is bytes

Decode = Callable[[bytes], bool | None]  # False: refused without an error, as a hub ignores what is not for it


class Decoder(NamedTuple):
    """What is attacked, with what, and what it may say."""

    name: str
    share: float  # of all inputs
    form: str  # msgpack, json or bytes: what the seeds are
    prepare: Callable[[Path], tuple[list[bytes], Decode]]
    errors: tuple[type[Exception], ...]


# ----------------------------------------------------------------------------------------------------------- mutation

NUMBERS = [0, -1, 1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, -0.0, 5e-324, float("nan"), float("inf")]
LENGTHS = [b"\0", b"\xff", b"\x7f\xff", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\xff" * 8, b"\0" * 8, b"\0\0\0\x80"]
WORDS = ["", "\0", "x" * 300, "../../etc/passwd", "/etc/passwd", "a/../b", "\udfff"[:0], "é" * 40, "true", "-1", "1e9"]
DEPTHS = (3, 40, 500, 3000)


def damaged(random: Random, seeds: list[bytes]) -> bytes:
    data = bytearray(random.choice(seeds))
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        _damage(random, data, seeds)
    return bytes(data)


def _damage(random: Random, data: bytearray, seeds: list[bytes]) -> None:
    place = random.randrange(len(data) + 1)
    span = min(len(data) - place, random.choice((1, 2, 4, 8, 64, 1024)))
    match random.randrange(9):
        case 0:
            if place < len(data):
                data[place] ^= 1 << random.randrange(8)
        case 1:
            del data[place:]
        case 2:
            del data[place : place + span]
        case 3:
            data[place:place] = data[place : place + span] * random.choice((1, 2, 50))
        case 4:
            data[place:place] = random.randbytes(random.choice((1, 4, 32)))
        case 5:
            length = random.choice(LENGTHS)
            data[place : place + len(length)] = length
        case 6:
            other = random.choice(seeds)
            start = random.randrange(len(other) + 1)
            data[place:] = other[start : start + 4096]
        case 7:
            data[place : place + span] = bytes([random.choice((0, 0x22, 0x5B, 0x7B, 0x91, 0xC1, 0xFF))]) * span
        case _:
            data[place : place + 1] = random.choice((b"\x91", b"[", b"\x81\xa1x", b'{"x":')) * random.choice(DEPTHS)


def changed(random: Random, trees: list[Any], form: str) -> bytes:
    """A value somewhere in a valid message replaced, and written down again."""
    tree = random.choice(trees)
    for _ in range(random.choice((1, 1, 2, 4))):
        tree = _change(random, tree, trees, form)
    return written(tree, form)


def _change(random: Random, value: Any, trees: list[Any], form: str) -> Any:
    """A copy with one place changed; the deeper, the likelier."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice(list(value))
        if random.random() < 0.1:
            return {name: each for name, each in value.items() if name != key}
        if random.random() < 0.05:
            return {**value, random.choice(WORDS): random.choice(list(value.values()))}
        return {**value, key: _change(random, value[key], trees, form)}
    if isinstance(value, list) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        if random.random() < 0.1:
            return value * random.choice((0, 2, 100) if len(value) < 100 else (0, 2))
        return [*value[:place], _change(random, value[place], trees, form), *value[place + 1 :]]
    return _strange(random, trees, form)


def _strange(random: Random, trees: list[Any], form: str) -> Any:
    match random.randrange(8):
        case 0 | 1:
            return random.choice(NUMBERS)
        case 2:
            return random.choice(WORDS)
        case 3:
            return random.choice((None, True, False, [], {}, [None], {"": None}))
        case 4:
            return random.choice(trees)
        case 5:
            return "x" * random.choice((1000, 100_000))
        case 6:
            return [0] * random.choice((1000, 20_000))
        case _:
            nested: Any = 0
            for _ in range(random.choice((3, 40, 400))):
                nested = [nested] if random.random() < 0.5 else {"x": nested}
            return nested if form != "msgpack" or random.random() < 0.5 else b"\xff" * 100


def written(tree: Any, form: str) -> bytes:
    if form == "msgpack":
        return msgspec.msgpack.encode(tree)
    return json.dumps(tree, ensure_ascii=False).encode(errors="surrogatepass")


def inputs(decoder: Decoder, seeds: list[bytes], seed: int, first: int) -> Iterator[bytes]:
    """All inputs of a decoder, from number `first` on: each depends on its number alone."""
    read = {"msgpack": msgspec.msgpack.decode, "json": json.loads}.get(decoder.form)
    trees = [read(each) for each in seeds] if read else []
    number = first
    while True:
        random = Random(f"{seed} {decoder.name} {number}")
        if trees and random.random() < VALUES:
            yield changed(random, trees, decoder.form)
        else:
            yield damaged(random, seeds)
        number += 1


# ------------------------------------------------------------------------------------------------------------ running


class Result(msgspec.Struct):
    name: str
    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    crashes: int = 0
    hangs: int = 0
    peak_mb: float = 0.0
    seconds: float = 0.0
    examples: list[str] = []


COUNTS = struct.Struct("<5q")  # the input under way, accepted, refused, crashes, kilobytes that memory grew by


def attack(decoder: Decoder, count: int, seed: int) -> Result:
    result = Result(decoder.name, examples=[])
    began = time.monotonic()
    with mmap.mmap(-1, 4096) as shared, tempfile.TemporaryDirectory(prefix="tailrace-fuzz-") as folder:
        first = 0
        while first < count:
            first = _attack_apart(decoder, Path(folder), shared, result, first, count, seed)
    result.inputs, result.seconds = count, round(time.monotonic() - began, 1)
    return result


def _attack_apart(
    decoder: Decoder, folder: Path, shared: mmap.mmap, result: Result, first: int, count: int, seed: int
) -> int:
    """In a child, until all is done or the child is dead or stuck. Returns which input is next."""
    shared[: COUNTS.size] = COUNTS.pack(first, 0, 0, 0, 0)
    report = folder.with_name(f"{folder.name}.report")
    child = os.fork()
    if not child:
        try:
            _attack_here(decoder, folder, shared, report, first, count, seed)
        except BaseException:
            report.write_text(traceback.format_exc())
            os._exit(BROKEN)
        os._exit(0)
    status = _wait(child, shared)
    if status is not None and os.waitstatus_to_exitcode(status) == BROKEN:
        raise RuntimeError(f"{decoder.name} cannot be attacked:\n{report.read_text()}")
    at, accepted, refused, crashes, grown = COUNTS.unpack(shared[: COUNTS.size])
    result.accepted, result.refused = result.accepted + accepted, result.refused + refused
    result.crashes, result.peak_mb = result.crashes + crashes, max(result.peak_mb, round(grown / 1024, 1))
    if report.exists():
        result.examples = (result.examples + report.read_text().splitlines())[:10]
        report.unlink()
    if status == 0:
        return count
    kind = "hang" if status is None else f"ended with status {status}"
    result.hangs, result.crashes = result.hangs + (status is None), result.crashes + (status is not None)
    result.examples = [*result.examples, f"input {at}: {kind}"][:10]
    return at + 1


def _wait(child: int, shared: mmap.mmap) -> int | None:
    """Its status; None if it was stuck and had to be killed."""
    last, since = -1, time.monotonic()
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        at = COUNTS.unpack(shared[: COUNTS.size])[0]
        if at != last:
            last, since = at, time.monotonic()
        elif time.monotonic() - since > HANG_S * (6 if at == 0 else 1):  # the first one may import torch
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.02)


def _attack_here(
    decoder: Decoder, folder: Path, shared: mmap.mmap, report: Path, first: int, count: int, seed: int
) -> None:
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    seeds, decode = decoder.prepare(folder)
    for each in seeds:
        assert decode(each) is not False, f"{decoder.name} refuses what is valid"
    _limit_memory()
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    accepted = refused = crashes = 0
    stream = inputs(decoder, seeds, seed, first)
    for at in range(first, count):
        data = next(stream)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
        shared[: COUNTS.size] = COUNTS.pack(at, accepted, refused, crashes, grown)
        try:
            fine = decode(data) is not False
            accepted, refused = accepted + fine, refused + (not fine)
        except decoder.errors:
            refused += 1
        except Exception as error:
            crashes += 1
            with report.open("a") as file:
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}:{place.lineno}"
                file.write(f"input {at}: {type(error).__name__}: {str(error)[:150]!r} at {where} from {data[:60]!r}\n")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base
    shared[: COUNTS.size] = COUNTS.pack(count, accepted, refused, crashes, grown)


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# ------------------------------------------------------------------------------------------------- the wire's decoders


def _messages() -> tuple[list[Any], list[Any]]:
    """One of everything that parts and controller say."""
    from tailrace import protocol
    from tailrace.types import Row, Segment, Trajectory
    from tailrace.wire.messages import Collapsed, Ended, Grown, Growth, Hello, Measured, Ordered, Reported

    events = [_example(each) for each in msgspec.inspect.type_info(protocol.AnyEvent).types]  # type: ignore[attr-defined]
    commands = [_example(each) for each in msgspec.inspect.type_info(protocol.AnyCommand).types]  # type: ignore[attr-defined]
    segments = (Segment(None, (1, 2, 3)), Segment(4, (5, 6), (-0.5, -1.5)))
    row = Row(1, (1, 2), [{"role": "user", "content": "2 + 2"}], {"answer": 4, "nested": {"a": [1, 2]}})
    up = [Hello("127.0.0.1:1", "/dev/shm/arena"), Measured(1, {"loss": 0.5}), Collapsed("no", True)]
    up += [Grown((Growth(7, 1, segments),)), *(Reported(event) for event in events)]
    trajectory = Trajectory(1, 2, 3, segments, "stop", 1.0)
    down = [Ended(True), Ordered(commands[0], {1: row}, {3: segments}, ((trajectory,),), {0: "127.0.0.1:1"}, "arena")]
    return up, down + [Ordered(command) for command in commands]


def _example(kind: Any) -> Any:
    """A value of a struct, made of small valid values."""
    match kind:
        case msgspec.inspect.StructType():
            return kind.cls(**{field.name: _example(field.type) for field in kind.fields})
        case msgspec.inspect.UnionType():
            return _example(kind.types[0])
        case msgspec.inspect.LiteralType():
            return kind.values[0]
        case msgspec.inspect.IntType():
            return 3
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.StrType():
            return "word"
        case msgspec.inspect.BytesType():
            return b"12345678"
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            return (
                [_example(kind.item_type)]
                if isinstance(kind, msgspec.inspect.ListType)
                else (_example(kind.item_type),)
            )
        case msgspec.inspect.TupleType():
            return tuple(_example(each) for each in kind.item_types)
        case msgspec.inspect.DictType():
            return {_example(kind.key_type): _example(kind.value_type)}
        case msgspec.inspect.NoneType():
            return None
        case _:
            return 1


def hub(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.wire.hub import Hub
    from tailrace.wire.messages import sign

    class Socket:
        """What a ROUTER would hand over: somebody known, a number, a good signature, and the input."""

        content = b""

        async def recv_multipart(self) -> list[bytes]:
            name, label = b"replica-0/1", bytes(8)
            return [name, label, sign("token", name, label, self.content), self.content]

        async def send_multipart(self, frames: list[bytes]) -> None:
            pass

    one = object.__new__(Hub)
    wire = Socket()
    one._token, one._socket, one._trusted, one._asked, one._heard = "token", wire, {b"replica-0/1"}, set(), {}  # type: ignore[assignment]

    def decode(data: bytes) -> bool:
        wire.content = data
        heard: list[Any] = []
        with suppress(StopIteration):
            one._hear(heard).send(None)
        return bool(heard)

    return [msgspec.msgpack.encode(each) for each in _messages()[0]], decode


def link(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.wire.messages import decode_from_controller

    return [msgspec.msgpack.encode(each) for each in _messages()[1]], lambda data: bool(decode_from_controller(data))


def judge_replies(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.envs.base import Faulted, Observed, Scored
    from tailrace.envs.judge_wire import Frames, Judged, Ready, Refused, frame, reply_in

    def decode(data: bytes) -> None:
        frames = Frames()
        for start in range(0, len(data), 1000):
            for each in frames.feed(data[start : start + 1000]):
                reply_in(each)

    answers = [Judged(1, Scored(1.0), 0.1), Judged(2, Observed("4"), 0.1), Judged(3, Faulted("late"), 1.0)]
    return [frame(each) for each in (Ready(), Refused("no"), *answers)], decode


def judge_questions(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.envs.base import Row, Turn
    from tailrace.envs.judge_wire import Question

    decoder = msgspec.msgpack.Decoder(list[Question])
    row = Row(1, (1, 2), "2 + 2", {"answer": 4})
    asked = [Question(1, row, (Turn("policy", "4"), Turn("environment", "no")))]
    return [msgspec.msgpack.encode(asked)], lambda data: bool(decoder.decode(data) or True)


class _Stream:
    """A socket on which some bytes arrive, and then the other side hangs up."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def recv_into(self, room: memoryview) -> int:
        piece = self.data[self.place : self.place + len(room)]
        room[: len(piece)] = piece
        self.place += len(piece)
        return len(piece)

    def send(self, data: memoryview) -> int:
        return len(data)

    def setsockopt(self, *_: object) -> None:
        pass

    def settimeout(self, *_: object) -> None:
        pass


def _relay_words() -> list[Any]:
    from tailrace.relay.messages import AnyMessage

    return [_example(each) for each in msgspec.inspect.type_info(AnyMessage).types]  # type: ignore[attr-defined]


def relay_stream(_: Path) -> tuple[list[bytes], Decode]:
    """Bytes from somebody who may not even know the token."""
    from tailrace.relay.link import MAGIC, Channel

    def decode(data: bytes) -> None:
        Channel(_Stream(data), "peer", 1.0).answer(b"token")  # type: ignore[arg-type]

    # Our own nonce is drawn anew each time, so nobody's message is ever right: the greeting alone can be.
    start = MAGIC + bytes(32) + (10).to_bytes(4, "big") + bytes(32)
    return [start + msgspec.msgpack.encode(each) for each in _relay_words()], _never(decode)


def _never(decode: Callable[[bytes], None]) -> Decode:
    """For a decoder that refuses its seeds too."""
    from tailrace.relay.link import TokenError

    def wrapped(data: bytes) -> bool | None:
        try:
            return decode(data)
        except TokenError:
            return None

    return wrapped


def relay_messages(_: Path) -> tuple[list[bytes], Decode]:
    """Bytes from somebody who knows the token and signs whatever it sends."""
    import hmac

    from tailrace.relay.link import Channel

    def decode(data: bytes) -> None:
        tag = hmac.digest(b"", b"caller" + bytes(8) + data, "sha256")
        channel = Channel(_Stream(len(data).to_bytes(4, "big") + tag + data), "peer", 1.0)  # type: ignore[arg-type]
        channel._words = (b"callee", b"caller")
        channel.receive("a request")

    return [msgspec.msgpack.encode(each) for each in _relay_words()], decode


def layout(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.relay.layout import Layout

    def whole(layout: Layout) -> bytes:
        return layout.header + bytes(layout.size - len(layout.header))

    def decode(data: bytes) -> None:
        Layout.read(data).arrays(data)

    two = Layout.of(["a.weight", "b"], ["float32", "bfloat16"], [(2, 3), (4,)])
    return [whole(two), whole(Layout.of(["x"], ["int8"], [(0,)])), whole(Layout.of([], [], []))], decode


# ------------------------------------------------------------------------------------------------- the store's decoders


def events(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.protocol import AnyEvent

    decoder = msgspec.json.Decoder(AnyEvent)
    seeds = [msgspec.json.encode(each.event) for each in _messages()[0] if hasattr(each, "event")]
    return seeds, lambda data: bool(decoder.decode(data) or True)


def commands(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.protocol import AnyCommand

    decoder = msgspec.json.Decoder(list[AnyCommand])
    seeds = [msgspec.json.encode([each.command]) for each in _messages()[1] if hasattr(each, "command")]
    return seeds, lambda data: bool(decoder.decode(data) or True)


def _small_run(folder: Path) -> Path:
    """A run's store with something in every table."""
    from tailrace.config import load
    from tailrace.store.run import RunStore
    from tailrace.types import Row, Segment

    shutil.rmtree(folder / "run", ignore_errors=True)
    config = load([], ["--model.preset", "qwen2.5-7b"])
    with RunStore.create(folder / "run", config) as store:
        store.vault.add_prompts([Row(0, (1, 2, 3), "2 + 2", {"answer": 4})])
        store.vault.assign(0, 1, 0, 0, resume=False)
        store.vault.append(0, 1, [Segment(0, (4, 5), (-0.1, -0.2))])
        store.metrics.measure(0.0, 1, "trainer", {"loss": 0.5})
        up, _ = _messages()
        for number, each in enumerate(each for each in up if hasattr(each, "event")):
            store.record(float(number), each.event, [])
        store.snapshot(3, b"state")
    return folder / "run" / "run.db"


def journal_rows(folder: Path) -> tuple[list[bytes], Decode]:
    """Whatever a row may hold, as text or as bytes."""
    from tailrace.store.journal import Journal

    path = _small_run(folder)
    seeds = [msgspec.json.encode(each.event) for each in _messages()[0] if hasattr(each, "event")]
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("PRAGMA synchronous = OFF")
        database.execute("DELETE FROM journal WHERE seq > 1")
        database.commit()
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA synchronous = OFF")
    column = ["event", "event", "commands", "now", "kind", "crc", "seq"]

    def decode(data: bytes) -> None:
        value: Any = data.decode(errors="replace") if len(data) % 3 else data
        name = column[len(data) % len(column)] if data not in seeds else "event"
        database.execute("DELETE FROM journal")
        row = {"seq": 1, "now": 0.0, "kind": "x", "event": seeds[0].decode(), "commands": "[]", "crc": 0}
        row[name] = value if name != "event" or data not in seeds else data.decode()
        with suppress(sqlite3.IntegrityError):
            database.execute("INSERT INTO journal VALUES (:seq, :now, :kind, :event, :commands, :crc)", row)
        journal = Journal(path)
        list(journal.entries())
        if data not in seeds:
            journal.check()

    return seeds, decode


def run_file(folder: Path) -> tuple[list[bytes], Decode]:
    """run.db itself: read as `story`, `replay` and the page do, and opened as `--resume` does."""
    from tailrace.page.follow import Follower
    from tailrace.store.journal import Journal, JournalError
    from tailrace.store.metrics import measurements
    from tailrace.store.run import RunStore
    from tailrace.store.vault import held

    path = _small_run(folder)
    whole = path.read_bytes()
    for rest in path.parent.glob("run.db-*"):
        rest.unlink()

    def decode(data: bytes) -> None:
        for rest in path.parent.glob("run.db-*"):
            rest.unlink()
        path.write_bytes(data)
        trouble: JournalError | None = None
        for read in (
            lambda: [Journal(path).config, *Journal(path).entries()],
            lambda: held(path, "trajectory", 0),
            lambda: list(measurements(path)),
            lambda: Follower(path),
            lambda: _resumed(RunStore.reopen(path.parent)),
        ):
            try:
                read()
            except JournalError as error:
                trouble = error
        if trouble is not None:
            raise trouble

    return [whole], decode


def _resumed(store: Any) -> None:
    with store:
        list(store.entries(0))
        store.newest_snapshot()
        store.vault.row(0)
        store.vault.read([0])


def snapshots(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.config import load
    from tailrace.control.plane import ControlPlane
    from tailrace.protocol import Prompt, PromptsAdded

    config = load([], ["--model.preset", "qwen2.5-7b"])
    plane = ControlPlane(config)
    plane.handle(0.0, PromptsAdded(0, tuple(Prompt(each, 10) for each in range(4))))  # type: ignore[call-arg]
    return [plane.snapshot()], lambda data: bool(ControlPlane.restore(config, data))


# ------------------------------------------------------------------------------------------------ weights and settings


def checkpoint_state(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.trainer.manifest import State, check, described

    place = folder / "step-00000001"
    place.mkdir(exist_ok=True)
    (place / "model.safetensors").write_bytes(b"weights" * 100)
    state = State(1, 4, files={"model.safetensors": described(place / "model.safetensors")})

    def decode(data: bytes) -> None:
        (place / "state.json").write_bytes(data)
        check(place)

    return [msgspec.json.encode(state)], decode


def checkpoint_tensors(folder: Path) -> tuple[list[bytes], Decode]:
    import torch
    from safetensors.torch import save

    from tailrace.trainer.checkpoint import _read

    file = folder / "optimizer.safetensors"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        _read(file)

    return [save({"exp_avg/a": torch.ones(3, 4), "step/a": torch.tensor(3.0)}), save({"x": torch.zeros(0)})], decode


def start_weights(folder: Path) -> tuple[list[bytes], Decode]:
    """Of a whole model directory: its config.json or its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tailrace.model.load import load_model

    torch.set_num_threads(1)
    small = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=11,
    )
    LlamaForCausalLM(small).save_pretrained(folder / "model")
    files = {name: (folder / "model" / name).read_bytes() for name in ("model.safetensors", "config.json")}

    def decode(data: bytes) -> None:
        name = "config.json" if data.lstrip()[:1] == b"{" else "model.safetensors"
        for each, content in files.items():
            (folder / "model" / each).write_bytes(data if each == name else content)
        load_model(str(folder / "model"))

    return list(files.values()), decode


def settings(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.config import load
    from tailrace.config.render import render

    file = folder / "run.toml"
    (folder / "base.toml").write_text('[model]\npreset = "qwen2.5-7b"\n')

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        render(load([file]))

    examples = [path.read_bytes() for path in sorted((ROOT / "examples").glob("*.toml"))]
    return [
        b'extends = "base.toml"\n[run]\nname = "x"\nsteps = 3\n[task.options]\na = [1, 2]\n',
        *_usable(examples, decode),
    ], decode


def _usable(seeds: list[bytes], decode: Decode) -> list[bytes]:
    """Examples that extend files which are not here are left out."""
    from tailrace.config import ConfigError

    found: list[bytes] = []
    for seed in seeds:
        with suppress(ConfigError):
            decode(seed)
            found.append(seed)
    return found


def options(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.config import load

    def decode(data: bytes) -> None:
        load([], [word.decode(errors="replace") for word in data.split(b"\n")])

    base = b"--model.preset\nqwen2.5-7b\n"
    return [
        base + b"--run.steps=3\n--schedule.kind\nsync\n--repack.enabled",
        base + b'--sampling.stop\n["a", "b"]\n--trainer.learning_rate\n1e-5',
        base + b"--task.options.size\n[1, [2]]\n--schedule.steps_ahead\nunset\n--run.seed=0x10",
    ], decode


def model_shape(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.config.hf import read_shape

    file = folder / "config.json"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        read_shape(str(file))

    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = {**fields, "vocab_size": 100, "model_type": "qwen2", "tie_word_embeddings": True}
    return [json.dumps(small).encode(), json.dumps({"text_config": {**small, "num_experts": 4}}).encode()], decode


# ------------------------------------------------------------------------------------------------------------ datasets


def jsonl(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.envs.data import read_rows

    file = folder / "rows.jsonl"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        msgspec.msgpack.encode(read_rows(file))

    rows = [{"prompt": "2 + 2", "answer": "4", "more": {"a": [1, 2.5, None]}}]
    rows += [{"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": 3}}]
    return [json.dumps(each).encode() for each in rows], decode


def parquet(folder: Path) -> tuple[list[bytes], Decode]:
    import pyarrow
    import pyarrow.parquet

    from tailrace.envs.data import read_rows

    table = pyarrow.table({"prompt": ["2 + 2", "3 + 3"], "answer": [4, 6], "x": [[1.0], None]})
    pyarrow.parquet.write_table(table, folder / "seed.parquet")
    pyarrow.parquet.write_table(table, folder / "flat.parquet", compression="none", use_dictionary=False)
    file = folder / "rows.parquet"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        read_rows(file)

    return [(folder / name).read_bytes() for name in ("seed.parquet", "flat.parquet")], decode


def arrow(folder: Path) -> tuple[list[bytes], Decode]:
    import io

    import pyarrow
    import pyarrow.ipc

    from tailrace.envs.data import read_rows

    table = pyarrow.table({"prompt": ["2 + 2", "3 + 3"], "answer": [4, 6]})
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    file = folder / "rows.arrow"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        read_rows(file)

    return [sink.getvalue()], decode


def splits(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.envs.data import read_rows

    (folder / "saved" / "train").mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text('{"prompt": "secret"}')

    def decode(data: bytes) -> None:
        (folder / "saved" / "dataset_dict.json").write_bytes(data)
        read_rows(folder / "saved")

    return [b'{"splits": ["train", "test"]}'], _unless_empty(decode)


def _unless_empty(decode: Callable[[bytes], None]) -> Decode:
    from tailrace.config import ConfigError

    def wrapped(data: bytes) -> bool | None:
        try:
            return decode(data)
        except ConfigError as error:
            if "holds no dataset" in str(error):
                return None  # the name was fine
            raise

    return wrapped


# ----------------------------------------------------------------------------------------------------- what models say


def calls(_: Path) -> tuple[list[bytes], Decode]:
    """What a policy writes: calls of tools, and final answers."""
    from tailrace.envs.answers import exact, last_between
    from tailrace.envs.tools import calculate

    def decode(data: bytes) -> None:
        text = data.decode(errors="replace")
        calculate(last_between(text, "<tool>", "</tool>") or text[:200])
        exact(text * (20 if len(data) % 50 == 0 else 1), "1,234.5")
        exact(text, "forty two")

    return [
        *(b"so <tool>12 * (3 + 4) ** 2</tool>", b"<answer>1,234.5</answer>", rb"thus \boxed{\frac{1}{2}} and #### 7"),
        *(b"<tool>" * 500, b"<answer>" * 500, b"1,111" * 200, b"2 ** 3 ** 4 // 5 % -6.5e3"),
    ], decode


def decoders() -> list[Decoder]:
    from fuzz_page import on_loopback, stranger

    from tailrace.config import ConfigError
    from tailrace.envs.judge_wire import FrameError
    from tailrace.relay.layout import LayoutError
    from tailrace.relay.link import LinkError
    from tailrace.store.database import JournalError
    from tailrace.trainer.manifest import CheckpointError

    return [
        Decoder("wire: parts to controller", 0.14, "msgpack", hub, ()),
        Decoder("wire: controller to parts", 0.12, "msgpack", link, MALFORMED),
        Decoder("judges: answers", 0.06, "bytes", judge_replies, (FrameError,)),
        Decoder("judges: questions", 0.06, "msgpack", judge_questions, MALFORMED),
        Decoder("relays: a stranger's bytes", 0.06, "bytes", relay_stream, (LinkError,)),
        Decoder("relays: signed messages", 0.08, "msgpack", relay_messages, (LinkError,)),
        Decoder("weights: layout", 0.08, "bytes", layout, (LayoutError,)),
        Decoder("journal: events", 0.08, "json", events, MALFORMED),
        Decoder("journal: commands", 0.06, "json", commands, MALFORMED),
        Decoder("journal: rows", 0.02, "json", journal_rows, (JournalError,)),
        Decoder("journal: snapshots", 0.03, "msgpack", snapshots, MALFORMED),
        Decoder("run.db", 0.008, "bytes", run_file, (JournalError,)),
        Decoder("checkpoint: state", 0.03, "json", checkpoint_state, (CheckpointError,)),
        Decoder("checkpoint: safetensors", 0.02, "bytes", checkpoint_tensors, (CheckpointError,)),
        Decoder("start weights", 0.001, "bytes", start_weights, (ConfigError,)),
        Decoder("settings: TOML", 0.01, "bytes", settings, (ConfigError,)),
        Decoder("settings: options", 0.015, "bytes", options, (ConfigError,)),
        Decoder("settings: config.json", 0.026, "json", model_shape, (ConfigError,)),
        Decoder("data: JSONL", 0.02, "json", jsonl, (ConfigError,)),
        Decoder("data: parquet", 0.01, "bytes", parquet, (ConfigError,)),
        Decoder("data: arrow", 0.01, "bytes", arrow, (ConfigError,)),
        Decoder("data: splits", 0.01, "json", splits, (ConfigError,)),
        Decoder("tools: calls and answers", 0.01, "bytes", calls, ()),
        Decoder("page: a stranger's bytes", 0.02, "bytes", stranger, ()),
        Decoder("page: on the loopback", 0.02, "bytes", on_loopback, ()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="decoders whose name contains this, each with --inputs")
    arguments = parser.parse_args()
    chosen = [each for each in decoders() if arguments.only in each.name]
    total = sum(each.share for each in chosen) if arguments.only else 1.0
    results = []
    print(
        f"{'decoder':<28}{'inputs':>10}{'accepted':>10}{'refused':>10}{'crashes':>9}{'hangs':>7}{'peak MB':>9}{'s':>8}"
    )
    for decoder in chosen:
        result = attack(decoder, max(1, round(arguments.inputs * decoder.share / total)), arguments.seed)
        results.append(result)
        _print(result)
    whole = _summed(results)
    _print(whole)
    if not arguments.only:
        content = {"inputs": whole.inputs, "seed": arguments.seed, "decoders": msgspec.to_builtins([*results, whole])}
        (ROOT / "benchmarks" / "results" / "fuzz.json").write_text(json.dumps(content, indent=1) + "\n")
    return 1 if whole.crashes or whole.hangs else 0


def _summed(results: list[Result]) -> Result:
    whole = Result("all", examples=[])
    for name in ("inputs", "accepted", "refused", "crashes", "hangs", "seconds"):
        setattr(whole, name, round(sum(getattr(each, name) for each in results), 1))
    whole.peak_mb = max(each.peak_mb for each in results)
    return whole


def _print(result: Result) -> None:
    figures = f"{result.inputs:>10,}{result.accepted:>10,}{result.refused:>10,}{result.crashes:>9}{result.hangs:>7}"
    print(f"{result.name:<28}{figures}{result.peak_mb:>9,.1f}{result.seconds:>8,.1f}", flush=True)
    for example in result.examples:
        print(f"    {example}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
