"""Seccomp: `rules.py` as a program for the kernel, which runs it before every system call. It stays for good.

A call that is refused fails with EPERM. One with a number newer than the rules fails with ENOSYS, as on a kernel that
does not have it, so that libraries fall back on what they used before.
"""

from __future__ import annotations

import ctypes
import errno
import os

from .calls import MACHINE, call, number
from .rules import ERRNO, HIGH, rules

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .rules import Case, Check

NEWER = 470  # the first number that the rules do not know; x32, the second numbering of x86-64, lies far above
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
KILL = 0x80000000

# classic BPF: the instructions that are needed
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # where they lie in what the kernel passes; arguments have 8 bytes each

SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE = 38, 22, 2
SET_MODE_FILTER, NEW_LISTENER = 1, 8
SET_PDEATHSIG = 1

Word = tuple[int, int, int, int]  # operation, jump if so, jump if not, operand


class _Instruction(ctypes.Structure):
    _fields_ = [("op", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("words", ctypes.POINTER(_Instruction))]


def apply(own_view: bool) -> None:
    """From here on, for this process and its threads. `own_view`: it sees no files of others that it could change."""
    install(compiled(rules(os.getpid(), own_view), MACHINE))


def install(words: Sequence[Word]) -> None:
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # the condition for a filter
    call("prctl", SET_SECCOMP, FILTER_MODE, ctypes.byref(_program(words)))


def install_listener(words: Sequence[Word]) -> int:
    """Of a filter that notifies: the descriptor on which it does."""
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    return call("seccomp", SET_MODE_FILTER, NEW_LISTENER, ctypes.byref(_program(words)))


def _program(words: Sequence[Word]) -> _Program:
    return _Program(len(words), (_Instruction * len(words))(*words))


def compiled(by_name: dict[str, list[Case]], machine: str) -> list[Word]:
    return [*_known(machine), *_allowed(by_name, machine), (RETURN, 0, 0, ERRNO | errno.EPERM)]


def _known(machine: str) -> list[Word]:
    """Calls in the convention of another processor, such as 32-bit ones, end the program."""
    return [
        *((LOAD, 0, 0, ARCH), (EQUAL, 1, 0, ARCHES[machine]), (RETURN, 0, 0, KILL)),
        *((LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, NEWER), (RETURN, 0, 0, ERRNO | errno.ENOSYS)),
    ]


def _allowed(by_name: dict[str, list[Case]], machine: str) -> Iterator[Word]:
    for name, cases in by_name.items():
        at = number(name, machine)
        if at is not None:
            rule = [word for each in cases for word in case(*each)]
            if cases[-1][1]:  # it has checks, so it may not be the one
                rule.append((RETURN, 0, 0, ERRNO | errno.EPERM))
            yield from [(EQUAL, 0, len(rule), at), *rule]


def case(verdict: int, checks: Sequence[Check]) -> list[Word]:
    words: list[Word] = [(RETURN, 0, 0, verdict)]
    for check in reversed(checks):
        words = [*_check(*check, past=len(words)), *words]
    return words


def _check(argument: int, mask: int, values: Sequence[int], past: int) -> Iterator[Word]:
    """Go on if the masked argument is one of the values, or else behind the `past` words that follow."""
    yield (LOAD, 0, 0, ARGUMENTS + 8 * (argument % HIGH) + 4 * (argument // HIGH))
    yield (AND, 0, 0, mask)
    *most, last = values
    for index, value in enumerate(most):
        yield (EQUAL, len(most) - index, 0, value)
    yield (EQUAL, 0, past, last)
