"""CPU kernels (`cpu.c`), compiled once per machine by its own C compiler and cached.

Called by `engines/compiled.py`. Without a working compiler `library` is None and prints the reason once; everything
then runs with torch alone, slower. The kernels use torch's OpenMP threads, so `torch.set_num_threads` bounds them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu.c")
MOST_DIM = 256  # largest head dimension, as in the source
COMPILE_S = 120.0
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
OFF = "TAILRACE_CPU_KERNELS"  # environment variable; 0: do not use them

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
SIGNATURES = {
    "product": (POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, INT),
    "norm": (POINTER, POINTER, POINTER, LONG, LONG, FLOAT),
    "gate": (POINTER, POINTER, LONG, LONG),
    "attend": (POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, POINTER),
}


class LayerOfHeads(ctypes.Structure):
    """`struct layer` of the source."""

    _fields_ = (
        *((name, LONG) for name in ("queries", "keys", "dim", "slots", "window")),
        *((name, FLOAT) for name in ("scale", "eps")),
        *((name, POINTER) for name in ("query_norm", "key_norm", "key_pool", "value_pool")),
    )


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels."""
    if os.environ.get(OFF) == "0":
        return None
    try:
        return _bound(ctypes.CDLL(str(_compiled())))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        log.warning("no compiled kernels for this CPU (%s): torch alone, slower", error)
        return None


def _bound(found: ctypes.CDLL) -> ctypes.CDLL:
    for name, arguments in SIGNATURES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = arguments, None
    return found


def _compiled() -> Path:
    """The shared library, from the cache if it was compiled before."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise RuntimeError("no C compiler; Debian's is in the package gcc")
    target = _cache() / f"cpu-{_fingerprint(compiler)}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            _compile(compiler, Path(folder) / "made.so").replace(target)  # atomic: other processes may compile too
    return target


def _compile(compiler: str, target: Path) -> Path:
    made = target.with_suffix(".o")
    _run(compiler, *FLAGS, "-c", str(SOURCE), "-o", str(made))
    # Linked without -fopenmp, so that the symbols resolve to the OpenMP library that torch has loaded, and its threads.
    _run(compiler, "-shared", str(made), "-o", str(target))
    return target


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} says: {(done.stderr.strip() or 'nothing').splitlines()[-1]}")


def _fingerprint(compiler: str) -> str:
    """Of everything that the library depends on: source, compiler, flags, processor."""
    parts = [SOURCE.read_text(), compiler, *FLAGS, platform.machine(), torch.__version__, _processor()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """Its features: machines with different processors may share a home directory."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else [platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace" / "kernels"
