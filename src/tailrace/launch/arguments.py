"""Words of a command line into values, for several commands. What they refuse, they refuse in a sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import nan
from pathlib import Path

BEST = "best"  # in place of a version
RESUMING = {
    "--resume": "go on where the run of this name stopped; its folder may be given for FILE",
    "--auto-resume": "go on with the run of this name if it was begun, else begin it: for a job that is started again",
}
SAMPLES_BY = {
    "prompt": "samples of this prompt (p12)",
    "group": "samples of this group (g12)",
    "row": "samples of this row of the data, at all visits",
    "step": "trained in this step; 0 is the first",
    "version": "with tokens that this version of the weights sampled (v12)",
    "min-tokens": "tokens after the prompt, at least",
    "max-tokens": "tokens after the prompt, at most",
    "min-reward": "reward, at least",
    "max-reward": "reward, at most",
}


def whole(text: str, most: int, what: str, least: int = 1) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}, at most {most}")
    return int(text)


def real(text: str, fits: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not fits(value):
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}")
    return value


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty name is no path; write one")
    return Path(text)


def number(letter: str = "") -> Callable[[str], int]:
    """Of a step, or of what people see with this letter in front: 12, v12, p12."""

    def parse(text: str) -> int:
        digits = text.removeprefix(letter)
        if not digits.isdecimal() or len(digits) > 15:
            example = f"12 or {letter}12" if letter else "one such as 12"
            raise argparse.ArgumentTypeError(f"'{text}' is not a number; write {example}")
        return int(digits)

    return parse


def lines(text: str) -> int:
    return whole(text, 200, "a number of lines; write --limit 50")


def reward(text: str) -> float:
    return real(text, lambda value: abs(value) <= 1e300, "a reward; write a number such as 0.5")


def version(text: str) -> int | str:
    number = text.removeprefix("v")
    if text == BEST:
        return text
    if not number.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a version; write --version 12, or best")
    return int(number)


def replicas(text: str) -> int | str:
    return text if text == "auto" else whole(text, 1024, "a number of replicas; write --replicas 2, or auto", least=0)


def ranks(text: str) -> int:
    return whole(text, 1024, "a number of ranks; write --ranks 2", least=0)


def site(text: str) -> str:
    if not text or len(text) > 64 or not text.isprintable():
        raise argparse.ArgumentTypeError(f"'{text}' is not the name of a site; write --site oslo")
    return text


def seconds(text: str) -> float:
    return real(text, lambda value: 0 <= value <= 1e7, "a number of seconds; write --wait 600")


def dollars(text: str) -> float:
    return real(text, lambda value: 0 <= value <= 1e6, "a price; write dollars an hour, such as 0.4")


def rounds(text: str) -> int:
    return whole(text, 100, "a number of rounds; write --rounds 3")


def names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def counts(text: str) -> list[int]:
    listed = names(text)
    if not listed or not all(name.isdecimal() and int(name) > 0 for name in listed):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of GPU counts; write --gpus 64,256,1024")
    return sorted({int(name) for name in listed})


def amount(text: str) -> float:
    return real(text, lambda value: 0 < value < 1e15, "a number above 0; write one such as 100")


def add_samples(command: argparse.ArgumentParser) -> None:
    """What samples are chosen by; the names are those of `browse.conditions.SampleFilter`."""
    command.add_argument("id", nargs="?", metavar="ID", help="one in full: t17; those of a group g3 or a prompt p3")
    for name, text in (("text", "words of the completion"), ("asked", "words of the prompt")):
        command.add_argument(f"--{name}", metavar="WORDS", help=f'{text}; "a phrase", begin*')
    for name in ("prompt", "group", "row", "step", "version", "min-tokens", "max-tokens"):
        letter = name[0] if name in ("prompt", "group", "version") else ""
        command.add_argument(f"--{name}", type=number(letter), metavar="N", help=SAMPLES_BY[name])
    for name in ("min-reward", "max-reward"):
        command.add_argument(f"--{name}", type=reward, metavar="X", help=SAMPLES_BY[name])
    command.add_argument("--finish", metavar="WHY", help="why it ended: stop, length")
    states = "running, finished, trained, failed, stale, filtered, stopped, lost or evaluated"
    command.add_argument("--state", metavar="STATE", help=states)
    command.add_argument("--of", metavar="WHAT", help="training (unless an evaluation is named), evaluation, all")
    command.add_argument("--failed", action="store_true", default=None, help="only those whose last attempt failed")
    command.add_argument("--error", metavar="WORDS", help="part of the reason why it failed")
    command.add_argument("--order", metavar="ORDER", help="newest, oldest, best, worst, longest, shortest")
    command.add_argument("--limit", type=lines, metavar="N", help="lines (50), at most 200")
    command.add_argument("--offset", type=number(), metavar="N", help="skip so many")
    rates = "prompts by pass rate over time; --order hardest, easiest, failing, rising, falling"
    command.add_argument("--prompts", action="store_true", help=rates)
    command.add_argument("--json", action="store_true", help="one JSON object per line, in full, for programs")
