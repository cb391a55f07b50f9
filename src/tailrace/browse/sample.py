"""One sample in full, for people: what it was asked, its turns token by token, what came of it.

Origins, versions and log-probs come from the segments in the store, reward and end from run.db; the advantage is
computed from the rewards of its group as the trainer does it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tailrace.browse.decoding import TokenDecoder
from tailrace.browse.tokens import SampleTokens, read_tokens
from tailrace.config.tree import Config
from tailrace.samples.messages import Piece
from tailrace.store.trajectories import KnownTrajectory, failed_attempts, known_trajectories, reward_parts
from tailrace.trainer.advantages import group_advantages
from tailrace.types import Row, token_ids

MOST_TOKENS = 20_000  # of one sample that are shown
CALLS = re.compile(r"<(tool|tool_call)>(.*?)</\1>", re.DOTALL)

Origin = Literal["prompt", "policy", "environment"]


class Passage(msgspec.Struct, frozen=True):
    """Tokens of one origin and version: one text per token, and its log-prob where the policy sampled it."""

    origin: Origin
    version: int | None
    pieces: list[str]
    logprobs: list[float]
    calls: list[str]  # of tools, as the policy wrote them

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class SampleView(msgspec.Struct, frozen=True):
    known: KnownTrajectory
    asked: str | list[dict[str, Any]]  # the prompt as it was written
    columns: dict[str, Any]  # the answer, and whatever else the row has
    passages: list[Passage]
    parts: dict[str, float]  # of the reward
    advantage: float | None
    hidden: int  # tokens that are not shown
    missing: str  # why there are no tokens
    failed: list[SampleView]  # attempts before this one, which ended without a reward


def view_samples(
    run: Path, config: Config, samples: Sequence[KnownTrajectory], decoder: TokenDecoder, most: int = MOST_TOKENS
) -> list[SampleView]:
    """Each in full, with its attempts that failed; `most` tokens of each."""
    ids = [one.id for one in samples]
    failures = failed_attempts(run, ids)
    tokens = read_tokens(run, [*samples, *failures])
    parts, advantages = reward_parts(run, ids), _advantages(run, config, samples)
    failed = [_view(one, each, decoder, most) for one, each in zip(failures, tokens[len(ids) :], strict=True)]
    found: list[SampleView] = []
    for one, each in zip(samples, tokens[: len(ids)], strict=True):
        earlier = [view for view in failed if view.known.id == one.id and view.known.attempt < one.attempt]
        rewarded = (parts.get(one.id), advantages.get(one.id)) if one.state != "failed" else (None, None)
        found.append(_view(one, each, decoder, most, *rewarded, earlier))
    return found


def completion_text(tokens: SampleTokens, decoder: TokenDecoder, most: int = 1 << 30) -> str:
    """What follows the prompt, `most` tokens of it."""
    pieces = tokens.stored.pieces[1:] if tokens.stored is not None else ()
    return decoder.text([id for piece in _first(pieces, most)[0] for id in token_ids(piece.tokens).tolist()])


def _view(
    known: KnownTrajectory,
    tokens: SampleTokens,
    decoder: TokenDecoder,
    most: int,
    parts: dict[str, float] | None = None,
    advantage: float | None = None,
    failed: Sequence[SampleView] = (),
) -> SampleView:
    row = tokens.row or Row(0, b"", "")
    pieces = tokens.stored.pieces if tokens.stored is not None else (Piece(None, row.tokens),)
    shown, hidden = _first(pieces, most)
    passages = [_passage(piece, place == 0, decoder) for place, piece in enumerate(shown)]
    facts = (parts or {}, advantage, hidden, tokens.missing)
    return SampleView(known, row.prompt, row.columns, passages, *facts, list(failed))


def _first(pieces: Sequence[Piece], most: int) -> tuple[list[Piece], int]:
    """As many tokens as may be shown, and how many are not."""
    kept: list[Piece] = []
    left = most
    for piece in pieces:
        size = 4 * min(left, len(piece))
        logprobs = None if piece.logprobs is None else piece.logprobs[:size]
        if size:
            kept.append(Piece(piece.version, piece.tokens[:size], logprobs))
        left -= size // 4
    return kept, sum(map(len, pieces)) - sum(map(len, kept))


def _passage(piece: Piece, is_prompt: bool, decoder: TokenDecoder) -> Passage:
    texts = decoder.pieces(token_ids(piece.tokens).tolist())
    if piece.version is None or piece.logprobs is None:
        return Passage("prompt" if is_prompt else "environment", None, texts, [], [])
    logprobs = np.frombuffer(piece.logprobs, "<f4").astype(float).round(4).tolist()
    calls = [call.strip() for _, call in CALLS.findall("".join(texts))]
    return Passage("policy", piece.version, texts, logprobs, calls)


def _advantages(run: Path, config: Config, samples: Sequence[KnownTrajectory]) -> dict[int, float]:
    """Of those whose groups have rewards; with a critic each token has its own, which is not kept."""
    if config.trainer.advantage == "gae":
        return {}
    found: dict[int, float] = {}
    for group, prompt in {(one.group, one.prompt) for one in samples}:  # only prompts have an index in run.db
        members = [one for one in known_trajectories(run, "prompt", prompt) if one.group == group]
        found |= _of_group(members, config)
    return found


def _of_group(members: Sequence[KnownTrajectory], config: Config) -> dict[int, float]:
    """Of those that were trained, or while none is, of all that have a reward."""
    rewarded = sorted([one for one in members if one.reward is not None], key=lambda one: one.state != "trained")
    used = [one for one in rewarded if one.state == "trained"] or rewarded
    if not used:
        return {}
    rewards = np.array([one.reward for one in rewarded], np.float64)
    values = group_advantages(rewards, config.trainer, config.groups, trained=len(used))
    return {one.id: round(float(value), 4) for one, value in zip(used, values, strict=True)}
