"""The figures of a run in Prometheus' text format, made from what the page shows (`/data`).

Everything is a gauge with the run's name as a label. What the trainer measured is `tailrace_train{name="entropy"}`,
what evaluations came to `tailrace_eval{name="held_out/avg@4"}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OF_RUN = {
    "steps": "steps that are trained",
    "total_steps": "steps that the run is to have",
    "version": "newest version that a relay has",
    "seconds": "running time, pauses left out",
    "reward": "mean reward of the last step",
    "trained_samples": "samples that were trained on",
    "trained_tokens": "tokens that were trained on, prompts included",
    "tokens_per_s": "trained tokens per second, over the last steps",
    "finished_tokens": "tokens of all finished samples",
    "trainer_idle": "share of the time in which the trainer waited for data",
    "rollout_idle": "share of the time in which replicas had nothing to do",
    "repacks": "repacks so far",
    "moved": "samples that were moved to another replica",
    "failures": "attempts at samples that failed",
    "failed_samples": "samples whose last attempt failed",
    "publish_stall_s": "mean trainer stall per weight publish",
}
OF_REPLICA = {
    "kv": "share of its KV cache in use",
    "running": "samples that it generates",
    "waiting": "samples that wait in it",
    "scoring": "samples that its judges have",
    "version": "version of its weights",
}

Gauge = tuple[str, str, list[tuple[dict[str, str], float]]]  # name, help, and each value with its labels


def exposition(data: bytes) -> bytes:
    """`data`: the JSON of the page."""
    shown = msgspec.json.decode(data)
    run = shown.get("run", {})
    name = {"run": str(shown.get("about", {}).get("name", ""))}
    lines = [line for gauge in _gauges(run, name) for line in _lines(gauge)]
    return "".join([f"{line}\n" for line in lines]).encode()


def _gauges(run: Mapping[str, Any], name: dict[str, str]) -> Iterator[Gauge]:
    for field, text in OF_RUN.items():
        yield field, text, [(name, run[field])] if run.get(field) is not None else []
    for which, value in run.get("staleness", {}).items():
        yield f"staleness_{which}", f"{which} staleness of what was trained on, in versions", [(name, value)]
    for field, text in OF_REPLICA.items():
        each = [(name | {"replica": str(one["id"])}, one[field]) for one in run.get("replicas", ())]
        yield f"replica_{field}", f"of a replica: {text}", each
    for kind, text in (("measured", "train"), ("evaluated", "eval")):
        values = [(name | {"name": key.removeprefix("eval/")}, value) for key, value in run.get(kind, {}).items()]
        yield text, f"newest figure of the {'trainer' if kind == 'measured' else 'evaluations'}, by name", values


def _lines(gauge: Gauge) -> Iterator[str]:
    name, text, values = gauge
    if not values:
        return
    yield f"# HELP tailrace_{name} {text}"
    yield f"# TYPE tailrace_{name} gauge"
    for labels, value in values:
        inner = ",".join([f'{key}="{_escaped(each)}"' for key, each in labels.items()])
        yield f"tailrace_{name}{{{inner}}} {float(value)!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
