"""Words of a command line into values, for several commands. What they refuse, they refuse in a sentence."""

from __future__ import annotations

import argparse
from pathlib import Path

RESUMING = {
    "--resume": "go on where the run of this name stopped; its folder may be given for FILE",
    "--auto-resume": "go on with the run of this name if it was begun, else begin it: for a job that is started again",
}


def whole(text: str, most: int, what: str, least: int = 1) -> int:
    if not text.isdecimal() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"'{text}' is not {what}, at most {most}")
    return int(text)


def path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty name is no path; write one")
    return Path(text)
