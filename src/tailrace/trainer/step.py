"""The learner: weights, and what one part of a training step does to them.

`worker.py` makes a `Learner` per rank and calls `train_part` with the groups of every `Train` command; all ranks get
the same groups. A part is one mini-batch and one optimiser update:

    groups -> samples and advantages -> packs -> log-probs under frozen policies -> forward, loss, backward per pack
           -> clip -> update -> metrics

Gradients add up over packs and ranks to the gradient of the whole mini-batch, however it was cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tailrace.config.tree import Config
from tailrace.model.load import load_model
from tailrace.model.packed import layout
from tailrace.trainer.batch import MiniBatch, mini_batch, rank_packs, token_credits, worth_a_pass
from tailrace.trainer.critic import Critic
from tailrace.trainer.logprobs import Policy, Scores
from tailrace.trainer.losses import NEEDS_PROXIMAL, TokenBatch, policy_loss, token_weights, value_loss
from tailrace.trainer.optim import Optimiser, Update
from tailrace.trainer.packing import Pack
from tailrace.trainer.parallel import Alone, Ranks, pick_device
from tailrace.trainer.policies import Proximal, Snapshot
from tailrace.types import Trajectory

Stats = dict[str, Tensor]


class Credit(NamedTuple):
    """What a pack's sampled tokens are worth; values and returns only with a critic."""

    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None


class Lesson(NamedTuple):
    """A pack and all that is known of its sampled tokens before the weights change."""

    pack: Pack
    weight: Tensor
    credit: Credit
    proximal: Tensor | None  # None: the weights being trained are still the proximal ones
    reference: Tensor | None


class Learner:
    """The policy, its optimiser and, for GAE, a critic. `step` is the version that the weights are, or are becoming."""

    def __init__(self, config: Config, ranks: Ranks | None = None):
        self.config, self.settings = config, config.trainer
        self.ranks = ranks or Alone()
        self.device = pick_device(self.settings.device, self.ranks.rank)
        self.step = 0
        self.model = _trainable(load_model(config.model.path, "float32", self.device), self.settings.recompute)
        self.policy = Policy(self.model, config.sampling.temperature, self.settings.logit_tokens)
        self.ranks.shard(self.policy)
        updates = config.run.steps * self.settings.mini_batches
        self.optimiser = Optimiser(self.model.named_parameters(), self.settings.learning_rate, self.settings, updates)
        self.critic = self._make_critic(updates)
        self._reference = Snapshot(self.model.parameters()) if self.settings.kl else None
        several = self.settings.mini_batches > 1
        self._proximal = Proximal(self.model.parameters(), several and self.settings.loss in NEEDS_PROXIMAL)

    def train_part(self, step: int, part: int, groups: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
        """Train on one mini-batch. Returns what to plot."""
        began = time.perf_counter()
        batch = mini_batch(groups, self.settings)
        sums, furthest = self._backward(self._lessons(step, part, batch))
        update = self._update()
        self.step = step + 1
        more = {"ratio_max": math.exp(furthest), "seconds": time.perf_counter() - began}
        return _of_tokens(sums) | _of_batch(batch) | _of_update(update) | more

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once and whole, under the name the model gives it. With several ranks all must go through."""
        for name, parameter in self.model.named_parameters():
            yield name, self.ranks.full(parameter.detach())

    @torch.no_grad()
    def scores(self, pack: Pack) -> Scores:
        """What the weights of now say of a pack."""
        return self._forward(pack)

    def _lessons(self, step: int, part: int, batch: MiniBatch) -> list[Lesson]:
        chosen, budget = worth_a_pass(batch, self.settings), self.settings.tokens_per_batch
        packs = rank_packs(batch.samples, chosen, budget, self.ranks.rank, self.ranks.size)
        weights = token_weights(self.settings.loss, batch.counts, self.config.workload.max_completion_tokens)
        return [
            Lesson(pack, self._tensor(weights[pack.sequence]), self._credit(pack, batch), proximal, reference)
            for pack, proximal, reference in zip(
                packs,
                self._logprobs_under(self._proximal.at(step, part), packs),
                self._logprobs_under(self._reference, packs),
                strict=True,
            )
        ]

    def _logprobs_under(self, snapshot: Snapshot | None, packs: list[Pack]) -> list[Tensor | None]:
        if snapshot is None:
            return [None] * len(packs)
        with snapshot.in_place():
            return [self.scores(pack).logprobs for pack in packs]

    def _credit(self, pack: Pack, batch: MiniBatch) -> Credit:
        if self.critic is None:
            return Credit(self._tensor(batch.advantages[pack.sequence]))
        with torch.no_grad():
            values = self.critic(self.scores(pack).hidden)
        advantages, returns = token_credits(pack.members, batch, values.double().cpu().numpy(), self.settings)
        return Credit(self._tensor(advantages), values, self._tensor(returns))

    def _backward(self, lessons: list[Lesson]) -> tuple[dict[str, float], float]:
        """Gradients of all lessons. Returns the statistics' sums over all tokens, and the largest log-ratio."""
        stats, furthest = zip(*(self._learn(lesson) for lesson in lessons), strict=True)
        names = sorted(stats[0])
        table = torch.stack([torch.stack([each[name].double() for name in names]) for each in stats])
        sums = self.ranks.add_up(table.sum(0))
        return dict(zip(names, sums.tolist(), strict=True)), float(self.ranks.largest(torch.stack(furthest).max()))

    def _learn(self, lesson: Lesson) -> tuple[Stats, Tensor]:
        tokens = self._tokens(lesson)
        loss, stats = policy_loss(tokens, self.settings)
        (loss * self.ranks.size).backward()  # sharded gradients are averaged over the ranks; this undoes it
        ratios = (tokens.new - tokens.behaviour).detach()
        furthest = ratios.max() if len(ratios) else ratios.new_tensor(-math.inf)
        counts = {"loss": loss.detach(), "passed_tokens": loss.new_tensor(len(ratios))}
        return stats | counts | self._learn_values(tokens), furthest

    def _learn_values(self, tokens: TokenBatch) -> Stats:
        if self.critic is None:
            return {}
        loss, stats = value_loss(tokens, self.settings.clip_high)
        loss.backward()
        return stats

    def _tokens(self, lesson: Lesson) -> TokenBatch:
        scores = self._forward(lesson.pack)
        return TokenBatch(
            new=scores.logprobs,
            behaviour=self._tensor(lesson.pack.behaviour),
            proximal=scores.logprobs.detach() if lesson.proximal is None else lesson.proximal,
            advantages=lesson.credit.advantages,
            weight=lesson.weight,
            entropy=scores.entropy,
            reference=lesson.reference,
            values=None if self.critic is None else self.critic(scores.hidden),
            old_values=lesson.credit.values,
            returns=lesson.credit.returns,
        )

    def _forward(self, pack: Pack) -> Scores:
        inputs, places, targets = (
            torch.from_numpy(x).to(self.device) for x in (pack.inputs, pack.places, pack.targets)
        )
        half = self.settings.precision == "bfloat16"
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=half):
            return self.policy(inputs, layout(pack.lengths, self.device), places, targets)

    def _update(self) -> Update:
        if self.critic is not None:
            for parameter in self.critic.parameters():
                assert parameter.grad is not None
                self.ranks.add_up(parameter.grad)
            self.critic.optimiser.update()
        return self.optimiser.update()

    def _make_critic(self, updates: int) -> Critic | None:
        if self.settings.advantage != "gae":
            return None
        width = self.model.config.get_text_config().hidden_size
        return Critic(width, self.config.run.seed, self.settings, updates, self.device)

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.device, torch.float32)


def _trainable(model: PreTrainedModel, recompute: bool) -> PreTrainedModel:
    """Without dropout: a log-prob must be a function of the weights alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train(recompute)  # transformers recomputes in training mode only


def _of_tokens(sums: dict[str, float]) -> dict[str, float]:
    """Means over the tokens that went through the model; the loss is a mean already."""
    passed = {name: sums.pop(name) for name in ("loss", "passed_tokens")}
    means = {name: total / max(1.0, passed["passed_tokens"]) for name, total in sums.items()}
    spread = math.sqrt(max(0.0, means.pop("ratio_squared") - means["ratio"] ** 2))
    return means | passed | {"ratio_std": spread}


def _of_batch(batch: MiniBatch) -> dict[str, float]:
    return {
        "reward": float(batch.rewards.mean()),
        "reward_std": float(batch.rewards.std()),
        "tokens": float(batch.counts.sum()),
        "sequences": float(len(batch.samples)),
    }


def _of_update(update: Update) -> dict[str, float]:
    return {"grad_norm": update.grad_norm, "lr": update.learning_rate, "skipped": float(update.skipped)}
