"""Decoders of what a user brings: weights, settings, datasets, and what models say."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from hostile.inputs import Decode

ROOT = Path(__file__).parents[2]


def start_weights(folder: Path) -> tuple[list[bytes], Decode]:
    """Of a whole model directory: its config.json or its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tailrace.model.load import load_model

    torch.set_num_threads(1)
    small = LlamaConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=11,
    )
    LlamaForCausalLM(small).save_pretrained(folder / "model")
    files = {name: (folder / "model" / name).read_bytes() for name in ("model.safetensors", "config.json")}

    def decode(data: bytes) -> None:
        name = "config.json" if data.lstrip()[:1] == b"{" else "model.safetensors"
        for each, content in files.items():
            (folder / "model" / each).write_bytes(data if each == name else content)
        load_model(str(folder / "model"))

    return list(files.values()), decode


def settings(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.config import load
    from tailrace.config.render import render

    file = folder / "run.toml"
    (folder / "base.toml").write_text('[model]\npreset = "qwen2.5-7b"\n')

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        render(load([file]))

    examples = [path.read_bytes() for path in sorted((ROOT / "examples").glob("*.toml"))]
    return [
        b'extends = "base.toml"\n[run]\nname = "x"\nsteps = 3\n[task.options]\na = [1, 2]\n',
        *_usable(examples, decode),
    ], decode


def _usable(seeds: list[bytes], decode: Decode) -> list[bytes]:
    """Examples that extend files which are not here are left out."""
    from tailrace.config import ConfigError

    found: list[bytes] = []
    for seed in seeds:
        with suppress(ConfigError):
            decode(seed)
            found.append(seed)
    return found


def options(_: Path) -> tuple[list[bytes], Decode]:
    from tailrace.config import load

    def decode(data: bytes) -> None:
        load([], [word.decode(errors="replace") for word in data.split(b"\n")])

    base = b"--model.preset\nqwen2.5-7b\n"
    return [
        base + b"--run.steps=3\n--schedule.kind\nsync\n--repack.enabled",
        base + b'--sampling.stop\n["a", "b"]\n--trainer.learning_rate\n1e-5',
        base + b"--task.options.size\n[1, [2]]\n--schedule.steps_ahead\nunset\n--run.seed=0x10",
    ], decode


def model_shape(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.config.hf_config import read_shape

    file = folder / "config.json"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        read_shape(str(file))

    fields = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    small = {**fields, "vocab_size": 100, "model_type": "qwen2", "tie_word_embeddings": True}
    return [json.dumps(small).encode(), json.dumps({"text_config": {**small, "num_experts": 4}}).encode()], decode


def jsonl(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.envs.data import read_rows

    file = folder / "rows.jsonl"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        msgspec.msgpack.encode(read_rows(file))

    rows = [{"prompt": "2 + 2", "answer": "4", "more": {"a": [1, 2.5, None]}}]
    rows += [{"prompt": [{"role": "user", "content": "x"}], "reward_model": {"ground_truth": 3}}]
    return [json.dumps(each).encode() for each in rows], decode


def parquet(folder: Path) -> tuple[list[bytes], Decode]:
    import pyarrow
    import pyarrow.parquet

    from tailrace.envs.data import read_rows

    table = pyarrow.table({"prompt": ["2 + 2", "3 + 3"], "answer": [4, 6], "x": [[1.0], None]})
    pyarrow.parquet.write_table(table, folder / "seed.parquet")
    pyarrow.parquet.write_table(table, folder / "flat.parquet", compression="none", use_dictionary=False)
    file = folder / "rows.parquet"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        read_rows(file)

    return [(folder / name).read_bytes() for name in ("seed.parquet", "flat.parquet")], decode


def arrow(folder: Path) -> tuple[list[bytes], Decode]:
    import io

    import pyarrow
    import pyarrow.ipc

    from tailrace.envs.data import read_rows

    table = pyarrow.table({"prompt": ["2 + 2", "3 + 3"], "answer": [4, 6]})
    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    file = folder / "rows.arrow"

    def decode(data: bytes) -> None:
        file.write_bytes(data)
        read_rows(file)

    return [sink.getvalue()], decode


def splits(folder: Path) -> tuple[list[bytes], Decode]:
    from tailrace.envs.data import read_rows

    (folder / "saved" / "train").mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text('{"prompt": "secret"}')

    def decode(data: bytes) -> None:
        (folder / "saved" / "dataset_dict.json").write_bytes(data)
        read_rows(folder / "saved")

    return [b'{"splits": ["train", "test"]}'], _unless_empty(decode)


def _unless_empty(decode: Callable[[bytes], None]) -> Decode:
    from tailrace.config import ConfigError

    def wrapped(data: bytes) -> bool | None:
        try:
            return decode(data)
        except ConfigError as error:
            if "holds no dataset" in str(error):
                return None  # the name was fine
            raise

    return wrapped


def calls(_: Path) -> tuple[list[bytes], Decode]:
    """What a policy writes: calls of tools, and final answers."""
    from tailrace.envs.answers import exact, last_between
    from tailrace.envs.tools import calculate

    def decode(data: bytes) -> None:
        text = data.decode(errors="replace")
        calculate(last_between(text, "<tool>", "</tool>") or text[:200])
        exact(text * (20 if len(data) % 50 == 0 else 1), "1,234.5")
        exact(text, "forty two")

    return [
        *(b"so <tool>12 * (3 + 4) ** 2</tool>", b"<answer>1,234.5</answer>", rb"thus \boxed{\frac{1}{2}} and #### 7"),
        *(b"<tool>" * 500, b"<answer>" * 500, b"1,111" * 200, b"2 ** 3 ** 4 // 5 % -6.5e3"),
    ], decode
