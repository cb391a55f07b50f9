"""A store's server: replicas append and fetch, trainer ranks read. One network loop, one writer, a few readers.

    network  a thread with an asyncio loop: checks what arrives and hands it on
    writer   commits in groups, then acknowledges (`writer`)
    readers  threads with connections of their own, for fetches, lengths and reads

Nothing grows without a bound. The replicas share one budget of bytes that are not committed: each is told its share
(`Credit`), and is not read from while more of its bytes wait for the writer. While more than `QUEUED` bytes wait in
all, nobody is read from: TCP holds the replicas back, and their credits run out. Each client has one answer under way
at a time, in slices of `SLICE` bytes; the next slice is sent when it has taken most of the last.

Who sends what cannot be true is cut off for good, and the controller gets a sentence about it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from tailrace.samples.file import SampleFile
from tailrace.samples.messages import (
    LONGEST_FRAME,
    Acknowledgement,
    Append,
    CompletionLimits,
    Credit,
    Fetch,
    FromClient,
    FromStore,
    LengthTable,
    PieceColumns,
    Prefix,
    PromptRows,
    ReadLengths,
    ReadPrompts,
    ReadSamples,
    Refusal,
    RequestFailed,
    Withdraw,
    column,
    complaint_about,
    decode_from_client,
    encode,
    read_column,
    slice_of,
)
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import PromptGoneError, SampleDamagedError, SampleGoneError
from tailrace.samples.writer import GroupWriter, Key, ReceivedFrame, Sign
from tailrace.types import MALFORMED, PromptId, Row, TrajectoryId
from tailrace.wire import descriptors
from tailrace.wire.keys import worker_of
from tailrace.wire.listener import Listener, OversizedFrameError, SignedChannel
from tailrace.wire.messages import LOOPBACK, Grant, Reconcile, WireError
from tailrace.wire.session import StrangerError
from tailrace.wire.tls import Identity

log = logging.getLogger(__name__)

QUEUED = 48 << 20  # bytes that may wait for the writer
BUDGET = 128 << 20  # bytes that all replicas may have on their way
LEAST_CREDIT = 1 << 16  # bytes of each, however many there are: a step of a large batch
SLICE = 4 << 20  # bytes of one answer to `ReadSamples`
LONGEST_OF_STRANGERS = 16 << 20  # bytes of a frame: the longest completion and more
UNREAD = 64 << 20  # bytes that a client has not taken yet; then it is hung up on, and has to connect again
READERS = 2
MOST_FETCHES = 1 << 16  # of one client
MOST_IDS = 1 << 22  # of one request
START_S = 30.0
FENCED_OFF = "there is a newer attempt"
NOT_WANTED = "nobody wants it any more"
FRAMES: dict[str, tuple[type, ...]] = {
    "replica": (Append, Fetch, Withdraw),
    "trainer": (ReadLengths, ReadSamples),
    "store": (ReadPrompts,),
}  # a stranger is a replica here


class Step(NamedTuple):
    """A frame of an answer, how to make the rest, and what was found to be lost."""

    frame: FromStore | None = None
    rest: Job | None = None
    lost: TrajectoryId | None = None


Job = Callable[[SampleReader], Step]


class Client:
    """A component that has connected."""

    def __init__(self, channel: SignedChannel) -> None:
        self.channel = channel
        self.name = channel.name
        self.role, _, number = self.name.partition("/")[0].rpartition("-")
        self.id = int(number.partition(".")[0]) if number.partition(".")[0].isdecimal() else -1
        self.is_stranger = bool(worker_of(self.name))
        self.longest_frame = LONGEST_OF_STRANGERS if self.is_stranger else LONGEST_FRAME
        self.queued_bytes = 0  # that wait for the writer
        self.may_send = asyncio.Event()  # these are no more than it may have
        self.may_send.set()
        self.fetches: set[Key] = set()
        self.jobs: asyncio.Queue[Job] = asyncio.Queue()

    def send(self, frame: FromStore) -> None:
        if self.channel.unsent_bytes > UNREAD:
            self.channel.hang_up()
        else:
            self.channel.send(encode(frame))


class SampleServer:
    """`key_of`: the key of each component, by its name. `sign` makes receipts. `accuse(component, reason)`,
    `broken(error)` and `lost(ids)`, of samples that somebody needs and that are gone or damaged, are called in threads
    of the server. All other methods may be called from any thread."""

    def __init__(
        self,
        file: SampleFile,
        key_of: Callable[[str], bytes],
        sign: Sign,
        accuse: Callable[[str, str], None],
        broken: Callable[[BaseException], None],
        limits: CompletionLimits = CompletionLimits(),
        identity: Identity | None = None,
        listen: str = LOOPBACK,
        port: int = 0,
        lost: Callable[[list[TrajectoryId]], None] = lambda _: None,
    ) -> None:
        self._broken = broken
        self._lost = lost
        self._file = file
        self._key_of = key_of
        self._tell = accuse
        self._limits = limits
        self._where = (port, identity, listen)
        self._writer = GroupWriter(file, self, sign)
        self._clients: dict[str, Client] = {}
        self._accused: set[str] = set()
        self._expelled: set[str] = set()  # strangers
        self._credit = BUDGET  # bytes, of each replica
        self._held: dict[TrajectoryId, set[tuple[Client, Key]]] = {}  # fetches of what was not assigned yet
        self._local = threading.local()
        self._opened: list[SampleReader] = []
        self._readers = ThreadPoolExecutor(READERS, "reader", self._open_reader)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)
        self._up = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Returns once it listens."""
        self._writer.start()
        self._thread.start()
        if not self._up.wait(START_S):
            raise WireError(f"the sample store does not listen after {START_S:g} s")
        if self._error is not None:
            raise self._error

    @property
    def address(self) -> str:
        """`host:port`, with `#fingerprint` if other hosts may connect."""
        address, fingerprint = self._listener.address, self._listener.fingerprint
        return f"{address}#{fingerprint}" if fingerprint else address

    def close(self) -> None:
        """Commit what has arrived, acknowledge it, then hang up."""
        self._writer.close()
        self._call(self._over.set)
        self._thread.join()
        self._readers.shutdown()
        for reader in self._opened:
            reader.close()
        self._file.close()

    # ---------------------------------------------------------------------------------------- what the controller wants

    def assign(self, grants: Sequence[Grant]) -> None:
        ids = [grant.trajectory for grant in grants]
        self._do(lambda file: file.assign(grants), lambda: self._call(self._look_again, ids))

    def forget(self, ids: Sequence[TrajectoryId], archive: bool) -> None:
        self._do(lambda file: file.forget(ids, archive), lambda: self._call(self._look_again, ids))

    def expel(self, worker: str) -> None:
        """This stranger neither reads nor writes here any more."""
        self._call(self._expel, worker)

    def add_prompts(self, rows: Sequence[Row], then: Callable[[], None]) -> None:
        self._do(lambda file: file.add_prompts(rows), then)

    @property
    def prompts(self) -> set[PromptId]:
        """That are here."""
        return self._file.prompts

    def reconcile(self, order: Reconcile, archive: bool, then: Callable[[list[TrajectoryId]], None]) -> None:
        """`then` is told which samples should be kept and are not here."""
        missing: list[TrajectoryId] = []

        def finish() -> None:
            self._call(self._look_again, None)
            then(missing)

        def change(file: SampleFile) -> None:
            missing.extend(file.reconcile(order.grants, order.keep, archive, order.finished, order.prefixes))

        self._do(change, finish)

    def _do(self, change: Callable[[SampleFile], None], then: Callable[[], None]) -> None:
        def action(file: SampleFile) -> Callable[[], None]:
            change(file)
            return then

        self._writer.do(action)

    # ------------------------------------------------------------------------------- what the writer tells (its thread)

    def committed(self, acknowledgements: list[tuple[Client, int, Acknowledgement]]) -> None:
        if acknowledgements:
            self._call(self._acknowledge, acknowledgements)

    def accuse(self, client: Client, reason: str) -> None:
        self._call(self._cut_off, client, reason)

    def taken(self) -> None:
        self._call(self._read_on)

    def broken(self, error: BaseException) -> None:
        self._broken(error)

    def _call(self, action: Callable[..., object], *values: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: there is nobody left to tell
            self._loop.call_soon_threadsafe(action, *values)

    # ------------------------------------------------------------------------------------------------------ the network

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        except BaseException as error:  # the border of the thread
            self._error = error
            self._broken(error)
        finally:
            self._up.set()
            self._loop.close()

    async def _listen(self) -> None:
        self._over, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self._listener = Listener(self._known_key, self._serve, *self._where)
        self._up.set()
        over = asyncio.ensure_future(self._over.wait())
        await asyncio.wait([over, self._listener.accepting], return_when=asyncio.FIRST_COMPLETED)
        await self._listener.stop()
        for client in self._clients.values():
            client.channel.hang_up()
        await self._listener.disconnect()

    def _known_key(self, name: str) -> bytes:
        if name in self._accused or worker_of(name) in self._expelled:
            raise StrangerError("it was cut off")
        return self._key_of(name)

    async def _serve(self, channel: SignedChannel) -> None:
        client = Client(channel)
        self._admit(client)
        answering = asyncio.create_task(self._answer(client))
        try:
            while True:
                await client.may_send.wait()
                await self._has_room.wait()
                number, content = await channel.receive(client.longest_frame)
                self._hear(client, number, content)
        except OversizedFrameError as error:
            self._cut_off(client, str(error))
        finally:
            answering.cancel()
            self._leave(client)

    def _admit(self, client: Client) -> None:
        """A name has one connection, the newest."""
        earlier = self._clients.pop(client.name, None)
        if earlier is not None:
            earlier.channel.hang_up()
        if client.role not in FRAMES or len(self._clients) >= descriptors.shares().known:
            raise WireError("there is no room for it")
        self._clients[client.name] = client
        self._share_credit(client)

    def _share_credit(self, newcomer: Client | None = None) -> None:
        """Among the next power of two of replicas, so that few of those who come and go change everybody's share."""
        replicas = [client for client in self._clients.values() if client.role == "replica"]
        share = max(LEAST_CREDIT, BUDGET >> max(0, len(replicas) - 1).bit_length())
        told = replicas if share != self._credit else [newcomer] if newcomer in replicas else []
        self._credit = share
        for client in told:
            client.send(Credit(share))

    def _leave(self, client: Client) -> None:
        if self._clients.get(client.name) is client:
            del self._clients[client.name]
            self._share_credit()
        for key in list(client.fetches):
            self._drop_fetch(client, key)

    def _hear(self, client: Client, number: int, content: bytes) -> None:
        try:
            frame: FromClient = decode_from_client(content)
        except MALFORMED as error:
            self._cut_off(client, f"a frame that nobody knows ({error})")
            return
        if not isinstance(frame, FRAMES[client.role]):
            self._cut_off(client, f"{type(frame).__name__}, which is not for a {client.role} to send")
            return
        if client.jobs.qsize() > MOST_FETCHES:
            self._cut_off(client, f"more than {MOST_FETCHES:,} requests at once")
            return
        match frame:
            case Append():
                self._append(client, number, frame)
            case Fetch():
                self._fetch(client, (frame.trajectory, frame.attempt))
            case Withdraw():
                self._drop_fetch(client, (frame.trajectory, frame.attempt))
            case ReadLengths() | ReadSamples() | ReadPrompts():
                self._request(client, frame)

    def _cut_off(self, client: Client, reason: str) -> None:
        client.channel.hang_up()
        if client.name not in self._accused:
            self._accused.add(client.name)
            self._tell(client.name, reason)

    def _expel(self, worker: str) -> None:
        self._expelled.add(worker)
        for client in [one for one in self._clients.values() if worker_of(one.name) == worker]:
            client.channel.hang_up()

    # ---------------------------------------------------------------------------------------------------------- appends

    def _append(self, client: Client, number: int, frame: Append) -> None:
        try:
            complaint = complaint_about(frame, self._limits)
        except WireError as error:
            complaint = str(error)
        if complaint:
            self._cut_off(client, complaint)
            return
        received = ReceivedFrame(client, client.id, number, frame)
        client.queued_bytes += received.size
        if client.queued_bytes > self._may_wait(client):
            client.may_send.clear()
        self._writer.put(received)
        if self._writer.queued_bytes > QUEUED:
            self._has_room.clear()

    def _read_on(self) -> None:
        if self._writer.queued_bytes <= QUEUED // 2:
            self._has_room.set()

    def _acknowledge(self, acknowledgements: list[tuple[Client, int, Acknowledgement]]) -> None:
        for client, size, acknowledgement in acknowledgements:
            client.queued_bytes -= size
            if client.queued_bytes <= self._may_wait(client):
                client.may_send.set()
            client.send(acknowledgement)

    def _may_wait(self, client: Client) -> int:
        """Bytes for the writer before more is read of this one. Of a stranger one frame alone: what it sends may be of
        no use, and take long."""
        return 0 if client.is_stranger else self._credit

    # ---------------------------------------------------------------------------------------------------------- fetches

    def _fetch(self, client: Client, key: Key) -> None:
        if len(client.fetches) >= MOST_FETCHES:
            self._cut_off(client, f"more than {MOST_FETCHES:,} fetches at once")
        elif key not in client.fetches:
            client.fetches.add(key)
            self._held.setdefault(key[0], set()).add((client, key))
            self._look(client, key)

    def _look_again(self, ids: Iterable[TrajectoryId] | None) -> None:
        """Something is known now of these samples; None: of all."""
        for id in list(self._held) if ids is None else ids:
            for client, key in list(self._held.get(id, ())):
                self._look(client, key)

    def _look(self, client: Client, key: Key) -> None:
        """Answer, unless the store has not heard of the assignment yet."""
        trajectory, attempt = key
        head = self._file.heads.get(trajectory)
        if head is None:
            client.jobs.put_nowait(partial(self._refusal, client, key))
        elif head.attempt > attempt:
            self._drop_fetch(client, key)
            client.send(Refusal(trajectory, attempt, FENCED_OFF))
        elif head.attempt == attempt and head.replica != client.id:
            self._cut_off(client, f"a fetch of t{trajectory}, which it was not given")
        elif head.attempt == attempt:
            self._drop_fetch(client, key)
            client.jobs.put_nowait(partial(_begun if client.is_stranger else _prefix, key, head.prompt))

    def _refusal(self, client: Client, key: Key, reader: SampleReader) -> Step:
        if key not in client.fetches or not reader.is_forgotten(*key):
            return Step()
        self._call(self._drop_fetch, client, key)
        return Step(Refusal(*key, NOT_WANTED))

    def _drop_fetch(self, client: Client, key: Key) -> None:
        client.fetches.discard(key)
        held = self._held.get(key[0])
        if held is not None:
            held.discard((client, key))
            if not held:
                del self._held[key[0]]

    # ---------------------------------------------------------------------------------------------------------- answers

    def _request(self, client: Client, frame: ReadLengths | ReadSamples | ReadPrompts) -> None:
        if len(frame.ids) % 8 or len(frame.ids) > 8 * MOST_IDS:
            self._cut_off(client, f"a request with {len(frame.ids):,} bytes of ids")
            return
        answer = {ReadLengths: _lengths, ReadSamples: _slice, ReadPrompts: _rows}[type(frame)]
        client.jobs.put_nowait(partial(answer, frame.request, read_column(frame.ids).tolist()))

    async def _answer(self, client: Client) -> None:
        """One answer after the other; the next slice is read while this one is on its way."""
        while True:
            upcoming = self._submit(await client.jobs.get())
            while upcoming is not None:
                content, rest = await upcoming
                upcoming = self._submit(rest) if rest is not None else None
                if content:
                    client.channel.send(content)
                    await client.channel.room()

    def _submit(self, job: Job) -> asyncio.Future[tuple[bytes, Job | None]]:
        return self._loop.run_in_executor(self._readers, self._make, job)

    def _make(self, job: Job) -> tuple[bytes, Job | None]:
        """In a reader's thread. Damage that is in nobody's answer ends the store: it must not go unseen."""
        try:
            frame, rest, lost = job(self._local.reader)
            if lost is not None:
                self._lost([lost])
            return encode(frame) if frame is not None else b"", rest
        except Exception as error:  # the border of the thread
            self._broken(error)
            return b"", None

    def _open_reader(self) -> None:
        self._local.reader = SampleReader(self._file.path, self._file)
        self._opened.append(self._local.reader)


# ------------------------------------------------------------------------------------------------- in a reader's thread


def _prefix(key: Key, prompt: PromptId, reader: SampleReader) -> Step:
    try:
        pieces = reader.prefix(key[0])
    except SampleDamagedError as error:  # control takes it back
        log.warning("%s", error)
        return Step(lost=error.trajectory)
    except SampleGoneError:
        return Step(Refusal(*key, NOT_WANTED))
    return Step(Prefix(*key, reader.row(prompt), *PieceColumns.of(pieces)))


def _begun(key: Key, prompt: PromptId, reader: SampleReader) -> Step:
    """For a stranger: the tokens of the prompt and nothing else, neither the answer nor what others have generated."""
    row = reader.row(prompt)
    return Step(Prefix(*key, Row(row.id, row.tokens, ""), *PieceColumns.of([])))


def _lengths(request: int, ids: list[TrajectoryId], reader: SampleReader) -> Step:
    try:
        return Step(LengthTable(request, column([value for one in reader.lengths(ids) for value in one[1:]])))
    except SampleGoneError as error:
        return _failure(request, error)


def _slice(request: int, ids: list[TrajectoryId], reader: SampleReader) -> Step:
    try:
        samples = reader.read(ids, SLICE)
    except SampleGoneError as error:
        return _failure(request, error)
    left = ids[len(samples) :]
    return Step(slice_of(request, samples), partial(_slice, request, left) if left else None)


def _failure(request: int, error: SampleGoneError) -> Step:
    log.warning("%s", error)
    return Step(RequestFailed(request, str(error)), lost=error.trajectory)


def _rows(request: int, ids: list[PromptId], reader: SampleReader) -> Step:
    try:
        return Step(PromptRows(request, tuple([reader.row(id) for id in ids])))
    except PromptGoneError as error:  # or a store of another machine asks for what never was
        return Step(RequestFailed(request, str(error)))
