"""Tests with a real vLLM, which has a Python of its own: `make vllm`. Without one they are left out."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

VARIABLE = "TAILRACE_VLLM_PYTHON"
DEADLINE_S = 1500  # of a test, whatever it waits for: vLLM takes a minute to start on two cores
collect_ignore_glob = [] if os.environ.get(VARIABLE) else ["test_*.py"]


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    def end(*_: object) -> None:
        raise TimeoutError(f"the test has taken {DEADLINE_S} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
