"""How many threads a program has, where the kernel's own limit does not serve.

RLIMIT_NPROC counts all processes of a user, so it fits only a user that has no others, as in a namespace. Elsewhere the
program's supervisor is asked about every thread before the kernel starts it: a seccomp filter that the program inherits
from the supervisor holds the call up until the supervisor has counted.
"""

from __future__ import annotations

import errno
import os

from .calls import number
from .filter import EQUAL, LOAD, NUMBER, RETURN, case, install, install_listener
from .rules import ALLOW, ERRNO

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from .filter import Word

NOTIFY = 0x7FC00000
CLONE_THREAD = 0x10000
RECEIVE, SEND, CONTINUE = 0xC0502100, 0xC0182101, 1
REQUEST_BYTES = 80


def listen() -> int | None:
    """For this process and all that it starts from now on. Returns where requests arrive; None where the container
    listens to its processes itself, which only one may: then there are no threads."""
    try:
        return install_listener(_words(NOTIFY))
    except OSError:
        install(_words(ERRNO | errno.EAGAIN))
        return None


def _words(verdict: int) -> list[Word]:
    """The verdict for a new thread; all else is left to the other filter."""
    rule = case(verdict, [(0, CLONE_THREAD, [CLONE_THREAD])])
    return [(LOAD, 0, 0, NUMBER), (EQUAL, 0, len(rule), number("clone") or 0), *rule, (RETURN, 0, 0, ALLOW)]


def answer(requests: int, process: int, most: int) -> None:
    """One request of the process: another thread, or EAGAIN as at the kernel's limit. Threads that ask at the same time
    may exceed it by their number, once."""
    import struct
    from fcntl import ioctl

    request = bytearray(REQUEST_BYTES)
    try:
        ioctl(requests, RECEIVE, request)
        error, flags = (0, CONTINUE) if _count(process) < most else (-errno.EAGAIN, 0)
        ioctl(requests, SEND, struct.pack("=8sqiI", request[:8], 0, error, flags))
    except FileNotFoundError:  # whoever asked was ended meanwhile
        return


def _count(process: int) -> int:
    """The kernel shows it as the number of folders there. Without /proc there is no telling, and no threads."""
    try:
        return os.stat(f"/proc/{process}/task").st_nlink - 2
    except OSError:
        return 1 << 30
