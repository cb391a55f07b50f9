"""The compiled CPU kernels against float64 references, on random shapes with ragged ends."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm, silu

from tailrace.kernels import cpu


@pytest.fixture(scope="module")
def kernels() -> ctypes.CDLL:
    found = cpu.library()
    if found is None:
        pytest.skip("this machine has no C compiler")
    return found


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 48])
@pytest.mark.parametrize(("width", "out"), [(64, 32), (37, 11), (576, 50), (3, 1)])
def test_a_product_adds_its_bias_and_what_was_there(kernels: ctypes.CDLL, rows: int, width: int, out: int) -> None:
    x, weight, bias, before = (
        torch.randn(rows, width),
        torch.randn(out, width),
        torch.randn(out),
        torch.randn(rows, out),
    )
    expected = x.double() @ weight.double().t()
    y = torch.empty(rows, out)
    kernels.product(x.data_ptr(), weight.data_ptr(), None, y.data_ptr(), rows, width, out, False)
    torch.testing.assert_close(y, expected.float(), atol=1e-4, rtol=1e-5)
    y = before.clone()
    kernels.product(x.data_ptr(), weight.data_ptr(), bias.data_ptr(), y.data_ptr(), rows, width, out, True)
    torch.testing.assert_close(y, (expected + bias + before).float(), atol=1e-4, rtol=1e-5)


def test_a_row_comes_out_the_same_whatever_other_rows_there_are(kernels: ctypes.CDLL) -> None:
    x, weight, alone, among = torch.randn(11, 100), torch.randn(30, 100), torch.empty(1, 30), torch.empty(11, 30)
    kernels.product(x.data_ptr(), weight.data_ptr(), None, among.data_ptr(), 11, 100, 30, False)
    for row in range(11):
        kernels.product(x[row].data_ptr(), weight.data_ptr(), None, alone.data_ptr(), 1, 100, 30, False)
        assert torch.equal(alone[0], among[row])


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 37), (20, 5)])
def test_norm_and_gate(kernels: ctypes.CDLL, rows: int, width: int) -> None:
    x, weight, y = torch.randn(rows, width), torch.randn(width), torch.empty(rows, width)
    kernels.norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, width, 1e-5)
    torch.testing.assert_close(y, rms_norm(x, (width,), weight, 1e-5))
    both = torch.randn(rows, 2 * width) * 30  # SiLU's exponential must not overflow
    kernels.gate(both.data_ptr(), y.data_ptr(), rows, width)
    gate, up = both.double().chunk(2, dim=-1)
    torch.testing.assert_close(y, (silu(gate) * up).float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dim", [8, 24, 64])
@pytest.mark.parametrize(("keys", "group"), [(1, 1), (2, 3), (1, 6)])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("normed", [False, True])
def test_attention_over_scattered_blocks(
    kernels: ctypes.CDLL, dim: int, keys: int, group: int, window: int | None, normed: bool
) -> None:
    tokens, blocks, slots, queries = 7, 6, 4, keys * group
    tables = np.random.default_rng(0).permutation(tokens * blocks).reshape(tokens, blocks)
    places = torch.tensor([0, 1, 3, 4, 11, 22, 23])
    pools = torch.randn(2, tokens * blocks, keys, slots, dim)
    cosines, sines = torch.randn(2, blocks * slots, dim)
    norms = torch.randn(2, dim) if normed else None
    qkv, out = torch.randn(tokens, (queries + 2 * keys) * dim), torch.empty(tokens, queries * dim)
    expected = [
        _looked(row, int(place), table, pools, (cosines, sines), norms, (queries, keys, dim), window)
        for row, place, table in zip(qkv.clone(), places, tables, strict=True)
    ]
    given = [None, None] if norms is None else [norm.data_ptr() for norm in norms]
    layer = cpu.LayerOfHeads(
        queries, keys, dim, slots, window or 0, dim**-0.5, 1e-6, *given, *(pool.data_ptr() for pool in pools)
    )
    rows = (qkv, cosines, sines, places)
    kernels.attend(
        ctypes.byref(layer),
        *(each.data_ptr() for each in rows),
        tables.ctypes.data,
        blocks,
        tokens,
        tokens,
        out.data_ptr(),
    )
    torch.testing.assert_close(out, torch.stack(expected).float(), atol=1e-5, rtol=1e-4)


def _looked(
    qkv: torch.Tensor,
    place: int,
    table: np.ndarray,
    pools: torch.Tensor,
    rotations: tuple[torch.Tensor, torch.Tensor],
    norms: torch.Tensor | None,
    heads: tuple[int, int, int],
    window: int | None,
) -> torch.Tensor:
    """What one token finds: a plain softmax over its sequence, itself included."""
    queries, keys, dim = heads
    query, key, value = qkv.view(-1, dim).double().split((queries, keys, keys))
    if norms is not None:
        query, key = (rms_norm(x, (dim,), norm.double(), 1e-6) for x, norm in zip((query, key), norms, strict=True))
    query, key = (x * rotations[0][place] + _half_turned(x) * rotations[1][place] for x in (query, key))
    before = pools.double()[:, table].transpose(1, 2).flatten(2, 3)[:, :, :place]
    seen, values = (torch.cat([old, new[:, None]], 1) for old, new in zip(before, (key, value), strict=True))
    first = max(0, place + 1 - window) if window else 0
    scores = torch.einsum("kgd,ksd->kgs", query.view(keys, -1, dim), seen[:, first:]) * dim**-0.5
    return torch.einsum("kgs,ksd->kgd", scores.softmax(-1), values[:, first:]).flatten()


def _half_turned(x: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, dim=-1)
    return torch.cat([-other, one], -1)


def test_without_a_compiler_there_are_no_kernels_and_a_sentence_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'error: no such machine' >&2\nexit 1\n")
    broken.chmod(0o755)
    for compiler, reason in (("not-a-compiler", "no C compiler"), (str(broken), "no such machine")):
        monkeypatch.setenv("CC", compiler)
        assert cpu.library.__wrapped__() is None
        assert reason in caplog.text
    assert not list((tmp_path / "tailrace" / "kernels").glob("*"))
