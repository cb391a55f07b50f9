"""Tests with a real vLLM, which has a Python of its own: `make vllm`. Without one they are left out."""

from __future__ import annotations

import os

VARIABLE = "TAILRACE_VLLM_PYTHON"
collect_ignore_glob = [] if os.environ.get(VARIABLE) else ["test_*.py"]
