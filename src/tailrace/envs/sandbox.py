"""A Python program of the policy, run apart: a process of its own with little time, little memory and no network.

Called by `tools.py`, inside a judge. Everything a program does wrong comes back as text for the policy to read. What
the machine offers is used: its own network, process and IPC namespaces and another user where that is allowed; limits
and an empty folder always. This stops accidents and runaways; against real malice run the replicas in a container.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

MEMORY = 512 << 20  # bytes of address space
FILE = 1 << 20  # bytes of the largest file, output included
SHOWN = 2000  # characters of output that the policy reads

# Read by the program's own interpreter, so that the limits hold before the first line of it. The alarm ends it even
# if nobody is left who could.
PRELUDE = """
import resource, signal, sys
seconds, memory, size, program = sys.argv[1:]
for kind, limit in (("CPU", int(float(seconds)) + 1), ("AS", int(memory)), ("FSIZE", int(size)), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + kind), (limit, limit))
signal.setitimer(signal.ITIMER_REAL, float(seconds) + 2)
sys.argv = [program]
with open(program) as file:
    source = file.read()
del resource, signal, seconds, memory, size, kind, limit, file
exec(compile(source, program, "exec"), {"__name__": "__main__"})
"""

NAMESPACES = ("--net", "--ipc", "--pid", "--fork", "--kill-child")
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs")
WALLS: tuple[tuple[str, ...], ...] = (  # the first that works here is used
    ("unshare", *NAMESPACES, "--", *NOBODY),
    ("unshare", *NAMESPACES, "--"),
    ("unshare", "--user", "--map-current-user", *NAMESPACES, "--"),
)


def run_python(program: str, seconds: float) -> str:
    """What the program printed, and how it ended if not well."""
    with tempfile.TemporaryDirectory(prefix="tailrace-tool-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o777)  # it may run as another user
        script = folder / "program.py"
        script.write_text(program, encoding="utf-8", errors="replace")
        with (folder / "output").open("w+b") as output:
            ending = _run(script, output.fileno(), seconds)
            output.seek(0)
            return _shown(output.read(4 * SHOWN).decode(errors="replace"), ending)


def _run(script: Path, output: int, seconds: float) -> str:
    arguments = [str(seconds), str(MEMORY), str(FILE), script.name]
    process = subprocess.Popen(
        [*_walls(), sys.executable, "-I", "-c", PRELUDE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd=script.parent,
        env={"PATH": os.defpath, "HOME": str(script.parent), "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"error: the program did not end within {seconds:g} s"
    finally:
        _end(process)
    return "" if status == 0 else f"error: the program ended with status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and whatever it started that is still in its session."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def _shown(output: str, ending: str) -> str:
    text = output.strip()
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}\n...\n{text[-SHOWN // 2 :]}"
    return "\n".join(part for part in (text, ending) if part) or "(no output)"


@functools.cache
def _walls() -> tuple[str, ...]:
    for walls in WALLS:
        command = [*walls, sys.executable, "-I", "-c", "import json, math, random"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=10, check=False, cwd="/")
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return walls
    return ()
