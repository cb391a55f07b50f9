"""Relays in one process: what is sent on, what is declined, and what a bad neighbour cannot do."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from threading import Thread

import pytest

from relays import DEADLINE_S, TOKEN, Node, Weights, nodes, publish, until
from tailrace.relay import shelf
from tailrace.relay.arena import Arena, Mapped
from tailrace.relay.checksum import PIECE, sum_up
from tailrace.relay.fetch import RemoteArena, fetch
from tailrace.relay.link import Address, Channel, LinkError, TokenError, dial
from tailrace.relay.messages import Busy, Chunk, Have, Offer, Stored, Want
from tailrace.relay.node import RelayNode
from tailrace.relay.transfer import offer

DATA = os.urandom(3 * PIECE + 100_000)


def send(node: Node, weights: Weights, fresh: bool = False) -> object:
    with dial(node.address, TOKEN) as channel:
        return offer(channel, weights, fresh=fresh)


def begin(channel: Channel, weights: Weights) -> None:
    """Send the first half, as a sender does that dies then."""
    channel.send(Offer(weights.version, weights.size, weights.edition, fresh=True))
    assert channel.receive("an answer") == Want(0)
    for start in range(0, weights.half, PIECE):
        channel.send(Chunk(start, PIECE, weights.sums(start, start + PIECE)))
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
    parcel = node._shelf.get(version)
    return parcel.written if parcel else 0


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
        assert isinstance(send(node, Weights(1, DATA)), Busy)
        weights.go.set()
        until(lambda: node.stored, "the version")
        assert isinstance(send(node, Weights(1, DATA)), Have)
        assert node.stored == [1]


def test_a_sender_that_has_fallen_silent_is_overtaken_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf, "OVERTAKE_S", 0.0)
    with nodes(1, tmp_path) as (node,):
        publish(node.address, Weights(1, DATA, hold=True))
        until(lambda: _arrived(node, 1), "the version to begin")
        until(lambda: isinstance(send(node, Weights(1, DATA)), Stored), "the second sender's turn")
        assert node.holds(1, DATA)
        assert (node.stored, len(node.failures)) == ([1], 1)


def test_a_dropped_version_comes_back_from_the_trainer_only(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        send(node, Weights(1, DATA))
        node.drop(1)
        assert node.versions() == node.arena.versions() == ()
        assert isinstance(send(node, Weights(1, DATA)), Have)
        assert isinstance(send(node, Weights(1, DATA), fresh=True), Stored)


def test_a_version_that_is_dropped_while_it_arrives_is_broken_off(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        weights = Weights(1, DATA, hold=True)
        publish(node.address, weights)
        until(lambda: _arrived(node, 1), "the version to begin")
        node.drop(1)
        weights.go.set()
        until(lambda: node.failures, "the report")
        assert "dropped while it arrived" in node.failures[0].reason
        assert (node.arena.held_bytes(), node.stored) == (0, [])


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
        assert isinstance(send(first, again), Stored)
        assert min(again.asked) == again.half
        until(lambda: second.holds(1, DATA), "the rest")
        assert second.failures == []


def test_a_part_of_one_edition_is_never_completed_from_another(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        with dial(node.address, TOKEN) as channel:
            begin(channel, Weights(1, DATA, hold=True))
            until(lambda: _arrived(node, 1), "the version to begin")
        until(lambda: node.failures, "the report")
        anew = Weights(1, DATA[::-1], edition="second")
        send(node, anew, fresh=True)
        assert min(anew.asked) == 0
        assert node.holds(1, DATA[::-1])


def test_a_part_gives_way_to_another_version_and_to_a_drop(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        for version in (1, 2):
            with dial(node.address, TOKEN) as channel:
                begin(channel, Weights(version, DATA, hold=True))
                until(lambda: _arrived(node, version), "the version to begin")  # noqa: B023
            until(lambda: len(node.failures) == version, "the report")  # noqa: B023
        assert [file.name for file in node.arena.path.glob("v*")] == ["v2.partial"]
        node.drop(2)
        assert node.arena.held_bytes() == 0


def test_a_trainer_that_was_replaced_is_refused(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        send(node, Weights(2, DATA, reign=2), fresh=True)
        with pytest.raises(LinkError, match="a trainer that has been replaced"):
            send(node, Weights(3, DATA, reign=1), fresh=True)
        assert isinstance(send(node, Weights(1, DATA, reign=1)), Stored)  # from a relay: it was made before


SPOILT = {
    "damaged": (0, lambda chunk, data: (chunk, bytes([data[0] ^ 1]) + data[1:]), "damaged"),
    "doubled": (
        1,
        lambda chunk, data: (Chunk(0, PIECE, sum_up(memoryview(DATA))[:8]), DATA[:PIECE]),
        "sent bytes 0 to 524,288",
    ),
    "foreign": (1, lambda chunk, data: (chunk, os.urandom(PIECE)), "damaged"),
    "left out": (1, lambda chunk, data: (Chunk(2 * PIECE, PIECE, chunk.sums), data), "instead of v1 from byte 524,288"),
    "too long": (1, lambda chunk, data: (Chunk(PIECE, 1 << 50, chunk.sums), data), "instead of v1"),
    "without sums": (1, lambda chunk, data: (Chunk(PIECE, PIECE, b""), data), "sums that do not fit"),
    "cut": (1, lambda chunk, data: (chunk, data[:1000]), "closed the connection"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_chunk_that_is_wrong_is_refused_and_asked_for_again(tmp_path: Path, case: str) -> None:
    place, spoil, reason = SPOILT[case]
    with nodes(2, tmp_path) as (node, following):
        node.route(1, {1: following.address})
        with dial(node.address, TOKEN) as channel:
            weights = Weights(1, DATA)
            channel.send(Offer(1, len(DATA), weights.edition))
            assert channel.receive("") == Want(0)
            for number in range(place + 1):
                start = number * PIECE
                chunk, data = Chunk(start, PIECE, weights.sums(start, start + PIECE)), DATA[start : start + PIECE]
                chunk, data = spoil(chunk, data) if number == place else (chunk, data)
                channel.send(chunk)
                channel.send_bytes(memoryview(data), "")
            channel.close()
            until(lambda: node.failures, "the report")
        assert reason in node.failures[0].reason
        again = Weights(1, DATA)
        assert isinstance(send(node, again), Stored)
        assert again.asked[0] == place * PIECE  # what was right is kept
        until(lambda: following.holds(1, DATA) and node.holds(1, DATA), "the version at both")


def test_a_version_cut_off_before_its_checksum_is_not_sealed_until_that_has_come(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        weights = Weights(1, DATA)
        with dial(node.address, TOKEN) as channel:
            begin(channel, weights)
            for start in range(0, len(DATA), PIECE):
                end = min(start + PIECE, len(DATA))
                channel.send(Chunk(start, end - start, weights.sums(start, end))) if start >= weights.half else None
                channel.send_bytes(memoryview(DATA)[start:end], "") if start >= weights.half else None
            until(lambda: _arrived(node, 1) == len(DATA), "all of it")
        until(lambda: node.failures, "the report")
        assert (node.stored, node.arena.versions()) == ([], ())
        again = Weights(1, DATA)
        assert isinstance(send(node, again), Stored)
        assert again.asked == []


def test_what_was_damaged_on_its_way_is_sealed_nowhere(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        first.route(1, {1: second.address})
        publish(first.address, Weights(1, DATA, checksum="0" * 16)).join(DEADLINE_S)
        until(lambda: first.failures, "the report")  # the other one may not even have been offered it by then
        assert "damaged on its way" in first.failures[0].reason
        until(lambda: first.arena.held_bytes() == 0, "the room to be given back")
        assert first.stored == second.stored == []
        assert isinstance(send(first, Weights(1, DATA)), Stored)
        until(lambda: second.holds(1, DATA), "the good copy")


def test_who_has_another_token_is_refused_on_either_side(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        with pytest.raises(TokenError, match="belongs to another run"), dial(node.address, b"x" * 32) as channel:
            offer(channel, Weights(1, DATA))
        with pytest.raises(TokenError):
            fetch(node.address, b"x" * 32, 1, Arena(tmp_path / "mine"))
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
    until(lambda: any(failure.lasting for failure in node.failures), "the second report")
    assert not node.failures[0].lasting
    assert {(failure.version, failure.target) for failure in node.failures} == {(1, 3)}
    node.close()


def test_a_relay_without_room_says_so_to_the_sender(tmp_path: Path) -> None:
    node = Node(0, tmp_path, quota=1000)
    with pytest.raises(LinkError, match=r"refused v1: v1 of .* does not fit"):
        send(node, Weights(1, DATA))
    node.close()


def test_a_replica_elsewhere_fetches_a_version(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        send(node, Weights(3, DATA))
        mine = Arena(tmp_path / "mine")
        assert bytes(fetch(node.address, TOKEN, 3, mine).buffer) == DATA
        with pytest.raises(LinkError, match="v4 is not held here"):
            fetch(node.address, TOKEN, 4, mine)
        assert mine.versions() == (3,)


def test_a_replica_elsewhere_opens_versions_of_a_relay_as_if_they_were_here(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        send(first, Weights(1, DATA))
        send(second, Weights(2, DATA[::-1]))
        mine = RemoteArena(tmp_path / "mine", first.address, TOKEN)
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
        mine = Arena(tmp_path / "mine")
        fetched: list[Mapped] = []
        errand = Thread(target=lambda: fetched.append(fetch(node.address, TOKEN, 1, mine)), daemon=True)
        until(lambda: _arrived(node, 1) == weights.half, "the first half at the relay")
        errand.start()
        until(lambda: _blocks(mine, 1) >= weights.half, "the first half here")
        for channel in list(node._guests)[1:]:
            channel.abort()
        weights.go.set()
        errand.join(DEADLINE_S)
        assert bytes(fetched[0].buffer) == DATA


def _blocks(arena: Arena, version: int) -> int:
    file = arena.path / f"v{version}.partial"
    return file.stat().st_blocks * 512 if file.exists() else 0


def test_a_fetch_from_a_relay_that_stalls_ends_at_its_deadline_and_leaves_nothing(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        weights = Weights(1, DATA, hold=True)
        publish(node.address, weights)
        until(lambda: _arrived(node, 1), "the version to begin")
        mine = Arena(tmp_path / "mine")
        with pytest.raises(LinkError, match="nothing moved"):
            fetch(node.address, TOKEN, 1, mine, deadline_s=0.2)
        assert mine.held_bytes() == 0
        weights.go.set()


def test_what_is_not_a_relay_or_silent_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address(*silent.getsockname())
        with pytest.raises(LinkError, match=f"receive from {address}: nothing moved for 0.2 s"):
            dial(address, TOKEN, stall_s=0.2).__enter__()
        with pytest.raises(LinkError, match=r"cannot listen on .* take another port"):
            RelayNode(0, Arena(tmp_path / "a"), TOKEN, port=address.port)
