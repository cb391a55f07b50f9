"""Hostile input against all that decodes: wire, sample stores, judges, relays, files, settings, datasets, HTTP.

    python benchmarks/fuzz.py                  # a million inputs in all, always the same ones
    python benchmarks/fuzz.py --inputs 20000   # the short form that the tests run

Inputs are valid messages and files with something done to them: bits flipped, pieces cut, doubled or taken from another
one, lengths changed, values replaced by huge, negative, empty, foreign and deeply nested ones. A decoder may accept an
input or refuse it with its own documented error. Anything else counts: an exception of another kind or a dead process
is a crash, ten seconds without an answer a hang. Each decoder runs in a process of its own; `peak MB` is what its
memory grew by over all its inputs. Writes benchmarks/results/fuzz.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
from hostile.attack import Result, attack
from hostile.brought import arrow, calls, jsonl, model_shape, options, parquet, settings, splits, start_weights
from hostile.holders import components, machines
from hostile.inputs import Decoder
from hostile.messages import (
    heartbeats,
    hub,
    hub_stranger,
    judge_questions,
    judge_replies,
    layout,
    link,
    relay_messages,
    relay_stream,
)
from hostile.page import on_loopback, stranger
from hostile.runs import checkpoint_state, checkpoint_tensors, commands, events, journal_rows, run_file, snapshots
from hostile.samples import from_store, orders, sample_file, to_store

from tailrace.types import MALFORMED

ROOT = Path(__file__).parents[1]


def decoders() -> list[Decoder]:
    from tailrace.config import ConfigError
    from tailrace.envs.judge_wire import FrameError
    from tailrace.samples.client import SampleStoreError
    from tailrace.store.database import JournalError
    from tailrace.trainer.manifest import CheckpointError
    from tailrace.weights.channel import ChannelError
    from tailrace.weights.layout import LayoutError
    from tailrace.wire.messages import WireError

    return [
        Decoder("wire: components to controller", 0.08, "msgpack", hub, ()),
        Decoder("wire: a stranger's bytes", 0.03, "bytes", hub_stranger, ()),
        Decoder("wire: heartbeats", 0.03, "bytes", heartbeats, ()),
        Decoder("wire: lies of components", 0.015, "msgpack", components, ()),
        Decoder("wire: lies of machines", 0.005, "msgpack", machines, ()),
        Decoder("wire: controller to components", 0.09, "msgpack", link, MALFORMED),
        Decoder("samples: clients to store", 0.03, "msgpack", to_store, ()),
        Decoder("samples: store to clients", 0.03, "msgpack", from_store, (*MALFORMED, WireError, SampleStoreError)),
        Decoder("samples: orders to store", 0.005, "msgpack", orders, MALFORMED),
        Decoder("samples-0.db", 0.008, "bytes", sample_file, (JournalError,)),
        Decoder("judges: answers", 0.05, "bytes", judge_replies, (FrameError,)),
        Decoder("judges: questions", 0.05, "msgpack", judge_questions, MALFORMED),
        Decoder("relays: a stranger's bytes", 0.06, "bytes", relay_stream, (ChannelError,)),
        Decoder("relays: signed messages", 0.07, "msgpack", relay_messages, (ChannelError,)),
        Decoder("weights: layout", 0.06, "bytes", layout, (LayoutError,)),
        Decoder("journal: events", 0.067, "json", events, MALFORMED),
        Decoder("journal: commands", 0.06, "json", commands, MALFORMED),
        Decoder("journal: rows", 0.02, "json", journal_rows, (JournalError,)),
        Decoder("journal: snapshots", 0.03, "msgpack", snapshots, MALFORMED),
        Decoder("run.db", 0.008, "bytes", run_file, (JournalError,)),
        Decoder("checkpoint: state", 0.03, "json", checkpoint_state, (CheckpointError,)),
        Decoder("checkpoint: safetensors", 0.02, "bytes", checkpoint_tensors, (CheckpointError,)),
        Decoder("start weights", 0.001, "bytes", start_weights, (ConfigError,)),
        Decoder("settings: TOML", 0.01, "bytes", settings, (ConfigError,)),
        Decoder("settings: options", 0.015, "bytes", options, (ConfigError,)),
        Decoder("settings: config.json", 0.026, "json", model_shape, (ConfigError,)),
        Decoder("data: JSONL", 0.02, "json", jsonl, (ConfigError,)),
        Decoder("data: parquet", 0.01, "bytes", parquet, (ConfigError,)),
        Decoder("data: arrow", 0.01, "bytes", arrow, (ConfigError,)),
        Decoder("data: splits", 0.01, "json", splits, (ConfigError,)),
        Decoder("tools: calls and answers", 0.01, "bytes", calls, ()),
        Decoder("page: a stranger's bytes", 0.02, "bytes", stranger, ()),
        Decoder("page: on the loopback", 0.02, "bytes", on_loopback, ()),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="decoders whose name contains this, each with --inputs")
    arguments = parser.parse_args()
    chosen = [each for each in decoders() if arguments.only in each.name]
    total = sum(each.share for each in chosen) if arguments.only else 1.0
    results = []
    print(
        f"{'decoder':<28}{'inputs':>10}{'accepted':>10}{'refused':>10}{'crashes':>9}{'hangs':>7}{'peak MB':>9}{'s':>8}"
    )
    for decoder in chosen:
        result = attack(decoder, max(1, round(arguments.inputs * decoder.share / total)), arguments.seed)
        results.append(result)
        _print(result)
    whole = _summed(results)
    _print(whole)
    if not arguments.only:
        content = {"inputs": whole.inputs, "seed": arguments.seed, "decoders": msgspec.to_builtins([*results, whole])}
        (ROOT / "benchmarks" / "results" / "fuzz.json").write_text(json.dumps(content, indent=1) + "\n")
    return 1 if whole.crashes or whole.hangs else 0


def _summed(results: list[Result]) -> Result:
    whole = Result("all", examples=[])
    for name in ("inputs", "accepted", "refused", "crashes", "hangs", "seconds"):
        setattr(whole, name, round(sum(getattr(each, name) for each in results), 1))
    whole.peak_mb = max(each.peak_mb for each in results)
    return whole


def _print(result: Result) -> None:
    figures = f"{result.inputs:>10,}{result.accepted:>10,}{result.refused:>10,}{result.crashes:>9}{result.hangs:>7}"
    print(f"{result.name:<28}{figures}{result.peak_mb:>9,.1f}{result.seconds:>8,.1f}", flush=True)
    for example in result.examples:
        print(f"    {example}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
