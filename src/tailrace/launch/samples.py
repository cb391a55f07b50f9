"""`tailrace samples`: the samples of a run on the terminal, by text, reward, length, step, prompt, version or error."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from tailrace.browse.conditions import SampleFilter, is_by_text, purpose_of
from tailrace.browse.console import list_lines, prompt_lines, sample_lines
from tailrace.browse.decoding import TokenDecoder, decoder_of
from tailrace.browse.index import build
from tailrace.browse.listing import FoundSamples, find_samples
from tailrace.browse.prompts import PromptFilter, PromptRate, prompt_rates
from tailrace.browse.sample import MOST_TOKENS, SampleView, completion_text, view_samples
from tailrace.browse.tokens import SampleTokens, read_tokens
from tailrace.errors import UsageError
from tailrace.logs import output
from tailrace.store.journal import Journal
from tailrace.store.trajectories import KnownTrajectory, known_trajectories
from tailrace.types import parse_label

log = logging.getLogger(__name__)

TOLD_EVERY = 200_000  # events between two lines about a long history


class ListOptions(NamedTuple):
    asked: Mapping[str, Any]  # fields of SampleFilter, or the order of prompts
    as_json: bool
    prompts: bool


class RunSamples(NamedTuple):
    """A run whose samples are asked for."""

    run: Path
    journal: Journal
    decoder: TokenDecoder

    @classmethod
    def of(cls, run: Path) -> RunSamples:
        journal = Journal(run)
        if journal.meta.get("driver") == "simulation":
            raise UsageError(f"{run} is a simulation, which has no samples; name a run of 'tailrace train'")
        return cls(run, journal, decoder_of(journal.config, journal.path.parent))

    def views(self, samples: Sequence[KnownTrajectory], most: int = MOST_TOKENS) -> list[SampleView]:
        return view_samples(self.run, self.journal.config, samples, self.decoder, most)

    def texts(self, samples: Sequence[KnownTrajectory]) -> list[str]:
        tokens = read_tokens(self.run, samples)
        return [_beginning(one, each, self.decoder) for one, each in zip(samples, tokens, strict=True)]


def _beginning(one: KnownTrajectory, tokens: SampleTokens, decoder: TokenDecoder) -> str:
    """What a line of a list is about: of one that failed, why, and on what."""
    text = tokens.missing or completion_text(tokens, decoder)
    return f"{one.reason} | {text}" if one.state == "failed" and one.reason else text


def print_samples(run: Path, label: str | None, options: ListOptions) -> int:
    opened = RunSamples.of(run)
    if label is not None:
        _refuse_others(options.asked, (), f"{label} by itself")
        _print_views(opened.views(_named(run, label)), options.as_json)
    elif options.prompts:
        _refuse_others(options.asked, PromptFilter.__struct_fields__, "--prompts")
        _index(run)
        _print_prompts(opened, _convert(options.asked, PromptFilter), options.as_json)
    else:
        asked = _convert(options.asked, SampleFilter)
        if is_by_text(asked):
            _index(run)
        _print_found(opened, find_samples(run, asked), options.as_json)
        if asked.of is None and purpose_of(asked) == "training" and opened.journal.config.eval.every:
            log.info("those of evaluations are left out; --of evaluation shows them, --of all both")
    return 0


def print_sample(run: Path, trajectory: int) -> None:
    """After its story; nothing where a run has no samples."""
    if (known := known_trajectories(run, "trajectory", trajectory)) and known[0].payload != "deleted":
        _print_views(RunSamples.of(run).views(known), as_json=False)


def _named(run: Path, label: str) -> list[KnownTrajectory]:
    try:
        kind, number = parse_label(label)
    except ValueError as error:
        raise UsageError(str(error)) from None
    found = known_trajectories(run, kind, number)
    if not found:
        raise UsageError(f"{label} is no sample, group or prompt of this run; tailrace samples {run} lists them")
    return found


def _refuse_others(values: Mapping[str, Any], fitting: Sequence[str], what: str) -> None:
    """An option that would change nothing is a mistake."""
    for name in SampleFilter.__struct_fields__:
        if values.get(name) is not None and name not in fitting:
            raise UsageError(f"--{name.replace('_', '-')} does not go together with {what}")


def _convert(values: Mapping[str, Any], kind: type[Any]) -> Any:
    known = {name: value for name, value in values.items() if value is not None and name in kind.__struct_fields__}
    for name, hint in get_type_hints(kind).items():
        words = [
            word for each in (hint, *get_args(hint)) if get_origin(each) is Literal for word in get_args(each) if word
        ]
        if words and known.get(name, words[0]) not in words:
            raise UsageError(f"--{name}: '{known[name]}' is none of {', '.join(words)}")
    try:
        return msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{error}; see tailrace samples --help") from None


def _index(run: Path) -> None:
    told = 0
    for read in build(run):
        if read - told >= TOLD_EVERY:
            told = read
            log.info("indexing: event %s", f"{read:,}")


def _print_views(views: Sequence[SampleView], as_json: bool) -> None:
    for view in views:
        output(msgspec.json.encode(view).decode() if as_json else "\n".join([*sample_lines(view), ""]))


def _print_found(opened: RunSamples, found: FoundSamples, as_json: bool) -> None:
    if as_json:
        _print_views(opened.views(found.samples), as_json=True)
        return
    width = shutil.get_terminal_size((120, 24)).columns
    output("\n".join(list_lines(found, opened.texts(found.samples), width)))


def _print_prompts(opened: RunSamples, asked: PromptFilter, as_json: bool) -> None:
    rates = prompt_rates(opened.run, asked)
    if as_json:
        output("\n".join(msgspec.json.encode(one).decode() for one in rates))
        return
    width = shutil.get_terminal_size((120, 24)).columns
    output("\n".join(prompt_lines(rates, [_question(opened, one) for one in rates], width)) or "no prompt was answered")


def _question(opened: RunSamples, one: PromptRate) -> str:
    known = known_trajectories(opened.run, "prompt", one.newest)[:1]
    found = [tokens.row for tokens in read_tokens(opened.run, known) if tokens.row is not None]
    return opened.decoder.text(found[0].ids.tolist()) if found else ""
