"""Worker extensions that forget something, as vLLM's own way of loading does. They run in vLLM's Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import vllm_experts
import vllm_weights
from vllm_weights import FileTensors, VersionLoader


class WithoutHead(FileTensors):
    def to_load(self, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.items())


class WithoutAnExpert(FileTensors):
    def to_load(self, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return (one for one in super().to_load(names) if "layers.1.mlp.experts.2.up_proj" not in one[0])


class ForgetsTheHead(VersionLoader):
    def load_version(self, path: str) -> tuple[int, list[str]]:
        with patch.object(vllm_weights, "FileTensors", WithoutHead):
            return super().load_version(path)


class ForgetsAnExpert(VersionLoader):
    def load_version(self, path: str) -> tuple[int, list[str]]:
        with patch.object(vllm_weights, "FileTensors", WithoutAnExpert):
            return super().load_version(path)


class LeavesExpertsUnpacked(VersionLoader):
    """On a CPU vLLM packs experts once."""

    def load_version(self, path: str) -> tuple[int, list[str]]:
        with patch.object(vllm_experts, "pack_again", lambda model: None):
            return super().load_version(path)
