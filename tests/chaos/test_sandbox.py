"""Escapes tried against the tool's sandbox, each a few lines that a hostile policy might write. All are refused.

Every attempt runs behind every set of walls that this machine has. An attempt says ESCAPED once it has what it wanted;
`test_the_harmless_attempts_succeed_without_walls` shows that the attempts would notice if a wall were missing.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import escapes
import pytest

from tailrace.envs import sandbox
from tailrace.envs.jail.calls import number
from tailrace.envs.jail.filter import NEWER
from tailrace.envs.jail.rules import rules
from tailrace.envs.sandbox import OUTPUT, layers_here, run_python

RUN_DB, MODULE = b"SQLite format 3\0", "x = 1\n"

# The oldest version of Landlock that is tried, and the last in which the kernel learned something new: signals.
LANDLOCKS = range(1, 7)


def walls() -> list[tuple[str, ...]]:
    """Every strong set that this machine can put up."""
    sets = [("namespaces", "landlock", "seccomp"), ("namespaces", "seccomp"), ("landlock", "seccomp")]
    return [each for each in sets if layers_here().there.keys() >= set(each)]


def older_walls() -> list[tuple[str, ...]]:
    """Those sets as older kernels have them, with a Landlock that knows fewer rules."""
    newest = int(layers_here().there.get("landlock", "version 0").split()[1])
    sets = [each for each in walls() if "landlock" in each]
    return [
        tuple(f"landlock={version}" if name == "landlock" else name for name in each)
        for version in LANDLOCKS
        if version < newest
        for each in sets
    ]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[dict[str, object]]:
    """What an escape would find outside: a run, a key, a package, a process, a service on each kind of socket."""
    run, outside = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("outside")
    (run / "run.db").write_bytes(RUN_DB)
    (run / "key").write_text("secret")
    library = tmp_path_factory.mktemp("installed") / "site-packages" / "module.py"
    library.parent.mkdir()
    library.write_text(MODULE)
    name = f"tailrace-{os.getpid()}"
    with (
        installed(library.parent),
        subprocess.Popen(["sleep", "600"]) as victim,
        socket.create_server(("127.0.0.1", 0)) as tcp,
        listening(f"\0{name}", socket.SOCK_STREAM),
        listening(str(run / "socket"), socket.SOCK_STREAM),
        listening(f"\0{name}-datagrams", socket.SOCK_DGRAM) as abstract,
        listening(str(run / "datagrams"), socket.SOCK_DGRAM) as file,
    ):
        yield {
            "run": run,
            "key": run / "key",
            "outside": outside,
            "library": library,
            "pid": os.getpid(),
            "victim": victim.pid,
            "process": victim,
            "port": tcp.getsockname()[1],
            "name": name,
            "datagrams": (abstract, file),
            "nr": escapes.NR,
        }
        victim.kill()


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """As if packages were installed there, which programs may import."""
    sys.path.append(str(folder))
    sandbox._packages.cache_clear()
    yield
    sys.path.remove(str(folder))
    sandbox._packages.cache_clear()


@contextmanager
def listening(address: str, kind: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, kind) as service:
        service.bind(address)
        if kind == socket.SOCK_STREAM:
            service.listen()
        yield service


def attempt(names: Iterable[str], world: dict[str, object], layers: tuple[str, ...]) -> list[str]:
    """Those that succeeded. One program tries them all, one after the other."""
    programs = [escapes.ESCAPES[name].format(**world) for name in names]
    said = run_python(TRY_ALL.format(programs=programs), 60.0, layers)
    assert said.endswith("\nall tried"), said
    return [name for name, line in zip(names, said.splitlines(), strict=False) if line.endswith("ESCAPED")]


TRY_ALL = """
for index, program in enumerate({programs!r}):
    print(index, end=' ', flush=True)
    try:
        exec(program, {{}})
        print('ESCAPED', flush=True)
    except (OSError, ValueError, AttributeError, RuntimeError):
        print('held', flush=True)
print('all tried')
"""


@pytest.mark.skipif(not layers_here().strong, reason="this machine has no walls")
@pytest.mark.parametrize("layers", [*walls(), *older_walls()], ids="+".join)
def test_no_escape_succeeds(layers: tuple[str, ...], world: dict[str, Any]) -> None:
    assert attempt(escapes.ESCAPES, world, layers) == []
    assert (world["run"] / "run.db").read_bytes() == RUN_DB
    assert world["key"].read_text() == "secret"
    assert world["library"].read_text() == MODULE
    assert list(world["outside"].iterdir()) == []
    assert world["process"].poll() is None
    assert received(world["datagrams"]) == []


def received(services: Sequence[socket.socket]) -> list[bytes]:
    datagrams: list[bytes] = []
    while ready := select.select(services, [], [], 0)[0]:
        datagrams += [service.recv(1) for service in ready]
    return datagrams


def test_the_harmless_attempts_succeed_without_walls(world: dict[str, Any]) -> None:
    assert set(attempt(sorted(escapes.HARMLESS), world, ())) == escapes.HARMLESS
    assert len(received(world["datagrams"])) == 6
    (world["outside"] / "mark").unlink()


@pytest.mark.skipif(not layers_here().strong, reason="this machine has no walls")
def test_every_call_that_no_rule_names_fails() -> None:
    """In the kernel, as `tests/unit/test_sandbox_filter.py` has it on paper: EPERM, or ENOSYS for a newer one. Some
    kernels do not ask about 335 and 336 of x86-64: they belong to probes, and end whoever else makes them."""
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def fails(number):
    return libc.syscall(number, *[ctypes.c_long(-1)] * 6) < 0 and ctypes.get_errno() == (1, 38)[number >= {newer}]
print([number for number in {{*range(600)}} - {named} - {{335, 336}} if not fails(number)])
"""
    for layers in walls()[-2:]:
        named = {number(name) for name in rules(2, "namespaces" in layers)}
        assert run_python(program.format(newer=NEWER, named=named), 20.0, layers) == "[]"


@pytest.mark.skipif(not layers_here().strong, reason="this machine has no walls")
@pytest.mark.parametrize("layers", walls(), ids="+".join)
def test_a_lock_locks_nobody_out(layers: tuple[str, ...], world: dict[str, Any]) -> None:
    """It could be one on an installed file. If the first lock were real, the second and the question would show it."""
    program = """
import fcntl, os, struct
first, second = [os.open({library!r}, os.O_RDONLY) for _ in range(2)]
fcntl.flock(first, fcntl.LOCK_EX)
fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
fcntl.fcntl(first, 37, struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0))
fcntl.lockf(first, fcntl.LOCK_SH)
held = fcntl.fcntl(second, 36, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 0, 0, 0))
print(struct.unpack('h', held[:2])[0] == fcntl.F_UNLCK)
"""
    assert run_python(program.format(library=str(world["library"])), 20.0, layers) == "True"


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="root, made an ordinary user, and setpriv")
def test_no_escape_succeeds_for_an_ordinary_user_either(world: dict[str, Any]) -> None:
    """Root without the right to administer has to go through a user namespace, as everybody else."""
    script = (
        "import json, sys, test_sandbox as t\n"
        "world = json.loads(sys.argv[1])\n"
        "with t.installed(t.Path(world['library']).parent):\n"
        "    escaped = [t.attempt(t.escapes.ESCAPES, world, layers) for layers in t.walls()]\n"
        "print(json.dumps([t.layers_here().there, escaped]))\n"
    )
    plain = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", sys.executable, "-c", script]
    words = json.dumps({name: value if name == "nr" else str(value) for name, value in world.items()})
    done = subprocess.run(
        [*plain, words], capture_output=True, text=True, timeout=120, check=False, cwd=Path(__file__).parent
    )
    there, escaped = json.loads(done.stdout or f'[{{}}, "{done.stderr[-300:]!r}"]')
    assert [each for each in escaped if each] == []
    assert there.get("namespaces", "for a user") == "for a user"


BOMBS = {
    "memory": ("x = [bytearray(1 << 20) for _ in range(10000)]", "MemoryError"),
    "mapped memory": ("import mmap\nx = [mmap.mmap(-1, 64 << 20) for _ in range(100)]", "Cannot allocate memory"),
    "many small mappings": (
        "import mmap\nkinds = mmap.PROT_READ, mmap.PROT_WRITE\n"
        "x = [mmap.mmap(-1, 4096, prot=kinds[i % 2]) for i in range(200000)]",
        "Cannot allocate memory",
    ),
    "threads": (
        "import threading, time\n"
        "for _ in range(10000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "can't start new thread",
    ),
    "small threads": (
        "import threading, time\nthreading.stack_size(32768)\n"
        "try:\n"
        "    while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "except RuntimeError: print(threading.active_count() <= 64)",
        "True",
    ),
    "threads past Python": (
        escapes.CALL + "stacks = ctypes.create_string_buffer(10000 << 12)\n"
        "top = (ctypes.addressof(stacks) + 4095) & ~15\n"
        "pause = ctypes.cast(libc.pause, ctypes.c_void_p)\n"
        "for i in range(10000): must(libc.clone(pause, ctypes.c_void_p(top + (i << 12)), 0x10F00, None))",
        "BlockingIOError",
    ),
    "threads that start threads": (
        "import os, threading\nthreading.stack_size(32768)\n"
        "def more():\n"
        "    while True:\n"
        "        try: threading.Thread(target=more, daemon=True).start()\n"
        "        except RuntimeError: pass\n"
        "more()",
        "did not end within 1 s",
    ),
    "pending signals": (
        "import os, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [40])\n"
        "for _ in range(1000): os.kill(os.getpid(), 40)\n"
        "print(sum(signal.sigtimedwait([40], 0) is not None for _ in range(1000)) <= 64)",
        "True",
    ),
    "forks": ("import os\nwhile True: os.fork()", "PermissionError"),
    "open files": ("x = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    "event counters": ("import os\nwhile True: os.eventfd(0)", "Too many open files"),
    "pollers": ("import select\nx = [select.epoll() for _ in range(1000)]", "Too many open files"),
    "full pipes": (
        "import os\nwhile True:\n    w = os.pipe()[1]\n    os.set_blocking(w, False)\n    os.write(w, bytes(1 << 20))",
        "Too many open files",
    ),
    "full sockets": (
        "import socket\nx = []\nwhile True:\n    x += socket.socketpair()\n    x[-1].setblocking(False)\n"
        "    try:\n        while True: x[-1].send(bytes(1 << 16))\n    except BlockingIOError: pass",
        "Too many open files",
    ),
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
    "32-bit system calls": (  # mov eax, 20; int 0x80; ret
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()",
        "SIGSYS|SIGSEGV|SIGILL",
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
        assert {Path(f"/proc/{each}/oom_score_adj").read_text() for each in processes(tmp_path)} == {"1000\n"}
        outermost = [each for each in processes(tmp_path) if _parent(each) == judge.pid]
        os.kill(outermost[0] if victim == "sandbox" else judge.pid, signal.SIGKILL)
        judge.wait(timeout=30)
        until(lambda: not processes(tmp_path))


@pytest.mark.skipif(("landlock", "seccomp") not in walls(), reason="this machine has no Landlock")
def test_where_the_container_itself_listens_there_are_no_threads() -> None:
    """Only one listener can count them. The program goes on without."""
    script = (
        "from tailrace.envs import sandbox\n"
        "from tailrace.envs.jail import threads\n"
        "assert threads.listen()\n"
        "print('threads only with namespaces' in str(sandbox.layers_here()))\n"
        "program = 'import threading\\nprint(1, flush=True)\\nthreading.Thread(target=print).start()'\n"
        "print(sandbox.run_python(program, 20.0, ('landlock', 'seccomp')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("True\n1\n")
    assert "can't start new thread" in done.stdout


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


ORDINARY = """
import asyncio, collections, concurrent.futures, datetime, decimal, fractions, itertools, json, math, multiprocessing
import os, random, re, signal, sqlite3, statistics, subprocess, sys, tempfile, threading, time
from dataclasses import dataclass
import numpy as np

@dataclass
class Point:
    x: int

async def later():
    signalled = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGALRM, signalled.set)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    await signalled.wait()
    return await asyncio.to_thread(sum, [3, 4])

def solved(n):
    return round(float(np.linalg.solve(np.eye(100) * n, np.ones(100)).sum()), 6)

with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(list(pool.map(solved, range(1, 9))))
ours, theirs = multiprocessing.Pipe()
ours.send({'x': 1})
rows = sqlite3.connect(':memory:').execute('select 1').fetchall()
print(asyncio.run(later()), Point(3), theirs.recv(), math.comb(10, 3), rows)
print(__name__, sys.argv, random.random() < 1, datetime.date(2024, 2, 29).isoformat(), decimal.Decimal(2).sqrt())
"""
ORDINARY_SAID = """
[100.0, 50.0, 33.333333, 25.0, 20.0, 16.666667, 14.285714, 12.5]
7 Point(x=3) {'x': 1} 120 [(1,)]
__main__ ['program.py'] True 2024-02-29 1.414213562373095048801688724
""".strip()
FOLDER = """
import os, pathlib, shutil, sqlite3, tempfile
with tempfile.NamedTemporaryFile('w+') as file, tempfile.TemporaryDirectory() as folder:
    file.write('kept')
    file.flush()
    os.fsync(file.fileno())
    shutil.copy2(file.name, pathlib.Path(folder) / 'copy')
    shutil.move(pathlib.Path(folder) / 'copy', 'notes')
    os.chmod('notes', 0o600)
    os.utime('notes', (1, 1))
os.truncate('notes', 3)
base = sqlite3.connect('base.db')
base.execute('create table t (x)')
base.execute('insert into t values (7)')
base.commit()
print(open('notes').read(), base.execute('select x from t').fetchall(), sorted(os.listdir()))
"""
FOLDER_SAID = "kep [(7,)] ['base.db', 'notes', 'program.py']"
ALGEBRA = (
    "import sympy\nx = sympy.symbols('x')\nprint(sympy.integrate(sympy.sin(x) ** 2, x), sympy.factorint(2**31 - 2))"
)
ALGEBRA_SAID = "x/2 - sin(x)*cos(x)/2 {2: 1, 3: 2, 7: 1, 11: 1, 31: 1, 151: 1, 331: 1}"


@pytest.mark.parametrize("layers", [*walls(), *older_walls(), ()], ids="+".join)
def test_ordinary_programs_work(layers: tuple[str, ...]) -> None:
    """Walls that keep everything out are easy; these are things that policies do."""
    assert run_python(ORDINARY, 20.0, layers) == ORDINARY_SAID
    if "namespaces" in layers:
        assert run_python(FOLDER, 20.0, layers) == FOLDER_SAID
    if layers in walls():
        assert run_python(ALGEBRA, 20.0, layers) == ALGEBRA_SAID


def test_threads_share_the_memory() -> None:
    """The C library would set 64 MB of address space aside for each, and there would be none left."""
    program = """
import threading, numpy as np
done = threading.Barrier(13)
def work(n):
    np.linalg.inv(np.eye(50) + n)
    done.wait()
for n in range(12): threading.Thread(target=work, args=(n,), daemon=True).start()
done.wait()
print(np.ones(8 << 20).sum())
"""
    for layers in walls()[-2:]:
        assert run_python(program, 20.0, layers) == "8388608.0"


@pytest.mark.parametrize(
    "program",
    [
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join()",
        "import multiprocessing as m; p = m.get_context('spawn').Process(target=print); p.start()",
        "import asyncio\nasync def f(): await asyncio.create_subprocess_exec('true')\nasyncio.run(f())",
    ],
)
def test_who_needs_another_process_is_told(program: str) -> None:
    for layers in walls():
        assert "PermissionError: [Errno 1] Operation not permitted" in run_python(program, 20.0, layers)


def test_an_error_shows_the_program_and_nothing_around_it() -> None:
    said = run_python("print('before')\nx = 1\nx / 0", 20.0)
    assert said.startswith('before\nTraceback (most recent call last):\n  File "program.py", line 3, in <module>\n')
    assert said.endswith("ZeroDivisionError: division by zero\nerror: the program ended with status 1")
