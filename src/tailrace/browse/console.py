"""Samples as plain text for a terminal. Whatever a sample contains, nothing of it steers the terminal: what is not
printable is written as an escape, and its lines are marked, so that they cannot pass for ours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from tailrace.browse.listing import COUNTED, FoundSamples
from tailrace.browse.prompts import PromptRate
from tailrace.browse.sample import Passage, SampleView
from tailrace.store.trajectories import KnownTrajectory
from tailrace.wording import counted, plain

LINE = "  | "
LEVELS = "\N{LOWER ONE EIGHTH BLOCK}▂▃▄▅▆▇█"


def one_line(text: str, width: int) -> str:
    flat = plain(" ".join(text[: 4 * width].split()))
    return flat if len(flat) <= width else f"{flat[: max(1, width - 1)]}…"


# ---------------------------------------------------------------------------------------------------------------- lists


def list_lines(found: FoundSamples, texts: Sequence[str], width: int) -> Iterator[str]:
    """A line per sample, with the beginning of its text."""
    heads = [_head(one) for one in found.samples]
    columns = [max(map(len, column)) for column in zip(*heads, strict=True)] if heads else []
    for head, text in zip(heads, texts, strict=True):
        words = "  ".join(word.ljust(size) for word, size in zip(head, columns, strict=True))
        yield f"{words}  {one_line(text, max(20, width - len(words) - 2))}"
    yield _count_line(found)


def _count_line(found: FoundSamples) -> str:
    if not found.count:
        return "no sample is like that"
    total = f"more than {COUNTED:,} samples" if found.more_than_counted else counted(found.count, "sample")
    return f"{len(found.samples):,} of {total}"


def _head(one: KnownTrajectory) -> tuple[str, ...]:
    tokens = "" if one.tokens is None else counted(one.tokens, "token")
    reward = "" if one.reward is None else f"reward {one.reward:.3g}"
    state = one.state if one.step is None else f"{one.state} in step {one.step}"
    state += f" (attempt {one.attempt})" if one.state == "failed" and one.attempt > 1 else ""
    return (f"t{one.id}", f"g{one.group}", f"p{one.prompt}", state, reward, tokens, _versions(one), one.finish)


def _versions(one: KnownTrajectory) -> str:
    if one.oldest is None or one.newest is None:
        return ""
    return f"v{one.oldest}" if one.oldest == one.newest else f"v{one.oldest}-v{one.newest}"


def prompt_lines(rates: Iterable[PromptRate], questions: Sequence[str], width: int) -> Iterator[str]:
    """A line per prompt: how often it passed, visit by visit."""
    for one, question in zip(rates, questions, strict=True):
        name = f"row {one.row}" if one.row >= 0 else f"p{one.newest}"
        levels = "".join(LEVELS[min(7, int(8 * visit.passed / visit.samples))] for visit in one.history)
        failed = f", {one.failed:,} failed" if one.failed else ""
        words = f"{name:<10} {one.passed:>5,} of {one.samples:<6,} passed{failed}  {levels}"
        yield f"{words}  {one_line(question, max(20, width - len(words) - 2))}"


# ------------------------------------------------------------------------------------------------------------ in full


def sample_lines(view: SampleView) -> Iterator[str]:
    """One sample with all of its turns."""
    known = view.known
    yield ", ".join(word for word in _head(known) if word)
    if known.reason:
        yield _failure(known)
    if view.parts:
        yield "reward: " + ", ".join(f"{plain(name)} {value:.4g}" for name, value in view.parts.items())
    if view.advantage is not None:
        yield f"advantage: {view.advantage:.4g}"
    for name, value in view.columns.items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield f"{plain(name)}: {one_line(text, 200)}"
    yield from _passages_lines(view, view.passages)
    for earlier in view.failed:
        yield ""
        yield f"attempt {earlier.known.attempt} {_failure(earlier.known)}"
        yield from _passages_lines(earlier, earlier.passages[1:])


def _failure(known: KnownTrajectory) -> str:
    return f"failed: {plain(known.reason)}"


def _passages_lines(view: SampleView, passages: Iterable[Passage]) -> Iterator[str]:
    for passage in passages:
        yield from _passage_lines(passage)
    if view.hidden:
        yield f"{counted(view.hidden, 'token')} more, not shown"
    if view.missing:
        yield view.missing


def _passage_lines(passage: Passage) -> Iterator[str]:
    version = "" if passage.version is None else f", v{passage.version}"
    logprob = f", mean log-prob {sum(passage.logprobs) / len(passage.logprobs):.3f}" if passage.logprobs else ""
    yield f"{passage.origin} ({counted(len(passage.pieces), 'token')}{version}{logprob})"
    for line in plain(passage.text).split("\n"):
        yield f"{LINE}{line}"
    for call in passage.calls:
        yield f"  calls a tool: {one_line(call, 200)}"
