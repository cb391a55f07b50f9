"""Which system calls a program may make, and with which arguments. What is not named here is refused.

A program is one process with threads. It reads the files it is shown, has a folder of its own or none, and talks to
nobody: it starts no process, sends signals to itself alone, and has no sockets but connected pairs. Namespaces and
Landlock say which files can be opened; nothing here relies on more than the first version of Landlock. `filter.py`
compiles these rules for the kernel; docs/reliability.md says group by group why a call is allowed.

A rule is a list of cases, a case a verdict and its checks. The first case whose checks all hold decides. If none does,
the call fails with EPERM.
"""

from __future__ import annotations

from errno import EACCES, EINVAL, ENOSYS, EOPNOTSUPP

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence

    Check = tuple[int, int, Sequence[int]]  # argument, mask, values: what the mask leaves of it is one of them
    Case = tuple[int, Sequence[Check]]

ALLOW, ERRNO = 0x7FFF0000, 0x00050000
SUCCEED = ERRNO | 0  # the call returns 0 and does nothing
HIGH = 8  # added to an argument's number: its upper 32 bits
ALL = 0xFFFFFFFF

ALLOWED = [
    # memory
    *("brk", "munmap", "mprotect", "mremap", "mseal", "map_shadow_stack", "membarrier"),
    # threads
    *("gettid", "set_tid_address", "set_robust_list", "rseq", "arch_prctl", "sched_yield", "getcpu"),
    *("futex_wait", "futex_wake", "futex_waitv", "futex_requeue", "exit", "exit_group"),
    # receiving signals; waiting for children, of which there are none
    *("rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend", "rt_sigpending", "rt_sigtimedwait"),
    *("sigaltstack", "signalfd", "signalfd4", "pause", "restart_syscall", "wait4", "waitid"),
    # time; timers are one of each kind, or descriptors, which have a limit
    *("gettimeofday", "time", "times", "nanosleep", "alarm", "getitimer", "setitimer"),
    *("timerfd_create", "timerfd_settime", "timerfd_gettime"),
    # waiting for descriptors
    *("poll", "ppoll", "select", "pselect6", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_wait"),
    *("epoll_pwait", "epoll_pwait2", "eventfd", "eventfd2"),
    # open descriptors
    *("read", "readv", "pread64", "preadv", "preadv2", "write", "writev", "pwrite64", "pwritev", "pwritev2"),
    *("lseek", "close", "dup", "dup2", "dup3", "pipe", "sendfile", "copy_file_range", "ftruncate", "fallocate"),
    # looking at files
    *("stat", "lstat", "fstat", "newfstatat", "statx", "statfs", "fstatfs", "access", "faccessat", "faccessat2"),
    *("readlink", "readlinkat", "getdents", "getdents64", "getcwd", "chdir", "fchdir", "umask"),
    # socket pairs
    *("recvfrom", "recvmsg", "recvmmsg", "shutdown", "getsockname", "getpeername", "getsockopt"),
    # about itself and the machine
    *("getpid", "getppid", "getpgrp", "getuid", "geteuid", "getgid", "getegid", "getresuid", "getresgid"),
    *("getgroups", "uname", "sysinfo", "getrusage", "getrlimit", "setrlimit", "getrandom"),
    *("sched_get_priority_max", "sched_get_priority_min"),
]
# Allowed in a view of its own, where everything but its folder is read only. Elsewhere there is nothing to change, and
# Landlock knows nothing of some of these.
FILE_CHANGES = [
    *("creat", "mkdir", "mkdirat", "rmdir", "unlink", "unlinkat", "rename", "renameat", "renameat2"),
    *("link", "linkat", "symlink", "symlinkat", "truncate"),
    *("chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown", "fchownat"),
    *("utime", "utimes", "futimesat", "utimensat"),
]
# The folder is in memory and the program alone in it: nothing has to be flushed and nobody locked out. For real these
# would reach others. A flush stalls the disk, a lock on an installed file stalls whoever else locks it, and the number
# of locks has no limit.
NO_OPS = ["sync", "syncfs", "fsync", "fdatasync", "sync_file_range", "msync", "flock"]
# Landlock does not guard them. "Not supported" is what copying a file takes in its stride.
XATTRS = [
    *("getxattr", "lgetxattr", "fgetxattr", "getxattrat", "listxattr", "llistxattr", "flistxattr", "listxattrat"),
    *("setxattr", "lsetxattr", "fsetxattr", "setxattrat"),
    *("removexattr", "lremovexattr", "fremovexattr", "removexattrat"),
]
FLAGS_IN_MEMORY = ["clone3", "openat2"]  # no filter sees those; libraries fall back on clone and openat

# clone: as C libraries start threads. Without CLONE_FILES every thread could open as many files again.
THREAD = 0x00010F00  # VM, FS, FILES, SIGHAND, THREAD
THREAD_OPTIONS = 0x017C0000  # SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID, DETACHED, CHILD_SETTID
MAP_HUGETLB = 0x40000
MADVISE = (0, 1, 2, 3, 4, 8, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23, 24, 102, 103)  # no MERGEABLE, PAGEOUT, HWPOISON
FUTEX = (0, 1, 3, 4, 5, 9, 10)  # the others lend priority to any thread of the machine
FUTEX_OPTIONS = 0x180  # PRIVATE, CLOCK_REALTIME
O_ACCMODE, O_TRUNC, O_ASYNC = 0x3, 0x200, 0x2000
NOTIFICATION_PIPE, CLOSE_RANGE_UNSHARE = 0x80, 2
FCNTL = (0, 1, 2, 3, 5, 36, 1027, 1030, 1032, 1034)  # DUPFD, GETFD, SETFD, GETFL, GETLK, GETPIPE_SZ, GET_SEALS
F_SETFL, FCNTL_LOCKS = 4, (6, 7, 37, 38)
IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX
PRCTL = (2, 3, 15, 16, 21, 23, 30, 39, 42, 51, 56, 64, 0x53564D41)  # SET_NAME, SET_VMA; the rest are questions
AF_UNIX, SOCK_STREAM, SOCK_OPTIONS, MSG_OOB = 1, 1, 0x80800, 1


def rules(pid: int, own_view: bool) -> dict[str, list[Case]]:
    """By name. `pid` is the program's own; `own_view`: no file of others that it could change is in sight."""
    return (
        _by_arguments()
        | _by_process(pid)
        | _all(ALLOWED, (ALLOW, ()))
        | _all(FILE_CHANGES, (ALLOW if own_view else ERRNO | EACCES, ()))
        | _all(NO_OPS, (SUCCEED, ()))
        | _all(XATTRS, (ERRNO | EOPNOTSUPP, ()))
        | _all(FLAGS_IN_MEMORY, (ERRNO | ENOSYS, ()))
    )


def _by_arguments() -> dict[str, list[Case]]:
    return {
        "clone": [_if(0, ALL ^ THREAD_OPTIONS, THREAD)],
        "mmap": [_if(3, MAP_HUGETLB, 0)],  # huge pages come from a pool of the whole machine
        "madvise": [_if(2, ALL, *MADVISE)],
        "futex": [_if(1, ALL ^ FUTEX_OPTIONS, *FUTEX), (ERRNO | ENOSYS, ())],
        "open": [_opens(flags=1)],
        "openat": [_opens(flags=2)],
        "close_range": [_if(2, CLOSE_RANGE_UNSHARE, 0)],
        "pipe2": [_if(1, NOTIFICATION_PIPE, 0)],
        "fcntl": [
            _if(1, ALL, *FCNTL),
            (ALLOW, [(1, ALL, [F_SETFL]), (2, O_ASYNC, [0])]),
            (SUCCEED, [(1, ALL, FCNTL_LOCKS)]),
        ],
        "ioctl": [_if(1, ALL, *IOCTL), (ERRNO | EOPNOTSUPP, ())],
        "prctl": [_if(0, ALL, *PRCTL)],
        "socketpair": [(ALLOW, [(0, ALL, [AF_UNIX]), (1, ALL ^ SOCK_OPTIONS, [SOCK_STREAM])])],
        "sendto": [(ALLOW, [(3, MSG_OOB, [0]), (4, ALL, [0]), (4 + HIGH, ALL, [0])])],  # without an address
    }


def _by_process(pid: int) -> dict[str, list[Case]]:
    """Calls that name a process: it has to be this one."""
    return (
        _all(["kill", "tgkill"], _if(0, ALL, pid))
        | _all(["prlimit64", "getpgid", "getsid"], _if(0, ALL, 0, pid))
        | _all(["getpriority"], _if(1, ALL, 0, pid))
        # C libraries ask these about single threads, and do without if there is no such call
        | _all(["sched_getaffinity", "sched_getscheduler", "sched_getparam"], _if(0, ALL, 0, pid), (ERRNO | ENOSYS, ()))
        # a negative clock is that of a process or a device
        | _all(["clock_gettime", "clock_getres", "clock_nanosleep"], _if(0, ALL ^ 15, 0), (ERRNO | EINVAL, ()))
    )


def _all(names: Sequence[str], *cases: Case) -> dict[str, list[Case]]:
    return {name: [*cases] for name in names}


def _if(argument: int, mask: int, *values: int) -> Case:
    return ALLOW, [(argument, mask, values)]


def _opens(flags: int) -> Case:
    """To cut a file it has to be opened for writing. Landlock 1 and 2 allow O_TRUNC to whoever may read, and to anybody
    with an access mode of 3, which is neither reading nor writing."""
    return _if(flags, O_ACCMODE | O_TRUNC, 0, 1, 2, 1 | O_TRUNC, 2 | O_TRUNC)
