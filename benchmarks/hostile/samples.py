"""The sample store: frames of its clients, orders of the controller, its own answers, and its file.

Beyond not crashing, a store keeps promises, and breaking one is a crash here: nothing that a client says ends it, what
other components have stored is as they stored it, and whoever sends what cannot be true is cut off.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from hostile.inputs import Decode

sys.path.append(str(Path(__file__).parents[2] / "tests"))

REPLICAS, SAMPLES = 2, 4  # sample i is granted to replica i // 2 of them
TOKENS = 40  # of each sample
CLIENTS = ("replica-0/1", "replica-1/1", "trainer-0/1", "store-1/1")


def store_file(folder: Path, name: str = "samples-0.db") -> Any:
    """With a prompt and some samples, half of each stored. Nobody waits for the disk here."""
    from sample_stores import PROMPT, grant, piece, put
    from tailrace.samples.file import SampleFile

    for rest in folder.glob(f"{name}*"):
        rest.unlink()
    file = SampleFile.create(folder / name)
    file._database.execute("PRAGMA synchronous = OFF")
    file.add_prompts([PROMPT])
    file.assign([grant(id, replica=id // REPLICAS) for id in range(SAMPLES)])
    for id in range(SAMPLES):
        put(file, id // REPLICAS, id, 1, 0, piece(id, 0, TOKENS))
        file.commit()
    return file


# ------------------------------------------------------------------------------------------------------------- frames


def client_frames() -> list[Any]:
    from sample_stores import piece
    from tailrace.samples.messages import Append, Fetch, PieceColumns, ReadLengths, ReadPrompts, ReadSamples, Withdraw
    from tailrace.samples.messages import column as ids

    def append(trajectory: int, start: int, end: int) -> Append:
        pieces = [piece(trajectory, start, end), piece(trajectory, end, end + 2, None)]
        starts = ids([start, end])
        return Append(ids([trajectory] * 2), ids([1, 1]), starts, ids([0, 1]), *PieceColumns.of(pieces), urgent=True)

    reads = [ReadLengths(1, ids([0, 1])), ReadSamples(2, ids([3, 0, 2])), ReadPrompts(3, ids([3]))]
    appends = [append(0, 0, 5), append(0, TOKENS, TOKENS + 3), append(2, TOKENS - 1, TOKENS + 1)]
    return [*appends, Fetch(0, 1), Fetch(2, 1), Fetch(7, 1), Withdraw(7, 1), *reads]


class Channel:
    """A client's connection, without one."""

    unsent_bytes = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.sent: list[bytes] = []
        self.is_open = True

    def send(self, content: bytes) -> None:
        self.sent.append(content)

    def hang_up(self) -> None:
        self.is_open = False


class Attacked:
    """A store whose threads take their turns here, one after the other."""

    def __init__(self, folder: Path) -> None:
        from sample_stores import KEY, LIMITS
        from tailrace.samples.server import SampleServer
        from tailrace.wire.keys import signed_receipt

        self.file, self.errors, self.accused = store_file(folder), list[BaseException](), dict[str, str]()
        keys, sign = (lambda _: b""), partial(signed_receipt, "store-0/1", KEY)
        limits = LIMITS._replace(completion_tokens=2 * TOKENS)
        self.server: Any = SampleServer(self.file, keys, sign, self.accused.__setitem__, self.errors.append, limits)
        self.server._has_room = asyncio.Event()
        self.server._open_reader()
        self.before = self.stored()

    def stored(self) -> list[tuple[Any, bytes]]:
        """The prompt and the first tokens of every sample."""
        found = self.server._local.reader.read(range(SAMPLES))
        answers = [b"".join([bytes(piece.tokens) for piece in one.pieces[1:]]) for one in found]
        return [(one.pieces[0], answer[: 4 * TOKENS]) for one, answer in zip(found, answers, strict=True)]

    def hear(self, name: str, content: bytes) -> bool:
        """Returns whether its sender is still there."""
        from tailrace.samples.server import Client

        client: Any = Client(Channel(name))  # type: ignore[arg-type]
        self.server._hear(client, 1, content)
        self._turn(client)
        assert not self.errors, repr(self.errors)
        assert self.stored() == self.before, "somebody else's tokens have changed"
        self.server._leave(client)
        self.server._accused.clear()
        return client.channel.is_open

    def _turn(self, client: Any) -> None:
        """Of the writer, of the loop, and of the readers."""
        if work := self.server._writer._take():
            self.server._writer._commit(work)
        self.server._loop.run_until_complete(asyncio.sleep(0))
        while not client.jobs.empty():
            job = client.jobs.get_nowait()
            while job is not None:
                _, job = self.server._make(job)


def to_store(folder: Path) -> tuple[list[bytes], Decode]:
    """Frames of components that have proven their names: replicas, a trainer, another store."""
    from tailrace.samples.messages import encode

    attacked, frames = Attacked(folder), client_frames()
    seeds = [encode(frame) for frame in frames]
    right = dict(zip(seeds, [_sender(frame) for frame in frames], strict=True))

    def decode(data: bytes) -> bool:
        return attacked.hear(right.get(data) or CLIENTS[crc32(data) % len(CLIENTS)], data)

    return seeds, decode


def _sender(frame: Any) -> str:
    """Who may send it."""
    from tailrace.samples.messages import Append, Fetch, ReadLengths, ReadPrompts, ReadSamples, Withdraw, read_column

    match frame:
        case ReadLengths() | ReadSamples():
            return "trainer-0/1"
        case ReadPrompts():
            return "store-1/1"
        case Append():
            return f"replica-{read_column(frame.trajectories)[0] // REPLICAS}/1"
        case Fetch(trajectory) | Withdraw(trajectory):
            return f"replica-{trajectory // REPLICAS % REPLICAS}/1"
        case _:
            raise AssertionError(frame)


def from_store(_: Path) -> tuple[list[bytes], Decode]:
    """Answers to a replica and to a trainer. A store that sends nonsense is hung up on, and connected to again."""
    from sample_stores import PROMPT, piece
    from tailrace.samples import messages
    from tailrace.samples.client import Inquiry, SampleClient, StoreConnection
    from tailrace.samples.messages import PieceColumns, column, encode, slice_of
    from tailrace.samples.uploads import Growth
    from tailrace.types import Segment
    from tailrace.wire.messages import StoreAddress

    store = StoreConnection(StoreAddress(0, "tcp://127.0.0.1:1", "", "ab"))
    sample = messages.StoredSample(1, 2, 3, (messages.Piece(None, PROMPT.tokens), piece(1, 0, 9)))
    receipt = messages.Acknowledgement(4, column([1, 2]), column([1, 1]), column([9, 0]), column([0, 3]))
    prefix = messages.Prefix(1, 1, PROMPT, *PieceColumns.of([piece(1, 0, 9), piece(1, 9, 12, None)]))
    answers = [receipt, prefix, messages.Refusal(2, 1, "there is a newer attempt"), slice_of(1, [sample])]
    answers += [messages.LengthTable(2, column([3, 12, 9, 9])), messages.PromptRows(3, (PROMPT,))]
    answers += [messages.RequestFailed(1, "t1 is gone")]
    kinds: Sequence[Any] = (messages.ReadSamples, messages.ReadLengths, messages.ReadPrompts)

    def decode(data: bytes) -> None:
        one = SampleClient("replica-0/1")
        one._fetches = {(1, 1): 0, (2, 1): 0}
        one._inquiries = {number: Inquiry(number, 0, kind, [1]) for number, kind in enumerate(kinds, 1)}
        one._uploads.append(Growth((1, 1), 0, [Segment.of(1, range(9), [-0.5] * 9)]))
        try:
            one._take_in(store, messages.decode_from_store(data))
            one.poll()
            for inquiry in one._inquiries.values():
                while not inquiry.answers.empty():
                    one._taken(inquiry, inquiry.answers.get())
        finally:
            one._wake.close()
            one._woken.close()

    return [encode(each) for each in answers[:-1]], decode


# ------------------------------------------------------------------------------------------------------------- orders


def orders(folder: Path) -> tuple[list[bytes], Decode]:
    """Grants, and what is to be kept and forgotten: after any of them the file can be read, and reopened."""
    from sample_stores import grant
    from tailrace.protocol import Forget
    from tailrace.wire.messages import Assigned, Ordered, Reconcile, decode_from_controller, encode

    grants = tuple([grant(id, 2, resume=bool(id % 2)) for id in range(SAMPLES)])
    said = [Assigned(grants), Assigned((grant(9),)), Ordered(Forget((1, 9), "trained"))]
    said += [Reconcile(grants[:2], (2, 3, 8), {2: (1, TOKENS), 3: (1, 7)}, (9,))]
    seeds = [encode(each) for each in said]

    def decode(data: bytes) -> bool:
        message: Any = decode_from_controller(data)
        if not isinstance(message, Assigned | Reconcile) and not isinstance(getattr(message, "command", 0), Forget):
            return False
        with closing(store_file(folder)) as file:
            _carry_out(file, message)
            file.commit()
        _read_all(folder / "samples-0.db")
        return True

    return seeds, decode


def _carry_out(file: Any, message: Any) -> None:
    from tailrace.wire.messages import Assigned, Reconcile

    match message:
        case Assigned(grants):
            file.assign(grants)
        case Reconcile(grants, keep, finished, prefixes):
            file.reconcile(grants, keep, False, finished, prefixes)
        case _:
            file.forget(message.command.trajectories, archive=False)


# --------------------------------------------------------------------------------------------------------------- file


def sample_file(folder: Path) -> tuple[list[bytes], Decode]:
    """samples-0.db itself: opened as a restarted store does, written to, and read as everybody does."""
    from sample_stores import piece, put
    from tailrace.samples.file import SampleFile
    from tailrace.samples.messages import STORED
    from tailrace.samples.schema import SampleGoneError
    from tailrace.store.errors import JournalError

    path = folder / "samples-0.db"
    store_file(folder).close()
    whole, before = path.read_bytes(), _read_all(path)

    def write() -> None:
        with closing(SampleFile.open(path)) as file:
            file._database.execute("PRAGMA synchronous = OFF")
            verdict = put(file, 0, 0, 1, TOKENS, piece(0, TOKENS, TOKENS + 4))
            file.forget([1], archive=False)
            file.commit()
            assert verdict != STORED or file.length(0) == TOKENS + 4

    def decode(data: bytes) -> None:
        for rest in folder.glob("samples-0.db*"):
            rest.unlink()
        path.write_bytes(data)
        trouble: JournalError | None = None
        try:
            read = _read_all(path)
            assert all(before[id] == one for id, one in read.items()), "something else was read than was written"
            if len(read) < len(before):
                trouble = SampleGoneError(0, "some are gone")
            write()
        except JournalError as error:
            trouble = error
        if trouble is not None:
            raise trouble

    return [whole], decode


def _read_all(path: Path) -> dict[int, Any]:
    """Every sample that can be read."""
    from tailrace.samples.reader import SampleReader
    from tailrace.samples.schema import SampleGoneError

    found: dict[int, Any] = {}
    with closing(SampleReader(path)) as reader:
        for id in range(SAMPLES):
            try:
                [found[id]] = reader.read([id])
                reader.lengths([id])
            except SampleGoneError:
                pass
    return found
