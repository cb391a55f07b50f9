"""The trainer's side: a snapshot that training cannot disturb, sent as often as asked for."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from relays import DEADLINE_S, TOKEN, Node, nodes, until
from tailrace.weights import in_place
from tailrace.weights.channel import Address
from tailrace.weights.in_place import InPlaceWriter
from tailrace.weights.layout import WeightLayout
from tailrace.weights.messages import WriteTarget
from tailrace.weights.publisher import Publisher
from tailrace.weights.region import NotOnThisHostError
from tailrace.weights.shard import ShardLayout
from tailrace.weights.shared_memory import SharedMemoryReader
from tailrace.weights.snapshot import ArraySnapshot, PublishError
from tailrace.weights.tensor_snapshot import TensorSnapshot

Answer = tuple[int, str]


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300, 500), value), "b": torch.full((7,), value, dtype=torch.float32)}


Make = Callable[..., Publisher]


def of_device(device: torch.device | None) -> Make:
    def make(connect_s: float = DEADLINE_S, wait_s: float = DEADLINE_S) -> Publisher:
        layout = WeightLayout.of(["a", "b"], ["float32", "bfloat16"], [(300, 500), (7,)])
        return Publisher(ShardLayout.whole(layout), TOKEN, connect_s=connect_s, wait_s=wait_s, device=device)

    return make


@pytest.fixture(params=[None, torch.device("cpu")], ids=["streamed", "in place"])
def publisher(request: pytest.FixtureRequest) -> Make:
    """Of weights in host memory, and of weights on a device: any torch device will do for the way they go."""
    return of_device(request.param)


def send(publisher: Publisher, address: Address) -> queue.Queue[Answer]:
    answers: queue.Queue[Answer] = queue.Queue()
    publisher.send(address, lambda v, _: answers.put((v, "")), lambda v, reason: answers.put((v, reason)))
    return answers


def read(node: Node, version: int) -> dict[str, torch.Tensor]:
    return SharedMemoryReader(node.memory.path).open(version).tensors()


def test_a_replica_maps_what_the_trainer_had_in_the_type_of_the_layout(tmp_path: Path, publisher: Make) -> None:
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


def test_the_last_snapshot_can_be_sent_again_to_another_master(tmp_path: Path, publisher: Make) -> None:
    with nodes(2, tmp_path) as (first, second):
        trainer = publisher()
        trainer.snapshot(1, iter(weights(1.0).items()))
        for node in (first, second, first):  # the last one has it and says so
            assert send(trainer, node.address).get(timeout=DEADLINE_S) == (1, "")
        assert read(second, 1)["a"][0, 0] == 1.0
        trainer.close()


def test_a_snapshot_leaves_alone_what_is_being_sent_and_a_third_one_waits(tmp_path: Path, publisher: Make) -> None:
    with nodes(1, tmp_path) as (node,), socket.create_server(("127.0.0.1", 0)) as silent:
        trainer = publisher(wait_s=0.2)
        trainer.snapshot(1, weights(1.0))
        send(trainer, Address(*silent.getsockname()))
        trainer.snapshot(2, weights(2.0))
        assert send(trainer, node.address).get(timeout=DEADLINE_S) == (2, "")
        assert read(node, 2)["a"][0, 0] == 2.0
        trainer.snapshot(3, weights(3.0))
        send(trainer, Address(*silent.getsockname()))
        with pytest.raises(PublishError, match="v4 finds no free buffer: v1, v3 are being sent"):
            trainer.snapshot(4, weights(4.0))
        trainer.close()


def test_a_closed_publisher_ends_what_is_under_way_and_calls_nobody(publisher: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        trainer = publisher()
        trainer.snapshot(1, weights(1.0))
        answers = send(trainer, Address(*silent.getsockname()))
        trainer.close()
        assert not any(thread.is_alive() for thread in trainer._threads)
        assert answers.empty()


def test_a_relay_that_cannot_be_reached_is_a_reason_after_the_deadline(publisher: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = Address(*gone.getsockname())
    trainer = publisher(connect_s=0.2)
    trainer.snapshot(1, weights(1.0))
    version, reason = send(trainer, address).get(timeout=DEADLINE_S)
    assert version == 1
    assert "could not connect" in reason


def test_weights_that_do_not_match_the_layout_are_refused(publisher: Make) -> None:
    trainer = publisher()
    with pytest.raises(PublishError, match="1 tensors of the layout were not given, 'b'"):
        trainer.snapshot(1, {"a": torch.zeros(300, 500)})
    with pytest.raises(PublishError, match=r"'a' of shape \[1, 2\]"):
        trainer.snapshot(1, {"a": torch.zeros(1, 2)})


def publish(trainer: Publisher, node: Node, version: int) -> int:
    """Publish a version of which every number is its own; returns the inode of its memory."""
    trainer.snapshot(version, weights(float(version)))
    assert send(trainer, node.address).get(timeout=DEADLINE_S) == (version, "")
    return next(node.memory.path.glob(f"v{version}.*.safetensors")).stat().st_ino


def test_memory_of_a_dropped_version_is_written_again_but_not_while_somebody_reads_it(tmp_path: Path) -> None:
    with nodes(1, tmp_path) as (node,):
        trainer = of_device(torch.device("cpu"))()
        first, second = publish(trainer, node, 1), publish(trainer, node, 2)
        node.drop(1)
        assert publish(trainer, node, 3) == first
        reading = read(node, 2)
        node.drop(2)
        assert publish(trainer, node, 4) not in (first, second)
        assert (reading["a"][0, 0], read(node, 3)["a"][0, 0], read(node, 4)["a"][0, 0]) == (2.0, 3.0, 4.0)
        node.drop(3)
        publish(trainer, node, 5)
        assert trainer._in_place is not None
        assert len(trainer._in_place._regions) == 2  # what the relay has freed is not kept in memory by the trainer
        trainer.close()


def test_a_relay_with_our_address_but_other_memory_is_sent_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(*_: object) -> None:
        raise NotOnThisHostError("not on this host")

    monkeypatch.setattr(InPlaceWriter, "_region", elsewhere)
    with nodes(1, tmp_path) as (node,):
        trainer = of_device(torch.device("cpu"))()
        publish(trainer, node, 1)
        publish(trainer, node, 2)
        assert (read(node, 1)["a"][0, 0], read(node, 2)["b"][0]) == (1.0, 2.0)
        trainer.close()


class Instant:
    """A stream and an event of CUDA, on which everything is over at once."""

    def __init__(self, **_: object) -> None:
        self.record = self.synchronize = lambda *_: None

    def query(self) -> bool:
        return True


@pytest.mark.parametrize("registered", [0, 3, 99])
def test_memory_is_registered_once_and_what_cannot_be_is_carried_by_threads(
    registered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def register(address: int, count: int, device: torch.device) -> bool:
        calls.append(count)
        return len(calls) <= registered

    monkeypatch.setattr(in_place, "REGISTER_BYTES", 1 << 16)
    monkeypatch.setattr(in_place, "_register", register)
    monkeypatch.setattr(in_place, "_unregister", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Event", Instant)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    file, data = tmp_path / "v1.partial", torch.randint(0, 256, (600_100,), dtype=torch.uint8)
    file.write_bytes(bytes(len(data)))
    memory = InPlaceWriter(torch.device("cpu"))
    where = WriteTarget(str(file), file.stat().st_ino)
    memory._region(where, len(data))._stream = Instant()  # pyright: ignore[reportAttributeAccessIssue]
    for source in (data, data.flip(0)):
        progress = list(memory.write(where, 1, source))
        assert progress == sorted(set(progress))
        assert file.read_bytes() == source.numpy().tobytes()
    assert sum(calls) == len(data) or registered < 99
    memory.close()


def test_a_relay_sends_on_what_is_written_into_its_memory(tmp_path: Path) -> None:
    with nodes(2, tmp_path) as (master, other):
        master.route(1, {other.id: other.address})
        trainer = of_device(torch.device("cpu"))()
        publish(trainer, master, 1)
        until(lambda: other.versions() == (1,), "the second relay")
        assert read(other, 1)["a"][0, 0] == 1.0
        trainer.close()


def test_a_snapshot_on_a_device_is_copied_to_the_host_once_and_only_when_it_is_streamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copies: list[TensorSnapshot] = []
    on_host = TensorSnapshot._on_host
    monkeypatch.setattr(TensorSnapshot, "_on_host", lambda one: copies.append(one) or on_host(one))
    layout = ShardLayout.whole(WeightLayout.of_tensors(weights(0.0)))
    snapshot, in_host_memory = TensorSnapshot(layout, torch.device("cpu")), TensorSnapshot(layout)
    for value in (1.0, 2.0):
        for one in (snapshot, in_host_memory):
            one.begin()
            one.copy_from(weights(value))
        assert snapshot not in copies
        assert bytes(snapshot.ready(0)) == bytes(in_host_memory.ready(0))
        assert snapshot.checksum() == in_host_memory.checksum()
        assert copies.count(snapshot) == 1
        copies.clear()


def test_a_snapshot_of_arrays_is_that_of_the_same_tensors() -> None:
    """Also where float32 is halfway between two of bfloat16, or close to it."""
    halves = np.arange(0x3F80_0000, 0x3F88_0000, 0x7FFF, dtype=np.uint32).view(np.float32)
    arrays = {"a": np.concatenate([halves, -halves]).reshape(2, -1), "b": halves}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    shapes = [array.shape for array in arrays.values()]
    layout = ShardLayout.whole(WeightLayout.of(list(arrays), ["bfloat16", "float32"], shapes))
    of_arrays, of_tensors = ArraySnapshot(layout), TensorSnapshot(layout)
    of_arrays.copy_from(arrays)
    of_tensors.copy_from(tensors)
    assert bytes(of_arrays.ready(0)) == bytes(of_tensors.ready(0))
