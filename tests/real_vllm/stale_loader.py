"""A worker extension that forgets the tied head, as vLLM's own way of loading does. Runs in vLLM's Python."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import vllm_weights


class ForgetsTheHead(vllm_weights.FileTensors):
    def to_load(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.items())


vllm_weights.FileTensors = ForgetsTheHead
StaleLoader = vllm_weights.VersionLoader
