"""The kernel that scores logits, on the CPU in Triton's interpreter, against autograd."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

DEADLINE_S = 300

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

if os.environ.get("TRITON_INTERPRET") != "1":  # asked once, when triton is first imported: so in a process of its own

    def test_the_score_kernel_in_tritons_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, f"\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"

else:
    import torch

    from tailrace.kernels.score import TILE, score, slope

    @pytest.mark.parametrize(("rows", "width", "factor"), [(3, TILE + 905, 1.0), (2, 100, 0.7), (1, TILE, 1.3)])
    def test_values_and_gradients_are_those_of_autograd(rows: int, width: int, factor: float) -> None:
        logits = (3 * torch.randn(rows, width)).requires_grad_()
        targets = torch.randint(width, (rows,))
        table = (logits * factor).log_softmax(-1)
        wanted = table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)
        logprobs, entropy, total = score(logits.detach(), targets, factor)
        torch.testing.assert_close((logprobs, entropy), wanted, atol=1e-4, rtol=1e-4)
        by_logprob, by_entropy = torch.randn(rows), torch.randn(rows)
        loss = (wanted[0] * by_logprob + wanted[1] * by_entropy).sum()
        expected = torch.autograd.grad(loss, logits)[0]
        found = slope(logits.detach(), targets, total, entropy, by_logprob, by_entropy, factor, torch.float32)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)

    def test_no_row_is_no_trouble() -> None:
        none = torch.zeros(0, dtype=torch.int64)
        assert score(torch.zeros(0, 9), none, 1.0)[0].shape == (0,)
        empty = torch.zeros(0)
        assert slope(torch.zeros(0, 9), none, empty, empty, empty, empty, 1.0, torch.float32).shape == (0, 9)
