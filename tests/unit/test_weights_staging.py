"""New weights on their way to a device: nothing is lost, nothing changes before the switch, and no room is no end."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tailrace.config.tree import Config
from tailrace.protocol import LoadWeights, PullFailed, WeightsLoaded
from tailrace.rollout import worker
from tailrace.weights import staging
from tailrace.weights.checksum import checksum
from tailrace.weights.layout import WeightLayout
from tailrace.weights.pinned_copy import PinnedCopier
from tailrace.weights.pull import PulledWeights, Puller
from tailrace.weights.region import SharedMemoryError
from tailrace.weights.shared_memory import SharedMemory, SharedMemoryReader
from tailrace.weights.staging import StagedWeights, Staging, replace_weights, staging_for
from tailrace.wire.messages import ComponentSpec, Ordered

CPU = torch.device("cpu")
DEADLINE_S = 20.0


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def store(memory: SharedMemory, version: int, model: LlamaForCausalLM) -> None:
    tensors = dict(model.named_parameters())
    layout = WeightLayout.of_tensors(tensors)
    buffer = memory.create(version, layout.size)
    (room,) = buffer.whole().claim(layout.size)
    room[: len(layout.header)] = layout.header
    for name, view in layout.views(room).items():
        view.copy_(tensors[name].detach())
    buffer.whole().advance(layout.size)
    buffer.seal(checksum(room))


def test_threads_move_ragged_tensors_both_ways_and_tell_their_progress_in_order() -> None:
    hauler = PinnedCopier(CPU, threads=3, buffer_bytes=1000)
    sources = [torch.randn(1234), torch.randn(3, 7).bfloat16(), torch.randint(0, 9, (5000,), dtype=torch.uint8)]
    for move in (hauler.to_device, hauler.to_host):
        targets = [torch.zeros_like(source) for source in sources]
        progress = list(move(zip(targets, sources, strict=True)))
        assert progress == sorted(progress)
        assert progress[-1] == sum(source.nbytes for source in sources)
        assert all(torch.equal(*pair) for pair in zip(targets, sources, strict=True))


def test_staged_weights_change_nothing_before_the_switch_and_no_address_with_it() -> None:
    model, new = tiny(0), tiny(1)
    addresses = [one.data_ptr() for one in model.parameters()]
    staging = Staging(model)
    for other in (new, tiny(2)):
        before = model.lm_head.weight.clone()
        staged = staging.stage(dict(other.named_parameters()))
        assert torch.equal(model.lm_head.weight, before)
        assert isinstance(staged, StagedWeights)
        replace_weights(model, staged)
        assert same(model, other)
    assert [one.data_ptr() for one in model.parameters()] == addresses


def test_staged_weights_of_another_type_are_converted_and_those_that_do_not_fit_refused() -> None:
    model, new = tiny(0), tiny(1).bfloat16()
    staged = Staging(model).stage(dict(new.named_parameters()))
    assert staged is not None
    replace_weights(model, staged)
    assert same(model, new.float())
    with pytest.raises(ValueError, match=r"the new weights lack 'model\.embed_tokens\.weight'"):
        Staging(model).stage({})


def test_no_room_for_a_second_set_is_said_once_and_weights_load_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(staging, "_device_memory", full)
    model, memory = tiny(0), SharedMemory(tmp_path / "a")
    puller = Puller(Staging(model))
    for version in (1, 2):
        new = tiny(version)
        store(memory, version, new)
        replace_weights(model, pulled(puller, version, memory).weights)
        assert same(model, new)
    assert caplog.text.count("no room on the GPU") == 1


def test_a_pull_lands_on_the_device_or_tells_what_went_wrong(tmp_path: Path) -> None:
    model, new, memory = tiny(0), tiny(1), SharedMemory(tmp_path / "a")
    store(memory, 4, new)
    puller = Puller(Staging(model))
    ready = pulled(puller, 4, memory)
    assert (ready.version, type(ready.weights), puller.busy) == (4, StagedWeights, False)
    replace_weights(model, ready.weights)
    assert same(model, new)
    with pytest.raises(SharedMemoryError, match="v5 is not in"):
        pulled(puller, 5, memory)
    assert not puller.busy
    puller.close()


class Context:
    """The link of a worker: what it is to receive next, and what it has reported."""

    def __init__(self, *_: object) -> None:
        self.incarnation = 0
        self.orders: list[Ordered] = []
        self.reports: list[object] = []
        self.report = self.reports.append

    def receive(self, timeout_s: float) -> list[Ordered]:
        orders, self.orders = self.orders, []
        return orders


class Seat:
    """A runner with nothing to play, and an engine for which weights are staged."""

    busy, episodes = False, ()

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.engine, self.version, self.staging = self, -1, Staging(model)
        self.model = model

    def load_weights(self, version: int, tensors: StagedWeights, keep_kv: bool) -> None:
        replace_weights(self.model, tensors)
        self.version = version


def test_a_worker_switches_when_weights_are_pulled_and_reports_a_version_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new, memory, seat = tiny(1), SharedMemory(tmp_path / "a"), Seat(tiny(0))
    store(memory, 4, new)
    monkeypatch.setattr(worker, "ControlClient", Context)
    monkeypatch.setattr(worker, "build_runner", lambda *_, **__: seat)
    subject = worker.RolloutWorker(ComponentSpec("replica", 0, 0, "", "", "", Config()))
    assert isinstance(subject.controller, Context)
    for version in (4, 5):
        subject.controller.orders.append(Ordered(LoadWeights(0, 0, version, 0), arena=str(memory.path)))
        end = time.monotonic() + DEADLINE_S
        while len(subject.controller.reports) < version - 3:
            assert time.monotonic() < end, f"waited {DEADLINE_S} s for a report"
            assert subject._obey(0.0)
            subject._advance()
    loaded, failed = subject.controller.reports
    assert loaded == WeightsLoaded(0, 0, 4)
    assert isinstance(failed, PullFailed)
    assert (seat.version, subject.loads, same(seat.model, new)) == (4, 1, True)


def test_a_cpu_stages_nothing() -> None:
    assert staging_for(tiny(0)) is None


def pulled(puller: Puller, version: int, memory: SharedMemory) -> PulledWeights:
    puller.begin(version, SharedMemoryReader(memory.path, parallel=True))
    end = time.monotonic() + DEADLINE_S
    while (ready := puller.poll()) is None:
        assert time.monotonic() < end, f"waited {DEADLINE_S} s for a pull"
        time.sleep(0.001)
    return ready
