"""From files and command-line words to one checked Config. The only way in which settings enter.

Files are composed left to right, options come last, then the model's shape is looked up and the whole is checked.
Every error is a ConfigError: one sentence that says what is wrong, where, and what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.check import check
from tailrace.config.defaults import fleet_of, follow
from tailrace.config.errors import ConfigError, refuse
from tailrace.config.fields import BadValueError, accept, fields, open_table, sections
from tailrace.config.files import Given, nested, read_file
from tailrace.config.keywords import AS_KEYWORD, KEYWORD, read_keywords
from tailrace.config.model_shapes import resolve
from tailrace.config.options import read_words
from tailrace.config.per_schedule import SECTION, apply, split_key
from tailrace.config.render import changes
from tailrace.config.suggestions import AS_OPTION, unknown
from tailrace.config.tree import Config


def load(paths: Sequence[str | Path], overrides: Sequence[str] = (), otherwise: Sequence[str] = ()) -> Config:
    """`load(["base.toml", "mine.toml"], ["--schedule.kind", "sync"])`. `otherwise`: options for what nobody has set."""
    return _build(read_words(otherwise) | read_files(paths) | read_words(overrides))


def load_section(paths: Sequence[str | Path], overrides: Sequence[str], section: str) -> Config:
    """What files and options say of one section. Everything else is at its plain default, whatever they say."""
    given = read_files(paths) | read_words(overrides)
    values = _accepted({key: value for key, value in given.items() if key.startswith(f"{section}.")})
    return msgspec.convert(nested(values), Config)


def read_files(paths: Sequence[str | Path]) -> dict[str, Given]:
    """The settings of these files, those of later ones on top."""
    return {key: value for path in paths for key, value in read_file(path).items()}


def from_keywords(keywords: Mapping[str, Any], paths: Sequence[str | Path] = ()) -> Config:
    """Settings of a Python program, on top of those in files: `from_keywords({"group_size": 8}, ["base.toml"])`."""
    return _build(read_files(paths) | read_keywords(keywords))


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """A checked copy with some settings changed: `with_values(config, {"schedule.kind": "sync"})`.

    Defaults follow the change, but the fleet stays what it was.
    """
    kept = {key: Given(value, "") for key, value in (changes(config) | fleet_of(config)).items()}
    return _build(kept | {key: Given(value, "") for key, value in values.items()})


def with_options(config: Config, words: Sequence[str], section: str) -> Config:
    """A checked copy with some settings of one section changed, as they are written on a command line."""
    return with_given(config, refuse_other_sections(words, section))


def with_given(config: Config, given: Mapping[str, Given]) -> Config:
    """A checked copy with settings changed that somebody wrote: what is wrong with one is told in their spelling."""
    kept = {key: Given(value, "") for key, value in (changes(config) | fleet_of(config)).items()}
    return _build(kept | dict(given))


def refuse_other_sections(words: Sequence[str], section: str) -> dict[str, Given]:
    """Those settings on a command line, if all are of this section and each can be so."""
    given = read_words(words)
    refuse([f"--{key} is the run's; only --{section}* can be set here" for key in given if not key.startswith(section)])
    _accepted(given)
    return given


def _build(settings: Mapping[str, Given]) -> Config:
    given = apply(_accepted(settings))
    model = resolve(msgspec.convert(nested(given), Config).model)
    values = given | follow(given, model.context)
    config = msgspec.structs.replace(msgspec.convert(nested(values), Config), model=model)
    check(config)
    return config


def _accepted(settings: Mapping[str, Given]) -> dict[str, Any]:
    """Every value as its field stores it; all that is wrong in one error."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, given in settings.items():
        try:
            values |= _one(key, given)
        except ConfigError as error:
            problems.append(str(error))
    refuse(problems)
    return values


def _one(key: str, given: Given) -> dict[str, Any]:
    if key in fields():
        try:
            return {key: accept(key, given.value)}
        except BadValueError as error:
            raise ConfigError(_placed(str(error), given.where)) from None
    if key.startswith(SECTION):
        return {key: _of_a_schedule(key, given)}
    if (key in sections() and given.value == {}) or open_table(key):
        return {} if given.value == {} else {key: given.value}
    raise ConfigError(_unknown(key, given))


def _of_a_schedule(key: str, given: Given) -> Any:
    """The value that a setting has for one schedule alone, judged as the setting itself."""
    owner, inner = split_key(key)
    if not inner:
        raise ConfigError(_unknown(key, given))
    if inner == "schedule.kind" or inner.startswith(SECTION):
        raise ConfigError(_placed(f"{key} cannot differ between schedules; leave it out of [{owner}]", given.where))
    return _one(inner, given)[inner]


def _unknown(key: str, given: Given) -> str:
    if given.where.startswith("--"):
        return _section_taken_for_value(key, "--") or unknown(key, AS_OPTION)
    if given.where == KEYWORD:
        return _section_taken_for_value(key) or unknown(key, AS_KEYWORD)
    return _placed(_section_taken_for_value(key) or _value_taken_for_section(key) or unknown(key), given.where)


def _section_taken_for_value(key: str, dashes: str = "") -> str:
    if key not in sections():
        return ""
    example = "model.path" if key == "model" else next(each for each in fields() if each.startswith(f"{key}."))
    return f"{dashes}{key} is a section, not a setting; write one of its settings, for example {dashes}{example}"


def _value_taken_for_section(key: str) -> str:
    owner = next((each for each in fields() if key.startswith(f"{each}.")), "")
    return f"{key} does not exist because {owner} is a single value; write {owner} = ..." if owner else ""


def _placed(sentence: str, where: str) -> str:
    """In a file: its name in front. An option: with its dashes. In a program: the sentence alone."""
    if where.startswith("--"):
        return f"--{sentence}"
    return f"{where}: {sentence}" if where not in ("", KEYWORD) else sentence
