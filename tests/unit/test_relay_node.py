"""Relays in one process: what is sent on, what is declined, and what a bad neighbour cannot do."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from relays import DEADLINE_S, TOKEN, Node, Weights, nodes, publish, until
from tailrace.relay import shelf
from tailrace.relay.arena import Arena
from tailrace.relay.fetch import fetch
from tailrace.relay.link import Address, Busy, Have, LinkError, Stored, TokenError, dial, offer
from tailrace.relay.node import RelayNode

DATA = os.urandom(600_000)


def send(node: Node, weights: Weights, fresh: bool = False) -> object:
    with dial(node.address, TOKEN) as channel:
        return offer(channel, weights, fresh=fresh)


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
        until(lambda: _arrived(third, 1) == len(DATA) // 2, "the first half at the end of the chain")
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


def test_what_was_damaged_on_its_way_is_sealed_nowhere(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        first.route(1, {1: second.address})
        publish(first.address, Weights(1, DATA, checksum="0" * 16)).join(DEADLINE_S)
        until(lambda: first.failures, "the report")  # the other one may not even have been offered it by then
        assert "damaged on its way" in first.failures[0].reason
        until(lambda: first.arena.held_bytes() == second.arena.held_bytes() == 0, "the room to be given back")
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
            nobody = gone.getsockname()
        first.route(1, {1: second.address, 2: silent.getsockname(), 3: nobody})
        send(first, Weights(1, data))
        until(lambda: second.holds(1, data), "the target that is well")
        until(lambda: first.failures, "the report")
        assert (first.failures[0].version, first.failures[0].target) == (1, 3)
        assert "could not connect" in first.failures[0].reason


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
