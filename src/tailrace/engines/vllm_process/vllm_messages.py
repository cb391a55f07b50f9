"""What a replica and its vLLM process say to each other: msgpack in frames, each with its length before it.

Read on both sides: by `engines/vllm_link.py`, and by `vllm_server.py` in vLLM's Python. So nothing is imported here but
msgspec, which vLLM has too.

    replica  StartEngine, then Submit, Abort and Load at any time
    vLLM     EngineReady, then Sampled whenever there is something, Loaded after each Load; its last word: EngineFailed
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

HEADER = 4  # bytes of a frame's length, which comes first
LARGEST = 1 << 30
GOES_ON, STOPPED, LIMITED = 0, 1, 2  # why a request has ended


class EngineMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all of them."""


class StartEngine(EngineMessage, frozen=True):
    """How to start the engine and how all of its requests are sampled."""

    arguments: dict[str, Any]  # of AsyncEngineArgs
    sampling: dict[str, Any]  # of SamplingParams
    kv_tokens: int  # size of the KV cache; 0: what memory allows
    gpu_memory: float  # share of a card's memory
    cpu_memory: float  # of the host's, where there is no card


class PromptRequest(msgspec.Struct, frozen=True, array_like=True):
    """`number` is used once: what is submitted again has another."""

    number: int
    tokens: bytes  # int32
    max_tokens: int
    temperature: float | None = None  # None: as all are sampled


class Submit(EngineMessage, frozen=True):
    requests: list[PromptRequest]


class Abort(EngineMessage, frozen=True):
    numbers: list[int]


class Load(EngineMessage, frozen=True):
    """End all requests, then take the weights in this safetensors file. What was sampled before comes before the
    answer. `keep_kv`: what is in the prefix cache may be used with the new weights."""

    version: int
    path: str
    keep_kv: bool


class EngineReady(EngineMessage, frozen=True):
    vllm: str
    device: str
    kv_capacity: int  # tokens
    context: int  # most tokens of a sequence


class EngineTotals(msgspec.Struct, frozen=True, array_like=True):
    """How full the engine is, and sums over its life."""

    kv_tokens: int = 0
    waiting: int = 0
    busy_s: float = 0.0
    steps: int = 0
    decoded: int = 0
    kv_read: int = 0
    prefilled: int = 0


class Sampled(EngineMessage, frozen=True):
    """New tokens of some requests, one after the other."""

    numbers: list[int]
    counts: list[int]
    tokens: bytes  # int32
    logprobs: bytes  # float32
    ended: list[int]
    totals: EngineTotals


class Loaded(EngineMessage, frozen=True):
    """The weights are in place, and every tensor was read back."""

    version: int
    seconds: float
    tensors: int


class EngineFailed(EngineMessage, frozen=True):
    reason: str


ToVllm = StartEngine | Submit | Abort | Load
FromVllm = EngineReady | Sampled | Loaded | EngineFailed


def frame(message: EngineMessage) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER, "big") + body


def take_frames(buffer: bytearray) -> Iterator[bytes]:
    """Every whole frame at the beginning of the buffer, which they leave."""
    while len(buffer) >= HEADER:
        end = HEADER + int.from_bytes(buffer[:HEADER], "big")
        if end > LARGEST:
            raise ValueError(f"a frame of {end:,} bytes: whoever wrote this speaks another language")
        if len(buffer) < end:
            return
        body = bytes(buffer[HEADER:end])
        del buffer[:end]
        yield body
