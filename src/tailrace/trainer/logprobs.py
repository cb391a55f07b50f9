"""Log-probs and entropies of tokens without the logits of a whole pack.

`Policy` is the one module that is trained (and sharded): it runs a pack through the model and scores the sampled tokens
from the hidden states that predict them, `chunk` tokens at a time, and grades them where it is told how. A chunk's
logits are thrown away and made again in backward, or give loss and gradient at once (`head.py`), so at any time
the logits of one chunk exist, and those of prompts never do.

Log-probs are after the sampling temperature. Top-k and top-p change the distribution that was sampled from in ways that
have no gradient; the policy that is trained is the one with the temperature alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tailrace.model.packed import Layout, hidden_states, install
from tailrace.model.support import check_layers, refuse, trunk_of, trying
from tailrace.trainer.head import Head, TokenLoss, fused_loss, scored


class Scores(NamedTuple):
    """One entry per sampled token in the first three, and their loss, if one was asked for."""

    logprobs: Tensor
    entropy: Tensor
    hidden: Tensor  # what predicts it, detached: for a critic
    loss: Tensor | None = None
    stats: dict[str, Tensor] | None = None


class Policy(nn.Module):
    """A causal language model as a function from packs to the log-probs of their sampled tokens."""

    def __init__(self, model: PreTrainedModel, temperature: float, chunk: int, like: PreTrainedModel | None = None):
        """`like`: a model of the same kind, which is tried out in place of one that is about to be sharded."""
        super().__init__()
        self.model = model
        self.temperature = temperature or 1.0  # greedy sampling: the model's own distribution
        self.chunk = chunk
        self.at_once = False  # forward and backward of the head in one go
        check_layers(model)
        if like is None:
            with trying(model):
                self._check_head()
        else:
            Policy(like, temperature, chunk)
        install(model, try_out=like is None)

    def forward(
        self, tokens: Tensor, where: Layout, positions: Tensor, targets: Tensor, token_loss: TokenLoss | None = None
    ) -> Scores:
        hidden = hidden_states(self.model, tokens, where).index_select(0, positions)
        if self.at_once and (token_loss or not torch.is_grad_enabled()):
            return self._at_once(hidden, targets, token_loss)
        logprobs, entropy = self.score(hidden, targets)
        loss, stats = token_loss(slice(0, len(targets)), logprobs, entropy) if token_loss else (None, None)
        return Scores(logprobs, entropy, hidden.detach(), loss, stats)

    def has_plain_head(self) -> bool:
        """A matrix and a factor, and nothing else."""
        head, config = self.model.get_output_embeddings(), self.model.config.get_text_config()
        capped = getattr(config, "final_logit_softcapping", None) is not None
        return isinstance(head, nn.Linear) and head.bias is None and not capped

    def _at_once(self, hidden: Tensor, targets: Tensor, token_loss: TokenLoss | None) -> Scores:
        weight: Any = self.model.get_output_embeddings().weight  # type: ignore[union-attr]
        head = Head(weight, self._factor() / self.temperature, self.chunk)
        if token_loss is None:
            return Scores(*scored(hidden, targets, head), hidden.detach())
        found = fused_loss(hidden, targets, head, token_loss)
        return Scores(found.logprobs, found.entropy, hidden.detach(), found.loss, found.stats)

    def score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, chunk by chunk."""
        pieces = [
            checkpoint(self._score_chunk, *piece, use_reentrant=False, preserve_rng_state=False)
            for piece in zip(hidden.split(self.chunk), targets.split(self.chunk), strict=True)
        ]
        logprobs, entropy = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropy)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's head, with what some families do to its output."""
        config, head = self.model.config.get_text_config(), self.model.get_output_embeddings()
        assert head is not None
        logits = _times(head(hidden).float(), self._factor())
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _factor(self) -> float:
        config = self.model.config.get_text_config()
        return (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)

    def _score_chunk(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return _Score.apply(_times(self.logits(hidden), 1 / self.temperature), targets)  # type: ignore[return-value]

    @torch.no_grad()
    def _check_head(self) -> None:
        """The head as written here must be the model's own."""
        tokens = torch.arange(4, device=self.model.device)[None]
        self.model.set_attn_implementation("eager")
        hidden = trunk_of(self.model)(input_ids=tokens, use_cache=False).last_hidden_state
        theirs = self.model(input_ids=tokens, use_cache=False).logits.float()
        if not torch.allclose(self.logits(hidden), theirs, atol=1e-3, rtol=1e-2):
            refuse(self.model.config.model_type, "it changes its logits in a way that the trainer does not know")


def _times(logits: Tensor, factor: float) -> Tensor:
    """Without a copy where there is nothing to do: logits are the largest tensors there are."""
    return logits if factor == 1 else logits * factor


class _Score(torch.autograd.Function):
    """Log-prob and entropy from logits, with one buffer the size of the logits in backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        total = logits.logsumexp(-1)
        chosen = logits.gather(-1, targets[:, None])[:, 0]
        mean = (logits - total[:, None]).exp_().mul_(logits).sum(-1)
        ctx.save_for_backward(logits, targets, total, total - mean)
        ctx.set_materialize_grads(False)
        return chosen - total, total - mean

    @staticmethod
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor, None]:  # type: ignore[override]
        logits, targets, total, entropy = ctx.saved_tensors
        slope = -(by_logprob if by_logprob is not None else torch.zeros_like(total))[:, None]
        grad = (logits - total[:, None]).exp_()
        if by_entropy is not None:
            slope = slope - by_entropy[:, None] * (logits - (total - entropy)[:, None])
        grad.mul_(slope)
        if by_logprob is not None:
            grad.scatter_add_(-1, targets[:, None], by_logprob[:, None])
        return grad, None
