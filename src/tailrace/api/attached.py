"""A command that goes when the program that started it goes: `python -m tailrace.api.attached train FILE`.

The program holds the other end of this process's standard input. When that is closed, because somebody asked for it or
because the program has ended however it did, the command is interrupted as by Ctrl-C: it writes everything down and can
be resumed. Returns the command's exit code.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

LOOK_S = 0.2


def main(words: list[str]) -> int:
    command = subprocess.Popen([sys.executable, "-m", "tailrace", *words], stdin=subprocess.DEVNULL)
    held = True
    while command.poll() is None:
        if not held or not select.select([0], [], [], LOOK_S)[0]:
            _rest(command, held)
        elif not os.read(0, 1 << 12):
            held = False
            command.send_signal(signal.SIGINT)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def _rest(command: subprocess.Popen[bytes], held: bool) -> None:
    if not held:
        command.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
