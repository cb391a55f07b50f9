"""Relays and ranks that die while several ranks publish a version: what arrives is whole and right, or nothing."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from relays import DEADLINE_S, TOKEN, RelayProcess, relay_processes, until
from tailrace.weights.layout import WeightLayout
from tailrace.weights.publisher import Publisher
from tailrace.weights.shard import RowRange, ShardLayout

LAYERS, ROWS, WIDTH, RANKS = 6, 3001, 600, 3  # 43 MB: more than the sockets hold
SHAPES = {f"layer{n}": (ROWS, WIDTH) for n in range(LAYERS)}
LAYOUT = WeightLayout.of(list(SHAPES), ["float32"] * LAYERS, list(SHAPES.values()))


def weights(seed: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, seed + n) for n, (name, shape) in enumerate(SHAPES.items())}


@contextmanager
def trainer(seed: float, generation: int = 1) -> Iterator[list[Publisher]]:
    """Its ranks, each with its rows of version 1."""
    each = -(-ROWS // RANKS)
    made: list[Publisher] = []
    for rank in range(RANKS):
        rows = RowRange(rank * each, min((rank + 1) * each, ROWS))
        layout = ShardLayout.of(LAYOUT, dict.fromkeys(SHAPES, rows), with_header=rank == 0)
        publisher = Publisher(layout, TOKEN, connect_s=DEADLINE_S, stall_s=2.0, generation=generation)
        mine = {name: tensor[slice(*rows)] for name, tensor in weights(seed).items()}
        publisher.snapshot(1, mine, content_id=f"of {generation}")
        made.append(publisher)
    try:
        yield made
    finally:
        for publisher in made:
            publisher.close()


def send(publisher: Publisher, master: RelayProcess, via: RelayProcess) -> queue.Queue[str]:
    answers: queue.Queue[str] = queue.Queue()
    publisher.send(master.address, lambda *_: answers.put(""), lambda _, reason: answers.put(reason), via.address)
    return answers


def holds(relay: RelayProcess, seed: float) -> bool:
    found = LAYOUT.views(relay.read(1))
    return all(torch.equal(found[name], tensor) for name, tensor in weights(seed).items())


def half_way(master: RelayProcess) -> None:
    until(lambda: master.arriving_bytes(1) > LAYOUT.size // 8, "some of it at the master")


def test_the_relay_of_a_rank_is_killed_and_the_rank_sends_to_the_master(tmp_path: Path) -> None:
    with relay_processes(3, tmp_path) as (master, own, last), trainer(1.0) as ranks:
        master.route(1, [last])
        answers = [send(rank, master, own) for rank in ranks[1:]]  # the first holds the others up
        half_way(master)
        own.kill()
        answers.append(send(ranks[0], master, own))
        assert [each.get(timeout=DEADLINE_S) for each in answers] == [""] * RANKS
        last.wait_for("stored", 1)
        assert holds(master, 1.0)
        assert holds(last, 1.0)


def test_the_master_is_killed_and_every_rank_sends_its_part_to_the_next(tmp_path: Path) -> None:
    with relay_processes(3, tmp_path) as (master, following, own), trainer(1.0) as ranks:
        master.route(1, [following])
        for rank in ranks[1:]:
            send(rank, master, own)
        half_way(master)
        master.kill()
        answers = [send(rank, following, own) for rank in ranks]
        assert [each.get(timeout=DEADLINE_S) for each in answers] == [""] * RANKS
        assert holds(following, 1.0)


def test_a_rank_dies_and_the_trainer_that_replaces_it_publishes_other_bytes(tmp_path: Path) -> None:
    with relay_processes(2, tmp_path) as (master, own):
        with trainer(1.0) as ranks:
            for rank in ranks[:2]:
                send(rank, master, own)
            half_way(master)  # and then all of them are gone, as when one has died
        with trainer(5.0, generation=2) as ranks:
            answers = [send(rank, master, own) for rank in ranks]
            assert [each.get(timeout=DEADLINE_S) for each in answers] == [""] * RANKS
        assert holds(master, 5.0)
