"""Trainer ranks and sample stores: a rank finds a store that moves while it reads, and checks versions."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sample_stores import RunningStore, address, client, grant, piece, store, stored, stream, until
from tailrace.protocol import Train, TrainGroup
from tailrace.samples import client as client_module
from tailrace.samples import server as server_module
from tailrace.samples.client import SampleClient, SampleStoreError
from tailrace.trainer.rank_group import _Group
from tailrace.trainer.reader import SampleInfo, StoreReader, sample_infos
from tailrace.wire.messages import Ordered, StoreAddresses

RANK = "trainer-0.1/1"


class Board:
    """In place of the other ranks: what the first has announced."""

    def __init__(self) -> None:
        self.text = ""

    def place(self, running: RunningStore) -> None:
        self.text = msgspec.json.encode(StoreAddresses((address(running.port, RANK),))).decode()

    def announced(self) -> bytes:
        return self.text.encode()


def test_a_rank_hears_of_a_store_that_has_moved_while_it_reads(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(server_module, "SLICE", 1 << 14)
    monkeypatch.setattr(client_module, "UNREAD", 1 << 14)
    board, over, rank = Board(), threading.Event(), SampleClient(RANK)
    group: Any = _Group(SimpleNamespace(name=RANK), board)  # type: ignore[arg-type]
    with store(tmp_path) as running, client(running.port) as replica:
        running.assign(*[grant(id) for id in range(50)])
        for id in range(50):
            stream(replica, id, [2000])
            stored(replica, id)
        board.place(running)
        rank.open()
        following = threading.Thread(target=group._follow_stores, args=(rank, over))
        following.start()
        reading = rank.read(range(50))
        begun = [next(reading).id for _ in range(3)]
        running.port = 0  # any other
        running.restart()
        board.place(running)
        assert begun + [sample.id for sample in reading] == list(range(50))
        over.set()
        following.join()
        rank.close(0.0)


def test_a_sample_of_versions_that_nobody_was_told_of_is_not_trained_on(tmp_path: Path) -> None:
    with store(tmp_path) as running, client(running.port) as replica, client(running.port, RANK) as rank:
        running.assign(grant(1))
        replica.append(1, 1, 0, [piece(1, 0, 10, 2), piece(1, 10, 20, 4)])
        stored(replica, 1)
        told = SampleInfo(1, 0, 1.0, 23, 20, 3, versions=(2, 4))
        until(lambda: [one.id for one in StoreReader(rank, [told]).read([1])] == [1])
        older = msgspec.structs.replace(told, versions=(3, 4))
        with pytest.raises(SampleStoreError, match="t1 is of versions 2 to 4 in store 0, and finished with 3 to 4"):
            list(StoreReader(rank, [older]).read([1]))


def test_a_sample_that_is_shorter_in_its_store_than_it_finished_is_not_trained_on(tmp_path: Path) -> None:
    """An older copy of the store's file has the beginning of it, of versions that fit."""
    command = Train(1, 5, 0, True, (TrainGroup(9, (1, 2)),))
    with store(tmp_path) as running, client(running.port) as replica, client(running.port, RANK) as rank:
        running.assign(grant(1), grant(2))
        for id in (1, 2):
            stream(replica, id, [20])
            stored(replica, id)
        until(lambda: [one.tokens for one in rank.lengths([1, 2])] == [20, 20])
        found, told = {one.id: one for one in rank.lengths([1, 2])}, Ordered(command, rewards={1: 0.5, 2: 1.0})
        expected = (SampleInfo(1, 9, 0.5, 23, 20, 3), SampleInfo(2, 9, 1.0, 23, 20, 3))
        assert sample_infos(command, msgspec.structs.replace(told, tokens={1: 20, 2: 20}), found) == expected
        with pytest.raises(SampleStoreError, match="t2 has 20 tokens in store 0, and finished with 64"):
            sample_infos(command, msgspec.structs.replace(told, tokens={1: 20, 2: 64}), found)
