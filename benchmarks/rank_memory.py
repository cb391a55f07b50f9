"""What a trainer rank has in memory, by number of ranks: weights, gradients, moments, snapshot, and the peaks.

    python benchmarks/rank_memory.py      # a Llama of 58M parameters; 1, 2 and 4 gloo ranks, float32 and bfloat16

Every rank is a process that loads the model, trains two mini-batches, scores a pack as a frozen policy does, publishes
a snapshot to a relay in this process and writes a checkpoint. `*_mb` are bytes of tensors; `*_peak_mb` is how far
resident memory rose during that phase above where it was before the model was loaded (the kernel's high-water mark, set
back before each phase), so it counts whatever the process keeps, such as the weights, as well. `pass_rise_mb` is how
far a forward pass alone raises it above where it was just before: gathered layers and activations of one pack of 64
tokens, and no more, if nothing is kept of a layer that is done. Precision is that of the arithmetic; weights and
moments are float32. Tensors are mapped one by one, so that freed ones do not count. The largest of all ranks is shown.
Writes benchmarks/results/rank_memory.json, row by row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from trainer_memory import _group, _lengths

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "rank_memory.json"
DEADLINE_S = 1200.0
PRECISIONS = ("float32", "bfloat16")
TRAINER: dict[str, Any] = {
    "mini_batches": 1,
    "device": "cpu",
    "tokens_per_batch": 256,
    "logit_tokens": 64,
    "recompute": True,
    "loss": "aipo",
}
TOKEN = "t" * 32
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


def be_a_rank(rank: int, size: int, meeting: str, folder: Path, address: str, precision: Any) -> dict[str, float]:
    from tailrace.config.tree import Config, Model, Trainer
    from tailrace.trainer import checkpoint
    from tailrace.trainer.packing import lay_out, read
    from tailrace.trainer.parallel import join
    from tailrace.trainer.ranks import Alone
    from tailrace.trainer.reader import in_memory
    from tailrace.trainer.sending import ParameterSender, PublishRoute
    from tailrace.trainer.step import Learner
    from tailrace.wire.messages import ComponentSpec

    ranks = join(rank, size, meeting, "cpu", DEADLINE_S, DEADLINE_S) if size > 1 else Alone()
    config = Config(model=Model(path=str(folder / "model")), trainer=Trainer(precision=precision, **TRAINER))
    before, figures = _resident_mb(), dict[str, float]()
    learner = _peak("load_peak_mb", figures, before, lambda: Learner(config, ranks))
    work = in_memory([_group(_lengths(64, 128))])

    def step() -> None:
        for number in range(2):
            learner.train_mini_batch(number, 0, *work)

    _peak("step_peak_mb", figures, before, step)
    figures |= _tensors(learner)
    pack, now = lay_out([read(one) for one in _group([64])], (0,)), _resident_mb()
    _peak("pass_rise_mb", figures, now, lambda: learner.scores(pack))
    spec = ComponentSpec("trainer", 0, 1, "", TOKEN, "", config, rank=rank)
    sender = ParameterSender(spec, learner.model.named_parameters())

    def publish() -> None:
        sender.snapshot(1, learner.model.named_parameters(), "all")
        sender.send(1, PublishRoute(0, {0: address}), lambda _, reason: sys.exit(reason))
        ranks.gather_bytes(b"")
        while sender._under_way is not None:
            time.sleep(0.01)

    _peak("publish_peak_mb", figures, before, publish)
    figures["snapshot_mb"] = sender.publisher.snapshot_bytes / 2**20
    _peak("checkpoint_peak_mb", figures, before, lambda: checkpoint.save(folder / f"saved-{size}-{precision}", learner))
    sender.publisher.close()
    ranks.gather_bytes(b"")
    ranks.leave()
    return figures


def _tensors(learner: Any) -> dict[str, float]:
    from tailrace.trainer.policies import local

    def mb(tensors: Iterable[Any]) -> float:
        return sum(local(tensor).nbytes for tensor in tensors) / 2**20

    parameters = list(learner.model.parameters())
    learner.optimiser.set_zero_gradients()
    gradients = [parameter.grad for parameter in parameters]
    found = {
        "weights_mb": mb(parameters),
        "gradients_mb": mb(gradients),
        "moments_mb": mb([tensor for _, tensor in learner.optimiser.moments()]),
    }
    learner.model.zero_grad(set_to_none=True)
    return found


def _peak(name: str, figures: dict[str, float], before: float, act: Callable[[], Any]) -> Any:
    Path("/proc/self/clear_refs").write_text("5")  # the mark begins at what is resident now
    result = act()
    status = Path("/proc/self/status").read_text()
    mark = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    figures[name] = int(mark.split()[1]) / 1024 - before
    return result


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(size: int, precision: str, folder: Path) -> dict[str, Any]:
    from tailrace.weights.relay_node import RelayNode
    from tailrace.weights.shared_memory import SharedMemory, shared_memory_path

    memory = SharedMemory(shared_memory_path(f"ranks-{os.getpid()}-{size}-{precision}", "h0"))
    node = RelayNode(0, memory, TOKEN.encode())
    meeting = f"file://{folder}/meeting-{size}-{precision}"
    words = [sys.executable, __file__, "--rank-of", str(size), meeting, str(folder), str(node.address), precision]
    mapped = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*words, str(rank)], env=mapped, stdout=subprocess.PIPE, text=True) for rank in range(size)
    ]
    try:
        found = [json.loads(each.communicate(timeout=DEADLINE_S)[0].splitlines()[-1]) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
        node.close()
        memory.remove()
    return {
        "precision": precision,
        "ranks": size,
        **{name: round(max(each[name] for each in found), 1) for name in found[0]},
    }


def _make_model(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder / "model")
    (folder / "model" / "tokenizer.json").write_text("{}")


def _with(out: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows in the file, and this one in the place of one of the same case."""

    def case(row: dict[str, Any]) -> tuple[int, int]:
        return PRECISIONS.index(row["precision"]), row["ranks"]

    known = json.loads(out.read_text()) if out.exists() else []
    return sorted([*(other for other in known if case(other) != case(row)), row], key=case)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    words.add_argument("--precisions", nargs="+", default=PRECISIONS)
    words.add_argument("--out", type=Path, default=RESULTS, help="rows of other cases that are there are kept")
    words.add_argument("--rank-of", nargs=6, help=argparse.SUPPRESS)
    options = words.parse_args()
    if options.rank_of:
        size, meeting, folder, address, precision, rank = options.rank_of
        print(json.dumps(be_a_rank(int(rank), int(size), meeting, Path(folder), address, precision)))
        return
    with tempfile.TemporaryDirectory() as folder:
        _make_model(Path(folder))
        for precision, size in product(options.precisions, options.ranks):
            rows = _with(options.out, measure(size, precision, Path(folder)))
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    rows = json.loads(options.out.read_text())
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
