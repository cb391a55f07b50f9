"""Relays in one process: what is sent on, what is declined, and what a bad neighbour cannot do."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path
from threading import Thread

import pytest

from relays import DEADLINE_S, TOKEN, Node, Weights, both_ways, nixl, nodes, publish, take_way, until
from tailrace.weights import version_buffer
from tailrace.weights.channel import Address, Channel, ChannelError, NobodyListensError, TokenError, dial
from tailrace.weights.checksum import PIECE, piece_checksums
from tailrace.weights.fetch import RemoteVersionCache, fetch
from tailrace.weights.messages import (
    AcceptVersion,
    AlreadyHeld,
    ChunkHeader,
    OfferVersion,
    ReceivingElsewhere,
    VersionSealed,
)
from tailrace.weights.region import MappedVersion
from tailrace.weights.relay_node import RelayNode
from tailrace.weights.shared_memory import SharedMemory
from tailrace.weights.transfer import offer
from tailrace.wire.keys import stranger_token

DATA = os.urandom(3 * PIECE + 100_000)


@pytest.fixture(autouse=True, params=both_ways())
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take_way(request.param, monkeypatch)


def send(node: Node, weights: Weights, from_trainer: bool = False) -> object:
    with dial(node.address, TOKEN) as channel:
        return offer(channel, weights, from_trainer=from_trainer, lender=nixl(-1))


def begin(channel: Channel, weights: Weights) -> None:
    """Send the first half, as a sender does that dies then."""
    channel.send(OfferVersion(weights.version, weights.size, weights.content_id, from_trainer=True))
    assert channel.receive("an answer") == AcceptVersion(0)
    for start in range(0, weights.half, PIECE):
        channel.send(ChunkHeader(start, PIECE, weights.checksums(start, start + PIECE)))
        channel.send_bytes(weights.ready(start, 0)[:PIECE], "a piece")


def test_a_version_travels_down_a_tree_of_seven(tmp_path: Path) -> None:
    with nodes(7, tmp_path) as tree:
        for place, node in enumerate(tree):
            node.route(1, {child.id: child.address for child in tree[2 * place + 1 : 2 * place + 3]})
        publish(tree[0].address, Weights(1, DATA)).join(DEADLINE_S)
        until(lambda: all(node.stored == [1] for node in tree), "the version everywhere")
        assert all(node.holds(1, DATA) for node in tree)
        assert [node.failures for node in tree] == [[]] * 7


def test_a_chunk_goes_on_before_the_next_one_has_come(tmp_path: Path) -> None:
    with nodes(3, tmp_path) as (first, second, third):
        first.route(1, {1: second.address})
        second.route(1, {2: third.address})
        weights = Weights(1, DATA, hold=True)
        publish(first.address, weights)
        until(lambda: _arrived(third, 1) == weights.half, "the first half at the end of the chain")
        assert first.versions() == ()
        weights.go.set()
        until(lambda: third.holds(1, DATA), "the rest")


def _arrived(node: Node, version: int) -> int:
    buffer = node._table.get(version)
    return buffer.written if buffer else 0


def test_a_new_target_gets_what_is_held_and_what_is_just_arriving(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        send(first, Weights(1, DATA))
        weights = Weights(2, DATA[::-1], hold=True)
        publish(first.address, weights)
        until(lambda: _arrived(first, 2), "the second version to begin")
        first.route(1, {1: second.address})
        until(lambda: _arrived(second, 2), "the part that was there")
        weights.go.set()
        until(lambda: second.holds(2, DATA[::-1]) and second.holds(1, DATA), "both versions")


def test_the_next_version_comes_over_the_connection_of_the_one_before(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        first.route(1, {1: second.address})
        send(first, Weights(1, DATA))
        until(lambda: second.holds(1, DATA), "the first version")
        before = set(second._connections)
        send(first, Weights(2, DATA[::-1]))
        until(lambda: second.holds(2, DATA[::-1]), "the second version")
        assert set(second._connections) == before


def test_an_older_route_is_ignored(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        assert first.route(5, {1: second.address})
        assert not first.route(4, {})
        send(first, Weights(1, DATA))
        until(lambda: second.holds(1, DATA), "the version at the target of the newer route")


def test_a_version_that_is_here_or_on_its_way_is_declined(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        weights = Weights(1, DATA, hold=True)
        publish(node.address, weights)
        until(lambda: _arrived(node, 1), "the version to begin")
        assert isinstance(send(node, Weights(1, DATA)), ReceivingElsewhere)
        weights.go.set()
        until(lambda: node.stored, "the version")
        assert isinstance(send(node, Weights(1, DATA)), AlreadyHeld)
        assert node.stored == [1]


def test_a_sender_that_has_fallen_silent_is_overtaken_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version_buffer, "TAKEOVER_S", 0.0)
    with nodes(1, tmp_path) as (node,):
        publish(node.address, Weights(1, DATA, hold=True))
        until(lambda: _arrived(node, 1), "the version to begin")
        until(lambda: isinstance(send(node, Weights(1, DATA)), VersionSealed), "the second sender's turn")
        assert node.holds(1, DATA)
        assert (node.stored, len(node.failures)) == ([1], 1)


def test_a_dropped_version_comes_back_from_the_trainer_only(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        send(node, Weights(1, DATA))
        node.drop(1)
        assert node.versions() == node.memory.versions() == ()
        assert isinstance(send(node, Weights(1, DATA)), AlreadyHeld)
        assert isinstance(send(node, Weights(1, DATA), from_trainer=True), VersionSealed)


def test_a_version_that_is_dropped_while_it_arrives_is_broken_off(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        weights = Weights(1, DATA, hold=True)
        publish(node.address, weights)
        until(lambda: _arrived(node, 1), "the version to begin")
        node.drop(1)
        weights.go.set()
        until(lambda: node.failures, "the report")
        assert "dropped while it was received" in node.failures[0].reason
        assert (node.memory.held_bytes(), node.stored) == (0, [])


def test_what_has_come_is_not_sent_again_when_the_sender_dies(tmp_path: Path) -> None:
    """In the middle of a broadcast, and those further down the chain do not even notice."""
    with nodes(2, tmp_path) as (first, second):
        first.route(1, {1: second.address})
        with dial(first.address, TOKEN) as channel:
            weights = Weights(1, DATA, hold=True)
            begin(channel, weights)
            until(lambda: _arrived(second, 1) == weights.half, "the first half at the end of the chain")
        until(lambda: first.failures, "the report")
        assert "closed the connection before v1 from byte" in first.failures[0].reason
        again = Weights(1, DATA)
        assert isinstance(send(first, again), VersionSealed)
        assert min(again.asked) == again.half
        until(lambda: second.holds(1, DATA), "the rest")
        assert second.failures == []


def test_a_part_of_one_content_id_is_never_completed_from_another(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        with dial(node.address, TOKEN) as channel:
            begin(channel, Weights(1, DATA, hold=True))
            until(lambda: _arrived(node, 1), "the version to begin")
        until(lambda: node.failures, "the report")
        anew = Weights(1, DATA[::-1], content_id="second")
        send(node, anew, from_trainer=True)
        assert min(anew.asked) == 0
        assert node.holds(1, DATA[::-1])


def test_a_part_gives_way_to_another_version_and_to_a_drop(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        for version in (1, 2):
            with dial(node.address, TOKEN) as channel:
                begin(channel, Weights(version, DATA, hold=True))
                until(lambda: _arrived(node, version), "the version to begin")  # noqa: B023
            until(lambda: len(node.failures) == version, "the report")  # noqa: B023
        assert [file.name for file in node.memory.path.glob("v*")] == ["v2.partial"]
        node.drop(2)
        assert node.memory.held_bytes() == 0


def test_a_trainer_that_was_replaced_is_refused(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        send(node, Weights(2, DATA, generation=2), from_trainer=True)
        with pytest.raises(ChannelError, match="a trainer that has been replaced"):
            send(node, Weights(3, DATA, generation=1), from_trainer=True)
        assert isinstance(send(node, Weights(1, DATA, generation=1)), VersionSealed)  # from a relay: it was made before


SPOILT = {
    "damaged": (0, lambda chunk, data: (chunk, bytes([data[0] ^ 1]) + data[1:]), "damaged"),
    "doubled": (
        1,
        lambda chunk, data: (ChunkHeader(0, PIECE, piece_checksums(memoryview(DATA))[:8]), DATA[:PIECE]),
        "sent bytes 0 to 524,288",
    ),
    "foreign": (1, lambda chunk, data: (chunk, os.urandom(PIECE)), "damaged"),
    "left out": (
        1,
        lambda chunk, data: (ChunkHeader(2 * PIECE, PIECE, chunk.checksums), data),
        "instead of v1 from byte 524,288",
    ),
    "too long": (1, lambda chunk, data: (ChunkHeader(PIECE, 1 << 50, chunk.checksums), data), "instead of v1"),
    "without sums": (1, lambda chunk, data: (ChunkHeader(PIECE, PIECE, b""), data), "checksums that do not match"),
    "cut": (1, lambda chunk, data: (chunk, data[:1000]), "closed the connection"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_chunk_that_is_wrong_is_refused_and_asked_for_again(tmp_path: Path, case: str) -> None:
    place, spoil, reason = SPOILT[case]
    with nodes(2, tmp_path) as (node, following):
        node.route(1, {1: following.address})
        with dial(node.address, TOKEN) as channel:
            weights = Weights(1, DATA)
            channel.send(OfferVersion(1, len(DATA), weights.content_id))
            assert channel.receive("") == AcceptVersion(0)
            for number in range(place + 1):
                start = number * PIECE
                chunk, data = (
                    ChunkHeader(start, PIECE, weights.checksums(start, start + PIECE)),
                    DATA[start : start + PIECE],
                )
                chunk, data = spoil(chunk, data) if number == place else (chunk, data)
                channel.send(chunk)
                channel.send_bytes(memoryview(data), "")
            channel.close()
            until(lambda: node.failures, "the report")
        assert reason in node.failures[0].reason
        again = Weights(1, DATA)
        assert isinstance(send(node, again), VersionSealed)
        assert again.asked[0] == place * PIECE  # what was right is kept
        until(lambda: following.holds(1, DATA) and node.holds(1, DATA), "the version at both")


def test_a_version_cut_off_before_its_checksum_is_not_sealed_until_that_has_come(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        weights = Weights(1, DATA)
        with dial(node.address, TOKEN) as channel:
            begin(channel, weights)
            for start in range(0, len(DATA), PIECE):
                end = min(start + PIECE, len(DATA))
                channel.send(
                    ChunkHeader(start, end - start, weights.checksums(start, end))
                ) if start >= weights.half else None
                channel.send_bytes(memoryview(DATA)[start:end], "") if start >= weights.half else None
            until(lambda: _arrived(node, 1) == len(DATA), "all of it")
        until(lambda: node.failures, "the report")
        assert (node.stored, node.memory.versions()) == ([], ())
        again = Weights(1, DATA)
        assert isinstance(send(node, again), VersionSealed)
        assert again.asked == []


def test_what_was_damaged_on_its_way_is_sealed_nowhere(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        first.route(1, {1: second.address})
        publish(first.address, Weights(1, DATA, checksum="0" * 16)).join(DEADLINE_S)
        until(lambda: first.failures, "the report")  # the other one may not even have been offered it by then
        assert "damaged in transit" in first.failures[0].reason
        until(lambda: first.memory.held_bytes() == 0, "the room to be given back")
        assert first.stored == second.stored == []
        assert isinstance(send(first, Weights(1, DATA)), VersionSealed)
        until(lambda: second.holds(1, DATA), "the good copy")


def test_a_relay_that_is_gone_is_not_waited_for_until_the_deadline(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        address = node.address
    own = SharedMemory(tmp_path / "mine")
    with pytest.raises(NobodyListensError, match="could not connect"):
        fetch(address, TOKEN, 1, own, deadline_s=math.inf, gone_s=0.3)
    assert own.held_bytes() == 0


def test_a_stranger_pulls_no_version_from_a_relay_of_ours_nor_sends_it_one(tmp_path: Path) -> None:
    """It has a token of its own, by which it is sent versions; which ones, is for control to say."""
    own = stranger_token(TOKEN.decode(), "alice").encode()
    with nodes(1, tmp_path) as (node,):
        publish(node.address, Weights(1, b"w" * PIECE)).join(DEADLINE_S)
        with pytest.raises(TokenError):
            fetch(node.address, own, 1, SharedMemory(tmp_path / "mine"))
        with pytest.raises(TokenError), dial(node.address, own) as channel:
            offer(channel, Weights(2, DATA))
        assert node.versions() == (1,)


def test_who_has_another_token_is_refused_on_either_side(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        with pytest.raises(TokenError, match="belongs to another run"), dial(node.address, b"x" * 32) as channel:
            offer(channel, Weights(1, DATA))
        with pytest.raises(TokenError):
            fetch(node.address, b"x" * 32, 1, SharedMemory(tmp_path / "mine"))
        assert node.versions() == ()


def test_a_target_that_does_not_read_or_is_not_there_holds_up_nobody(tmp_path: Path) -> None:
    data = os.urandom(20_000_000)  # more than the sockets hold
    with nodes(2, tmp_path) as (first, second), socket.create_server(("127.0.0.1", 0)) as silent:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            nobody = Address(*gone.getsockname())
        first.route(1, {1: second.address, 2: Address(*silent.getsockname()), 3: nobody})
        send(first, Weights(1, data))
        until(lambda: second.holds(1, data), "the target that is well")
        until(lambda: first.failures, "the report")
        assert (first.failures[0].version, first.failures[0].target) == (1, 3)
        assert "could not connect" in first.failures[0].reason


def test_a_target_that_stays_out_of_reach_is_reported_as_such(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = Address(*gone.getsockname())
    node = Node(0, tmp_path, stall_s=0.2)
    send(node, Weights(1, DATA))
    node.route(1, {3: nobody})
    until(lambda: any(failure.persistent for failure in node.failures), "the second report")
    assert not node.failures[0].persistent
    assert {(failure.version, failure.target) for failure in node.failures} == {(1, 3)}
    node.close()


def test_a_relay_without_room_says_so_to_the_sender(tmp_path: Path) -> None:
    node = Node(0, tmp_path, quota=1000)
    with pytest.raises(ChannelError, match=r"refused v1: v1 of .* does not fit"):
        send(node, Weights(1, DATA))
    node.close()


def test_a_replica_elsewhere_fetches_a_version(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        send(node, Weights(3, DATA))
        mine = SharedMemory(tmp_path / "mine")
        assert bytes(fetch(node.address, TOKEN, 3, mine).buffer) == DATA
        with pytest.raises(ChannelError, match="v4 is not held here"):
            fetch(node.address, TOKEN, 4, mine)
        assert mine.versions() == (3,)


def test_a_replica_elsewhere_opens_versions_of_a_relay_as_if_they_were_here(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        send(first, Weights(1, DATA))
        send(second, Weights(2, DATA[::-1]))
        mine = RemoteVersionCache(tmp_path / "mine", first.address, TOKEN)
        assert bytes(mine.open(1).buffer) == DATA
        mine.address = second.address
        assert bytes(mine.open(2).buffer) == DATA[::-1]
        assert mine.versions() == (2,)
        first.close()
        mine.address = first.address
        assert bytes(mine.open(2).buffer) == DATA[::-1]  # it is here: nobody is asked


def test_a_fetch_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        weights = Weights(1, DATA, hold=True)
        publish(node.address, weights)
        mine = SharedMemory(tmp_path / "mine")
        fetched: list[MappedVersion] = []
        fetching = Thread(target=lambda: fetched.append(fetch(node.address, TOKEN, 1, mine)), daemon=True)
        until(lambda: _arrived(node, 1) == weights.half, "the first half at the relay")
        fetching.start()
        until(lambda: _blocks(mine, 1) >= weights.half, "the first half here")
        for channel in list(node._connections)[1:]:
            channel.abort()
        weights.go.set()
        fetching.join(DEADLINE_S)
        assert bytes(fetched[0].buffer) == DATA


def _blocks(memory: SharedMemory, version: int) -> int:
    file = memory.path / f"v{version}.partial"
    return file.stat().st_blocks * 512 if file.exists() else 0


def test_a_fetch_from_a_relay_that_stalls_ends_at_its_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        weights = Weights(1, DATA, hold=True)
        publish(node.address, weights)
        until(lambda: _arrived(node, 1), "the version to begin")
        mine = SharedMemory(tmp_path / "mine")
        with pytest.raises(ChannelError, match="no data"):
            fetch(node.address, TOKEN, 1, mine, deadline_s=0.2)
        assert mine.held_bytes() == 0
        weights.go.set()


def test_who_leaves_does_not_wait_for_a_relay_that_is_gone(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        gone = node.address
    asked = list[int]()
    mine = RemoteVersionCache(tmp_path / "mine", gone, TOKEN, lambda: asked.append(1) or len(asked) == 3)
    with pytest.raises(ChannelError):
        mine.open(1)
    assert len(asked) == 3, "until then it tried again"
    assert mine.held_bytes() == 0


def test_what_is_not_a_relay_or_silent_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(*silent.getsockname())
        with pytest.raises(ChannelError, match=f"receive from {address}: no data for 0.2 s"):
            dial(address, TOKEN, stall_s=0.2).__enter__()
        with pytest.raises(ChannelError, match=r"cannot listen on .* take another port"):
            RelayNode(0, SharedMemory(tmp_path / "a"), TOKEN, port=address.port)
