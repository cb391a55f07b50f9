"""The filter of system calls, run by an interpreter of its instructions: for both processors, whichever this one is."""

from __future__ import annotations

import errno
import re
import subprocess
from pathlib import Path

import pytest

from tailrace.envs.jail import filter
from tailrace.envs.jail.calls import MACHINES, NUMBERS, number
from tailrace.envs.jail.rules import ALLOW, ERRNO, rules

PID = 4711
OTHER = 42
LAST = 600  # far above the newest call
VIEWS = [True, False]


def verdict(
    at: int, arguments: tuple[int, ...] = (), machine: str = "x86_64", own_view: bool = False, arch: int = 0
) -> int | str:
    """What becomes of a call: "allowed", "killed", or the error that it fails with."""
    words = filter.compiled(rules(PID, own_view), machine)
    data = bytearray(64)
    data[0:4] = (at & 0xFFFFFFFF).to_bytes(4, "little")
    data[4:8] = (arch or filter.ARCHES[machine]).to_bytes(4, "little")
    for index, argument in enumerate(arguments):
        data[16 + 8 * index : 24 + 8 * index] = (argument & (1 << 64) - 1).to_bytes(8, "little")
    result = interpreted(words, bytes(data))
    return {ALLOW: "allowed", filter.KILL: "killed"}.get(result, result - ERRNO)


def interpreted(words: list[filter.Word], data: bytes) -> int:
    here = loaded = 0
    while True:
        operation, yes, no, operand = words[here]
        here += 1
        if operation == filter.LOAD:
            loaded = int.from_bytes(data[operand : operand + 4], "little")
        elif operation == filter.AND:
            loaded &= operand
        elif operation == filter.RETURN:
            return operand
        else:
            holds = loaded == operand if operation == filter.EQUAL else loaded >= operand
            here += yes if holds else no


def of(name: str, *arguments: int, machine: str = "x86_64", own_view: bool = False) -> int | str:
    at = number(name, machine)
    assert at is not None
    return verdict(at, arguments, machine, own_view)


@pytest.mark.parametrize("own_view", VIEWS)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_call_that_no_rule_names_is_refused(machine: str, own_view: bool) -> None:
    named = {number(name, machine) for name in rules(PID, own_view)}
    others = {at: verdict(at, (PID,) * 6, machine, own_view) for at in range(LAST) if at not in named}
    wanted = {at: errno.EPERM if at < filter.NEWER else errno.ENOSYS for at in others}
    assert others == wanted


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_processor_end_the_program(machine: str) -> None:
    arches = {"i386": 0x40000003, "arm": 0x40000028, **filter.ARCHES}
    for name, arch in arches.items():
        if name != machine:
            assert verdict(39, (), machine, arch=arch) == "killed", name


def test_the_second_numbering_of_x86_is_unknown() -> None:
    assert {verdict(0x40000000 + at) for at in range(LAST)} == {errno.ENOSYS}


REFUSED = {  # call: arguments, error
    "a process": ("clone", (17,), errno.EPERM),
    "a thread with files of its own": ("clone", (0x3D0B00,), errno.EPERM),
    "a thread in a new namespace": ("clone", (0x3D0F00 | 0x20000,), errno.EPERM),
    "huge pages": ("mmap", (0, 4096, 3, 0x40022), errno.EPERM),
    "memory merged with that of others": ("madvise", (0, 0, 12), errno.EPERM),
    "memory that is broken": ("madvise", (0, 0, 100), errno.EPERM),
    "priority for another thread": ("futex", (0, 6 | 128), errno.ENOSYS),
    "cutting what is read": ("openat", (-100, 1, 0x200), errno.EPERM),
    "cutting what is neither read nor written": ("openat", (-100, 1, 0x203), errno.EPERM),
    "neither reading nor writing": ("openat", (-100, 1, 0x80003), errno.EPERM),
    "opening by a structure": ("openat2", (-100, 1, 1, 24), errno.ENOSYS),
    "files of its own": ("close_range", (3, 60, 2 | 4), errno.EPERM),
    "a pipe of notifications": ("pipe2", (1, 0x80080), errno.EPERM),
    "an owner": ("fcntl", (3, 8, OTHER), errno.EPERM),
    "an extended owner": ("fcntl", (3, 15, 1), errno.EPERM),
    "a signal": ("fcntl", (3, 10, 9), errno.EPERM),
    "a signal for input": ("fcntl", (3, 4, 0x2800), errno.EPERM),
    "a lease": ("fcntl", (3, 1024, 0), errno.EPERM),
    "news of a folder": ("fcntl", (3, 1026, 1), errno.EPERM),
    "a larger pipe": ("fcntl", (3, 1031, 1 << 20), errno.EPERM),
    **{f"ioctl {word:#x}": ("ioctl", (3, word), errno.EOPNOTSUPP) for word in (0x8901, 0x8902, 0x5452, 0x5412)},
    **{f"prctl {word}": ("prctl", (word, 1), errno.EPERM) for word in (1, 4, 8, 22, 35, 36, 38, 62, 0x59616D61)},
    "a pair of datagram sockets": ("socketpair", (1, 2 | 0x80000, 0), errno.EPERM),
    "a pair of another family": ("socketpair", (30, 1, 0), errno.EPERM),
    "sending to a low address": ("sendto", (3, 1, 1, 0, 0x7000, 110), errno.EPERM),
    "sending to a high address": ("sendto", (3, 1, 1, 0, 0x7FFF_0000_0000, 110), errno.EPERM),
    "urgent bytes": ("sendto", (3, 1, 1, 1, 0, 0), errno.EPERM),
    "a signal to all": ("kill", (-1, 9), errno.EPERM),
    "a signal to its group": ("kill", (0, 9), errno.EPERM),
    "a signal to another process": ("kill", (OTHER, 9), errno.EPERM),
    "a signal to a thread of another process": ("tgkill", (OTHER, OTHER, 9), errno.EPERM),
    "limits of another process": ("prlimit64", (OTHER, 7), errno.EPERM),
    "the group of another process": ("getpgid", (OTHER,), errno.EPERM),
    "the priority of another process": ("getpriority", (0, OTHER), errno.EPERM),
    "the processors of another process": ("sched_getaffinity", (OTHER,), errno.ENOSYS),
    "the clock of another process": ("clock_gettime", (~OTHER << 3,), errno.EINVAL),
    "sleeping by the clock of another process": ("clock_nanosleep", (~OTHER << 3 | 2,), errno.EINVAL),
    "reading attributes": ("getxattr", (), errno.EOPNOTSUPP),
}


@pytest.mark.parametrize("own_view", VIEWS)
@pytest.mark.parametrize("machine", MACHINES)
def test_arguments_that_reach_others_are_refused(machine: str, own_view: bool) -> None:
    said = {what: of(name, *words, machine=machine, own_view=own_view) for what, (name, words, _) in REFUSED.items()}
    assert said == {what: error for what, (_, _, error) in REFUSED.items()}


ORDINARY = [
    ("clone", (0x3D0F00,)),  # glibc's threads
    ("clone", (0x7D0F00,)),  # musl's
    ("mmap", (0, 4096, 3, 0x22)),
    ("madvise", (0, 0, 14)),
    ("futex", (0, 0x189)),
    ("openat", (-100, 1, 0x80000)),
    ("openat", (-100, 1, 0x80241, 0o666)),
    ("openat", (-100, 1, 0x242, 0o666)),
    ("close_range", (3, 60, 4)),
    ("pipe2", (1, 0x80000)),
    ("fcntl", (3, 1030, 10)),
    ("fcntl", (3, 4, 0x800)),
    ("fcntl", (3, 5, 0x7FFF_0000_2000)),  # the address of a lock, which looks like O_ASYNC
    ("ioctl", (1, 0x5401)),
    ("ioctl", (1, 0x802C542A)),
    ("prctl", (15, 1)),
    ("socketpair", (1, 1 | 0x80800, 0)),
    ("sendto", (3, 1, 1, 0x4000, 0, 0)),
    ("kill", (PID, 9)),
    ("tgkill", (PID, OTHER, 6)),
    ("prlimit64", (0, 7)),
    ("sched_getaffinity", (0,)),
    ("clock_gettime", (3,)),
]


@pytest.mark.parametrize("machine", MACHINES)
def test_ordinary_arguments_are_allowed(machine: str) -> None:
    assert [each for each in ORDINARY if of(each[0], *each[1], machine=machine) != "allowed"] == []


@pytest.mark.parametrize("machine", MACHINES)
def test_locks_and_flushes_succeed_without_being_done(machine: str) -> None:
    assert {of("fcntl", 3, command, machine=machine) for command in (6, 7, 37, 38)} == {0}
    assert {of(name, machine=machine) for name in ("flock", "fsync", "fdatasync", "sync", "syncfs", "msync")} == {0}


@pytest.mark.parametrize("machine", MACHINES)
def test_files_are_changed_by_name_only_in_a_view_of_its_own(machine: str) -> None:
    for name in ("truncate", "unlinkat", "renameat2", "fchmodat", "fchownat", "utimensat", "linkat", "symlinkat"):
        assert [of(name, machine=machine, own_view=own) for own in VIEWS] == ["allowed", errno.EACCES], name


@pytest.mark.parametrize("machine", MACHINES)
def test_what_newer_libraries_try_first_works_or_is_unknown(machine: str) -> None:
    """They fall back on older calls after ENOSYS, but not after EPERM."""
    used = ("clone3", "rseq", "set_robust_list", "membarrier", "getrandom", "statx", "faccessat2", "openat2", "mseal")
    used += ("close_range", "epoll_pwait2", "futex_waitv", "futex_wait", "preadv2", "copy_file_range", "fchmodat2")
    said = {name: of(name, machine=machine, own_view=True) for name in used}
    assert {name: each for name, each in said.items() if each not in ("allowed", errno.ENOSYS)} == {}


def test_every_jump_fits_and_the_kernel_takes_the_program() -> None:
    for machine in MACHINES:
        words = filter.compiled(rules(PID, True), machine)
        assert len(words) < 4096
        assert max(max(yes, no) for _, yes, no, _ in words) < 256


HEADERS = {
    "x86_64": ("x86_64-linux-gnu/asm/unistd_64.h", []),
    "aarch64": (
        "asm-generic/unistd.h",  # which is what arm64 includes, with these words
        ["RENAMEAT", "NEW_STAT", "SET_GET_RLIMIT", "TIME32_SYSCALLS", "SYS_CLONE3", "MEMFD_SECRET"],
    ),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header, wanted = HEADERS[machine]
    if not (Path("/usr/include") / header).exists():
        pytest.skip("no headers of the kernel here (linux-libc-dev)")
    expected = numbers_in(header, wanted)
    ours = {name: number(name, machine) for name in NUMBERS}
    newest = max(expected.values())
    known = {name: at for name, at in ours.items() if at is not None and at <= newest}
    assert {name: (at, expected.get(name)) for name, at in known.items() if at != expected.get(name)} == {}
    assert [name for name, at in ours.items() if at is None and name in expected] == []


def numbers_in(header: str, wanted: list[str]) -> dict[str, int]:
    defines = ["-D__BITS_PER_LONG=64", *(f"-D__ARCH_WANT_{word}" for word in wanted)]
    command = ["cc", "-E", "-dM", *defines, f"/usr/include/{header}"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except FileNotFoundError:
        pytest.skip("no C compiler here to read headers with")
    found = dict(re.findall(r"#define (__NR\w+) (\w+)", text))
    found = {name: found.get(value, value) for name, value in found.items()}  # some are named after another one
    return {name[5:]: int(value) for name, value in found.items() if name.startswith("__NR_") and value.isdigit()}
