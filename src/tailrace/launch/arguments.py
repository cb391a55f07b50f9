"""Words of a command line into values, for several commands. What they refuse, they refuse in a sentence."""

from __future__ import annotations

import argparse
from pathlib import Path

LETTERS = "pgtrhsv"  # before the number of a prompt, group, trajectory...: `types.KINDS`
BEST = "best"  # in place of a version
RESUMING = {
    "--resume": "go on where the run of this name stopped; its folder may be given for FILE",
    "--auto-resume": "go on with the run of this name if it was begun, else begin it: for a job that is started again",
}
SAMPLES_BY = {
    "prompt": "samples of this prompt (p12)",
    "group": "samples of this group (g12)",
    "row": "samples of this row of the data, at all visits",
    "step": "trained in this step",
    "version": "with tokens that this version of the weights sampled (v12)",
    "min-tokens": "tokens after the prompt, at least",
    "max-tokens": "tokens after the prompt, at most",
}


def whole(text: str, most: int, what: str, least: int = 1) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}, at most {most}")
    return int(text)


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty name is no path; write one")
    return Path(text)


def number(text: str) -> int:
    """Of a step, or of what people see with a letter in front: 12, v12, p12."""
    digits = text[1:] if text[:1] and text[0] in LETTERS else text
    if not digits.isdecimal() or len(digits) > 15:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number; write 12, or p12 for a prompt")
    return int(digits)


def add_samples(command: argparse.ArgumentParser) -> None:
    """What samples are chosen by; the names are those of `browse.conditions.SampleFilter`."""
    command.add_argument("id", nargs="?", metavar="ID", help="one in full: t17; those of a group g3 or a prompt p3")
    for name, text in (("text", "words of the completion"), ("asked", "words of the prompt")):
        command.add_argument(f"--{name}", metavar="WORDS", help=f'{text}; "a phrase", begin*')
    for name in ("prompt", "group", "row", "step", "version", "min-tokens", "max-tokens"):
        command.add_argument(f"--{name}", type=number, metavar="N", help=SAMPLES_BY[name])
    for name in ("min-reward", "max-reward"):
        command.add_argument(f"--{name}", type=float, metavar="X", help="of the reward")
    command.add_argument("--finish", metavar="WHY", help="why it ended: stop, length")
    command.add_argument("--state", metavar="STATE", help="running, finished, trained, failed, stale, filtered")
    command.add_argument("--failed", action="store_true", default=None, help="only those whose last attempt failed")
    command.add_argument("--error", metavar="WORDS", help="part of the reason why it failed")
    command.add_argument("--order", metavar="ORDER", help="newest, oldest, best, worst, longest, shortest")
    command.add_argument("--limit", type=number, metavar="N", help="lines (50), at most 200")
    command.add_argument("--offset", type=number, metavar="N", help="skip so many")
    command.add_argument("--prompts", action="store_true", help="prompts by pass rate over time; --order hardest, ...")
    command.add_argument("--json", action="store_true", help="one JSON object per line, in full, for programs")
