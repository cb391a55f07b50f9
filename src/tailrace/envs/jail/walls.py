"""What a program can see and reach: namespaces with a view of their own, and Landlock.

With `enter_namespaces` the process has its own users, processes, network, IPC, host name and files: the interpreter and
the system's libraries, read only, four harmless devices, no /proc, and an empty folder in memory of a fixed size. With
`apply_landlock` the kernel lets it open those files and no others, whatever else is in sight. Either one suffices to
hide the run and its keys; where both exist, both are used.
"""

from __future__ import annotations

import ctypes
import os

from .calls import call

TYPE_CHECKING = False  # as `typing` has it, which takes long to import
if TYPE_CHECKING:
    from collections.abc import Sequence

BOX = "/box"  # the program's own folder
BOX_BYTES, BOX_FILES = 16 << 20, 1024
NOBODY = 65534
OWN_USERS = 0x7000_0000  # so far from all real users that adding a process id meets none

LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

NEW_USER = 0x10000000
NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC, NEW_PIDS, NEW_NET = (
    *(0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x20000000, 0x40000000),
)
NAMESPACES = NEW_MOUNTS | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NET
NOSUID, NODEV, NOEXEC = 2, 4, 8
BIND, RECURSIVE, PRIVATE, DETACH = 4096, 16384, 1 << 18, 2
ATTR_READ_ONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
AT_FDCWD, AT_RECURSIVE = -100, 0x8000

CAP_SYS_ADMIN, CAP_SETUID = 21, 7
CAPABILITIES_3 = 0x20080522


# ---------------------------------------------------------------------------------------------------------- namespaces


def enter_namespaces(shown: Sequence[str]) -> int | None:
    """New namespaces and, in them, a new root with nothing but `shown`, libraries, devices and the box. The process
    namespace begins with the next child. Returns the user to become, if this is an administrator."""
    user = OWN_USERS + os.getpid() if may_administer() else None
    if user is None:
        _become_nobody_in_a_user_namespace()
    else:
        call("unshare", NAMESPACES)
    call("sethostname", b"sandbox", 7)
    _build_view(shown)
    return user


def drop_privileges(user: int | None) -> None:
    if user is not None:
        os.setgroups([])
        try:
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        except OSError:  # a container that knows only so many users
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
    drop_capabilities()


def drop_capabilities() -> None:
    call("capset", (ctypes.c_uint32 * 2)(CAPABILITIES_3, 0), (ctypes.c_uint32 * 6)())


def may_administer() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        held = next(int(line.split()[1], 16) for line in status if line.startswith("CapEff"))
    return bool(held >> CAP_SYS_ADMIN & 1 and held >> CAP_SETUID & 1)


def _become_nobody_in_a_user_namespace() -> None:
    user, group = os.getuid(), os.getgid()
    call("unshare", NEW_USER | NAMESPACES)
    for file, text in (
        *(("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")),
    ):
        with open(f"/proc/self/{file}", "w", encoding="ascii") as map:
            map.write(text)


def _build_view(shown: Sequence[str]) -> None:
    _mount(None, "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=64k,mode=755")
    os.mkdir("/tmp/old")
    call("pivot_root", b"/tmp", b"/tmp/old")
    os.chdir("/")
    for path in (*LIBRARIES, *shown):
        _show(path, ATTR_READ_ONLY | ATTR_NOSUID | ATTR_NODEV)
    for path in DEVICES:
        _show(path, ATTR_READ_ONLY | ATTR_NOSUID | ATTR_NOEXEC)
    os.mkdir(BOX)
    _mount("tmpfs", BOX, "tmpfs", NOSUID | NODEV | NOEXEC, f"size={BOX_BYTES},nr_inodes={BOX_FILES},mode=777")
    call("umount2", b"/old", DETACH)
    os.rmdir("/old")
    _set_attributes("/", ATTR_READ_ONLY | ATTR_NOSUID | ATTR_NODEV, 0)


def _show(path: str, attributes: int) -> None:
    """The same file or folder at the same place; what is a link stays one."""
    source = f"/old{path}"
    if not os.path.lexists(source) or os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(source, path, None, BIND | RECURSIVE)
    _set_attributes(path, attributes, AT_RECURSIVE)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    words = [word.encode() if word else None for word in (source, target, kind)]
    call("mount", *words, flags, options.encode())


def _set_attributes(path: str, attributes: int, flags: int) -> None:
    """Only ever more limits than there were."""
    wanted = (ctypes.c_uint64 * 4)(attributes)
    call("mount_setattr", AT_FDCWD, path.encode(), flags, ctypes.byref(wanted), ctypes.sizeof(wanted))


# ------------------------------------------------------------------------------------------------------------ Landlock

READ = 1 << 2 | 1 << 3  # a file, a directory
WRITE_FILE = 1 << 1
# remove folders and files, make both and links, move and cut them
CHANGE = READ | WRITE_FILE | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 13 | 1 << 14
BENEATH = 1  # the kind of rule


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("descriptor", ctypes.c_int32)]


def landlock_version() -> int:
    """0 where the kernel has none."""
    try:
        return call("landlock_create_ruleset", None, 0, 1)
    except OSError:
        return 0


def apply_landlock(shown: Sequence[str], box: str, may_write: bool, version: int) -> None:
    """Files: `shown` and libraries to read, the box, four devices. No TCP and no signals, where it knows of them.
    `version`: of its rules, at most what the kernel has."""
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = (ctypes.c_uint64 * 3)(handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 8 * (1 + (version >= 4) + (version >= 6))
    ruleset = call("landlock_create_ruleset", ctypes.byref(rules), size, 0)
    for path in (*LIBRARIES, *shown):
        _allow(ruleset, path, READ)
    for path in DEVICES:
        _allow(ruleset, path, READ | WRITE_FILE)
    _allow(ruleset, box, (CHANGE if may_write else READ) & handled)
    call("prctl", 38, 1, 0, 0, 0)  # no new privileges: the condition for what follows
    call("landlock_restrict_self", ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= 1 << 2 | WRITE_FILE
    try:
        call("landlock_add_rule", ruleset, BENEATH, ctypes.byref(_Rule(rights, descriptor)), 0)
    finally:
        os.close(descriptor)
