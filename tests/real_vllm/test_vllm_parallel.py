"""vLLM's own ways to spread a model, dense and with experts. Every update is read back on every rank, and one that
leaves an expert as it was is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_models import gone_soon, mixture, processes_of, settings, subject, use_loader

import engines_under_test as known
from tailrace.config.errors import ConfigError
from tailrace.engines.contract import CHECKS
from tailrace.engines.vllm_engine import build_engine
from tailrace.engines.vllm_link import VllmLostError

TENSOR = ["--rollout.vllm.tensor_parallel_size", "2"]
PIPELINE = ["--rollout.vllm.pipeline_parallel_size", "2"]


@pytest.mark.parametrize(
    ("family", "options"),
    [("", PIPELINE), ("qwen3", TENSOR), ("qwen2", []), ("mixtral", PIPELINE), ("", TENSOR)],
    ids=["dense-pipeline", "qwen3-tensor", "qwen2", "mixtral-pipeline", "dense-tensor"],
)
def test_it_keeps_the_contract(family: str, options: list[str], tmp_path: Path):
    model = mixture(family, tmp_path / family) if family else known.START
    with subject(*options, model=model) as spread:
        workers = 2 if options else 1
        assert len(processes_of(spread.engine.process.pid)) >= 2 + workers  # pyright: ignore
        for check in CHECKS:
            check(spread)


@pytest.mark.parametrize("loader", ["ForgetsAnExpert", "LeavesExpertsUnpacked"])
def test_new_weights_of_experts_that_vllm_does_not_take_end_the_replica(
    loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_loader(loader, monkeypatch)
    model = mixture("qwen3", tmp_path / "model")
    engine = build_engine(settings(model=model))
    with pytest.raises(VllmLostError, match=r"did not take the new weights of .*mlp\.experts\.gate_up_proj"):
        engine.load_weights(1, known.weights(1, model))
    assert gone_soon(engine.process.pid)


def test_a_shape_that_vllm_understands_otherwise_is_refused(tmp_path: Path):
    model = mixture("of another shape", tmp_path / "model")
    engine = build_engine(settings(model=model))
    with pytest.raises(VllmLostError, match=r"q_proj\.weight is a matrix of 128 x 64, but vLLM's is 64 x 64"):
        engine.load_weights(0, known.weights(0, model))
    assert gone_soon(engine.process.pid)


def test_expert_parallelism_is_refused_on_a_cpu_where_it_would_crash():
    with pytest.raises(ConfigError, match="CPU build has no expert parallelism"):
        build_engine(settings(*TENSOR, "--rollout.vllm.enable_expert_parallel", "true"))
