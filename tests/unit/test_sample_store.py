"""A sample store and its clients over real sockets: exactly once, fenced, held back, refused, and bounded."""

from __future__ import annotations

import random
import threading
import tracemalloc
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sample_stores import (
    DEADLINE_S,
    KEY,
    PROMPT,
    RunningStore,
    address,
    client,
    grant,
    ids_in,
    once_durable,
    piece,
    store,
    stored,
    stream,
    tokens_of,
    until,
)
from tailrace.samples import client as client_module
from tailrace.samples import server as server_module
from tailrace.samples.client import SampleClient, SampleStoreError
from tailrace.samples.messages import (
    MOST_RUNS,
    Append,
    AssignmentLost,
    Fetch,
    Fetched,
    Piece,
    PieceColumns,
    ReadLengths,
    SampleLength,
    Withdraw,
    column,
    encode,
)
from tailrace.samples.server import READERS
from tailrace.types import Row
from tailrace.wire.connection import Connection
from tailrace.wire.keys import sample_key, signed_receipt
from tailrace.wire.messages import UNNUMBERED, Receipt
from tailrace.wire.session import StrangerError
from tailrace.wire.tls import Identity

TRAINER = "trainer-0/1"


def read(running: RunningStore, *ids: int) -> list[list[int]]:
    with client(running.port, TRAINER) as trainer:
        return [ids_in(sample) for sample in trainer.read(ids)]


def fetched(one: SampleClient) -> Fetched | AssignmentLost:
    found: list[Fetched | AssignmentLost] = []
    until(lambda: found.extend(one.poll()) or found)
    return found[0]


def test_samples_arrive_whole_and_an_action_follows_when_they_are_durable(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as replica:
        running.assign(*[grant(id) for id in range(20)])
        durable: list[int] = []
        for id in range(20):
            stream(replica, id, range(10, 200, 17))
            once_durable(replica, id, 1, lambda id=id: durable.append(running.file.heads[id].tokens))
        until(lambda: len(durable) == 20)
        assert durable == [range(10, 200, 17)[-1]] * 20
        assert read(running, *range(20)) == [tokens_of(id, 0, durable[0]).tolist() for id in range(20)]
        assert replica.unacknowledged_bytes == 0


def test_a_restart_of_the_server_in_the_middle_of_a_stream_costs_and_doubles_nothing(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as replica:
        running.assign(grant(1), grant(2))
        for restart in range(4):
            for start in range(restart * 500, restart * 500 + 500, 5):
                for id in (1, 2):
                    replica.append(id, 1, start, [piece(id, start, start + 5)])
            if restart % 2:
                stored(replica, 1)
            running.restart()
        stored(replica, 1)
        stored(replica, 2)
        assert read(running, 1, 2) == [tokens_of(id, 0, 2000).tolist() for id in (1, 2)]


def test_a_fetch_is_held_back_until_the_store_has_heard_of_the_assignment(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as replica, client(running.port, "replica-1/1") as other:
        running.assign(grant(1))
        stream(replica, 1, [30, 50])
        stored(replica, 1)
        running.assign(grant(8, replica=1))
        for key in ((1, 2), (9, 1), (8, 1)):
            other.fetch(*key)
        assert fetched(other) == Fetched(8, 1, PROMPT, ())  # the others, which were asked for before it, are held back
        running.assign(grant(1, attempt=2, replica=1, resume=True))
        answer = fetched(other)
        assert isinstance(answer, Fetched)
        assert (answer.trajectory, answer.attempt, answer.row) == (1, 2, PROMPT)
        assert [bytes(one.tokens) for one in answer.prefix] == [tokens_of(1, 0, 50).tobytes()]
        assert np.allclose(np.frombuffer(answer.prefix[0].logprobs or b"", "<f4"), -tokens_of(1, 0, 50) / 1e6)
        running.server.forget([9], archive=False)
        running.assign(grant(9, replica=1))
        assert fetched(other) == Fetched(9, 1, PROMPT, ())


def test_who_is_fenced_off_hears_it_and_its_actions_are_dropped(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as replica:
        running.assign(grant(1), grant(2))
        stream(replica, 1, [10])
        stored(replica, 1)
        running.assign(grant(1, attempt=2, replica=1))
        called: list[str] = []
        replica.append(1, 1, 10, [piece(1, 10, 20)])
        once_durable(replica, 1, 1, lambda: called.append("t1"))
        stream(replica, 2, [10])
        replica.then_all([(1, 1), (2, 1)], lambda durable: called.append(str(sorted(durable))))
        until(lambda: called)
        assert called == ["[(2, 1)]"]
        refused = fetched(replica)
        assert (refused.trajectory, refused.attempt) == (1, 1)
        assert isinstance(refused, AssignmentLost)
        replica.fetch(1, 1)
        assert isinstance(fetched(replica), AssignmentLost)


def test_what_is_forgotten_is_refused_whoever_asks(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as replica, client(running.port, TRAINER) as trainer:
        running.assign(grant(1))
        stream(replica, 1, [10])
        stored(replica, 1)
        running.server.forget([1], archive=True)
        until(lambda: 1 not in running.file.heads)
        replica.append(1, 1, 10, [piece(1, 10, 20)])
        assert isinstance(fetched(replica), AssignmentLost)
        replica.fetch(1, 1)
        assert isinstance(fetched(replica), AssignmentLost)
        with pytest.raises(SampleStoreError, match=r"store 0 at 127.0.0.1:\d+ cannot answer: .* does not have t1"):
            list(trainer.read([1]))


def test_what_is_generated_anew_may_be_asked_for_before_the_store_has_heard_of_it(tmp_path: Path) -> None:
    """As when a stranger is sent away: what it has made is forgotten, and begun by others at once."""
    with store(tmp_path) as running, client(running.port) as replica, client(running.port, "replica-1/1") as other:
        running.assign(grant(1), grant(8, replica=1))
        stream(replica, 1, [10])
        stored(replica, 1)
        running.server.forget([1], archive=True)
        until(lambda: 1 not in running.file.heads)
        other.fetch(1, 2)
        stream(other, 1, [5], attempt=2)
        other.fetch(8, 1)
        assert fetched(other) == Fetched(8, 1, PROMPT, ()), "the first one is held back"
        running.assign(grant(1, attempt=2, replica=1))
        assert fetched(other) == Fetched(1, 2, PROMPT, ())
        stored(other, 1, attempt=2)
        assert read(running, 1) == [tokens_of(1, 0, 5).tolist()]


def test_what_the_store_has_not_heard_of_is_sent_until_it_has(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as replica:
        done: list[int] = []
        stream(replica, 1, range(10, 300, 10))
        once_durable(replica, 1, 1, lambda: done.append(1))
        stream(replica, 2, [10])
        replica.withdraw(2, 1)
        running.assign(grant(3))
        stream(replica, 3, [10])
        stored(replica, 3)  # the store has seen the frames before it, and could do nothing with them
        assert not done
        running.assign(grant(1))
        until(lambda: done)
        assert read(running, 1) == [tokens_of(1, 0, 290).tolist()]
        assert 2 not in running.file.heads
        assert replica.unacknowledged_bytes == 0


def test_a_store_that_has_lost_what_it_acknowledged_is_found_out(tmp_path: Path) -> None:
    with store(tmp_path / "first") as running, client(running.port) as replica:
        running.assign(grant(1))
        stream(replica, 1, [10])
        stored(replica, 1)
        running.restart(tmp_path / "second")
        running.assign(grant(1))
        replica.append(1, 1, 10, [piece(1, 10, 20)])
        refused = fetched(replica)
        assert isinstance(refused, AssignmentLost)
        assert refused.reason == "the store has 0 tokens of it, and had acknowledged 10"


def test_a_complete_sample_has_a_receipt_of_its_store_and_does_not_grow_any_more(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as replica:
        running.assign(*[grant(id) for id in range(4)])
        receipts: dict[int, Receipt | None] = {}
        for start, version in ((0, 3), (10, None), (20, 2)):
            replica.append(1, 1, start, [piece(1, start, start + 10, version)])
        stream(replica, 2, [10])
        stored(replica, 2)
        for id, tokens in ((1, 30), (2, 10), (3, 0)):  # on its way, stored already, without any token
            replica.complete(id, 1, tokens, partial(receipts.__setitem__, id))
        until(lambda: len(receipts) == 3)
        assert receipts == {
            1: signed_receipt("store-0/1", KEY, 1, 1, 30, 2, 3),
            2: signed_receipt("store-0/1", KEY, 2, 1, 10, 1, 1),
            3: signed_receipt("store-0/1", KEY, 3, 1, 0, -1, -1),
        }
        assert not replica.unacknowledged_bytes
        replica.append(1, 1, 30, [piece(1, 30, 40)])
        assert fetched(replica) == AssignmentLost(1, 1, "there is a newer attempt, or nobody wants it any more")
        running.assign(grant(1, attempt=2, resume=True))
        replica.append(1, 2, 30, [piece(1, 30, 40)])
        stored(replica, 1, attempt=2)
        assert read(running, 1) == [tokens_of(1, 0, 40).tolist()]
        replica.complete(1, 1, 30, partial(receipts.__setitem__, 1))
        until(lambda: receipts[1] is None)


def test_a_receipt_is_asked_for_again_on_a_new_connection(tmp_path: Path, monkeypatch) -> None:
    with store(tmp_path) as running, client(running.port) as replica:
        running.assign(grant(1))
        stream(replica, 1, [10])
        stored(replica, 1)
        monkeypatch.setattr(running.server, "_acknowledge", lambda *_: None)  # committed, and never said
        receipts: list[Receipt | None] = []
        replica.append(1, 1, 10, [piece(1, 10, 20)])
        replica.complete(1, 1, 20, receipts.append)
        until(lambda: running.file.heads[1].tokens == 20)
        running.restart()
        until(lambda: receipts)
        assert receipts == [signed_receipt("store-0/1", KEY, 1, 1, 20, 1, 1)]
        assert read(running, 1) == [tokens_of(1, 0, 20).tolist()]


def test_lengths_and_samples_come_in_the_order_asked_for_and_in_bounded_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "SLICE", 1 << 18)
    monkeypatch.setattr(client_module, "UNREAD", 1 << 19)
    count, length = 200, 10_000  # 16 MB
    with store(tmp_path) as running, client(running.port, credit_bytes=1 << 30) as replica:
        running.assign(*[grant(id) for id in range(count)])
        for id in range(count):
            stream(replica, id, [length // 2, length])
        replica.append(0, 1, length, [piece(0, length, length + 7, version=None)])
        for id in range(count):
            stored(replica, id)
        order = random.Random(1).sample(range(count), count)
        with client(running.port, TRAINER) as trainer:
            lengths = [SampleLength(id, 3, 3 + length, length, length if id else length + 7) for id in order]
            assert trainer.lengths(order) == lengths
            reading = trainer.read(order)
            first = next(reading)
            assert first.id == order[0]
            until(lambda: unread(trainer) >= 1 << 19)
            assert len(read(running, *order)) == count  # others have all of theirs, and this one waits to be read
            assert unread(trainer) < 1 << 20
            reading.close()
            tracemalloc.start()
            try:
                for id, sample in zip(order, trainer.read(order), strict=True):
                    assert (sample.id, sample.prompt, sample.group) == (id, PROMPT.id, id // 4)
                    assert bytes(sample.pieces[0].tokens) == PROMPT.tokens
                    assert bytes(sample.pieces[1].tokens) == tokens_of(id, 0, length).tobytes()
                    assert len(sample.pieces) == (3 if id == 0 else 2)
                assert tracemalloc.get_traced_memory()[1] < 6 << 20
            finally:
                tracemalloc.stop()


def unread(trainer: SampleClient) -> int:
    return sum(inquiry.unread_bytes for inquiry in trainer._inquiries.values())


def test_a_read_goes_on_after_a_restart_of_the_store(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "SLICE", 1 << 14)
    monkeypatch.setattr(client_module, "UNREAD", 1 << 14)
    with store(tmp_path) as running, client(running.port) as replica, client(running.port, TRAINER) as trainer:
        running.assign(*[grant(id) for id in range(100)])
        for id in range(100):
            stream(replica, id, [2000])
        for id in range(100):
            stored(replica, id)
        reading = trainer.read(range(100))
        begun = [next(reading).id for _ in range(3)]
        running.restart()
        assert begun + [sample.id for sample in reading] == list(range(100))


def test_a_trainer_waits_only_so_long_and_names_the_store(tmp_path: Path) -> None:
    with store(tmp_path) as running:
        port = running.port
    with (
        client(port, TRAINER) as trainer,
        pytest.raises(SampleStoreError, match=f"store 0 at 127.0.0.1:{port} has not answered for 0.2 s"),
    ):
        trainer.lengths([1], within_s=0.2)


# ------------------------------------------------------------------------------------------------------- back-pressure


def test_a_slow_disk_uses_up_credits_by_name_and_all_recovers_by_itself(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "QUEUED", 1 << 18)
    with store(tmp_path) as running, ExitStack() as clients:
        replicas = [clients.enter_context(client(running.port, f"replica-{id}/1", 1 << 20)) for id in range(4)]
        running.assign(*[grant(id, replica=id // 10) for id in range(40)])
        free, commit = threading.Event(), running.file.commit
        monkeypatch.setattr(running.file, "commit", lambda: (free.wait(), commit())[1])
        sent = [generate_until_held_up(replica, number) for number, replica in enumerate(replicas)]
        assert all(replica.waiting_for == "store 0: 1.1 MB not yet stored" for replica in replicas)
        until(lambda: not running.server._has_room.is_set())
        assert running.server._writer.queued_bytes < 1 << 22  # what is read is bounded, whatever was sent
        free.set()
        until(lambda: not any(replica.unacknowledged_bytes for replica in replicas))
        assert not any(replica.waiting_for for replica in replicas)
        assert [len(ids) for ids in read(running, *range(40))] == [length for lengths in sent for length in lengths]
        assert not running.accused


def test_all_replicas_share_one_budget_of_what_may_be_on_its_way(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "BUDGET", 1 << 21)
    with store(tmp_path) as running, ExitStack() as clients:
        replicas = [clients.enter_context(client(running.port, f"replica-{id}/1")) for id in range(8)]
        until(lambda: {replica._uploads.queue(0).credit for replica in replicas} == {1 << 18})
        running.assign(*[grant(id, replica=id // 10) for id in range(80)])
        free, commit = threading.Event(), running.file.commit
        monkeypatch.setattr(running.file, "commit", lambda: (free.wait(), commit())[1])
        for number, replica in enumerate(replicas):
            generate_until_held_up(replica, number)
        assert sum(replica.unacknowledged_bytes for replica in replicas) < (1 << 21) + 8 * 10 * 500 * 8
        free.set()
        until(lambda: not any(replica.unacknowledged_bytes for replica in replicas))
        for replica in replicas[1:]:
            replica.close(0.0)
        until(lambda: replicas[0]._uploads.queue(0).credit == 1 << 21)  # who stays has what the others had


def test_who_sends_more_than_its_share_is_not_read_until_that_is_stored(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "BUDGET", 1 << 18)
    with store(tmp_path) as running, client(running.port) as honest:
        running.assign(grant(1), grant(2, replica=1))
        free, commit = threading.Event(), running.file.commit
        monkeypatch.setattr(running.file, "commit", lambda: (free.wait(), commit())[1])
        greedy = Connection(f"tcp://127.0.0.1:{running.port}", "replica-1/1", sample_key(KEY, "replica-1/1"))
        for number, start in enumerate(range(0, 20_000, 200), 1):
            for _ in range(20):  # the same again and again
                greedy.send(number, encode(frame(2, start, [piece(2, start, start + 200)])))
        until(lambda: greedy.flush() or "replica-1/1" in running.server._clients)
        until(lambda: greedy.flush() or not running.server._clients["replica-1/1"].may_send.is_set())
        assert running.server._writer.queued_bytes < 1 << 19
        stream(honest, 1, [10])
        free.set()
        stored(honest, 1)
        greedy.close()


def generate_until_held_up(replica: SampleClient, number: int) -> list[int]:
    """As an engine does: ten samples, a few tokens of each at a time."""
    lengths = [0] * 10
    while not replica.waiting_for:
        for at, start in enumerate(lengths):
            replica.append(number * 10 + at, 1, start, [piece(number * 10 + at, start, start + 500)])
            lengths[at] += 500
    return lengths


# ------------------------------------------------------------------------------------------------------------ strangers


def frame(trajectory: int, start: int, pieces: list[Piece], attempt: int = 1) -> Append:
    many = len(pieces)
    columns = column([trajectory] * many), column([attempt] * many), column([start] * many), column([0] * many)
    return Append(*columns, *PieceColumns.of(pieces))


GOOD = piece(1, 0, 4)
TOKENS, LOGPROBS = np.array([1, 2, 3, 4], "<i4"), np.array([-1, -2, -3, -4], "<f4")
LIES = {
    "a token outside of the vocabulary": (Piece(1, (TOKENS + 49_997).tobytes(), GOOD.logprobs), "token 50001, where"),
    "a negative token": (Piece(1, (-TOKENS).tobytes(), GOOD.logprobs), "token -4, where"),
    "a log-prob that is no number": (Piece(1, GOOD.tokens, (LOGPROBS * np.nan).tobytes()), "log-probs that are not"),
    "a probability above 1": (Piece(1, GOOD.tokens, (-LOGPROBS).tobytes()), "log-probs that are not"),
    "fewer log-probs than tokens": (Piece(1, GOOD.tokens, LOGPROBS[1:].tobytes()), "4 tokens and 3 log-probs, where"),
    "log-probs of what nobody sampled": (
        Piece(None, GOOD.tokens, LOGPROBS.tobytes()),
        "4 tokens and 4 log-probs, where",
    ),
    "half a token": (Piece(1, GOOD.tokens[:-2], LOGPROBS[:3].tobytes()), "3.5 tokens and 3 log-probs, where"),
    "a version that cannot be": (Piece(1 << 40, GOOD.tokens, GOOD.logprobs), "a version from"),
}


def accused(running: RunningStore, content: bytes, name: str = "replica-0/1") -> str:
    """What the store says of somebody who sends this, and that it does not let it in again."""
    key = sample_key(KEY, name)
    with Connection(f"tcp://127.0.0.1:{running.port}", name, key) as wire:
        wire.send(1, content)
        with suppress(ConnectionError):  # it may be cut off before all of it is sent
            wire.flush()
        until(lambda: name in running.accused)
    with pytest.raises(StrangerError):
        Connection(f"tcp://127.0.0.1:{running.port}", name, key)
    return running.accused[name]


@pytest.mark.parametrize(("lie", "sentence"), LIES.values(), ids=LIES)
def test_who_sends_what_cannot_be_true_is_cut_off_and_named(tmp_path: Path, lie: Piece, sentence: str) -> None:
    with store(tmp_path) as running:
        running.assign(grant(1))
        assert sentence in accused(running, encode(frame(1, 0, [lie])))
        assert running.file.heads[1].tokens == 0


def test_who_sends_what_is_not_its_own_to_send_is_cut_off_and_named(tmp_path: Path) -> None:
    with store(tmp_path) as running:
        running.assign(grant(1), grant(2))
        said = [
            accused(running, encode(frame(1, 0, [piece(1, 0, 5)])), "replica-1/1"),
            accused(running, encode(frame(1, 19_990, [piece(1, 0, 11)])), "replica-0/2"),
            accused(running, encode(ReadLengths(1, column([1]))), "replica-0/3"),
            accused(running, encode(frame(1, 0, [GOOD])), "trainer-0/1"),
            accused(running, b"nonsense", "replica-0/4"),
            accused(running, encode(Fetch(2, 1)), "replica-1/2"),
        ]
        assert said[:4] == [
            "tokens of t1, which it was not given",
            "t1 with more tokens than 20,000, the most that a completion may have",
            "ReadLengths, which is not for a replica to send",
            "Append, which is not for a trainer to send",
        ]
        assert said[4].startswith("a frame that nobody knows")
        assert said[5] == "a fetch of t2, which it was not given"
        with client(running.port) as replica:  # nobody else is the worse for it
            stream(replica, 1, [10])
            stored(replica, 1)


def test_a_frame_has_no_more_runs_than_are_written_at_once(tmp_path: Path) -> None:
    with store(tmp_path) as running:
        running.assign(*[grant(id) for id in range(MOST_RUNS + 100)])
        assert accused(running, encode(frame(1, 0, [GOOD] * (MOST_RUNS + 1)))) == f"{MOST_RUNS + 1:,} runs in a frame"
        with client(running.port, "replica-0/2") as replica:
            for id in range(MOST_RUNS + 100):
                replica.append(id, 1, 0, [piece(id, 0, 1)])
            until(lambda: all(running.file.heads[id].tokens == 1 for id in range(MOST_RUNS + 100)))
            assert "replica-0/2" not in running.accused


def test_of_a_stranger_one_frame_at_a_time_waits_to_be_written(tmp_path: Path) -> None:
    with store(tmp_path) as running:
        running.assign(grant(1, replica=5))
        name, held = "replica-5/1@alice", threading.Event()
        running.server.add_prompts([PROMPT], lambda: until(held.is_set))  # in the writer's thread
        with Connection(f"tcp://127.0.0.1:{running.port}", name, sample_key(KEY, name)) as wire:
            for number, start in enumerate((0, 4, 8), start=1):
                wire.send(number, encode(frame(1, start, [piece(1, start, start + 4)])))
            wire.flush()
            until(lambda: name in running.server._clients and not running.server._clients[name].may_send.is_set())
            one = running.server._clients[name].queued_bytes
            assert 0 < one < 2 * len(encode(frame(1, 0, [GOOD])))
            held.set()
            until(lambda: running.file.heads[1].tokens == 12)
        assert name not in running.accused


def test_who_asks_faster_than_it_can_be_answered_or_sends_too_much_at_once_is_cut_off(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("tailrace.samples.server.MOST_FETCHES", 100)
    monkeypatch.setattr("tailrace.samples.server.LONGEST_OF_STRANGERS", 1 << 16)
    with store(tmp_path) as running:
        name, held = "replica-1/1@alice", threading.Event()
        for _ in range(READERS):  # nobody is answered meanwhile
            running.server._readers.submit(held.wait, DEADLINE_S)
        with Connection(f"tcp://127.0.0.1:{running.port}", name, sample_key(KEY, name)) as wire:
            for number in range(200):
                wire.send(UNNUMBERED, encode(Fetch(number, 1)))
                wire.send(UNNUMBERED, encode(Withdraw(number, 1)))
            with suppress(ConnectionError):  # it may be cut off before all of it is sent
                wire.flush()
            until(lambda: name in running.accused)
        held.set()
        assert running.accused[name] == "more than 100 requests at once"
        assert accused(running, bytes(1 << 17), "replica-1/2@alice") == "a message of 131,072 bytes"


def test_a_prompt_that_never_was_is_refused_and_ends_nothing(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port, "store-1/1") as other:
        with pytest.raises(SampleStoreError, match="p99 is missing"):
            other.rows([PROMPT.id, 99])
        assert other.rows([PROMPT.id]) == [PROMPT]


def test_a_stranger_is_not_let_in(tmp_path: Path) -> None:
    with store(tmp_path) as running, pytest.raises(StrangerError):
        Connection(f"tcp://127.0.0.1:{running.port}", "replica-0/1", sample_key(KEY, "replica-1/1"))


def test_a_client_follows_its_store_to_another_address(tmp_path: Path) -> None:
    with store(tmp_path / "first") as first, store(tmp_path / "second") as second, client(first.port) as replica:
        first.assign(grant(1))
        stream(replica, 1, [10])
        stored(replica, 1)
        second.assign(grant(2))
        replica.connect([address(second.port, "replica-0/1")])
        stream(replica, 2, [10])
        stored(replica, 2)
        assert read(second, 2) == [tokens_of(2, 0, 10).tolist()]


def test_other_hosts_come_encrypted_and_know_the_store_by_its_certificate(tmp_path: Path) -> None:
    identity = Identity()
    with store(tmp_path, identity) as running, client(running.port) as replica:
        assert running.server.address == f"127.0.0.1:{running.port}#{identity.fingerprint}"
        running.assign(*[grant(id) for id in range(3)])
        replica.connect([address(running.port, "replica-0/1", identity.fingerprint)])
        for id in range(3):
            stream(replica, id, range(5000, 20_001, 5000))
        for id in range(3):
            stored(replica, id)
        trainer = SampleClient(TRAINER)
        trainer.connect([address(running.port, TRAINER, identity.fingerprint)])
        trainer.open()
        assert [ids_in(one) for one in trainer.read(range(3))] == [tokens_of(id, 0, 20_000).tolist() for id in range(3)]
        trainer.connect([address(running.port, TRAINER, "0" * 64)])
        with pytest.raises(SampleStoreError, match="has not answered"):
            trainer.lengths([1], within_s=0.3)
        trainer.close(0.0)


def test_a_stranger_gets_the_tokens_of_the_prompt_and_nothing_that_others_have_made(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as ours:
        running.assign(grant(1))
        stream(ours, 1, [10])
        stored(ours, 1)
        running.assign(grant(1, attempt=2, replica=5, resume=True))
        with client(running.port, "replica-5/1@alice") as theirs:
            theirs.fetch(1, 2)
            found: list[Any] = []
            until(lambda: found.extend(theirs.poll()) or found)
            assert (found[0].row, found[0].prefix) == (Row(PROMPT.id, PROMPT.tokens, ""), ())


def test_an_expelled_stranger_is_hung_up_on_and_does_not_come_in_again(tmp_path: Path) -> None:
    with store(tmp_path) as running:
        name = "replica-5/1@alice"
        with Connection(f"tcp://127.0.0.1:{running.port}", name, sample_key(KEY, name)):
            until(lambda: name in running.server._clients)
            running.server.expel("alice")
            until(lambda: name not in running.server._clients)
        with pytest.raises(StrangerError):
            Connection(f"tcp://127.0.0.1:{running.port}", name, sample_key(KEY, name))
        Connection(f"tcp://127.0.0.1:{running.port}", "replica-5/1@bob", sample_key(KEY, "replica-5/1@bob")).close()
