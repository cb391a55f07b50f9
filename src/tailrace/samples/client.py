"""How replicas and trainer ranks reach the stores: one thread for all of them.

`append` never waits. What was appended is kept until a store says that it is durable, and sent again on every new
connection; a store skips what it has. What waits for that (`then_all`, `complete`) is called afterwards, so an event
about data is sent once the data is durable. Each store says how many bytes it lets this client have without an
acknowledgement. When there are more, `waiting_for` says so, and who generates has to wait.

A store that does not answer is connected to again and again, each time in a thread of its own, so that one silent host
does not keep the traffic with other stores waiting.
"""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from functools import partial
from math import inf

from tailrace.errors import TailraceError
from tailrace.samples.messages import (
    Acknowledgement,
    AssignmentLost,
    Credit,
    Fetch,
    Fetched,
    FromClient,
    FromStore,
    LengthTable,
    Piece,
    Prefix,
    PromptRows,
    ReadLengths,
    ReadPrompts,
    ReadSamples,
    Refusal,
    RequestFailed,
    SampleLength,
    SampleSlice,
    StoredSample,
    Withdraw,
    column,
    decode_from_store,
    encode,
    pieces_in,
    read_column,
    samples_in,
    samples_of,
    segment_of,
)
from tailrace.samples.uploads import FIRST_CREDIT, Action, Completed, Growth, Key, Uploads
from tailrace.types import MALFORMED, PromptId, Row, Segment, TrajectoryId
from tailrace.wire.connection import Connection
from tailrace.wire.messages import Receipt, StoreAddress, StoreAddresses, WireError

CREDIT = 8 << 20  # bytes that a client keeps at most, whatever the stores would let it have
UNREAD = 16 << 20  # bytes of answers that wait for who asked; then nothing more is read from that store
RETRY_S, RETRY_MAX_S = 0.1, 2.0  # before the next try to connect
DIAL_S = 10.0  # until a connection is made and proven
GATHER_S = 0.002  # that what was appended waits for company
IDLE_S = 1.0
SILENT_S = 120.0  # without a word of a store that was asked
ROWS_AT_ONCE = 64  # prompts

Receipts = dict[Key, Receipt]
Samples = Generator[StoredSample, None, None]


class SampleStoreError(TailraceError):
    """Why samples cannot be had from a store."""


Question = ReadLengths | ReadSamples | ReadPrompts
Answer = LengthTable | SampleSlice | PromptRows
Answers = Generator[Answer, None, None]


class Inquiry:
    """What a trainer, or another store, has asked of a store, and the answers that it has not taken yet."""

    def __init__(self, number: int, store: int, kind: type[Question], ids: Sequence[int]) -> None:
        self.number = number
        self.store = store
        self._kind = kind
        self._missing = list(ids)
        self.answers: queue.SimpleQueue[Answer | RequestFailed] = queue.SimpleQueue()
        self.unread_bytes = 0

    @property
    def frame(self) -> Question:
        """To be sent at first, and again on a new connection."""
        return self._kind(self.number, column(self._missing))

    def take_in(self, frame: Answer | RequestFailed) -> None:
        if isinstance(frame, SampleSlice):
            self._missing = self._missing[samples_of(frame) :]
            self.unread_bytes += len(frame.tokens) + len(frame.logprobs)
        self.answers.put(frame)


class StoreConnection:
    """One store, as its client sees it. Only the client's thread touches the connection."""

    def __init__(self, address: StoreAddress) -> None:
        self.id = address.store
        self.address = address
        self.wire: Connection | None = None
        self.dialling = False
        self.dial_at = 0.0
        self.pause_s = RETRY_S
        self.number = self.answered = 0  # the last frame with samples, and the last that was answered
        self.outbox: deque[FromClient] = deque()  # small frames

    @property
    def is_answered(self) -> bool:
        """Nothing is on its way, or waits to be committed."""
        return self.answered >= self.number

    def hang_up(self, pause_s: float = 0.0) -> None:
        if self.wire is not None:
            self.wire.close()
        self.wire, self.dial_at = None, time.monotonic() + pause_s
        self.pause_s = min(2 * self.pause_s, RETRY_MAX_S) if pause_s else RETRY_S


class SampleClient:
    """`name` is the component's, for which the keys in the addresses were made. Methods may be called from any thread;
    only `lengths`, `read` and `close` wait. Who has many clients in one thread calls `turn` of each, again and again,
    instead of `open`, and `disconnect` instead of `close`."""

    def __init__(self, name: str, credit_bytes: int = CREDIT) -> None:
        self._name = name
        self._most_credit = credit_bytes
        self._lock = threading.Lock()  # of all that follows
        self._addresses: dict[int, StoreAddress] = {}
        self._departed: frozenset[int] = frozenset()
        self._stores: dict[int, StoreConnection] = {}
        self._uploads = Uploads(min(FIRST_CREDIT, credit_bytes))
        self._fetches: dict[Key, int] = {}  # and the store of each
        self._inquiries: dict[int, Inquiry] = {}
        self._asked = 0
        self._results: deque[Fetched | AssignmentLost] = deque()
        self._due: deque[Action] = deque()
        self._dialled: queue.SimpleQueue[tuple[StoreConnection, StoreAddress, Connection | None]] = queue.SimpleQueue()
        self._close_at = inf
        self._error: BaseException | None = None
        self._wake, self._woken = socket.socketpair()
        self._called = False
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def close(self, within_s: float = 2.0) -> None:
        """Wait for what was appended to be durable, for at most so long, then hang up."""
        self._close_at = time.monotonic() + within_s
        self._call()
        self._thread.join()

    def find(self, stores: StoreAddresses) -> None:
        """What the controller says of them."""
        self._departed = frozenset(stores.departed)
        self.connect(stores.addresses)

    def connect(self, addresses: Iterable[StoreAddress]) -> None:
        """To these stores, which are all that there are now."""
        with self._lock:
            self._addresses = {address.store: address for address in addresses}
        self._call()

    def _call(self) -> None:
        """The thread, unless it has been called and has not looked since."""
        if not self._called:
            self._called = True
            with suppress(OSError):  # it is closed
                self._wake.send(b"!")

    def _refuse_broken(self) -> None:
        if self._error is not None:
            raise self._error

    # ------------------------------------------------------------------------------------------------------- replicas

    def fetch(self, trajectory: TrajectoryId, attempt: int, store: int = 0) -> None:
        """`poll` has the answer once the store has heard of the assignment."""
        with self._lock:
            self._fetches[trajectory, attempt] = store
            self._post(store, Fetch(trajectory, attempt))
        self._call()

    def _post(self, store: int, frame: FromClient) -> None:
        """Without a connection it is left to the next one, which begins with all that has no answer."""
        found = self._stores.get(store)
        if found is not None and found.wire is not None:
            found.outbox.append(frame)

    def poll(self) -> list[Fetched | AssignmentLost]:
        """What has been answered. Never waits."""
        self._refuse_broken()
        with self._lock:
            found = list(self._results)
            self._results.clear()
        return found

    def append(
        self, trajectory: TrajectoryId, attempt: int, start: int, pieces: Iterable[Piece | Segment], store: int = 0
    ) -> None:
        """`start`: how many tokens after the prompt come before these."""
        self.append_all([Growth((trajectory, attempt), start, pieces, store)])

    def append_all(self, growths: Sequence[Growth]) -> None:
        self._refuse_broken()
        with self._lock:
            for growth in growths:
                self._uploads.append(growth)
            due = any(self._is_due(store) for store in {growth.store for growth in growths})
        if due:
            self._call()

    def _is_due(self, store: int) -> bool:
        found = self._stores.get(store)
        return found is None or self._uploads.may_send(store, found.is_answered)

    def then_all(self, keys: Sequence[Key], action: Callable[[frozenset[Key]], None]) -> None:
        """Call it, in the client's thread, once all that was appended to each of these is durable or gone (refused or
        withdrawn), with those that are durable."""
        left, durable = set(keys), set[Key]()

        def ended(key: Key, is_durable: bool) -> None:
            left.discard(key)
            if is_durable:
                durable.add(key)
            if not left:
                action(frozenset(durable))

        if not left:
            self._then((-1, -1), lambda _: action(frozenset()))
        for key in list(left):
            self._then(key, partial(ended, key))

    def _then(self, key: Key, ended: Callable[[bool], None]) -> None:
        self._refuse_broken()
        with self._lock:
            self._due.extend(self._uploads.then(key, ended))
        self._call()

    def complete(
        self,
        trajectory: TrajectoryId,
        attempt: int,
        tokens: int,
        completed: Completed,
        store: int = 0,
        failed: bool = False,
    ) -> None:
        """This attempt ends with so many tokens after the prompt. Call `completed`, in the client's thread, with the
        store's receipt once all of them are durable; with None if the attempt is refused or withdrawn before.
        `failed`: there is no reward for it, and its tokens are kept for people alone."""
        self._refuse_broken()
        with self._lock:
            self._uploads.complete((trajectory, attempt), store, tokens, completed, failed)
        self._call()

    def complete_all(self, attempts: Sequence[tuple[Key, int, int]], action: Callable[[Receipts], None]) -> None:
        """The same for several, each with its tokens and its store: call `action` with the receipts of those that are
        durable once each is durable or gone."""
        left, receipts = {key for key, _, _ in attempts}, Receipts()

        def ended(key: Key, receipt: Receipt | None) -> None:
            left.discard(key)
            if receipt is not None:
                receipts[key] = receipt
            if not left:
                action(receipts)

        if not attempts:
            self._then((-1, -1), lambda _: action(receipts))
        for key, tokens, store in attempts:
            self.complete(*key, tokens, partial(ended, key), store)

    def withdraw(self, trajectory: TrajectoryId, attempt: int) -> None:
        """Nobody wants it any more."""
        key = (trajectory, attempt)
        with self._lock:
            self._due.extend(self._uploads.withdraw(key))
            store = self._fetches.pop(key, None)
            if store is not None:
                self._post(store, Withdraw(trajectory, attempt))
        self._call()

    @property
    def unacknowledged_bytes(self) -> int:
        return self._uploads.bytes

    @property
    def waiting_for(self) -> str:
        """Which store has to catch up before more may be generated; nothing if none has to."""
        with self._lock:
            slow, size = self._uploads.slow_store()
            return f"store {slow}: {size / 1e6:.1f} MB not yet stored" if size else ""

    # ------------------------------------------------------------------------------------------------------- trainers

    def lengths(self, ids: Sequence[TrajectoryId], store: int = 0, within_s: float = SILENT_S) -> list[SampleLength]:
        """In the order of `ids`. `SampleStoreError` if the store has nothing to say for so long."""
        if not ids:
            return []
        with closing(self._ask(store, ReadLengths, ids, within_s)) as answers:
            answer = next(answers)
        assert isinstance(answer, LengthTable)
        rows = read_column(answer.values).reshape(-1, 4).tolist()
        return [SampleLength(id, *row) for id, row in zip(ids, rows, strict=True)]

    def read(self, ids: Sequence[TrajectoryId], store: int = 0, within_s: float = SILENT_S) -> Samples:
        """Whole samples, in the order of `ids`; some megabytes of them are in memory at a time."""
        left = len(ids)
        with closing(self._ask(store, ReadSamples, ids, within_s)) as answers:
            while left:
                answer = next(answers)
                assert isinstance(answer, SampleSlice)
                left -= samples_of(answer)
                yield from samples_in(answer)

    def rows(self, prompts: Sequence[PromptId], store: int = 0, within_s: float = SILENT_S) -> list[Row]:
        """For another store, which keeps samples of these prompts. In the order of `prompts`."""
        rows: list[Row] = []
        while len(rows) < len(prompts):
            with closing(self._ask(store, ReadPrompts, prompts[len(rows) :][:ROWS_AT_ONCE], within_s)) as answers:
                answer = next(answers)
            assert isinstance(answer, PromptRows)
            rows.extend(answer.rows)
        return rows

    def _ask(self, store: int, kind: type[Question], ids: Sequence[int], within_s: float) -> Answers:
        with self._lock:
            self._asked += 1
            inquiry = self._inquiries[self._asked] = Inquiry(self._asked, store, kind, ids)
            self._post(store, inquiry.frame)
        try:
            while True:
                self._call()
                yield self._answer(inquiry, within_s)
        finally:
            with self._lock:  # the client's thread goes through them
                del self._inquiries[inquiry.number]

    def _answer(self, inquiry: Inquiry, within_s: float) -> Answer:
        until = time.monotonic() + within_s
        while inquiry.answers.empty() and time.monotonic() < until:
            self._refuse_broken()
            if inquiry.store in self._departed or self._close_at < inf:
                raise SampleStoreError(f"store {inquiry.store} has left the run")
            with suppress(queue.Empty):
                return self._taken(inquiry, inquiry.answers.get(timeout=min(within_s, IDLE_S)))
        if inquiry.answers.empty():
            raise SampleStoreError(f"{self._title(inquiry.store)} has not answered for {within_s:g} s; see its log")
        return self._taken(inquiry, inquiry.answers.get())

    def _taken(self, inquiry: Inquiry, answer: Answer | RequestFailed) -> Answer:
        if isinstance(answer, RequestFailed):
            raise SampleStoreError(f"{self._title(inquiry.store)} cannot answer: {answer.reason}")
        if isinstance(answer, SampleSlice):
            with self._lock:
                inquiry.unread_bytes -= len(answer.tokens) + len(answer.logprobs)
        return answer

    def _title(self, store: int) -> str:
        address = self._addresses.get(store)
        where = address.endpoint.removeprefix("tcp://") if address is not None else "an address that is not known"
        return f"store {store} at {where}"

    # ---------------------------------------------------------------------------------------------- the client's thread

    def _run(self) -> None:
        try:
            while not self._is_over():
                self.turn()
                if not self._due:
                    self._wait()
        except BaseException as error:  # the border of the thread: whoever calls next raises it
            self._error = error
        finally:
            self.disconnect()

    def disconnect(self) -> None:
        """Hang up, whatever is under way."""
        for store in self._stores.values():
            store.hang_up()
        self._woken.close()
        self._wake.close()

    def _is_over(self) -> bool:
        left = self._due or self.unacknowledged_bytes
        return self._close_at < inf and (not left or time.monotonic() >= self._close_at)

    def turn(self) -> None:
        """Whatever can be done without waiting."""
        while self._due:
            self._due.popleft()()
        self._follow_addresses()
        while not self._dialled.empty():
            self._begin(*self._dialled.get())
        for store in self._stores.values():
            self._serve(store)

    def _follow_addresses(self) -> None:
        with self._lock:
            for number in [number for number in self._stores if number not in self._addresses]:
                self._stores.pop(number).hang_up()
            for number, address in self._addresses.items():
                store = self._stores.setdefault(number, StoreConnection(address))
                if store.address != address:
                    store.address = address
                    store.hang_up()

    def _serve(self, store: StoreConnection) -> None:
        if store.wire is None:
            if not store.dialling and time.monotonic() >= store.dial_at:
                store.dialling = True
                threading.Thread(target=self._dial, args=(store, store.address), daemon=True).start()
            return
        try:
            self._receive(store, store.wire)
            self._send(store, store.wire)
        except (OSError, WireError):
            store.hang_up(store.pause_s)

    def _dial(self, store: StoreConnection, address: StoreAddress) -> None:
        """In a thread of its own."""
        wire = None
        with suppress(OSError, WireError):
            wire = Connection(address.endpoint, self._name, bytes.fromhex(address.key), address.fingerprint, DIAL_S)
        self._dialled.put((store, address, wire))
        self._call()

    def _begin(self, store: StoreConnection, address: StoreAddress, wire: Connection | None) -> None:
        """Whatever has no answer yet is sent on the new connection."""
        store.dialling = False
        if wire is None:
            store.hang_up(store.pause_s)
            return
        if address != store.address or self._stores.get(store.id) is not store:
            wire.close()
            return
        with self._lock:
            store.wire, store.pause_s, store.answered = wire, RETRY_S, store.number
            self._uploads.begin_anew(store.id)
            fetches = [Fetch(*key) for key, at in self._fetches.items() if at == store.id]
            asked = [inquiry.frame for inquiry in self._inquiries.values() if inquiry.store == store.id]
            store.outbox = deque([*fetches, *asked])

    def _send(self, store: StoreConnection, wire: Connection) -> None:
        wire.flush()
        while not wire.has_unsent and (frame := self._next_frame(store)) is not None:
            wire.send(store.number, encode(frame))
            wire.flush()

    def _next_frame(self, store: StoreConnection) -> FromClient | None:
        with self._lock:
            if store.outbox:
                return store.outbox.popleft()
            frame = self._uploads.take(store.id, store.number + 1, time.monotonic(), store.is_answered)
            store.number += frame is not None
            return frame

    def _wait(self) -> None:
        """Until something arrives, can be sent, or is due; then a little for company, so that frames are few."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        for store in self._stores.values():
            if store.wire is not None:
                reads = select.POLLIN if self._takes_answers(store.id) else 0
                poller.register(store.wire, reads | (select.POLLOUT if store.wire.has_unsent else 0))
        ready = dict(poller.poll(int(1000 * max(0.0, self._due_at() - time.monotonic())) + 1))
        if self._woken.fileno() in ready:
            time.sleep(GATHER_S)
            self._woken.recv(1 << 16)
            self._called = False  # what is said from here on calls again; what was said before is seen in this turn

    def _due_at(self) -> float:
        now = time.monotonic()
        with self._lock:
            lost = [store.dial_at for store in self._stores.values() if store.wire is None and not store.dialling]
            free = [(id, store) for id, store in self._stores.items() if _is_free(store)]
            retries = [self._uploads.due_at(id, store.is_answered) for id, store in free]
        return min([now + IDLE_S, self._close_at, *lost, *retries])

    # --------------------------------------------------------------------------------------------------------- answers

    def _takes_answers(self, store: int) -> bool:
        with self._lock:
            return sum([one.unread_bytes for one in self._inquiries.values() if one.store == store]) < UNREAD

    def _receive(self, store: StoreConnection, wire: Connection) -> None:
        if not self._takes_answers(store.id):
            return
        for content in wire.receive():
            try:
                self._take_in(store, decode_from_store(content))
            except MALFORMED as error:
                raise WireError(f"{self._title(store.id)} sends what nobody knows ({error})") from None
            if not self._takes_answers(store.id):
                return

    def _take_in(self, store: StoreConnection, frame: FromStore) -> None:
        with self._lock:
            match frame:
                case Credit(size):
                    self._uploads.queue(store.id).credit = min(size, self._most_credit)
                case Acknowledgement():
                    store.answered = max(store.answered, frame.number)
                    self._settle(frame)
                case Prefix(trajectory, attempt, row):
                    if self._fetches.pop((trajectory, attempt), None) is not None:
                        self._results.append(
                            Fetched(trajectory, attempt, row, tuple(map(segment_of, pieces_in(frame))))
                        )
                case Refusal(trajectory, attempt, reason):
                    self._refused((trajectory, attempt), reason)
                case LengthTable(request) | SampleSlice(request) | PromptRows(request) | RequestFailed(request):
                    if request in self._inquiries:
                        self._inquiries[request].take_in(frame)

    def _settle(self, said: Acknowledgement) -> None:
        receipts = {(one.trajectory, one.attempt): one for one in said.receipts}
        columns, now = (said.trajectories, said.attempts, said.lengths, said.verdicts), time.monotonic()
        for trajectory, attempt, length, verdict in zip(*[read_column(one).tolist() for one in columns], strict=True):
            key = (trajectory, attempt)
            due, lost = self._uploads.settle(key, verdict, length, said.number, now, receipts.get(key))
            self._due.extend(due)
            if lost:
                self._refused(key, lost)

    def _refused(self, key: Key, reason: str) -> None:
        self._fetches.pop(key, None)
        self._due.extend(self._uploads.withdraw(key))
        self._results.append(AssignmentLost(*key, reason))


def _is_free(store: StoreConnection) -> bool:
    """It has a connection that takes more."""
    return store.wire is not None and not store.wire.has_unsent
