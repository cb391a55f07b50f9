"""How many bytes a weight version is as differences from the one before, and what it takes to make and to apply them.

    python benchmarks/deltas.py                     # the default recipe on this machine's CPU: results/deltas.json
    python benchmarks/deltas.py --gpu               # SmolLM2-135M at 1e-6 and 1e-5 on one GPU: results/gpu_deltas.json
    python benchmarks/deltas.py --gpu --rehearse    # the same steps with the default recipe on a CPU; writes nothing
    python benchmarks/deltas.py --only encodings    # or `runs`, `relays`, `hop`: one of the tables

`runs`: real training that saves the trainer's float32 weights with every version. They are compared as they are, and
rounded to bfloat16 as the publisher does it. `share` is bytes over those of the whole version, `changed` the share of
elements that differ at all; megabytes of whole versions are for each second of one thread's processor time, and by
`threads` of them for each second on the clock. Every version is made again from the one before, and compared bit by
bit. `encodings` tries others on the last of these differences; those of packages that are not installed are left out.
`relays`: a thousand versions through a chain of three relays, where one joins in the middle; each one is compared bit
by bit with the trainer's. `hop`: seconds from one relay to the next on the loopback, whole and as differences, in
turns. Results are written after every row.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT / "tests"), str(ROOT / "src")]

from processes import tailrace, tails  # noqa: E402

from relays import DEADLINE_S, Node, RelayProcess, Weights, ending, publish, until  # noqa: E402
from tailrace.weights.checksum import PIECE  # noqa: E402
from tailrace.weights.delta import decode, encode  # noqa: E402

RECIPES = {False: "examples/running_total/running_total.toml", True: "examples/gpu/smollm2_sums.toml"}
RATES = {False: [3e-4], True: [1e-6, 1e-5]}  # of learning; the first is the default recipe's
STEPS = {False: 30, True: 6}
COMPARED = {False: 30, True: 3}  # the last so many differences
WIDTHS = {"bfloat16": 2, "float32": 4}
THREADS = min(8, os.cpu_count() or 1)
VERSIONS = 1000
Bits = np.ndarray[Any, Any]
Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------------------- real runs


def train(recipe: str, rate: float, steps: int, folder: Path, options: argparse.Namespace) -> list[Path]:
    """The checkpoints of a run, one for each version."""
    run, log = folder / f"rate-{rate:g}", folder / f"rate-{rate:g}.log"
    every = ["--trainer.checkpoint_every", "1", "--trainer.keep_checkpoints", str(steps + 2)]
    words = ["--run.folder", str(folder), "--run.name", run.name, "--run.steps", str(steps), "--run.evaluate", "false"]
    words += ["--trainer.learning_rate", str(rate), *every, *options.set]
    code = tailrace(["train", str(ROOT / recipe), *words], log, options.deadline)
    found = sorted(run.glob("checkpoints/step-*/model.safetensors"))
    if len(found) < 2:
        raise RuntimeError(f"tailrace train ended with {code} and {len(found)} checkpoints\n{tails(run, log)}")
    return found


def read(checkpoint: Path, kind: str) -> memoryview:
    """All weights, one after the other, as they are published."""
    whole = np.memmap(checkpoint, dtype=np.uint8, mode="r")
    start = 8 + int.from_bytes(whole[:8].tobytes(), "little")
    bits = whole[start:].copy().view("<u4")
    if kind == "float32":
        return bits.data.cast("B")
    rounded = (bits + 0x7FFF + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype("<u2").data.cast("B")


def pieces(data: memoryview) -> Iterator[memoryview]:
    return (data[start : start + PIECE] for start in range(0, len(data), PIECE))


def measure(before: memoryview, after: memoryview, kind: str) -> Row:
    width = WIDTHS[kind]
    encoded, make_s = timed(lambda: [encode(a, b, width) for a, b in zip(pieces(before), pieces(after), strict=True)])
    found = memoryview(bytearray(len(after)))
    _, apply_s = timed(lambda: [apply(a, e, b) for a, e, b in zip(pieces(before), encoded, pieces(found), strict=True)])
    for place, piece, whole in zip(pieces(found), pieces(after), encoded, strict=True):
        assert place == piece or not whole, "a difference has led to other bytes"
    with ThreadPoolExecutor(THREADS) as pool:
        both = (list(pieces(before)), list(pieces(after)), [width] * len(encoded))
        _, pooled_s = timed(lambda: list(pool.map(encode, *both)), time.perf_counter)
    sent = sum(len(each) or len(piece) for each, piece in zip(encoded, pieces(after), strict=True))
    megabytes = len(after) / 1e6
    kinds = (np.frombuffer(side, dtype=f"<u{width}") for side in (before, after))
    return {
        "mbytes": round(megabytes, 2),
        "changed": round(float(np.mean(np.not_equal(*kinds))), 5),
        "share": round(sent / len(after), 5),
        "make_mbytes_per_s": round(megabytes / make_s),
        "apply_mbytes_per_s": round(megabytes / apply_s),
        "threads": THREADS,
        "make_by_threads_mbytes_per_s": round(megabytes / pooled_s),
    }


def apply(base: memoryview, encoded: bytes, into: memoryview) -> None:
    if encoded:
        decode(base, memoryview(encoded), into)


def timed(action: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> tuple[Any, float]:
    """Seconds of this thread's processor, unless it is another clock: others may be at work here."""
    began = clock()
    return action(), clock() - began


def runs(options: argparse.Namespace, save: Callable[..., None]) -> None:
    small = options.rehearse or not options.gpu
    recipe, steps = options.recipe or RECIPES[not small], options.steps or STEPS[options.gpu]
    rows: list[Row] = []
    for rate in RATES[options.gpu]:
        with TemporaryDirectory(dir=options.folder, prefix="deltas-") as folder:
            checkpoints = train(recipe, rate, steps, Path(folder), options)[-1 - COMPARED[options.gpu] :]
            for kind in WIDTHS:
                rows.append(compared(checkpoints, kind, rate, recipe))
                save(runs=rows)
            if rate == RATES[options.gpu][0] and options.only != "runs":
                save(encodings=[row for kind in WIDTHS for row in encodings(checkpoints[-2], checkpoints[-1], kind)])


def compared(checkpoints: list[Path], kind: str, rate: float, recipe: str) -> Row:
    each = [measure(read(before, kind), read(after, kind), kind) for before, after in pairwise(checkpoints)]
    middle = {name: median(row[name] for row in each) for name in each[0]}
    shares = {"smallest": min(row["share"] for row in each), "largest": max(row["share"] for row in each)}
    head = {"recipe": Path(recipe).stem, "learning_rate": rate, "kind": kind, "versions": len(each)}
    return {**head, **middle, **shares}


# ----------------------------------------------------------------------------------------------------- other encodings


def encodings(before: Path, after: Path, kind: str) -> list[Row]:
    """Ours, and byte planes of the exclusive or and of the folded difference through general compressors."""
    width, whole = WIDTHS[kind], (read(before, kind), read(after, kind))
    pairs = list(zip(pieces(whole[0]), pieces(whole[1]), strict=True))[:64]
    rows = [tried("as built", kind, pairs, lambda a, b: len(encode(a, b, width) or b))]
    for name, compress in compressors().items():
        rows.append(tried(f"exclusive or, planes, {name}", kind, pairs, planes(np.bitwise_xor, width, compress)))
        rows.append(tried(f"difference, planes, {name}", kind, pairs, planes(folded, width, compress)))
    return rows


def tried(name: str, kind: str, pairs: list[tuple[memoryview, memoryview]], size: Callable[..., int]) -> Row:
    sent, seconds = timed(lambda: sum(size(*pair) for pair in pairs))
    total = sum(len(after) for _, after in pairs)
    return {
        "encoding": name,
        "kind": kind,
        "share": round(sent / total, 5),
        "mbytes_per_s": round(total / 1e6 / seconds),
    }


def planes(combine: Callable[..., Bits], width: int, compress: Callable[[bytes], bytes]) -> Callable[..., int]:
    def size(before: memoryview, after: memoryview) -> int:
        mixed = combine(*[np.frombuffer(side, dtype=f"<u{width}") for side in (before, after)])
        table = mixed.view(np.uint8).reshape(-1, width)
        return sum(len(compress(table[:, number].tobytes())) for number in range(width))

    return size


def folded(before: Bits, after: Bits) -> Bits:
    signed = (after - before).view(f"<i{before.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * before.itemsize - 1))).view(before.dtype)


def compressors() -> dict[str, Callable[[bytes], bytes]]:
    found: dict[str, Callable[[bytes], bytes]] = {"zlib 1": lambda data: zlib.compress(data, 1)}
    with suppress(ImportError):
        found["zstd 1"] = import_module("zstandard").ZstdCompressor(level=1).compress
    with suppress(ImportError):
        found["lz4"] = import_module("lz4.block").compress
    return found


# --------------------------------------------------------------------------------------------------------------- relays


def updates(count: int, size: int) -> Iterator[bytes]:
    """Versions in bfloat16 of weights that a step at 1e-6 has moved a little further each time."""
    draw = np.random.default_rng(0)
    weights = draw.normal(0.0, 0.02, size // 2).astype(np.float32)
    for _ in range(count):
        yield ((weights.view(np.uint32) + 0x7FFF + ((weights.view(np.uint32) >> 16) & 1)) >> 16).astype("<u2").tobytes()
        weights += 1e-6 * draw.standard_normal(len(weights), dtype=np.float32)


def relays(versions: int, size: int = 3 * PIECE) -> list[Row]:
    """A chain of two, and a third one from the middle on."""
    with TemporaryDirectory(dir="/dev/shm") as folder:
        chain = [Node(id, Path(folder), full_every=1 << 30) for id in range(3)]
        chain[0].route(1, {1: chain[1].address})
        began = time.perf_counter()
        for version, data in enumerate(updates(versions, size)):
            if version == versions // 2:
                chain[1].route(2, {2: chain[2].address})
            broadcast(chain[: 2 + (version >= versions // 2)], version, data)
        seconds = time.perf_counter() - began
        counts = [node._table.buffers[versions - 1].deltas for node in chain]
        for node in chain:
            node.close()
    row = {"versions": versions, "mbytes": size / 1e6, "differences_in_a_row": counts, "seconds": round(seconds, 1)}
    return [{**row, "identical": True}]


def broadcast(chain: list[Node], version: int, data: bytes) -> None:
    publish(chain[0].address, Weights(version, data)).join(DEADLINE_S)
    until(lambda: all(version in node.versions() for node in chain), f"version {version}")
    assert all(node.holds(version, data) for node in chain), "a relay has other bytes than the trainer"
    for node in chain:
        node.drop(version - 2)


def hop(size: int, rounds: int) -> list[Row]:
    """From relay to relay, both processes of their own; the trainer is a third."""
    times: dict[str, list[float]] = {"whole": [], "differences": []}
    for _ in range(rounds):
        for way, found in times.items():
            found.append(_one_hop(size, full_every=1 if way == "whole" else 64))
    return [
        {
            "way": way,
            "mbytes": size / 1e6,
            "seconds": round(median(found), 2),
            "all_seconds": [round(t, 2) for t in found],
        }
        for way, found in times.items()
    ]


def _one_hop(size: int, full_every: int) -> float:
    """Seconds of the second version over its one hop, after it has been sealed at the first relay."""
    with TemporaryDirectory(dir="/dev/shm") as folder, ending() as made:
        made += [RelayProcess(id, Path(folder), full_every=full_every, updates=True) for id in range(2)]
        near, far = made
        near.route(1, [far])
        near.publish(1, size, near)
        far.wait_for("stored", 1)
        near.route(2, [])
        near.publish(2, size, near)
        near.wait_for("stored", 2)
        began = time.time()
        near.route(3, [far])
        return far.wait_for("stored", 2)["at"] - began


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--gpu", action="store_true", help="SmolLM2-135M, at two learning rates")
    words.add_argument("--rehearse", action="store_true", help="the small recipe in place of SmolLM2; writes nothing")
    words.add_argument("--only", choices=["runs", "encodings", "relays", "hop"])
    words.add_argument("--recipe", help="another one")
    words.add_argument("--steps", type=int, default=0)
    words.add_argument("--deadline", type=float, default=240.0, help="seconds for one run")
    words.add_argument("--folder", type=Path, help="where checkpoints are kept for as long as they are compared")
    words.add_argument("--results", type=Path, help="another file for the results")
    words.add_argument("--set", nargs=argparse.REMAINDER, default=[], help="more options of `tailrace train`")
    options = words.parse_args()
    path = options.results or ROOT / "benchmarks" / "results" / ("gpu_deltas.json" if options.gpu else "deltas.json")

    def save(**tables: list[Row]) -> None:
        print(json.dumps(tables), flush=True)
        if not options.rehearse:
            known: Row = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(known | tables, indent=1) + "\n")

    if options.only in (None, "runs", "encodings"):
        runs(options, save)
    if options.only == "relays" or not (options.only or options.gpu):
        save(relays=relays(VERSIONS))
    if options.only == "hop" or not (options.only or options.gpu):
        save(hop=hop(128 << 20, 3))


if __name__ == "__main__":
    main()
