"""Imports point downwards: the contracts in pyproject.toml hold. And what checks them is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_layers_hold() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_start_up_loads_nothing_heavy() -> None:
    program = "import sys, tailrace.config; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "rich", "torch", "asyncio", "matplotlib"} & set(loaded)


def test_continuous_integration_runs_the_checks_and_the_tests(tmp_path: Path) -> None:
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "make").chmod(0o755)
    subprocess.run([ROOT / ".ci/run"], env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, check=True)
    assert (tmp_path / "asked").read_text().split() == ["check", "test"]
