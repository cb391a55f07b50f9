"""What a run that is resumed may be given anew, and what it may not.

Its decisions so far are replayed, so nothing that they depended on may change silently. What may change is either not
read by control, or its change is an event in the journal (`SettingsChanged`), from which on control decides by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

import msgspec

from tailrace.config.fields import fields, read
from tailrace.config.tree import Config

MAY_CHANGE = frozenset(
    {
        "run.steps",
        "run.name",
        "run.folder",
        "run.archive",
        "run.evaluate",
        "task.epochs",
        "task.reward_workers",
        "groups.max_filtered",
        "local.port",
        "local.listen",
        "local.start_s",
        "local.wait_s",
        "local.ranks",  # a checkpoint is resumed on any number of ranks, anywhere
        "rollout.cards",  # the machine may be another one
        "rollout.memory",
        "rollout.device",
        "relay.streams",
        "relay.transport",
        "relay.interface",
        "trainer.ranks",
        "trainer.interface",
        "trainer.collective_s",
        "trainer.cards",
        "trainer.device",
        "trainer.threads",
        "trainer.sharding",
        "trainer.tokens_per_batch",  # what a step costs, not what comes of it
        "trainer.logit_tokens",
        "trainer.recompute",
        "trainer.compile",
        "trainer.learning_rate",
        "trainer.critic_learning_rate",
        "trainer.warmup_steps",
        "trainer.decay",
        "trainer.weight_decay",
        "trainer.max_grad_norm",
        "trainer.kl",
        "trainer.entropy",
        "trainer.clip_low",
        "trainer.clip_high",
        "trainer.dual_clip",
        "trainer.importance_cap",
        "trainer.checkpoint_every",
        "trainer.keep_checkpoints",
        "trainer.archive_every",
        "eval.every",
        "eval.samples",
        "eval.temperature",
        "eval.by",
        "eval.keep_best",
        "eval.patience",
        "log.to",
        "log.project",
        "log.samples",
    }
)


def differences(before: Config, now: Config) -> dict[str, Any]:
    """What has changed of what may, by dotted key."""
    changed = [key for key in fields() if key in MAY_CHANGE and read(before, key) != read(now, key)]
    return {key: read(now, key) for key in changed}


def fixed(before: Config, now: Config) -> list[str]:
    """The settings that are not the same and may not change."""
    return [key for key in fields() if key not in MAY_CHANGE and read(before, key) != read(now, key)]


def replaced(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy with these values, which were checked when they were first given."""
    table = msgspec.to_builtins(config)
    for key, value in values.items():
        *path, name = key.split(".")
        reduce(getitem, path, table)[name] = value
    return msgspec.convert(table, Config) if values else config


def goes_further(before: Config, now: Config) -> bool:
    """Whether there is something to do for a run that had come to its end."""
    more_prompts = before.task.epochs and (now.task.epochs > before.task.epochs or not now.task.epochs)
    had, has = before.eval.patience, now.eval.patience
    more_patience = had and (has > had or not has)  # for a run that stopped early
    return now.run.steps > before.run.steps or bool(more_prompts or more_patience)
