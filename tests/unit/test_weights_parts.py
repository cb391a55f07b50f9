"""A version in parts: sharded over ranks, or striped over connections. Assembled, it is what one rank would publish."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pytest
import torch

from relays import DEADLINE_S, TOKEN, Node, Weights, nodes, until
from tailrace.weights import part as part_module
from tailrace.weights import streams
from tailrace.weights.channel import Address, Channel, connect, dial
from tailrace.weights.checksum import PIECE, checksum, piece_checksums, scattered_checksums
from tailrace.weights.layout import WeightLayout
from tailrace.weights.messages import AcceptVersion, ChunkHeader, OfferVersion, VersionSealed
from tailrace.weights.part import Part, stripes
from tailrace.weights.publisher import Publisher
from tailrace.weights.shard import RowRange, ShardLayout
from tailrace.weights.shared_memory import SharedMemory
from tailrace.weights.transfer import offer

DATA = os.urandom(5 * PIECE + 100_000)
TENSORS = {
    "embed": torch.randn(2003, 256),
    "norm": torch.randn(7),
    "lm_head": torch.randn(1501, 256),
    "scale": torch.tensor(3.5),
}
LAYOUT = WeightLayout.of_tensors(TENSORS, dtype="bfloat16")


def rows_of(rank: int, ranks: int) -> dict[str, RowRange]:
    """As FSDP2 cuts them: equal but for the last ones, which may have none."""
    cut: dict[str, RowRange] = {}
    for name, tensor in TENSORS.items():
        rows = (tensor.shape or (1,))[0]
        each = -(-rows // ranks)
        cut[name] = RowRange(min(rank * each, rows), min((rank + 1) * each, rows))
    return cut


@contextmanager
def trainer(ranks: int, connect_s: float = DEADLINE_S, generation: int = 0) -> Iterator[list[Publisher]]:
    """A publisher per rank, each with a snapshot of version 1."""
    made: list[Publisher] = []
    for rank in range(ranks):
        rows = rows_of(rank, ranks)
        layout = ShardLayout.of(LAYOUT, rows, with_header=rank == 0)
        publisher = Publisher(layout, TOKEN, connect_s=connect_s, generation=generation)
        local = {
            name: TENSORS[name].reshape(-1, *TENSORS[name].shape[1:])[slice(*rows[name])] for name in layout.entries
        }
        local = {name: one.reshape(layout.entries[name].shape) for name, one in local.items()}
        publisher.snapshot(1, local, content_id="all")
        made.append(publisher)
    yield made
    for publisher in made:
        publisher.close()


def send(publisher: Publisher, master: Address, via: Address | None = None) -> queue.Queue[str]:
    answers: queue.Queue[str] = queue.Queue()
    publisher.send(master, lambda *_: answers.put(""), lambda _, reason: answers.put(reason), via)
    return answers


def of_one_rank(folder: Path) -> bytes:
    with nodes(1, folder / "alone") as (node,), trainer(1) as (alone,):
        assert send(alone, node.address).get(timeout=DEADLINE_S) == ""
        return bytes(node.memory.open(1).buffer)


@pytest.mark.parametrize("ranks", [2, 3, 4, 9])
def test_a_version_published_by_several_ranks_is_bit_for_bit_that_of_one(tmp_path: Path, ranks: int) -> None:
    with nodes(3, tmp_path) as (master, other, last), trainer(ranks) as publishers:
        master.route(1, {1: other.address})
        other.route(1, {2: last.address})
        answers = [send(each, master.address, [master, other][n % 2].address) for n, each in enumerate(publishers)]
        assert [each.get(timeout=DEADLINE_S) for each in answers] == [""] * ranks
        expected = of_one_rank(tmp_path)
        until(lambda: all(node.holds(1, expected) for node in (master, other, last)), "the version everywhere")
        assert [master.stored, other.stored, last.stored] == [[1]] * 3
        assert sum(each.snapshot_bytes for each in publishers) == len(expected)


def test_what_a_part_is_of_a_version_survives_the_wire() -> None:
    part = Part.of(100, [(0, 10), (10, 20), (30, 30), (40, 100)])
    assert part.ranges == ((0, 20), (40, 100))
    assert Part.unpack(100, part.pack()) == part
    assert Part.unpack(100, Part.whole(100).pack()) == Part.whole(100)
    assert list(part.segments(15, 30)) == [(15, 20), (40, 50)]
    assert (part.place(0), part.place(20), part.place(80)) == (0, 40, 100)
    assert part.of_part(Part.of(80, [(10, 25)])).ranges == ((10, 20), (40, 45))
    assert part.overlaps([Part.of(100, [(19, 21)])])
    assert not part.overlaps([Part.of(100, [(20, 40)])])
    for wrong in ([(0, 101)], [(5, 5)], [(10, 20), (15, 30)], [(50, 60), (0, 10)]):
        with pytest.raises(ValueError, match="overlap or lie outside"):
            Part.unpack(100, b"".join(n.to_bytes(8, "little") for pair in wrong for n in pair))
    with pytest.raises(ValueError, match="cut short"):
        Part.unpack(100, b"123")


def test_pieces_in_several_places_have_the_checksums_of_the_same_bytes_in_one() -> None:
    whole = memoryview(DATA)
    cuts = [0, 3, PIECE - 1, PIECE, 2 * PIECE + 7, 2 * PIECE + 7, len(DATA)]
    segments = [whole[a:b] for a, b in pairwise(cuts)]
    assert scattered_checksums(segments) == piece_checksums(whole)


def begin(node: Node, part: Part, data: bytes, content_id: str = "all", generation: int = 0) -> Channel:
    """As a rank that sends its first piece and then nothing."""
    channel = connect(node.address, DEADLINE_S)
    channel.call(TOKEN)
    channel.send(OfferVersion(1, part.version_size, content_id, generation, from_trainer=True, ranges=part.pack()))
    answer = channel.receive("an answer")
    assert answer == AcceptVersion(0), answer
    piece = data[:PIECE]
    channel.send(ChunkHeader(0, len(piece), piece_checksums(memoryview(piece))))
    channel.send_bytes(memoryview(piece), "a piece")
    return channel


class PartOfWeights(Weights):
    """One of several parts, as a rank has it: without the checksum of the whole."""

    def __init__(self, data: bytes, part: Part, content_id: str = "all", generation: int = 0) -> None:
        mine = b"".join([data[start:end] for start, end in part.ranges])
        super().__init__(1, mine, content_id=content_id, generation=generation)
        self.part = part

    def checksum(self, timeout_s: float) -> str:
        return ""


FIRST, SECOND = (
    Part.of(len(DATA), [(0, 700_000), (1_400_000, 2_000_000)]),
    Part.of(len(DATA), [(700_000, 1_400_000), (2_000_000, len(DATA))]),
)


def offered(node: Node, weights: Weights) -> object:
    with dial(node.address, TOKEN, stall_s=DEADLINE_S) as channel:
        return offer(channel, weights, from_trainer=True)


def test_a_part_whose_sender_died_is_resumed_while_the_others_wait(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        begin(node, FIRST, DATA).close()
        until(lambda: node.failures, "the report")
        results: list[object] = []
        waiting = Thread(target=lambda: results.append(offered(node, PartOfWeights(DATA, SECOND))), daemon=True)
        waiting.start()
        until(lambda: _arrived(node) >= SECOND.size, "the second part")
        assert (node.stored, results) == ([], [])
        again = PartOfWeights(DATA, FIRST)
        assert isinstance(offered(node, again), VersionSealed)
        assert min(again.asked) == PIECE  # what had come is not sent again
        waiting.join(DEADLINE_S)
        assert isinstance(results[0], VersionSealed)
        assert node.holds(1, DATA)


def _arrived(node: Node) -> int:
    buffer = node._table.get(1)
    return buffer.arrived if buffer else 0


def test_what_is_complete_from_the_start_goes_on_before_the_rest_has_come(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (master, following):
        master.route(1, {1: following.address})
        one, other = begin(master, FIRST, DATA), begin(master, SECOND, DATA[700_000:1_400_000])
        until(lambda: _prefix(following) == PIECE, "the first piece at the next relay")
        one.close()
        other.close()


def _prefix(node: Node) -> int:
    buffer = node._table.get(1)
    return buffer.written if buffer else 0


def test_a_part_that_never_comes_gives_the_others_a_reason(tmp_path: Path) -> None:
    node = Node(0, tmp_path, stall_s=0.3)
    with trainer(2, connect_s=0.5) as (first, _):
        reason = send(first, node.address).get(timeout=DEADLINE_S)
        assert "the other parts do not come" in reason
    assert node.stored == []
    node.close()


def test_a_rank_of_a_trainer_that_was_replaced_is_refused_also_where_its_part_is_passed_on(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (master, local):
        with trainer(2, generation=2) as publishers:
            answers = [send(each, master.address, local.address) for each in publishers]
            assert [each.get(timeout=DEADLINE_S) for each in answers] == ["", ""]
        for via in (master, local):
            with trainer(2, connect_s=0.2, generation=1) as (old, _):
                assert "has been replaced" in send(old, master.address, via.address).get(timeout=DEADLINE_S)


def test_without_the_relay_of_its_host_a_rank_sends_to_the_master(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (master, gone), trainer(2) as publishers:
        gone.close()
        answers = [send(each, master.address, gone.address) for each in publishers]
        assert [each.get(timeout=DEADLINE_S) for each in answers] == ["", ""]
        assert master.holds(1, of_one_rank(tmp_path))


def test_a_master_that_cannot_be_reached_is_a_reason_also_through_another_relay(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (gone, local), trainer(2, connect_s=0.3) as (_, second):
        gone.close()
        reason = send(second, gone.address, local.address).get(timeout=DEADLINE_S)
        assert "cannot be passed on: could not connect" in reason


def test_parts_that_overlap_or_come_from_other_bytes_are_not_mixed(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        channel = begin(node, FIRST, DATA)
        until(lambda: _arrived(node) == PIECE, "the first part")
        for other in (PartOfWeights(DATA, Part.of(len(DATA), [(0, 10)])), PartOfWeights(DATA, SECOND, "other")):
            assert type(offered(node, other)).__name__ == "ReceivingElsewhere"
        with dial(node.address, TOKEN) as wrong:
            wrong.send(OfferVersion(1, 100, ranges=Part.of(1000, [(0, 500)]).pack()))
            assert "no such part of v1" in str(wrong.receive("an answer"))
        channel.close()


def test_a_damaged_chunk_of_a_part_is_found_where_it_is_passed_on(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (master, local), dial(local.address, TOKEN) as channel:
        request = OfferVersion(1, len(DATA), "all", ranges=FIRST.pack(), destination=str(master.address))
        channel.send(request)
        assert channel.receive("an answer") == AcceptVersion(0)
        channel.send(ChunkHeader(0, PIECE, piece_checksums(memoryview(DATA)[:PIECE])))
        channel.send_bytes(memoryview(bytes([DATA[0] ^ 1]) + DATA[1:PIECE]), "a piece")
        assert "damaged" in str(channel.receive("the refusal"))
        until(lambda: master.failures, "the end of the part at the master")
        assert _arrived(master) == 0


@pytest.mark.parametrize("count", [2, 5])
def test_several_streams_carry_what_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(part_module, "STRIPE_BLOCK", PIECE)
    monkeypatch.setattr(streams, "STRIPE_BLOCK", PIECE)
    monkeypatch.setattr(streams, "streams_for", lambda *_: count)
    with nodes(3, tmp_path) as (master, second, third):
        master.route(1, {1: second.address})
        second.route(1, {2: third.address})
        weights = Weights(1, DATA, hold=True)
        with dial(master.address, TOKEN) as channel:
            begin_whole(channel, weights)
            until(lambda: _prefix(third) == weights.half, "the first half at the end of the chain")
        for each in list(second._connections):
            each.abort()  # as if the link had broken
        until(lambda: isinstance(offered(master, Weights(1, DATA)), VersionSealed), "the loss of the first sender")
        until(lambda: third.holds(1, DATA) and second.holds(1, DATA), "the version everywhere")
        assert third.memory.open(1).checksum == checksum(DATA)
        assert second.stored == third.stored == [1]


def begin_whole(channel: Channel, weights: Weights) -> None:
    channel.send(OfferVersion(1, weights.size, weights.content_id, from_trainer=True))
    assert channel.receive("an answer") == AcceptVersion(0)
    for start in range(0, weights.half, PIECE):
        channel.send(ChunkHeader(start, PIECE, weights.checksums(start, start + PIECE)))
        channel.send_bytes(weights.ready(start, 0)[:PIECE], "a piece")


def test_a_far_relay_is_worth_several_streams_and_a_near_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Link:
        def __init__(self, local: bool, round_trip_s: float) -> None:
            self.is_local, self.round_trip_s = lambda: local, round_trip_s

    def count(local: bool, round_trip_s: float, size: int = 1 << 30, wanted: int = 0, rate: float | None = None) -> int:
        return streams.streams_for(Link(local, round_trip_s), size, wanted, rate)  # pyright: ignore[reportArgumentType]

    assert [count(False, s) for s in (0.0002, 0.01, 0.05, 3.0)] == [1, 1, 5, 8]
    assert (count(True, 0.5), count(False, 0.0, wanted=3), count(False, 0.5, size=1000)) == (1, 3, 1)
    assert [count(False, 0.2, rate=mbits * 125_000) for mbits in (1, 50, 100, 1000)] == [1, 1, 2, 8]


def test_a_verified_piece_goes_on_whatever_else_has_come(tmp_path: Path) -> None:
    buffer = SharedMemory(tmp_path / "m").create(1, 4 * PIECE)
    first, second = (buffer.buffer_of(Part.of(4 * PIECE, [half])) for half in ((0, 2 * PIECE), (2 * PIECE, 4 * PIECE)))
    assert first is not None
    assert second is not None
    data = os.urandom(PIECE)
    second.claim(PIECE)[0][:] = data
    assert second.confirm(PIECE, piece_checksums(memoryview(data)))
    assert bytes(buffer.ready(2 * PIECE, 0.0)) == data
    assert buffer.checksums(2 * PIECE, 3 * PIECE) == piece_checksums(memoryview(data))
    assert not buffer.ready(0, 0.0)
    assert not buffer.ready(3 * PIECE, 0.0)


def test_stripes_are_whole_pieces_in_turns_and_together_everything() -> None:
    for size in (1, PIECE, 100 << 20, (100 << 20) + 5, 800 << 30):
        parts = stripes(size, 3)
        assert sum(each.size for each in parts) == size
        assert not parts[0].overlaps(parts[1:])
        assert all(start % PIECE == 0 for each in parts for start, _ in each.ranges)
        assert sum(len(each.ranges) for each in parts) <= part_module.MOST_BLOCKS + 1
