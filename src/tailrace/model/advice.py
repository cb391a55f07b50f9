"""Warnings about settings and models that are allowed but may surprise: `tailrace train` prints them before anything
starts, `tailrace doctor` among its notices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tailrace.config.tree import Config
from tailrace.model.load import read_config

ROUTER_LOSSES = ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef", "aux_loss_alpha")


def advice(config: Config) -> Iterator[str]:
    yield from _about_speeds(config)
    if config.trainer.engine == "native" and config.model.path:
        yield from _about_sampling(config)
        yield from _about_experts(Path(config.model.path).expanduser())


def _about_speeds(config: Config) -> Iterator[str]:
    if config.rollout.speeds and config.rollout.engine != "emulated":
        yield (
            f'rollout.speeds has no effect with rollout.engine = "{config.rollout.engine}", whose replicas are as fast '
            'as their machines; it is for simulations and rollout.engine = "emulated": leave it out'
        )


def _about_sampling(config: Config) -> Iterator[str]:
    """The trainer's log-probs are over the whole vocabulary, at the sampling temperature."""
    sampling = config.sampling
    if sampling.temperature == 0:
        yield (
            "sampling.temperature is 0: all samples of a prompt come out the same, so none has an advantage, and the "
            "trainer's log-probs are those at temperature 1; write 1 for training"
        )
        return
    cuts = [f"{name} is {value:g}" for name, value, off in _cuts(config) if value != off]
    if cuts:
        yield (
            f"{' and '.join(cuts)}: tokens are sampled from a part of the vocabulary, but the trainer's log-probs are "
            "over all of it, so importance weights are biased from the start; write sampling.top_p = 1 and "
            "sampling.top_k = 0 for training"
        )


def _cuts(config: Config) -> Iterator[tuple[str, float, float]]:
    yield "sampling.top_p", config.sampling.top_p, 1
    yield "sampling.top_k", config.sampling.top_k, 0


def _about_experts(folder: Path) -> Iterator[str]:
    if not (folder / "config.json").is_file():
        return
    table = read_config(folder)
    inner = table.get("text_config")
    for name in ROUTER_LOSSES:
        value = (inner if isinstance(inner, dict) else {}).get(name) or table.get(name)
        if isinstance(value, int | float) and value:
            yield (
                f"model.path: this mixture of experts was trained with a load-balancing loss ({name} = {value:g} in "
                "config.json); the training loss here has none, so expert load may become unbalanced over a long run: "
                "keep the learning rate low"
            )
            return
