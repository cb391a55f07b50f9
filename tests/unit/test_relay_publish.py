"""The trainer's side: a snapshot that training cannot disturb, sent as often as asked for."""

from __future__ import annotations

import queue
import socket
from pathlib import Path

import pytest
import torch

from relays import DEADLINE_S, TOKEN, Node, nodes
from tailrace.relay.arena import ArenaReader
from tailrace.relay.layout import Layout
from tailrace.trainer.publish import Publisher, PublishError

Answer = tuple[int, str]


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300, 500), value), "b": torch.full((7,), value, dtype=torch.float32)}


def publisher(connect_s: float = DEADLINE_S, wait_s: float = DEADLINE_S) -> Publisher:
    layout = Layout.of(["a", "b"], ["float32", "bfloat16"], [(300, 500), (7,)])
    return Publisher(layout, TOKEN, connect_s=connect_s, wait_s=wait_s)


def send(publisher: Publisher, address: tuple[str, int]) -> queue.Queue[Answer]:
    answers: queue.Queue[Answer] = queue.Queue()
    publisher.send(address, lambda v, _: answers.put((v, "")), lambda v, reason: answers.put((v, reason)))
    return answers


def read(node: Node, version: int) -> dict[str, torch.Tensor]:
    return ArenaReader(node.arena.path).open(version).tensors()


def test_a_replica_maps_what_the_trainer_had_in_the_type_of_the_layout(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        trainer = publisher()
        model = weights(1.5)
        assert trainer.snapshot(1, model) > 0
        model["a"].zero_()  # training goes on
        assert send(trainer, node.address).get(timeout=DEADLINE_S) == (1, "")
        found = read(node, 1)
        assert torch.equal(found["a"], torch.full((300, 500), 1.5))
        assert found["b"].dtype == torch.bfloat16
        trainer.close()


def test_the_last_snapshot_can_be_sent_again_to_another_master(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (first, second):
        trainer = publisher()
        trainer.snapshot(1, iter(weights(1.0).items()))
        for node in (first, second, first):  # the last one has it and says so
            assert send(trainer, node.address).get(timeout=DEADLINE_S) == (1, "")
        assert read(second, 1)["a"][0, 0] == 1.0
        trainer.close()


def test_a_snapshot_leaves_alone_what_is_being_sent_and_a_third_one_waits(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,), socket.create_server(("127.0.0.1", 0)) as silent:
        trainer = publisher(wait_s=0.2)
        trainer.snapshot(1, weights(1.0))
        send(trainer, silent.getsockname())
        trainer.snapshot(2, weights(2.0))
        assert send(trainer, node.address).get(timeout=DEADLINE_S) == (2, "")
        assert read(node, 2)["a"][0, 0] == 2.0
        trainer.snapshot(3, weights(3.0))
        send(trainer, silent.getsockname())
        with pytest.raises(PublishError, match="v4 finds no free buffer: v1, v3 are being sent"):
            trainer.snapshot(4, weights(4.0))
        trainer.close()


def test_a_closed_publisher_ends_what_is_under_way_and_calls_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        trainer = publisher()
        trainer.snapshot(1, weights(1.0))
        answers = send(trainer, silent.getsockname())
        trainer.close()
        assert not any(thread.is_alive() for thread in trainer._threads)
        assert answers.empty()


def test_a_relay_that_cannot_be_reached_is_a_reason_after_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    trainer = publisher(connect_s=0.2)
    trainer.snapshot(1, weights(1.0))
    version, reason = send(trainer, address).get(timeout=DEADLINE_S)
    assert version == 1
    assert "could not connect" in reason


def test_weights_that_do_not_match_the_layout_are_refused() -> None:
    trainer = publisher()
    with pytest.raises(PublishError, match="1 tensors of the layout were not given, 'b'"):
        trainer.snapshot(1, {"a": torch.zeros(300, 500)})
    with pytest.raises(PublishError, match=r"'a' of shape \[1, 2\]"):
        trainer.snapshot(1, {"a": torch.zeros(1, 2)})
