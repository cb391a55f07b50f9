"""A default is never the reason of a refusal: one setting, all others untouched, is taken over its whole range."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.inspect import BoolType, FloatType, IntType, LiteralType

from tailrace.config import Config, ConfigError, load, render, with_values
from tailrace.config.fields import Field, fields, read
from tailrace.lengths import LengthLaw
from tailrace.sim.cost_model import check_fit

ROOT = Path(__file__).parents[2]
MODEL = {"model.preset": "qwen2.5-0.5b"}  # small: no card is too small for it
OF_THE_MODEL = "model."  # its shape is not a matter of defaults
PARTNERS = {  # a choice that says nothing without them
    "empirical": {"workload.lengths.file": "/lengths.json"},
    "vllm": {"rollout.python": "/opt/vllm/bin/python"},
}
MEANINGLESS = {  # whatever the others are
    ("split.trainer_share", 1.0): "leaves none to generate",
    ("split.tensor_parallel", 100): "does not divide the model's heads",
    ("split.tensor_parallel", 3000): "does not divide the model's heads",
    ("workload.lengths.tail_share", 1.0): "between 0 and 1",
    ("workload.lengths.tail_alpha", 0.01): "no finite mean",
    ("workload.lengths.tail_alpha", 0.97): "no finite mean",
    ("workload.lengths.tail_alpha", 1.0): "no finite mean",
    ("trainer.dual_clip", 0.01): "write a value above 1",
    ("trainer.dual_clip", 0.97): "write a value above 1",
    ("trainer.dual_clip", 1.0): "write a value above 1",
    ("rollout.memory", 0.01): "write more than rollout.memory = 0.01",
    ("local.replicas", 0): "write local.listen",
    ("local.ranks", 0): "write local.listen",
    ("relay.transport", "nixl"): "relay.interface",
    **{("strangers.checkers", number): "write local.listen" for number in (1, 2, 7, 14, 100, 3000)},
}


def values_of(field: Field) -> Iterator[Any]:
    """The ends of a field's range and something between them."""
    kind = field.kind
    if isinstance(kind, BoolType):
        yield from (True, False)
    elif isinstance(kind, LiteralType):
        yield from field.choices
    elif isinstance(kind, IntType):
        yield from (value for value in (0, 1, 2, 7, 14, 100, 3000) if _in_range(value, kind))
    elif isinstance(kind, FloatType):
        yield from (value for value in (0.0, 0.01, 0.97, 1.0, 3.0, 90.0, 17_000.0) if _in_range(value, kind))
    if field.optional:
        yield "unset"


def _in_range(value: float, kind: IntType | FloatType) -> bool:
    low = value >= kind.ge if kind.ge is not None else kind.gt is None or value > kind.gt
    return low and (kind.le is None or value <= kind.le)


def loaded(values: dict[str, Any]) -> Config:
    return load([], [f"--{key}={value}" for key, value in values.items()])


def refusal(key: str, value: Any) -> str:
    """Why the simulator would not run with this one setting; nothing if it would."""
    try:
        config = loaded(MODEL | {key: value} | PARTNERS.get(value, {}))
        check_fit(config)
        if config.workload.lengths.law != "empirical":
            LengthLaw(config.workload, 0).group(0, config.workload.group_size)
    except ConfigError as error:
        return str(error)
    assert value in (0, "unset") or read(config, key) == value
    assert with_values(config, {}) == config
    return ""


def test_one_setting_alone_is_taken_over_its_whole_range() -> None:
    cases = [(key, value) for key, field in fields().items() for value in values_of(field)]
    cases = [case for case in cases if not case[0].startswith(OF_THE_MODEL)]
    assert len(cases) > 500
    refused = {case: reason for case in cases if (reason := refusal(*case))}
    assert refused.keys() == MEANINGLESS.keys(), refused
    assert all(words in refused[case] for case, words in MEANINGLESS.items())


FOLLOWING = [
    ({"workload.group_size": 1}, "groups.min_survivors", 1),
    ({"workload.prompts_per_step": 2}, "trainer.mini_batches", 2),
    ({"trainer.mini_batches": 600}, "workload.prompts_per_step", 600),
    ({"workload.max_completion_tokens": 96}, "workload.lengths.median", 12),
    ({"workload.max_completion_tokens": 40_000}, "workload.lengths.median", 2000),
    ({"workload.lengths.mean": 800}, "workload.lengths.sigma", 1),
    ({"workload.lengths.sigma": 0.5}, "workload.lengths.median", 2000),
    ({"workload.lengths.tail_share": 0.1}, "workload.lengths.law", "mixture"),
    ({"workload.lengths.file": "/lengths.json"}, "workload.lengths.law", "empirical"),
    ({"workload.turns.mean": 3}, "workload.turns.maximum", 6),
    ({"task.tools": "calculator"}, "task.max_turns", 3),
    ({"local.ranks": 3}, "trainer.ranks", 3),
    ({"filters.rate": 0.1}, "groups.filter", "all"),
    ({"groups.max_filtered": 9}, "groups.filter", "zero_advantage"),
    ({"schedule.publish_every": 6}, "schedule.max_staleness", 5),
    ({"schedule.kind": "stream", "schedule.steps_ahead": 7}, "schedule.max_staleness", 7),
    ({"health.backoff_s": 90}, "health.backoff_max_s", 90),
    ({"health.backoff_max_s": 1}, "health.backoff_s", 1),
    ({"trainer.engine": "emulated"}, "rollout.engine", "emulated"),
    ({"rollout.engine": "emulated"}, "trainer.engine", "emulated"),
    ({"split.trainer_tensor_parallel": 4, "split.trainer_pipeline_parallel": 2}, "split.trainer_parallel", 8),
    ({"split.tensor_parallel": 14}, "cluster.gpus", 28),
    ({"split.trainer_gpus": 30}, "cluster.gpus", 32),
    ({"cluster.gpus": 1}, "split.colocated", True),
    ({"rollout.kv_tokens": 4000}, "workload.max_completion_tokens", 2000),
    ({"rollout.kv_tokens": 400, "workload.max_completion_tokens": 320}, "workload.prompt_tokens", 80),
    ({"model.preset": "smollm2-135m"}, "workload.max_completion_tokens", 4096),
]


@pytest.mark.parametrize(("given", "key", "value"), FOLLOWING, ids=str)
def test_a_default_follows_what_is_given(given: dict[str, Any], key: str, value: Any) -> None:
    assert read(loaded(MODEL | given), key) == value


def test_a_default_that_followed_is_neither_written_nor_kept(tmp_path: Path) -> None:
    config = loaded(MODEL | {"workload.group_size": 1})
    assert "min_survivors" not in render(config, only_changed=True)
    assert with_values(config, {"workload.group_size": 8}).groups.min_survivors == 2
    (tmp_path / "all.toml").write_text(render(config))
    assert load([tmp_path / "all.toml"]) == config


def test_what_is_tried_never_gets_a_larger_fleet() -> None:
    with pytest.raises(ConfigError, match=r"split\.trainer_gpus is 9 but cluster\.gpus is 8"):
        with_values(loaded(MODEL), {"split.trainer_gpus": 9})


def test_the_context_of_a_model_directory_bounds_the_answers(tmp_path: Path) -> None:
    start = ROOT / "examples/running_total/start"
    (tmp_path / "run.toml").write_text(f'model.path = "{start}"\n')
    assert load([tmp_path / "run.toml"]).workload.max_completion_tokens == 640 // 2
