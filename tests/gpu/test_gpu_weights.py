"""Weights from one GPU place to another: written into a relay's memory, brought back, taken over under a graph."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from relays import DEADLINE_S, TOKEN, nodes
from tailrace.weights.layout import WeightLayout
from tailrace.weights.publisher import Publisher
from tailrace.weights.shard import ShardLayout
from tailrace.weights.shared_memory import SharedMemoryReader, default_base
from tailrace.weights.staging import Staging, replace_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Stack(torch.nn.Module):
    """Odd sizes, and more than one piece of everything on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(6001, 4003, device="cuda", dtype=torch.bfloat16)
        self.narrow = torch.nn.Linear(4003, 3, device="cuda", dtype=torch.bfloat16)

    @property
    def device(self) -> torch.device:
        return self.wide.weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.wide(x))


@pytest.fixture(params=["shared memory", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Memory that the GPU can write to, and files that it probably cannot, so that threads carry the bytes."""
    if request.param == "disk":
        yield tmp_path
        return
    with TemporaryDirectory(dir=default_base()) as shared:
        yield Path(shared)


@torch.no_grad()
def test_every_version_arrives_whole_under_a_captured_graph(folder: Path) -> None:
    model = Stack()
    masters = {name: p.float() for name, p in model.named_parameters()}
    x = torch.randn(5, 6001, device="cuda", dtype=torch.bfloat16)
    model(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(x)
    staging = Staging(model)  # pyright: ignore[reportArgumentType]
    layout = ShardLayout.whole(WeightLayout.of_tensors(masters, dtype="bfloat16"))
    publisher = Publisher(layout, TOKEN, device=x.device)
    answers: queue.Queue[str] = queue.Queue()
    with nodes(1, folder) as (node,):
        for version in range(5):
            expected = {name: p.normal_().bfloat16() for name, p in masters.items()}
            publisher.snapshot(version, masters)
            publisher.send(node.address, lambda *_: answers.put(""), lambda _, reason: answers.put(reason))
            for parameter in masters.values():
                parameter.zero_()  # training goes on
            assert answers.get(timeout=DEADLINE_S) == ""
            assert publisher.copied_s > 0
            staged = staging.stage(SharedMemoryReader(node.memory.path).open(version).tensors())
            assert staged is not None
            replace_weights(model, staged)  # pyright: ignore[reportArgumentType]
            assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
            graph.replay()
            assert (output - model(x)).abs().max() <= 0.05 * output.abs().max()
            if version:
                node.drop(version - 1)
    publisher.close()
