"""The words of a command line: which are the command's own, which are settings, and which are misspelt."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path

from tailrace.errors import UsageError

HYDRA = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=(?!.*\.toml$).*")  # `trainer.total_epochs=15`, as verl is told


def split_words(words: list[str], commands: Mapping[str, argparse.ArgumentParser]) -> tuple[list[str], list[str]]:
    """The command's own words, and the settings among them: every other `--name`, with the value that follows it."""
    name, rest = words[0], words[1:]
    if name.startswith("-"):
        return words, []
    if name not in commands:
        raise UsageError(f"there is no command '{name}'; {_nearest_command(name, list(commands))}")
    own, settings, command = [name], list[str](), commands[name]
    while rest and rest[0] in _inner(command):
        command = _inner(command)[rest[0]]
        own.append(rest.pop(0))
    takes_value = {o: a.nargs != 0 for a in command._actions for o in a.option_strings}
    while rest:
        word = rest.pop(0)
        option, equals, _ = word.partition("=")
        if HYDRA.fullmatch(word) and not Path(word).exists() and "journal" not in {a.dest for a in command._actions}:
            _refuse_without_dashes(word.lstrip("+"))
        if not word.startswith("--") or word == "--" or option in takes_value:
            own.append(word)
            if takes_value.get(option) and not equals and rest:
                own.append(rest.pop(0))
            continue
        _refuse_misspelt(option, [each for each in takes_value if each.startswith("--")])
        settings.append(word)
        if not equals and rest and not rest[0].startswith("--") and not _is_lone_flag(option, rest[0]):
            settings.append(rest.pop(0))
    return own, settings


def _inner(command: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a command."""
    groups = [each for each in command._actions if isinstance(each, argparse._SubParsersAction)]
    return dict(groups[0].choices) if groups else {}


def _is_lone_flag(option: str, following: str) -> bool:
    """`--repack.enabled run.toml`: the word after a yes-or-no setting is not its value unless it says yes or no."""
    from tailrace.config.fields import fields, is_bool

    key = option[2:].replace("-", "_")
    return key in fields() and is_bool(key) and following.lower() not in ("true", "false", "unset")


def _refuse_without_dashes(word: str) -> None:
    from tailrace.config.fields import fields, open_table
    from tailrace.config.suggestions import AS_OPTION, unknown

    key = word.partition("=")[0]
    if key in fields() or open_table(key):
        raise UsageError(f"a setting is written with two dashes: --{word}")
    raise UsageError(unknown(key, AS_OPTION))


def _refuse_misspelt(option: str, known: list[str]) -> None:
    from tailrace.config.spelling import near

    close = near(option, known, short=4)
    if close and "." not in option:
        raise UsageError(f"there is no option {option}; did you mean {close}?")


def _nearest_command(name: str, known: list[str]) -> str:
    from tailrace.config.spelling import near

    close = near(name, known, short=3)
    return f"did you mean '{close}'?" if close else f"the commands are {', '.join(known)}"
