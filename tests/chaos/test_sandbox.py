"""Escapes tried against the tool's sandbox, each a few lines that a hostile policy might write. All are refused.

Every attempt runs behind every set of walls that this machine has. An attempt says ESCAPED once it has what it wanted;
`test_the_harmless_attempts_succeed_without_walls` shows that the attempts would notice if a wall were missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tailrace.envs.sandbox import OUTPUT, layers_here, run_python

CALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"  # straight to the kernel, past Python
FAIL = "if {} < 0: raise OSError(ctypes.get_errno(), 'refused')"

# `run`, `key`, `outside`, `pid`, `port` and `name` are written in: what lies, runs and listens outside.
ESCAPES = {
    # files of others
    "read the passwords": "open('/etc/shadow').read()",
    "read the users": "open('/etc/passwd').read()",
    "read run.db": "open('{run}/run.db', 'rb').read()",
    "list the run's folder": "import os\nos.listdir('{run}')",
    "read a key": "open('{key}').read()",
    "read a key the long way": "open('/box/../../..{key}').read()",
    "read a key through a link": "import os\nos.symlink('{key}', 'k')\nopen('k').read()",
    "read a key through a hard link": "import os\nos.link('{key}', 'k')\nopen('k').read()",
    "move a key here": "import os\nos.rename('{key}', 'k')\nopen('k').read()",
    "list the homes": "import os\nos.listdir('/home')",
    "write outside": "open('{outside}/mark', 'w').write('x')",
    "write to /tmp": "open('/tmp/tailrace-escape-mark', 'w').write('x')",
    "write at the root": "open('/mark', 'w').write('x')",
    "cut run.db": "import os\nos.truncate('{run}/run.db', 0)",
    "remove run.db": "import os\nos.remove('{run}/run.db')",
    "open run.db to all": "import os\nos.chmod('{run}/run.db', 0o777)",
    "touch run.db": "import os\nos.utime('{run}/run.db', (0, 0))",
    "mark run.db": "import os\nos.setxattr('{run}/run.db', 'user.mark', b'x')",
    "write into the interpreter's library": "import json\nopen(json.__file__, 'a').write('\\n')",
    "write a module into site-packages": "import numpy, os\n"
    "open(os.path.dirname(os.path.dirname(numpy.__file__)) + '/escape.py', 'w').write('x')",
    "write bytecode": "import json, os\nopen(os.path.dirname(json.__file__) + '/__pycache__/x.pyc', 'wb').write(b'x')",
    # devices and the kernel's own files
    "read the disk": "open('/dev/vda', 'rb').read(1)",
    "read the memory": "open('/dev/mem', 'rb').read(1)",
    "read the log": "open('/dev/kmsg', 'rb').read(1)",
    "use shared memory": "open('/dev/shm/mark', 'w').write('x')",
    "use the terminal": "open('/dev/tty', 'w').write('x')",
    "make a device": "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))",
    "set the kernel's settings": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')",
    "read the control groups": "import os\nos.listdir('/sys/fs/cgroup')",
    # other processes
    "read the environment of process 1": "open('/proc/1/environ', 'rb').read()",
    "read the parent's environment": "open('/proc/{pid}/environ', 'rb').read()",
    "read the parent's memory": "open('/proc/{pid}/mem', 'rb').read(1)",
    "list the parent's files": "import os\nos.listdir('/proc/{pid}/fd')",
    "leave through the parent's root": "import os\nos.listdir(os.path.join('/proc/{pid}', 'root', 'etc'))",
    "kill the parent": "import os\nos.kill({pid}, 0)",
    "kill whoever started it": "import os\nos.kill(os.getppid() or 1, 0)",
    "kill everybody": "import os\nos.kill(-1, 0)",
    "kill its group": "import os\nos.killpg(0, 0)",
    "trace the parent": CALL + FAIL.format("libc.ptrace(16, {pid}, 0, 0)"),
    "be traced": CALL + FAIL.format("libc.ptrace(0, 0, 0, 0)"),
    "read the parent by process_vm_readv": CALL + FAIL.format("libc.syscall(310, {pid}, 0, 0, 0, 0, 0)"),
    "take a file of the parent": CALL + FAIL.format("libc.syscall(434, {pid}, 0)"),
    "slow the parent down": "import os\nos.setpriority(os.PRIO_PROCESS, {pid}, 19)",
    "limit the parent": "import resource\nresource.prlimit({pid}, resource.RLIMIT_NOFILE, (3, 3))",
    "pin the parent": "import os\nos.sched_setaffinity({pid}, {{0}})",
    # other programs, and surviving
    "fork": "import os\nos.fork() or os._exit(0)",
    "fork past Python": CALL + FAIL.format("libc.fork()"),
    "vfork": CALL + FAIL.format("libc.syscall(58)"),
    "start a process by clone3": CALL + "args = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)\n"
    "pid = libc.syscall(435, args, 88)\nif pid == 0: os._exit(0)\n" + FAIL.format("pid"),
    "start a daemon": "import os\nos.setsid()\nos.fork() or os.fork() or open('{outside}/mark', 'w')",
    "start a shell": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "start a program": "import subprocess\nsubprocess.run(['ls', '/'])",
    "become root by su": "import os\nos.execv('/bin/su', ['su'])",
    "become root": "import os\nos.setuid(0)\nopen('/etc/shadow').read()",
    "start a program from memory": CALL + FAIL.format("libc.syscall(319, b'x', 0)"),
    "leave shared memory behind": CALL + FAIL.format("libc.shmget(1234, 4096, 0o1600)"),
    # the network
    "connect": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "connect to the world": "import socket\nsocket.create_connection(('1.1.1.1', 80), timeout=1)",
    "listen": "import socket\nsocket.create_server(('127.0.0.1', 0))",
    "send a datagram": "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "ask for a name": "import socket\nsocket.getaddrinfo('example.com', 80)",
    "connect to an abstract socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{name}')",
    "connect to a socket file": "import socket\nsocket.socket(socket.AF_UNIX).connect('{run}/socket')",
    "talk to the kernel by netlink": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "read raw packets": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "talk to the host by vsock": "import socket\nsocket.socket(40, socket.SOCK_STREAM)",
    # other views of the machine
    "chroot": "import os\nos.chroot('/')",
    "mount": CALL + FAIL.format("libc.mount(b'none', b'/box', b'tmpfs', 0, None)"),
    "mount over the root": CALL + FAIL.format("libc.mount(None, b'/', None, 32, None)"),
    "unmount": CALL + FAIL.format("libc.umount2(b'/box', 2)"),
    "make a user namespace": CALL + FAIL.format("libc.unshare(0x10000000)"),
    "make a mount namespace": CALL + FAIL.format("libc.unshare(0x20000)"),
    "clone into a user namespace": CALL + FAIL.format("libc.syscall(56, 0x10000011, 0, 0, 0, 0)"),
    "enter a namespace": CALL + FAIL.format("libc.setns(0, 0)"),
    "open by handle": CALL + FAIL.format("libc.syscall(304, -100, (ctypes.c_char * 32)(), 0)"),
    # the kernel's wide doors
    "load a BPF program": CALL + FAIL.format("libc.syscall(321, 0, (ctypes.c_char * 128)(), 128)"),
    "use io_uring": CALL + FAIL.format("libc.syscall(425, 1, (ctypes.c_char * 128)())"),
    "use the keyring": CALL + FAIL.format("libc.syscall(250, 0, -3, 0, 0, 0)"),
    "watch performance": CALL + FAIL.format("libc.syscall(298, (ctypes.c_char * 128)(), 0, -1, -1, 0)"),
    "handle page faults": CALL + FAIL.format("libc.syscall(323, 1)"),
    "make system calls under other numbers": CALL + FAIL.format("libc.syscall(0x40000000 + 57)"),
    "make system calls that are too new": CALL + FAIL.format("libc.syscall(470, 0, 0, 0)"),
    "watch files": CALL + FAIL.format("libc.inotify_init()"),
    "set the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0.0)",
    "restart the machine": CALL + FAIL.format("libc.reboot(0)"),
    "outlive its starter": CALL + FAIL.format("libc.prctl(1, 0, 0, 0, 0)"),
    "have more memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))",
    "use files of whoever started it": "import os\n"
    "if not [os.fstat(each) for each in range(3, 64)]: raise OSError",  # fstat of a closed one raises
}
# Those that do no harm when they succeed, and so can be tried without walls.
HARMLESS = {
    *("read the users", "read run.db", "list the run's folder", "read a key", "read a key through a link"),
    *("write outside", "read the parent's environment", "list the parent's files", "kill the parent", "fork"),
    *("start a program", "connect", "listen", "connect to an abstract socket", "connect to a socket file"),
    *("watch files", "leave shared memory behind", "outlive its starter"),
}


def walls() -> list[tuple[str, ...]]:
    """Every strong set that this machine can put up."""
    sets = [("namespaces", "landlock", "seccomp"), ("namespaces", "seccomp"), ("landlock", "seccomp")]
    return [each for each in sets if layers_here().there.keys() >= set(each)]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[dict[str, object]]:
    """What an escape would find outside: a run, a key, a service on each kind of socket."""
    run, outside = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("outside")
    (run / "run.db").write_bytes(b"SQLite format 3\0")
    key = run / "key"
    key.write_text("secret")
    name = f"tailrace-{os.getpid()}"
    abstract, file = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as tcp, abstract, file:
        abstract.bind(f"\0{name}")
        abstract.listen()
        file.bind(str(run / "socket"))
        file.listen()
        port = tcp.getsockname()[1]
        yield {"run": run, "key": key, "outside": outside, "pid": os.getpid(), "port": port, "name": name}


def attempt(escape: str, world: dict[str, object], layers: tuple[str, ...]) -> str:
    body = textwrap.indent(ESCAPES[escape].format(**world), "    ")
    refusals = "(OSError, ValueError, AttributeError, RuntimeError)"
    program = f"try:\n{body}\n    print('ESCAPED')\nexcept {refusals} as error:\n    print('held:', repr(error))\n"
    return run_python(program, 10.0, layers)


@pytest.mark.skipif(not layers_here().strong, reason="this machine has no walls")
@pytest.mark.parametrize("layers", walls(), ids="+".join)
def test_no_escape_succeeds(layers: tuple[str, ...], world: dict[str, object]) -> None:
    run, outside = Path(str(world["run"])), Path(str(world["outside"]))
    verdicts = {escape: attempt(escape, world, layers) for escape in ESCAPES}
    assert {escape: said for escape, said in verdicts.items() if not said.startswith("held:")} == {}
    assert (run / "run.db").read_bytes() == b"SQLite format 3\0"
    assert (run / "key").read_text() == "secret"
    assert list(outside.iterdir()) == []


def test_the_harmless_attempts_succeed_without_walls(world: dict[str, object]) -> None:
    verdicts = {escape: attempt(escape, world, ()) for escape in HARMLESS}
    assert {escape: said for escape, said in verdicts.items() if "ESCAPED" not in said} == {}
    (Path(str(world["outside"])) / "mark").unlink()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="root, made an ordinary user, and setpriv")
def test_no_escape_succeeds_for_an_ordinary_user_either(world: dict[str, object]) -> None:
    """Root without the right to administer has to go through a user namespace, as everybody else."""
    script = (
        "import json, sys, test_sandbox as t\n"
        "from tailrace.envs.sandbox import layers_here\n"
        "world = json.loads(sys.argv[1])\n"
        "held = [t.attempt(escape, world, t.walls()[0]).startswith('held:') for escape in t.ESCAPES]\n"
        "print(json.dumps([layers_here().there, [e for e, h in zip(t.ESCAPES, held) if not h]]))\n"
    )
    plain = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", script]
    words = json.dumps({name: str(value) for name, value in world.items()})
    done = subprocess.run(
        [*plain, words], capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parent
    )
    there, escaped = json.loads(done.stdout or f'[{{}}, "{done.stderr[-300:]!r}"]')
    assert escaped == []
    assert there.get("namespaces", "for a user") == "for a user"


BOMBS = {
    "memory": ("x = [bytearray(1 << 20) for _ in range(10000)]", "MemoryError"),
    "mapped memory": ("import mmap\nx = [mmap.mmap(-1, 64 << 20) for _ in range(100)]", "Cannot allocate memory"),
    "threads": (
        "import threading, time\n"
        "for _ in range(10000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "can't start new thread",
    ),
    "forks": ("import os\nwhile True: os.fork()", "PermissionError"),
    "open files": ("x = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    "one large file": ("open('x', 'wb').write(bytes(2 << 20))", "File too large|Permission denied"),
    "a hole": ("import os\nos.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 1 << 40)", "File too large|Permission de"),
    "many files of some size": (
        "for i in range(100):\n    with open(str(i), 'wb') as f: f.write(bytes(1 << 19))",
        "No space left|Permission denied",
    ),
    "many files": ("for i in range(100000): open(str(i), 'w').close()", "No space left|Permission denied"),
    "many folders": (
        "import os\nwhile True:\n    os.mkdir('x')\n    os.chdir('x')",
        "No space left|Permission denied",
    ),
    "output": ("while True: print('x' * 10000)", "printed more than 1 MB"),
    "errors": ("import sys\nwhile True: sys.stderr.write('x' * 10000)", "printed more than 1 MB"),
    "processor time": ("while True: pass", "did not end within 1 s"),
    "processor time in C": ("sum(range(10 ** 12))", "did not end within 1 s"),
    "a large power": ("print(len(str(7 ** 10 ** 9)))", "did not end|MemoryError"),
    "sleep": ("import time\ntime.sleep(1000)", "did not end within 1 s"),
    "deaf to signals": (
        "import signal, time\nfor s in range(1, 32):\n"
        "    if s not in (9, 19): signal.signal(s, signal.SIG_IGN)\ntime.sleep(1000)",
        "did not end within 1 s",
    ),
    "a stop": ("import os\nos.kill(os.getpid(), 19)", "did not end within 1 s"),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        "did not end|SIGSEGV|MemoryError",
    ),
    "a crash": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    "a long source": ("x = " + "(" * 100_000, "SyntaxError|MemoryError"),
}


@pytest.mark.skipif(not layers_here().strong, reason="this machine has no walls")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_goes_off_inside(bomb: str) -> None:
    program, ending = BOMBS[bomb]
    seconds = 1.0 if "did not end" in ending else 10.0
    for layers in walls()[-2:]:
        said = run_python(program, seconds, layers)
        assert any(each in said for each in ending.split("|")), said
        assert len(said) < OUTPUT


@pytest.mark.skipif(not layers_here().strong, reason="this machine has no walls")
def test_nothing_of_a_program_is_left(tmp_path: Path, monkeypatch) -> None:
    """Neither a process nor a file, however it ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for program in ("open('x', 'w').write('x')", "import time\ntime.sleep(1000)", "import os\nos.kill(os.getpid(), 9)"):
        for layers in walls():
            run_python(program, 0.5, layers)
    assert list(tmp_path.iterdir()) == []
    assert processes(tmp_path) == []


@pytest.mark.skipif(not layers_here().strong, reason="this machine has no walls")
@pytest.mark.parametrize("layers", walls(), ids="+".join)
def test_a_program_ends_with_whoever_started_it(layers: tuple[str, ...], tmp_path: Path) -> None:
    """As when the out-of-memory killer strikes: first the outermost process of the sandbox alone, then the judge."""
    script = (
        f"from tailrace.envs.sandbox import run_python\nrun_python('import time; time.sleep(60)', 60.0, {layers!r})"
    )
    for victim in ("sandbox", "judge"):
        judge = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"TMPDIR": str(tmp_path)})
        until(lambda: len(processes(tmp_path)) > 1)
        outermost = [each for each in processes(tmp_path) if _parent(each) == judge.pid]
        os.kill(outermost[0] if victim == "sandbox" else judge.pid, signal.SIGKILL)
        judge.wait(timeout=30)
        until(lambda: not processes(tmp_path))


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processes(folder: Path) -> list[int]:
    """Of sandboxes whose boxes are made in this folder, by their command line."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes()
            if b"jail.inside.main()" in words and str(folder).encode() in words:
                found.append(int(process.name))
    return found


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_ordinary_programs_work() -> None:
    """Walls that keep everything out are easy; these are things that policies do."""
    program = """
        import asyncio, collections, concurrent.futures, datetime, decimal, fractions, itertools, json, math, os, random
        import re, statistics, sys, tempfile, threading
        from dataclasses import dataclass
        import numpy as np

        @dataclass
        class Point:
            x: int

        async def later():
            await asyncio.sleep(0.001)
            return 7

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            squares = list(pool.map(lambda n: n * n, range(5)))
        print(squares, asyncio.run(later()), Point(3), float(np.linalg.det(np.eye(3))), math.comb(10, 3))
        print(__name__, sys.argv, random.random() < 1, datetime.date(2024, 2, 29).isoformat())
    """
    expected = "[0, 1, 4, 9, 16] 7 Point(x=3) 1.0 120\n__main__ ['program.py'] True 2024-02-29"
    for layers in [*walls(), ()]:
        assert run_python(textwrap.dedent(program), 20.0, layers) == expected
    if ("namespaces", "seccomp") in walls():
        write = "with open('notes', 'w') as f: f.write('kept')\nprint(open('notes').read())"
        assert run_python(write, 20.0, ("namespaces", "landlock", "seccomp")) == "kept"


def test_an_error_shows_the_program_and_nothing_around_it() -> None:
    said = run_python("print('before')\nx = 1\nx / 0", 20.0)
    assert said.startswith('before\nTraceback (most recent call last):\n  File "program.py", line 3, in <module>\n')
    assert said.endswith("ZeroDivisionError: division by zero\nerror: the program ended with status 1")
