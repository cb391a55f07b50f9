"""The GPU kernels on the CPU, in Triton's interpreter, against plain float32 arithmetic on ragged random shapes.

Triton asks once, when it is first imported, whether it is to interpret. So the tests run in a process of their own,
started with that wish by the one test that the others see; `TRITON_INTERPRET=1 pytest` runs them directly.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEADLINE_S = 600

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

if not INTERPRETED:

    def test_kernels_in_tritons_interpreter() -> None:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, f"\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"

else:
    import random
    from typing import NamedTuple

    import torch

    from tailrace.config.tree import Sampling
    from tailrace.engines.sampling import sample, uniform
    from tailrace.kernels import decode, prefill, skinny
    from tailrace.kernels import draw as drawing
    from tailrace.kernels.decode import paged_decode, splits_for
    from tailrace.kernels.draw import draw
    from tailrace.kernels.gate import silu_mul
    from tailrace.kernels.norm import add_rms_norm, rms_norm
    from tailrace.kernels.prefill import paged_prefill
    from tailrace.kernels.rope import rope_store

    CHUNK = 128
    CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    types = pytest.mark.parametrize("kind", CLOSE, ids=str)
    types_of_products = pytest.mark.parametrize("kind", [torch.float32, torch.float16], ids=str)  # no bf16 in there

    @pytest.fixture(autouse=True)
    def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
        """The interpreter is slow: several tiles, splits and chunks of few tokens each."""
        monkeypatch.setattr(decode, "TILE", 16)
        monkeypatch.setattr(decode, "SHARE", 32)
        monkeypatch.setattr(prefill, "QUERIES", 32)
        monkeypatch.setattr(prefill, "TILE", 16)
        monkeypatch.setattr(drawing, "CHUNK", CHUNK)

    @pytest.fixture(autouse=True)
    def seeded(request: pytest.FixtureRequest) -> None:
        torch.manual_seed(len(request.node.name))
        random.seed(len(request.node.name))

    def close(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.isfinite().all()
        limit = CLOSE[found.dtype]
        torch.testing.assert_close(found.float(), expected, atol=limit, rtol=limit)

    def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()

    @types
    @pytest.mark.parametrize(("rows", "hidden"), [(5, 64), (3, 576), (1, 1000)])
    def test_rms_norm(kind: torch.dtype, rows: int, hidden: int) -> None:
        x = torch.randn(rows, 2 * hidden).mul(3).to(kind)[:, :hidden]  # rows further apart than they are long
        weight = torch.rand(hidden).to(kind)
        close(rms_norm(x, weight, 1e-3), normed(x, weight, 1e-3))

    def test_rms_norm_rounds_before_the_weight_is_applied() -> None:
        x, weight = torch.randn(4, 96).to(torch.float16), torch.rand(96).to(torch.float16)
        plain = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        same = rms_norm(x, weight, 1e-6) == plain.to(torch.float16) * weight
        assert same.float().mean() > 0.98  # the sums' order may move a bit

    @types
    @pytest.mark.parametrize(("parts", "rows", "hidden"), [(1, 5, 64), (3, 2, 576), (11, 1, 100)])
    def test_add_rms_norm(kind: torch.dtype, parts: int, rows: int, hidden: int) -> None:
        added = torch.randn(parts, rows, hidden)
        residual, weight = torch.randn(rows, hidden).mul(3).to(kind), torch.rand(hidden).to(kind)
        expected = (residual.float() + added.sum(0)).to(kind)
        found = add_rms_norm(added, residual, weight, 1e-3)
        close(residual, expected.float())
        close(found, normed(expected, weight, 1e-3))

    DIVIDED = pytest.mark.parametrize(
        ("rows", "columns", "depth", "tiling"),
        [
            (1, 40, 96, skinny.Tiling(16, 32, 3, 1, 1)),
            (5, 70, 100, skinny.Tiling(16, 32, 2, 1, 1)),  # neither columns nor depth are whole tiles
            (17, 64, 160, skinny.Tiling(32, 32, 4, 1, 1)),  # as few steps as make four splits three
            (skinny.MOST_ROWS, 64, 64, None),
        ],
    )

    def factors(rows: int, columns: int, depth: int, kind: torch.dtype) -> list[torch.Tensor]:
        """Rows further apart than they are long, a matrix, a bias, and the product in float32."""
        x = torch.randn(rows, 2 * depth).to(kind)[:, :depth]
        weight, bias = torch.randn(columns, depth).div(8).to(kind), torch.randn(columns).to(kind)
        return [x, weight, bias, x.float() @ weight.float().T]

    @types_of_products
    @DIVIDED
    def test_products_of_few_rows(
        kind: torch.dtype, rows: int, columns: int, depth: int, tiling: skinny.Tiling | None
    ) -> None:
        x, weight, bias, expected = factors(rows, columns, depth, kind)
        close(skinny.product(x, weight, None, tiling), expected)
        close(skinny.product(x, weight.T.contiguous().T, bias, tiling), expected + bias.float())
        parts = skinny.product_parts(x, weight, bias, tiling)
        assert parts.shape[1:] == (rows, columns)
        assert parts.dtype == torch.float32
        close(parts.sum(0), expected + bias.float())

    @types_of_products
    @DIVIDED
    def test_gated_product(
        kind: torch.dtype, rows: int, columns: int, depth: int, tiling: skinny.Tiling | None
    ) -> None:
        x, weight, bias, expected = factors(rows, columns, depth, kind)
        gate, up = expected.chunk(2, -1)
        close(skinny.gated_product(x, weight, None, tiling), torch.nn.functional.silu(gate) * up)
        gate, up = (expected + bias.float()).chunk(2, -1)
        close(skinny.gated_product(x, weight, bias, tiling), torch.nn.functional.silu(gate) * up)

    def test_no_split_of_a_product_is_empty() -> None:
        for depth in (64, 96, 160, 1536, 8960):
            for splits in range(1, 12):
                tiling = skinny.Tiling(64, 32, splits, 1, 1)
                found = skinny._without_empty_splits(tiling, depth).splits
                share = -(-depth // (32 * found)) * 32
                assert 1 <= found <= splits
                assert (found - 1) * share < depth <= found * share

    def test_default_divisions_occupy_the_card_and_fill_their_pipelines() -> None:
        """Four splits fill their pipelines, ten occupy the card, and columns with a gate occupy it without splits."""

        def division(rows: int, columns: int, depth: int, gated: bool = False) -> skinny.Tiling:
            x = torch.empty(rows, depth, dtype=torch.bfloat16)
            return skinny._without_empty_splits(skinny.tiling_for(x, columns, gated), depth)

        for rows in (1, 16, 32):
            assert division(rows, 1536, 1536) == (64, 128, 4, 4, 3)
            assert division(rows, 1536, 8960) == (64, 128, 10, 4, 3)
        assert division(16, 8960, 1536, gated=True) == (64, 64, 1, 4, 4)
        assert division(32, 18944, 3584, gated=True) == (64, 64, 1, 4, 3)

    @types
    @pytest.mark.parametrize(("rows", "width"), [(3, 40), (2, 1536), (1, 1100)])
    def test_silu_mul(kind: torch.dtype, rows: int, width: int) -> None:
        gate_up = torch.randn(rows, 2 * width).to(kind)
        gate, up = gate_up.float().chunk(2, -1)
        close(silu_mul(gate_up), torch.nn.functional.silu(gate) * up)

    def tables(places: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.arange(places)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-high, low], -1) * sin[:, None]

    @types
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "size", "with_norms", "parts"),
        [(3, 3, 64, False, 0), (6, 1, 16, True, 0), (4, 2, 48, True, 3), (4, 1, 32, False, 1)],
    )
    def test_rope_store(kind: torch.dtype, heads: int, kv_heads: int, size: int, with_norms: bool, parts: int) -> None:
        tokens, blocks = 9, 4
        given = torch.randn(max(parts, 1), tokens, (heads + 2 * kv_heads) * size)
        given = given if parts else given[0].to(kind)
        qkv = given.sum(0).to(kind) if parts else given
        cos, sin = tables(50, size)
        places = torch.randint(50, (tokens,), dtype=torch.int32)
        slots = torch.randperm(blocks * 16)[:tokens]
        slots[2] = -1
        keys, values = (torch.full((blocks, kv_heads, 16, size), 7.0, dtype=kind) for _ in range(2))
        norms = [torch.rand(size).to(kind) if with_norms else None for _ in range(2)]
        found = rope_store(given, cos, sin, places, slots, keys, values, norms[0], norms[1], 1e-5)

        q, k, v = qkv.float().view(tokens, -1, size).split([heads, kv_heads, kv_heads], 1)
        if norms[0] is not None and norms[1] is not None:
            q, k = normed(q, norms[0], 1e-5), normed(k, norms[1], 1e-5)
        close(found, turned(q, cos[places], sin[places]))
        expected_keys, expected_values = (torch.full((blocks, kv_heads, 16, size), 7.0) for _ in range(2))
        k = turned(k, cos[places], sin[places])
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected_keys[slot // 16, :, slot % 16] = k[token]
                expected_values[slot // 16, :, slot % 16] = v[token]
        close(keys, expected_keys)
        close(values, expected_values)

    class Pool(NamedTuple):
        """Sequences scattered over blocks, every unused cell filled with a value that would be noticed."""

        keys: torch.Tensor
        values: torch.Tensor
        table: torch.Tensor
        plain: list[tuple[torch.Tensor, torch.Tensor]]  # per sequence: keys and values [kv heads, tokens, size]

    def pooled(lengths: list[int], kv_heads: int, size: int, block_tokens: int, kind: torch.dtype) -> Pool:
        needed = [-(-length // block_tokens) for length in lengths]
        order = torch.randperm(sum(needed) + 3).tolist()
        keys, values = (torch.full((len(order), kv_heads, block_tokens, size), 1e4, dtype=kind) for _ in range(2))
        table = torch.full((len(lengths), max(needed) + 1), 10**6, dtype=torch.int32)
        plain = []
        for row, length in enumerate(lengths):
            k, v = (torch.randn(kv_heads, length, size).to(kind) for _ in range(2))
            plain.append((k.float(), v.float()))
            for number in range(needed[row]):
                block = order.pop()
                table[row, number] = block
                part = slice(number * block_tokens, min((number + 1) * block_tokens, length))
                keys[block, :, : part.stop - part.start] = k[:, part]
                values[block, :, : part.stop - part.start] = v[:, part]
        return Pool(keys, values, table, plain)

    def attended(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: int,
        scale: float,
        window: int | None,
        cap: float | None,
    ) -> torch.Tensor:
        """Queries [tokens, heads, size] from place `start` on over keys and values [kv heads, places, size]."""
        group = q.shape[1] // len(k)
        scores = torch.einsum("thd,hpd->htp", q.float(), k.repeat_interleave(group, 0)) * scale
        scores = cap * torch.tanh(scores / cap) if cap else scores
        back = (start + torch.arange(len(q)))[:, None] - torch.arange(k.shape[1])
        hidden = (back < 0) | (back >= (window or 10**9))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("htp,hpd->thd", weights, v.repeat_interleave(group, 0))

    VARIANTS = pytest.mark.parametrize(
        ("shape", "window", "softcap"),  # heads, kv heads, head size, tokens per block
        [
            ((6, 1, 32, 16), None, None),
            ((3, 3, 16, 32), 37, None),
            ((4, 2, 48, 16), None, 2.0),
            ((2, 1, 16, 16), 20, 3.0),
        ],
    )
    Shape = tuple[int, int, int, int]

    @VARIANTS
    @pytest.mark.parametrize("splits", [1, 4])
    def test_paged_decode(shape: Shape, window: int | None, softcap: float | None, splits: int) -> None:
        heads, kv_heads, size, block_tokens = shape
        lengths = [1, 0, 17, 32, random.randint(33, 60), random.randint(200, 250)]
        pool = pooled(lengths, kv_heads, size, block_tokens, torch.float32)
        q = torch.randn(len(lengths), heads, size)
        counts = torch.tensor(lengths, dtype=torch.int32)
        found = paged_decode(q, pool.keys, pool.values, pool.table, counts, 0.3, window, softcap, splits)
        for row, length in enumerate(lengths):
            k, v = pool.plain[row]
            expected = attended(q[row : row + 1], k, v, length - 1, 0.3, window, softcap) if length else q[:1] * 0
            close(found[row : row + 1], expected)

    @types_of_products
    def test_paged_decode_in_every_type(kind: torch.dtype) -> None:
        pool = pooled([100, 5], 2, 64, 16, kind)
        q = torch.randn(2, 4, 64).to(kind)
        lengths = torch.tensor([100, 5], dtype=torch.int32)
        found = paged_decode(q, pool.keys, pool.values, pool.table, lengths, 0.125, None, None, 2)
        for row, length in enumerate([100, 5]):
            close(found[row : row + 1], attended(q[row : row + 1], *pool.plain[row], length - 1, 0.125, None, None))

    def test_splits_fill_the_processors_and_level_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        assert splits_for(256, 2, 384, 132) == 1  # the rows alone fill them
        assert splits_for(16, 2, 4096, 132) == 16
        assert splits_for(1, 2, 512, 132) == 8  # no more than is worth it
        assert splits_for(1024, 2, 8192, 132) == 8  # one long row among many short ones

    @VARIANTS
    def test_paged_prefill(shape: Shape, window: int | None, softcap: float | None) -> None:
        counts = [1, random.randint(65, 90), 32, 0, random.randint(2, 30)]
        starts = [random.choice([0, 16, 31, 75]) for _ in counts]
        lengths = [start + count for start, count in zip(starts, counts, strict=True)]
        found, expected = prefilled(counts, starts, lengths, shape, window, softcap)
        close(found, expected)

    @types_of_products
    def test_paged_prefill_in_every_type(kind: torch.dtype) -> None:
        found, expected = prefilled([40, 3], [0, 40], [40, 43], (4, 2, 64, 16), None, None, kind)
        close(found, expected)

    def prefilled(
        counts: list[int],
        starts: list[int],
        lengths: list[int],
        shape: Shape,
        window: int | None,
        softcap: float | None,
        kind: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the kernel finds for chunks of sequences, and what is expected."""
        heads, kv_heads, size, block_tokens = shape
        pool = pooled(lengths, kv_heads, size, block_tokens, kind)
        q = torch.randn(sum(counts), heads, size).to(kind)
        cu = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        places, sizes = torch.tensor(starts, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        found = paged_prefill(
            q, pool.keys, pool.values, pool.table, places, sizes, cu, max(counts), 0.2, window, softcap
        )
        parts = zip(q.split(counts), pool.plain, starts, strict=True)
        return found, torch.cat([attended(part, *kv, start, 0.2, window, softcap) for part, kv, start in parts])

    @types
    def test_draws_are_those_of_the_cpu_engine(kind: torch.dtype) -> None:
        rows, words = 12, 2 * CHUNK + 77
        logits = torch.randn(rows, words).mul(4).to(kind)
        logits[:, ::5] = -torch.inf
        logits[3, CHUNK:] = -torch.inf  # whole chunks without weight
        trajectories, positions = torch.randint(2**40, (rows,)), torch.randint(5000, (rows,))
        for temperature in (1.0, 0.7):
            tokens, logprobs = draw(logits, temperature, 2**63 + 11, trajectories, positions)
            wanted = Sampling(temperature=temperature)
            expected = sample(logits, 2**63 + 11, trajectories.tolist(), positions.tolist(), wanted)
            assert tokens.tolist() == expected[0].tolist()
            torch.testing.assert_close(logprobs, torch.tensor(expected[1]), atol=1e-5, rtol=1e-5)

    def test_the_random_number_is_the_cpu_engines() -> None:
        """Equal weights: the token says which of as many cells of [0, 1) the number lies in."""
        trajectories, positions = torch.arange(12) ** 7, torch.arange(12) + 100
        for seed in (0, -3, 2**40):
            tokens, logprobs = draw(torch.zeros(12, 250), 1.0, seed, trajectories, positions)
            expected = uniform(seed, trajectories.numpy(), positions.numpy()) * 250
            assert tokens.tolist() == expected.astype(int).tolist()
            torch.testing.assert_close(logprobs.exp(), torch.full((12,), 1 / 250))

    @types
    def test_temperature_zero_takes_the_first_of_the_likeliest(kind: torch.dtype) -> None:
        logits = torch.randn(6, CHUNK + 90).to(kind)
        logits[0, [CHUNK - 1, CHUNK + 5]] = 9.0
        logits[1, CHUNK + 5 : CHUNK + 8] = 9.0
        tokens, logprobs = draw(logits, 0.0, 1, torch.arange(6), torch.arange(6))
        expected = logits.float().log_softmax(-1)
        assert tokens[:2].tolist() == [CHUNK - 1, CHUNK + 5]
        torch.testing.assert_close(logprobs, expected.amax(-1), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(expected.gather(-1, tokens[:, None])[:, 0], expected.amax(-1))

    @pytest.mark.filterwarnings("ignore:invalid value")
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf])
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_logits_that_are_not_finite_give_no_log_prob(bad: float, temperature: float) -> None:
        logits = torch.randn(3, CHUNK + 50)
        logits[1, 7] = bad
        logits[2] = -torch.inf
        tokens, logprobs = draw(logits, temperature, 1, torch.arange(3), torch.arange(3))
        assert logprobs.isnan().tolist() == [False, True, True]
        assert all(0 <= token < CHUNK + 50 for token in tokens.tolist())

    def test_nothing_to_do_is_no_error() -> None:
        none = torch.empty(0, dtype=torch.int64)
        assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
        assert silu_mul(torch.empty(0, 8)).shape == (0, 4)
        assert skinny.product(torch.empty(0, 8), torch.empty(4, 8), None).shape == (0, 4)
        assert add_rms_norm(torch.empty(2, 0, 8), torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)
        assert draw(torch.empty(0, 10), 1.0, 0, none, none)[0].shape == (0,)
