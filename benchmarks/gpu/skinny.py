"""Products of few rows on a GPU: checked against float32 references, then timed against the library's.

    PYTHONPATH=src python benchmarks/gpu/skinny.py [--sweep] [--seed N] [--out FILE]

Needs torch and triton alone. Every product is timed together with the kernel that reads it in a decode step, since that
one adds up its components: queries, keys and values with the rotation, the gate with its activation, the two that go
onto the residual with the norm behind them. There are as many weights as a model has layers, so that no cache helps.
Then whole steps without attention and draw. `--sweep` also looks for the best division of every product: columns of a
tile, weights per step, splits, warps, stages. Prints tables, writes benchmarks/results/gpu_skinny.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))

from kernel_times import LIMITS, SHAPES, Shape, angle_tables, error, microseconds, normal, normed, poison

from tailrace.kernels import gate, norm, rope, skinny
from tailrace.kernels.skinny import Tiling

RESULTS = Path(__file__).parent.parent / "results" / "gpu_skinny.json"
ROWS = (1, 8, 16, 32)
CHECKED_ROWS = (1, 7, 16, 31, 32)
HEADS_OF_WORDS = 3  # copies of the largest matrix: one alone exceeds the cache
EPS = 1e-6
PIPELINES = [(32, 128, 4), (64, 64, 4), (64, 128, 4), (128, 64, 8)]  # tried: columns of a tile, weights per step, warps
SHARED_BYTES = 224_000  # of a multiprocessor, for one program
Tensor = torch.Tensor


# ---------------------------------------------------------------------------------- products as a decode step uses them


class Work(NamedTuple):
    """One product of a shape with what follows it, for up to `MOST_ROWS` rows."""

    name: str
    weights: list[Tensor]
    library: Callable[[Tensor, Tensor], Tensor]  # input, weight -> result
    ours: Callable[..., Tensor]  # the same; a division may be given


class Model(NamedTuple):
    """The products of a random model, and what they grow in a step."""

    shape: Shape
    residual: Tensor
    works: list[Work]


def model_of(shape: Shape) -> Model:
    residual = torch.zeros(skinny.MOST_ROWS, shape.hidden, dtype=torch.bfloat16, device="cuda")
    output = added("output", matrices(shape.layers, shape.hidden, shape.hidden), residual)
    down = added("down", matrices(shape.layers, shape.hidden, shape.inner), residual)
    return Model(shape, residual, [facing(shape), output, gated(shape), down, head(shape)])


def facing(shape: Shape) -> Work:
    bias, (rotated, _) = normal(width_of(shape)), rotation(shape)
    return Work(
        "qkv", matrices(shape.layers, width_of(shape), shape.hidden), lambda x, w: rotated(torch.addmm(bias, x, w.t())),
        lambda x, w, tiling=None: rotated(skinny.product_parts(x, w, bias, tiling)),
    )  # fmt: skip


def added(name: str, weights: list[Tensor], residual: Tensor) -> Work:
    scale = normal(residual.shape[1])

    def library(x: Tensor, w: Tensor) -> Tensor:
        return norm.rms_norm(residual[: len(x)].addmm_(x, w.t()), scale, EPS)

    def ours(x: Tensor, w: Tensor, tiling: Tiling | None = None) -> Tensor:
        return norm.add_rms_norm(skinny.product_parts(x, w, None, tiling), residual[: len(x)], scale, EPS)

    return Work(name, weights, library, ours)


def gated(shape: Shape) -> Work:
    return Work(
        "gate_up", matrices(shape.layers, 2 * shape.inner, shape.hidden),
        lambda x, w: gate.silu_mul(torch.mm(x, w.t())),
        lambda x, w, tiling=None: skinny.gated_product(x, w, None, tiling),
    )  # fmt: skip


def head(shape: Shape) -> Work:
    return Work(
        "head", matrices(HEADS_OF_WORDS, shape.words, shape.hidden), lambda x, w: torch.mm(x, w.t()),
        lambda x, w, tiling=None: skinny.product(x, w, None, tiling),
    )  # fmt: skip


def rotation(shape: Shape, kind: torch.dtype = torch.bfloat16) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """From the product, or its components, to the rotated queries as rows; and the pools that keys and values go to."""
    tables, places = angle_tables(512, shape.size), torch.arange(skinny.MOST_ROWS, device="cuda")
    pools = torch.zeros(2, -(-skinny.MOST_ROWS // 16), shape.kv_heads, 16, shape.size, dtype=kind, device="cuda")
    around = *tables, places, places, pools[0], pools[1]
    return lambda qkv: rope.rope_store(qkv, *around, None, None, EPS).flatten(1), pools


def matrices(count: int, columns: int, depth: int, kind: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return list(torch.empty(count, columns, depth, dtype=kind, device="cuda").normal_(0, depth**-0.5))


def width_of(shape: Shape) -> int:
    return (shape.heads + 2 * shape.kv_heads) * shape.size


# --------------------------------------------------------------------------------------------------------------- checks


def checks(shape: Shape, kind: torch.dtype, rows: int) -> Iterator[tuple[str, float]]:
    """Every form with its default division, against float32 arithmetic on the same numbers."""
    hidden, inner, width = shape.hidden, shape.inner, width_of(shape)
    poison(rows * inner, rows * width * 12)
    for name, columns, depth in (("qkv", width, hidden), ("output", hidden, hidden), ("down", hidden, inner)):
        x, w, bias, expected = factors(rows, columns, depth, kind)
        yield f"{name} parts", error(skinny.product_parts(x, w, bias).sum(0), expected + bias.float())
        yield f"{name} plain", error(skinny.product(x, w, bias), expected + bias.float())
        yield f"{name} without bias", error(skinny.product(x, w, None), expected)
    x, w, _, expected = factors(rows, 2 * inner, hidden, kind)
    left, right = expected.chunk(2, -1)
    yield "gated", error(skinny.gated_product(x, w, None), torch.nn.functional.silu(left) * right)
    yield from checks_of_parts(shape, kind, rows)


def checks_of_parts(shape: Shape, kind: torch.dtype, rows: int) -> Iterator[tuple[str, float]]:
    """Kernels that add up parts."""
    parts = normal(7, rows, shape.hidden, kind=torch.float32)
    residual, scale = normal(rows, shape.hidden, kind=kind), normal(shape.hidden, kind=kind)
    expected = (residual.float() + parts.sum(0)).to(kind).float()
    found = norm.add_rms_norm(parts, residual, scale, EPS)
    yield "residual", error(residual, expected)
    yield "add_rms_norm", error(found, normed(expected, scale))
    parts = normal(5, rows, width_of(shape), kind=torch.float32)
    (rotated, pools), (expected_of, expected_pools) = rotation(shape, kind), rotation(shape, kind)
    yield "queries of components", error(rotated(parts), expected_of(parts.sum(0).to(kind)))
    yield "keys and values of components", error(pools, expected_pools)


def factors(rows: int, columns: int, depth: int, kind: torch.dtype) -> list[Tensor]:
    x, w, bias = normal(rows, depth, kind=kind), matrices(1, columns, depth, kind)[0], normal(columns, kind=kind)
    return [x, w, bias, x.float() @ w.float().t()]


def report_checks() -> bool:
    done = wrong = 0
    for shape, kind, rows in itertools.product(SHAPES, (torch.bfloat16, torch.float16), CHECKED_ROWS):
        for what, found in checks(shape, kind, rows):
            done += 1
            if not found <= LIMITS[kind]:  # a NaN is wrong too
                wrong += 1
                print(f"WRONG {shape.name} {str(kind)[6:]} {rows} rows, {what}: {found:.2e}", flush=True)
    print(f"{done - wrong} of {done} checks passed", flush=True)
    return not wrong


# ---------------------------------------------------------------------------------------------------------------- times


def timed(call: Callable[..., Tensor], x: Tensor, weights: list[Tensor], *division: Tiling) -> float:
    return round(microseconds([lambda w=w: call(x, w, *division) for w in weights]), 2)


def report_products(model: Model, sweep: bool) -> Iterator[dict[str, Any]]:
    for work, rows in itertools.product(model.works, ROWS):
        x = normal(rows, work.weights[0].shape[1])
        library, ours = (timed(call, x, work.weights) for call in (work.library, work.ours))
        best, tiling = best_of(work, x) if sweep else (ours, None)
        line = f"{model.shape.name:6}{work.name:9}{rows:5}{library:10.2f}{ours:10.2f}{library / ours:7.2f}x"
        print(line, f"{best:9.2f} {list(tiling)}" if tiling else "", flush=True)
        row = {"shape": model.shape.name, "product": work.name, "rows": rows, "library_us": library, "default_us": ours}
        yield row | ({"best_us": best, "best": tiling} if tiling else {})


def best_of(work: Work, x: Tensor) -> tuple[float, Tiling]:
    return min((timed(work.ours, x, work.weights, tiling), tiling) for tiling in divisions(work.name, len(x)))


def divisions(name: str, rows: int) -> Iterator[Tiling]:
    """Those that the card has room for."""
    splits = (1, 2, 3, 4, 6, 8, 10) if name in ("qkv", "output", "down") else (1,)
    for (tile, step, warps), count, stages in itertools.product(PIPELINES, splits, (2, 3, 4, 5, 6)):
        columns = 2 * tile if name == "gate_up" else tile
        if (columns + max(rows, 16)) * step * 2 * stages <= SHARED_BYTES:
            yield Tiling(tile, step, count, warps, stages)


def report_steps(model: Model) -> Iterator[dict[str, Any]]:
    for rows in ROWS:
        x = normal(rows, model.shape.hidden)
        library, expected = timed_step(model, x, "library")
        ours, found = timed_step(model, x, "ours")
        apart, line = error(found, expected), f"{model.shape.name:6}{'step':9}{rows:5}{library:10.3f}{ours:10.3f} ms"
        print(f"{line}, results {apart:.4f} apart", flush=True)
        row = {"shape": model.shape.name, "rows": rows, "library_ms": round(library, 4), "default_ms": round(ours, 4)}
        yield row | {"apart": apart}


def timed_step(model: Model, x: Tensor, whose: str) -> tuple[float, Tensor]:
    """Milliseconds, and the logits. In place of what attention would find stand the rotated queries."""
    *of_a_layer, words = model.works
    logits: list[Tensor] = []

    def step() -> None:
        model.residual.zero_()
        found = x
        for layer in range(model.shape.layers):
            for work in of_a_layer:
                found = getattr(work, whose)(found, work.weights[layer])
        logits[:] = [getattr(words, whose)(found, words.weights[0])]

    return microseconds([step]) / 1000, logits[0].float()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="also look for better divisions")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random inputs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the figures go")
    asked = parser.parse_args()
    torch.manual_seed(asked.seed)
    passed = report_checks()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "seed": asked.seed, "products": [], "steps": []}
    print(f"{'shape':6}{'product':9}{'rows':>5}{'library':>10}{'default':>10}{'gain':>8}  us")
    for shape in SHAPES:
        model = model_of(shape)
        results["products"] += report_products(model, asked.sweep)
        results["steps"] += report_steps(model)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(results, indent=1) + "\n")
    if not passed:
        sys.exit("some products are wrong: see the lines above")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU: torch finds none here")
    main()
