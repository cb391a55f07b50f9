"""Real vLLM engines for tests: dense and mixture-of-experts models, made on the spot, and what is left of processes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen2MoeConfig, Qwen3MoeConfig

import engines_under_test as known
from tailrace.config.tree import Config
from tailrace.engines import vllm_engine
from tailrace.engines.contract import EngineUnderTest
from tailrace.engines.vllm_engine import VllmEngine, build_engine

PYTHON = os.environ["TAILRACE_VLLM_PYTHON"]
OPTIONS = ["--rollout.engine", "vllm", "--rollout.python", PYTHON, "--rollout.kv_tokens", "8192"]
EAGER = ["--rollout.vllm.enforce_eager", "true"]
SIZES: dict[str, Any] = {
    "vocab_size": 143,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 640,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
ROUTED: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True}
MIXTURES: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3": lambda: Qwen3MoeConfig(**SIZES, **ROUTED),
    "qwen2": lambda: Qwen2MoeConfig(**SIZES | {"head_dim": 32}, **ROUTED, shared_expert_intermediate_size=96),
    "of another shape": lambda: Qwen2MoeConfig(**SIZES, **ROUTED),  # vLLM does not read its head_dim
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, intermediate_size=48),  # vLLM pads it to 64
}


def mixture(family: str, folder: Path) -> Path:
    """Random weights, and the default recipe's tokenizer."""
    AutoModelForCausalLM.from_config(MIXTURES[family]()).save_pretrained(folder)
    for file in known.START.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def settings(*options: str, model: Path = known.START) -> Config:
    return known.settings(*OPTIONS, *EAGER, *options, model=model)


def engine_of(*options: str, model: Path = known.START) -> VllmEngine:
    engine = build_engine(settings(*options, model=model))
    engine.load_weights(0, known.weights(0, model))
    return engine


def subject_of(engine: VllmEngine, model: Path = known.START) -> EngineUnderTest:
    weights, truth = partial(known.weights, folder=model), partial(known.truth, folder=model)
    return EngineUnderTest(
        engine, known.PROMPTS, known.MAX_TOKENS, weights, truth, stop_tokens=known.stop_tokens(), within_s=300.0
    )


def use_loader(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are built from now on have a worker extension of `stale_loader.py`."""
    real = vllm_engine._start

    def with_loader(*given: Any) -> Any:
        start = real(*given)
        own = {"worker_extension_cls": f"stale_loader.{name}"}
        return msgspec.structs.replace(start, arguments=start.arguments | own)

    monkeypatch.setattr(vllm_engine, "_start", with_loader)
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))


@contextmanager
def subject(*options: str, model: Path = known.START) -> Iterator[EngineUnderTest]:
    engine = engine_of(*options, model=model)
    try:
        yield subject_of(engine, model)
    finally:
        engine.close()
    assert gone_soon(engine.process.pid), "processes of vLLM are left"


def processes_of(group: int) -> list[int]:
    """That are alive in the group of a vLLM process."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def gone_soon(group: int) -> bool:
    until = time.monotonic() + 60
    while processes_of(group) and time.monotonic() < until:
        time.sleep(0.05)
    return not processes_of(group)
