"""The learner: weights, and what one mini-batch of a training step does to them.

`rank_group.py` makes a `Learner` per rank and calls `train_mini_batch` for every `Train` command, with the metadata of
all samples of the mini-batch and a reader for those that the rank trains on. Each is one
optimiser update:

    metadata -> advantages -> this rank's share -> packs -> log-probs under frozen policies
             -> forward, loss, backward per pack -> clip -> update -> metrics

Gradients add up over packs and ranks to the gradient of the whole mini-batch, however it was cut. So a mini-batch that
runs out of memory on the way is cut finer and begun again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrace.config.tree import Config
from tailrace.model.load import load_model, precision_on, shallow
from tailrace.model.longrope import switch_of
from tailrace.model.memory import DoesNotFitError, free_memory, ran_out
from tailrace.model.packed import Layout, layout, reads_rows
from tailrace.trainer.batch import (
    MiniBatch,
    figures,
    invented_group,
    plan_mini_batch,
    rank_share,
    read_packs,
    sample_sizes,
    token_credits,
    worth_a_pass,
)
from tailrace.trainer.bfloat16_copy import Bfloat16Copy, rotate_in_float32
from tailrace.trainer.compiled import Blocks, padded
from tailrace.trainer.critic import Critic
from tailrace.trainer.head import TokenLoss, chunk_that_fits
from tailrace.trainer.logprobs import Policy, Scores
from tailrace.trainer.losses import NEEDS_PROXIMAL, LossOutput, TokenBatch, policy_loss, token_weights, value_loss
from tailrace.trainer.memory import TokenBudget
from tailrace.trainer.optim import Optimiser
from tailrace.trainer.packing import Pack, filler
from tailrace.trainer.parallel import pick_device
from tailrace.trainer.policies import FrozenPolicy, ProximalPolicy, local
from tailrace.trainer.ranks import Alone, Ranks
from tailrace.trainer.reader import SampleInfo, TrajectoryReader, in_memory
from tailrace.trainer.recompute import recompute_layers

Stats = dict[str, Tensor]
FEW = 512  # tokens: less than where torch's compiler begins to fuse sums over rows with sums over columns
LOGIT_TOKENS = 1024  # on a CPU, where more are no faster


class DevicePack(NamedTuple):
    """A pack on the device."""

    inputs: Tensor
    where: Layout
    positions: Tensor
    targets: Tensor
    behavior_logprobs: Tensor


class TokenCredit(NamedTuple):
    """What a pack's sampled tokens are worth; values and returns only with a critic."""

    advantages: Tensor
    values: Tensor | None = None
    returns: Tensor | None = None


class OldScores(NamedTuple):
    """What the weights at the start of the step say of a pack's sampled tokens."""

    logprobs: Tensor | None = None  # None: the weights being trained are still those
    values: Tensor | None = None  # with a critic


class MicroBatch(NamedTuple):
    """A pack and all that is known of its sampled tokens before the weights change."""

    pack: Pack
    on_device: DevicePack
    weight: Tensor
    credit: TokenCredit
    proximal: Tensor | None  # as in `OldScores`
    reference: Tensor | None


class Learner:
    """The policy, its optimiser and, for GAE, a critic. `step` is the version that the weights are, or are becoming."""

    def __init__(self, config: Config, ranks: Ranks | None = None, model: PreTrainedModel | None = None):
        self.config, self.settings = config, config.trainer
        self.ranks = ranks or Alone()
        self.device = pick_device(self.settings.device, self.ranks.rank)
        self.step = 0
        model = model if model is not None else self._load()
        self.model = model.eval()  # without dropout: a log-prob must be a function of the weights alone
        if self.settings.recompute:
            recompute_layers(self.model)
        like = None if self.ranks.size == 1 else shallow(self.model).to(self.device)  # pyright: ignore[reportArgumentType]
        self.policy = Policy(self.model, config.sampling.temperature, self._logit_tokens(), like)
        self.switch = switch_of(self.model)
        self.budget = TokenBudget(self.settings.tokens_per_batch, self.settings.recompute)
        self._prepare_passes(like or self.model)
        updates = config.run.steps * self.settings.mini_batches
        self.optimiser = Optimiser(self.model.named_parameters(), self.settings.learning_rate, self.settings, updates)
        self.critic = self._make_critic(updates)
        self._reference = FrozenPolicy(self.model.parameters()) if self.settings.kl else None
        self._proximal = self._make_proximal()

    def _load(self) -> PreTrainedModel:
        """With several ranks in host memory and as it is in its files, which are mapped, not read: `Ranks.shard` takes
        from there what a rank keeps."""
        if self.ranks.size == 1:
            return load_model(self.config.model.path, "float32", self.device)
        return load_model(self.config.model.path, "auto", "cpu")

    def _prepare_passes(self, like: PreTrainedModel) -> None:
        """The model's arithmetic: in which precision, sharded or not, with which kernels. `like` is one of its kind."""
        bfloat16 = precision_on(self.device, self.settings.precision) == "bfloat16"
        self.policy.at_once = self.device.startswith("cuda") and self.policy.has_plain_head()
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=bfloat16):
            self._rows = reads_rows(like)
        self.ranks.shard(self.policy, bfloat16)
        self._bfloat16 = Bfloat16Copy(self.model) if bfloat16 and self.ranks.size == 1 else None
        if self._bfloat16 is not None:
            self.policy.model = self._bfloat16.model
        if bfloat16:
            rotate_in_float32(self.policy.model)
        compiles = self.settings.compile and self._rows and self._bfloat16 is not None
        self._blocks = Blocks(self.policy.model) if compiles else None

    def warm_up(self) -> None:
        """Compile what has to be, and see what fits into memory, before there is work. Weights stay as they are."""
        if self._blocks is None:
            return
        for budget in (self.budget.tokens, FEW):  # torch compiles a pack of few tokens otherwise than one of many
            batch = plan_mini_batch(*in_memory([invented_group(self.config, budget)]), self.settings)
            for number in range(min(2, self.settings.mini_batches)):  # the second looks back at the policy of the first
                self._gradients(-1, number, batch)
                self._clear_gradients()
        free_memory()  # a replica beside it may be taking its share just now

    def train_mini_batch(
        self, step: int, mini_batch: int, samples: Sequence[SampleInfo], reader: TrajectoryReader
    ) -> dict[str, float]:
        """Train on one mini-batch. Returns what to plot."""
        began = time.perf_counter()
        batch = plan_mini_batch(samples, reader, self.settings, self.config.groups)
        learn = self._learn_from if worth_a_pass(batch, self.settings) else self._update_without_passes
        measured = learn(step, mini_batch, batch)
        self.step = step + 1
        return measured | figures(batch) | {"seconds": time.perf_counter() - began}

    def _learn_from(self, step: int, mini_batch: int, batch: MiniBatch) -> dict[str, float]:
        sums, furthest = self._gradients(step, mini_batch, batch)
        sound = all(math.isfinite(sums[name]) for name in ("loss", "value_loss") if name in sums)
        update = self._update(sound)
        return _of_tokens(sums) | update | {"ratio_max": float(np.exp(furthest)), "without_advantage": 0.0}

    def _update_without_passes(self, step: int, mini_batch: int, batch: MiniBatch) -> dict[str, float]:
        """Nobody did better than the rest of its group: nothing goes through the model, so there is nothing to say of
        its loss, entropy or ratios."""
        self._proximal.at(step, mini_batch)
        self.optimiser.set_zero_gradients()
        update = self._update(sound=True)
        kept = {name: update[name] for name in ("lr", "nonfinite_weights")}
        return kept | {"passed_tokens": 0.0, "without_advantage": 1.0}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter once and whole, under the name the model gives it. With several ranks all must go through."""
        for name, parameter in self.model.named_parameters():
            yield name, self.ranks.full(parameter.detach())

    @torch.no_grad()
    def scores(self, pack: Pack) -> Scores:
        """What the weights of now say of a pack."""
        return self._forward(self._to_device(pack))

    # ----------------------------------------------------------------------------------------------------- trying again

    def _gradients(self, step: int, mini_batch: int, batch: MiniBatch) -> tuple[dict[str, float], float]:
        while (found := self._attempt(step, mini_batch, batch)) is None:
            self._clear_gradients()
            free_memory()
        return found

    def _clear_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.zero_grad(set_to_none=True)

    def _attempt(self, step: int, mini_batch: int, batch: MiniBatch) -> tuple[dict[str, float], float] | None:
        """None: it did not work out, but may if it is tried again. What failed is let go of on the way out of here."""
        failures = self._blocks.failures if self._blocks is not None else ()
        try:
            return self._backward(self._micro_batches(step, mini_batch, batch))
        except (torch.OutOfMemoryError, *failures) as error:
            if not ran_out(error):
                assert self._blocks is not None
                self._blocks.give_up(error)
            elif self.ranks.size > 1:
                self.budget.refuse()
            else:
                self.budget.shrink(max(sample_sizes(batch, self.switch)))
        return None

    # ---------------------------------------------------------------------------------------------------- micro-batches

    def _micro_batches(self, step: int, mini_batch: int, batch: MiniBatch) -> list[MicroBatch]:
        packs = self._packs(batch)
        on_device = [self._to_device(pack) for pack in packs]
        weights = token_weights(self.settings.loss, batch.counts, self.config.workload.max_completion_tokens)
        before, reference = self._before(step, mini_batch, on_device), self._logprobs_under(self._reference, on_device)
        return [
            MicroBatch(
                pack, spot, self._tensor(weights[pack.sequence]), self._credit(pack, old, batch), old.logprobs, other
            )
            for pack, spot, old, other in zip(packs, on_device, before, reference, strict=True)
        ]

    def _packs(self, batch: MiniBatch) -> list[Pack]:
        """This rank's. All ranks have the same number of packs, at least one: a pass over sharded weights takes all."""
        share = rank_share(batch, worth_a_pass(batch, self.settings), self.ranks.rank, self.ranks.size, self.switch)
        packs = list(read_packs(batch, share, self.budget.tokens, fold=not self._rows, switch=self.switch))
        return packs + [filler()] * (self.ranks.most(max(1, len(packs))) - len(packs))

    @torch.no_grad()
    def _before(self, step: int, mini_batch: int, packs: list[DevicePack]) -> list[OldScores]:
        snapshot = self._proximal.at(step, mini_batch)
        if snapshot is not None:
            with snapshot.in_place():
                return [OldScores(scores.logprobs, self._values(scores)) for scores in map(self._forward, packs)]
        if self.critic is None:
            return [OldScores()] * len(packs)
        return [OldScores(None, self._values(scores)) for scores in map(self._forward, packs)]

    def _values(self, scores: Scores) -> Tensor | None:
        return None if self.critic is None else self.critic(scores.hidden)

    @torch.no_grad()
    def _logprobs_under(self, snapshot: FrozenPolicy | None, packs: list[DevicePack]) -> list[Tensor | None]:
        if snapshot is None:
            return [None] * len(packs)
        with snapshot.in_place():
            return [self._forward(pack).logprobs for pack in packs]

    def _credit(self, pack: Pack, before: OldScores, batch: MiniBatch) -> TokenCredit:
        if before.values is None:
            return TokenCredit(self._tensor(batch.advantages[pack.sequence]))
        advantages, returns = token_credits(pack.members, batch, before.values.double().cpu().numpy(), self.settings)
        return TokenCredit(self._tensor(advantages), before.values, self._tensor(returns))

    def _backward(self, micro_batches: list[MicroBatch]) -> tuple[dict[str, float], float]:
        """Gradients of all micro-batches. Returns the statistics' sums over all tokens, and the largest log-ratio."""
        stats, furthest = zip(*(self._forward_backward(micro_batch) for micro_batch in micro_batches), strict=True)
        names = sorted(stats[0])
        table = torch.stack([torch.stack([each[name].double() for name in names]) for each in stats])
        sums = self.ranks.add_up(table.sum(0))
        return dict(zip(names, sums.tolist(), strict=True)), float(self.ranks.largest(torch.stack(furthest).max()))

    def _forward_backward(self, micro_batch: MicroBatch) -> tuple[Stats, Tensor]:
        scores = self._forward(micro_batch.on_device, partial(self._token_loss, micro_batch))
        assert scores.loss is not None
        assert scores.stats is not None
        (scores.loss * self.ranks.size).backward()  # sharded gradients are averaged over the ranks; this undoes it
        ratios = (scores.logprobs - micro_batch.on_device.behavior_logprobs).detach()
        furthest = ratios.max() if len(ratios) else ratios.new_tensor(-math.inf)
        counts = {"loss": scores.loss.detach(), "passed_tokens": ratios.new_tensor(len(ratios))}
        return scores.stats | counts | self._learn_values(micro_batch, scores), furthest

    def _learn_values(self, micro_batch: MicroBatch, scores: Scores) -> Stats:
        if self.critic is None:
            return {}
        tokens = self._tokens(micro_batch, slice(None), scores.logprobs, scores.entropy, self.critic(scores.hidden))
        loss, stats = value_loss(tokens, self.settings.clip_high)
        loss.backward()
        return stats

    def _token_loss(self, micro_batch: MicroBatch, chunk: slice, logprobs: Tensor, entropy: Tensor) -> LossOutput:
        return policy_loss(self._tokens(micro_batch, chunk, logprobs, entropy), self.settings)

    def _tokens(
        self, micro_batch: MicroBatch, chunk: slice, logprobs: Tensor, entropy: Tensor, values: Tensor | None = None
    ) -> TokenBatch:
        """Some of a micro-batch's sampled tokens."""

        def some(numbers: Tensor | None) -> Tensor | None:
            return None if numbers is None else numbers[chunk]

        return TokenBatch(
            new=logprobs,
            behavior_logprobs=micro_batch.on_device.behavior_logprobs[chunk],
            proximal=logprobs.detach() if micro_batch.proximal is None else micro_batch.proximal[chunk],
            advantages=micro_batch.credit.advantages[chunk],
            weight=micro_batch.weight[chunk],
            entropy=entropy,
            reference=some(micro_batch.reference),
            values=values,
            old_values=some(micro_batch.credit.values),
            returns=some(micro_batch.credit.returns),
        )

    # ----------------------------------------------------------------------------------------------------------- passes

    def _forward(self, pack: DevicePack, token_loss: TokenLoss | None = None) -> Scores:
        if self._bfloat16 is not None:
            self._bfloat16.follow(self.optimiser.updates)
        return self.policy(pack.inputs, pack.where, pack.positions, pack.targets, token_loss)

    def _to_device(self, pack: Pack) -> DevicePack:
        tokens = len(pack.inputs)
        room = self._room(tokens)
        inputs = pack.inputs if room is None else np.pad(pack.inputs, (0, room - tokens))
        arrays = (inputs, pack.positions, pack.targets)
        inputs, positions, targets = (torch.tensor(array, dtype=torch.int64, device=self.device) for array in arrays)
        paths = None if pack.paths is None else pack.paths.astype(np.int64)
        where = layout(pack.lengths, self.device, room, paths)
        return DevicePack(inputs, where, positions, targets, self._tensor(pack.behavior_logprobs))

    def _room(self, tokens: int) -> int | None:
        """The length of a row with so many tokens; None: it is not read as a row."""
        if not self._rows:
            return None
        compiled = self._blocks is not None and self._blocks.on
        return padded(tokens) if compiled else tokens

    def _logit_tokens(self) -> int:
        if self.settings.logit_tokens or not self.device.startswith("cuda"):
            return self.settings.logit_tokens or LOGIT_TOKENS
        return chunk_that_fits(self.model.config.get_text_config().vocab_size)

    # ---------------------------------------------------------------------------------------------------------- updates

    def _update(self, sound: bool) -> dict[str, float]:
        if self.optimiser.updates == 0:
            free_memory()  # the moments are made now and stay for good: not between what passes have left
        try:
            return self._update_all(sound) | self._state_of_weights()
        except torch.OutOfMemoryError:
            size = sum(p.nbytes for p in self.model.parameters()) / 1e9
            raise DoesNotFitError(
                f"the optimiser has no memory for its moments, two times the {size:.1f} GB of the weights: use a GPU "
                "with more memory, or several (trainer.ranks)"
            ) from None

    def _update_all(self, sound: bool) -> dict[str, float]:
        """Policy and critic, or neither: if the loss or a gradient is not finite, the weights stay as they are."""
        optimisers = {"": self.optimiser}
        if self.critic is not None:
            optimisers["critic_"] = self.critic.optimiser
            for parameter in self.critic.parameters():
                assert parameter.grad is not None
                self.ranks.add_up(parameter.grad)
        norms = {f"{name}grad_norm": optimiser.clip() for name, optimiser in optimisers.items()}
        sound = sound and all(map(math.isfinite, norms.values()))
        updates = [each.finish(norm, sound) for each, norm in zip(optimisers.values(), norms.values(), strict=True)]
        return norms | {"lr": updates[0].learning_rate, "skipped": float(updates[0].skipped)}

    def _state_of_weights(self) -> dict[str, float]:
        """Also a finite gradient can leave weights that are not finite, at a learning rate that is far too high."""
        kept = [*self.model.parameters(), *(self.critic.parameters() if self.critic is not None else ())]
        mine = [shard for p in kept if (shard := local(p).detach()).numel()]
        largest = torch.stack(torch._foreach_norm(mine, math.inf))  # pyright: ignore[reportPrivateImportUsage]
        return {"nonfinite_weights": float(self.ranks.largest((~largest.isfinite()).any().float()))}

    def _make_critic(self, updates: int) -> Critic | None:
        if self.settings.advantage != "gae":
            return None
        width = self.model.config.get_text_config().hidden_size
        return Critic(width, self.config.run.seed, self.settings, updates, self.device)

    def _make_proximal(self) -> ProximalPolicy:
        """The policy at the start of a step, and the critic, whose values of then its move is measured from."""
        parameters = [*self.model.parameters(), *(self.critic.parameters() if self.critic is not None else ())]
        looks_back = self.settings.loss in NEEDS_PROXIMAL or self.critic is not None
        return ProximalPolicy(parameters, looks_back and self.settings.mini_batches > 1)

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=self.device)


def _of_tokens(sums: dict[str, float]) -> dict[str, float]:
    """Means over the tokens that went through the model; the loss is a mean already."""
    passed = {name: sums.pop(name) for name in ("loss", "passed_tokens")}
    means = {name: total / max(1.0, passed["passed_tokens"]) for name, total in sums.items()}
    spread = math.sqrt(max(0.0, means.pop("ratio_squared") - means["ratio"] ** 2))
    return means | passed | {"ratio_std": spread}
