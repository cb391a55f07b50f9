"""A Python program of the policy, run apart: it gets time, memory and an empty folder, and reaches nothing else.

Called by `tools.py`, inside a judge. Everything a program does wrong comes back as text for the policy to read. What
walls a machine has is found out once (`layers_here`); `jail/` puts them up, in a process of its own for every call:

    namespaces   its own processes, network and files: the interpreter, read only, and a folder in memory
    landlock     the kernel opens no other files for it; alone it suffices too, but then there is no folder to write to
    seccomp      a list of allowed system calls: one process with threads, no sockets, no signals to others
    limits       time, memory, threads, open files and their size; always

Strong is seccomp with one or both of the first two. Less than that keeps accidents in, not malice: then the tool
refuses to run unless `task.sandbox` is "weak".
"""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from tailrace.config.errors import ConfigError
from tailrace.envs.jail.inside import LATE

OUTPUT = 1 << 20  # bytes that a program may print
SHOWN = 2000  # characters of output that the policy reads
REAP_S = 10.0  # for what was killed to be gone
GRACE_S = 2.0  # for the walls to go up, and for the supervisor to end the program before we do

# what Landlock learned to refuse, with which version
SINCE_LANDLOCK = {3: "truncating files", 4: "TCP", 5: "device ioctls", 6: "signals and abstract sockets"}

PACKAGE = str(Path(__file__).parent)
START = f"import sys; sys.path.append({PACKAGE!r}); import jail.inside; sys.path.pop(); jail.inside."


class SandboxError(RuntimeError):
    """The walls did not go up for once, so the program was not run."""


class Layers(NamedTuple):
    """The walls of this machine, and of the missing ones why."""

    there: dict[str, str]
    missing: dict[str, str]

    @property
    def strong(self) -> bool:
        return "seccomp" in self.there and bool(self.there.keys() & {"namespaces", "landlock"})

    def gaps(self) -> Iterator[str]:
        """What is not guaranteed here, and would be with all layers of a recent kernel."""
        namespaces, landlock = "namespaces" in self.there, int(self.there.get("landlock", "version 0").split()[1])
        if "seccomp" not in self.there:
            yield "without seccomp programs can make every system call, signals to other processes included"
        if not namespaces and not landlock:
            yield "without namespaces and Landlock they can read and change your files"
        elif not namespaces:
            yield "without namespaces they have no folder to write to, and can ask if a file exists, its size and times"
        elif not landlock:
            yield "without Landlock the mounts of the namespace alone hide files"
        unknown = [what for version, what in SINCE_LANDLOCK.items() if version > landlock > 0]
        if unknown:
            yield f"Landlock {landlock} does not know of {', '.join(unknown)}: seccomp alone refuses those"

    def __str__(self) -> str:
        there = [f"{name} ({how})" for name, how in self.there.items()]
        missing = [f"no {name} ({why})" for name, why in self.missing.items()]
        verdict = "strong" if self.strong else "weak: programs of the policy run only with task.sandbox = 'weak'"
        return f"{verdict}; {', '.join([*there, 'limits', *missing])}"


@functools.cache
def layers_here() -> Layers:
    """Tried, not guessed: a container may forbid what its kernel can."""
    if not sys.platform.startswith("linux"):
        return Layers({}, dict.fromkeys(("namespaces", "landlock", "seccomp"), "only Linux has it"))
    done = subprocess.run(
        [*_interpreter(), START + "probe()"], capture_output=True, timeout=30, check=False, cwd="/", text=True
    )
    words = [line.strip() for line in done.stdout.splitlines()]
    there = dict(word.split("=", 1) for word in words if "=" in word.split(":", 1)[0])
    missing = dict(word.split(": ", 1) for word in words if "=" not in word.split(":", 1)[0])
    return Layers(there, missing)


def refuse_weak(allowed: bool) -> None:
    """One sentence for a machine that cannot wall programs off, unless that is allowed."""
    if allowed or layers_here().strong:
        return
    why = "; ".join(f"{name}: {reason}" for name, reason in layers_here().missing.items())
    raise ConfigError(
        "task.tools = 'python' runs programs that the model writes, and this machine cannot wall them off "
        f"({why}); use Linux 5.13 or later, or write task.sandbox = 'weak' to run them with limits of time and memory "
        "alone, which keeps accidents in but no malice: they could read your files"
    )


def run_python(program: str, seconds: float, layers: tuple[str, ...] | None = None) -> str:
    """What the program printed, and how it ended if not well."""
    layers = tuple(layers_here().there) if layers is None else layers
    box = tempfile.TemporaryDirectory(prefix="tailrace-tool-", ignore_cleanup_errors=True)
    with box, tempfile.TemporaryFile() as source:
        source.write(program.encode(errors="replace"))
        source.seek(0)
        output, ending = _run(source, box.name, seconds, layers)
    return _shown(output.decode(errors="replace"), ending)


def _run(source: IO[bytes], box: str, seconds: float, layers: tuple[str, ...]) -> tuple[bytes, str]:
    told, tells = os.pipe()
    words = [",".join(layers) or "limits", str(seconds), str(tells), box, *_packages()]
    process = subprocess.Popen(
        [*_interpreter(), START + "main()", *words],
        stdin=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[tells],
        cwd=box,
        env={"PATH": os.defpath, "HOME": box, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        start_new_session=True,
    )
    os.close(tells)
    try:
        output, ending = _heard(process, seconds)
    finally:
        _end(process)
        walls_went_up = bool(select.select([told], [], [], 0)[0] and os.read(told, 1))
        os.close(told)
    if not walls_went_up:
        raise SandboxError(f"the sandbox did not start: {output.decode(errors='replace').strip()[-500:] or ending}")
    return output, ending


def _interpreter() -> list[str]:
    """Without the environment, the user's packages, .pth files and bytecode of its own."""
    return [sys.executable, "-I", "-S", "-B", "-c"]


@functools.cache
def _packages() -> tuple[str, ...]:
    """Where installed packages lie; what else this process imports from is not for the program."""
    return tuple(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))


def _heard(process: subprocess.Popen[bytes], seconds: float) -> tuple[bytes, str]:
    """What it printed until it ended, and how that was."""
    assert process.stdout is not None
    deadline = time.monotonic() + seconds + GRACE_S
    output = bytearray()
    with process.stdout as pipe:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            piece = os.read(pipe.fileno(), 1 << 16)
            output += piece
            if not piece:
                return bytes(output), _ending(process, deadline, seconds)
            if len(output) > OUTPUT:
                return bytes(output), f"error: the program printed more than {OUTPUT >> 20} MB"
    return bytes(output), _late(seconds)


def _ending(process: subprocess.Popen[bytes], deadline: float, seconds: float) -> str:
    try:
        status = process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return _late(seconds)
    if status in (LATE, 128 + signal.SIGXCPU):
        return _late(seconds)
    if status > 128 and status - 128 in set(signal.Signals):
        return f"error: the program was ended by {signal.Signals(status - 128).name}"
    return f"error: the program ended with status {status}" if status else ""


def _late(seconds: float) -> str:
    return f"error: the program did not end within {seconds:g} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and whatever it started that is still in its session."""
    with suppress(ProcessLookupError, PermissionError):  # all of it is gone, or has another user by now
        os.killpg(process.pid, signal.SIGKILL)
    try:
        process.wait(timeout=REAP_S)
    except subprocess.TimeoutExpired:
        late = f"process {process.pid} of the sandbox was killed and is still there after {REAP_S:g} s"
        raise RuntimeError(f"{late}; the kernel holds it (a disk that does not answer?)") from None


def _shown(output: str, ending: str) -> str:
    text = output.strip()
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}\n...\n{text[-SHOWN // 2 :]}"
    return "\n".join(part for part in (text, ending) if part) or "(no output)"
