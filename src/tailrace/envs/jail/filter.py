"""Seccomp: which system calls a program may make. The rest fails with "not permitted", in the kernel.

A program is one process with threads: it starts no other, so nothing outlives it and its memory is what one process
may have. It has no sockets but pairs of its own. The filter stays for good; nothing that it allows can lift it.
"""

from __future__ import annotations

import ctypes
import errno
import os

from .calls import MACHINE, call, number

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Iterator

DENIED = [
    # other programs and processes
    *("execve", "execveat", "fork", "vfork", "setsid", "setpgid"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "kcmp"),
    *("pidfd_open", "pidfd_getfd", "pidfd_send_signal", "tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"),
    *("sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler", "setpriority", "ioprio_set"),
    *("move_pages", "migrate_pages", "mbind"),
    # the network, and memory that belongs to no process
    *("socket", "shmget", "semget", "msgget", "mq_open", "memfd_create", "memfd_secret"),
    # other views of the machine
    *("unshare", "setns", "chroot", "pivot_root", "mount", "umount2", "mount_setattr", "move_mount", "open_tree"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "name_to_handle_at", "open_by_handle_at"),
    # what the kernel trusts its administrators with, and parts of it that many holes were found in
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("keyctl", "add_key", "request_key", "fanotify_init", "inotify_init", "inotify_init1", "personality"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot", "syslog", "acct"),
    *("swapon", "swapoff", "quotactl", "quotactl_fd", "iopl", "ioperm", "modify_ldt", "vhangup"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname"),
]
# Files of others, by name: Landlock does not watch these, so they go where there is no view of one's own.
OWNERSHIP = [
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat", "utime", "utimes"),
    *("futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr", "removexattr", "lremovexattr"),
]
UNKNOWN = 457  # calls from here on are newer than this list

# Berkeley packet filter: the words of the machine that the kernel runs
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NR, ARCH, FIRST = 0, 4, 16  # where the number, the processor and the first argument's low half are
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

THREAD = 0x10000  # clone: stay in this process
SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER_MODE = 38, 22, 2
SET_PDEATHSIG = 1

Word = tuple[int, int, int, int]  # operation, jump if so, jump if not, operand


class _Instruction(ctypes.Structure):
    _fields_ = [("op", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint16), ("words", ctypes.POINTER(_Instruction))]


def apply(own_view: bool) -> None:
    """From here on, for this process. `own_view`: it sees no files of others anyway."""
    words = list(_words(os.getpid(), DENIED if own_view else DENIED + OWNERSHIP))
    array = (_Instruction * len(words))(*words)
    call("prctl", SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", SET_SECCOMP, FILTER_MODE, ctypes.byref(_Program(len(words), array)))


def _words(pid: int, denied: list[str]) -> Iterator[Word]:
    refuse = (RETURN, 0, 0, ERRNO | errno.EPERM)
    unknown = (RETURN, 0, 0, ERRNO | errno.ENOSYS)
    yield from [(LOAD, 0, 0, ARCH), (EQUAL, 1, 0, ARCHES[MACHINE]), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NR)]
    yield from [(AT_LEAST, 0, 1, UNKNOWN), unknown]  # the second numbering of x86-64 too
    for name in denied:
        if (nr := number(name)) is not None:
            yield from [(EQUAL, 0, 1, nr), refuse]
    yield from [(EQUAL, 0, 1, number("clone3") or 0), unknown]  # its flags lie in memory; libraries fall back on clone
    yield from _first("clone", [(ANY_BIT, 0, 1, THREAD), (RETURN, 0, 0, ALLOW), refuse])
    for name in ("kill", "tgkill"):  # itself alone, not its group either
        yield from _first(name, [(EQUAL, 0, 1, pid), (RETURN, 0, 0, ALLOW), refuse])
    yield from _first("prlimit64", [(EQUAL, 1, 0, 0), (EQUAL, 0, 1, pid), (RETURN, 0, 0, ALLOW), refuse])
    yield from _first("prctl", [(EQUAL, 0, 1, SET_PDEATHSIG), refuse, (RETURN, 0, 0, ALLOW)])
    yield (RETURN, 0, 0, ALLOW)


def _first(name: str, verdict: list[Word]) -> list[Word]:
    """A verdict that depends on the first argument of a call."""
    return [(EQUAL, 0, len(verdict) + 1, number(name) or 0), (LOAD, 0, 0, FIRST), *verdict]
