"""A program that ends with whoever started it: `python -m tailrace.launch.placers.bound SIGNAL PARENT PROGRAM...`.

The kernel sends the signal when the parent is gone, by whatever signal; nobody has to be alive to remember it. It holds
for the program that this one becomes. The parent must start it from a thread that lives as long as itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
MODULE = "tailrace.launch.placers.bound"


def tailrace(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tailrace", *words]


def bound(program: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """The command that runs this program so that it ends with this process."""
    return [sys.executable, "-m", MODULE, str(int(number)), str(os.getpid()), *program]


def become(number: int, parent: int, program: Sequence[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel was asked
        sys.exit(1)
    os.execv(program[0], list(program))


if __name__ == "__main__":
    become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
