"""The part of Tailrace inside vLLM's workers: takes a weight version from shared memory and reads it back.

vLLM adds `VersionLoader` to its worker class (`worker_extension_cls`), once per tensor- or pipeline-parallel rank;
`vllm_server.py` calls it. vLLM's own loader does not say what it left as it was. A head that is tied to the embedding,
for one, stays stale on a CPU. So after every update some columns of each matrix go through the very product that
generation uses, and are compared with the file bit for bit.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in another environment.
from __future__ import annotations

import logging
import os
import random
import select
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import starmap
from typing import Any, NamedTuple

import torch
import vllm_experts

SERVER = "TAILRACE_VLLM_SERVER"  # the process id of vllm_server.py
COLUMNS = 4  # of each matrix that are read back: a step of training changes thousands of numbers in them
ROWS = 64  # of the embedding
JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}  # in one matrix
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

RELOADER = "vllm.model_executor.model_loader.reload.layerwise"

logging.getLogger(RELOADER).setLevel(logging.ERROR)  # it warns of layers without weights; what matters is read back


def _end_with(server: int) -> None:
    """vLLM's engine process outlives a killed server; its workers end it and themselves, who are one group."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(server)], [], [])
    if os.getpgrp() == server:  # it led the group
        os.killpg(server, signal.SIGKILL)


if SERVER in os.environ:
    threading.Thread(target=_end_with, args=(int(os.environ[SERVER]),), daemon=True).start()


class Verified(NamedTuple):
    """What was read back: its name in the file, what it should be and what it is."""

    name: str
    wanted: torch.Tensor
    found: torch.Tensor


class VersionLoader:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def make_ready(self) -> None:
        """A later pipeline stage on a CPU, uncompiled, lacks the tensors that it receives activations in: vLLM makes
        them in its trial run, which it leaves out there."""
        from vllm.distributed import get_pp_group

        runner = self.model_runner
        if not get_pp_group().is_first_rank and getattr(runner, "intermediate_tensors", "none of its own") is None:
            make = runner.get_model().make_empty_intermediate_tensors
            sizes = {"batch_size": runner.max_num_tokens, "dtype": runner.model_config.dtype, "device": runner.device}
            runner.intermediate_tensors = make(**sizes)

    def load_version(self, path: str) -> tuple[int, list[str]]:
        """Load a safetensors file. Returns how many tensors it has, and which were not read back on this rank."""
        from safetensors import safe_open

        model = self.model_runner.get_model()
        with safe_open(path, "pt") as file, torch.no_grad():
            tensors = FileTensors(file)
            vllm_experts.pack_again(model)
            self.model_runner.reload_weights(weights_iterator=tensors.to_load(vllm_experts.names_in(model)))
            return check_loaded(model, tensors)


class FileTensors(Mapping[str, torch.Tensor]):
    """The tensors of a file, mapped when they are asked for."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = list(file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def to_load(self, names: vllm_experts.ExpertNames) -> Iterator[tuple[str, torch.Tensor]]:
        """As a checkpoint has them; a tied head under both of its names."""
        for name in self:
            yield from vllm_experts.as_checkpoint(name, self, names)
            if name == EMBEDDING and HEAD not in self:
                yield HEAD, self[name]


def check_loaded(model: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[int, list[str]]:
    checked: set[str] = set()
    differences: list[tuple[str, torch.Tensor]] = []
    for name, wanted, found in _read_back(model, tensors):
        differences.append((name, (wanted.to(device=found.device, dtype=found.dtype) != found).sum()))
        checked.add(name)
    stale = sorted({name for name, count in differences if int(count)})
    if stale:
        raise RuntimeError(f"vLLM did not take the new weights of {', '.join(stale[:3])} and {len(stale)} in all")
    return len(tensors), sorted(set(tensors) - checked)


def _read_back(model: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[Verified]:
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    packed = JOINED | getattr(model, "packed_modules_mapping", {})
    for name, module in ((vllm_experts.in_file(name), module) for name, module in model.named_modules()):
        if vllm_experts.has_experts(module):
            yield from starmap(Verified, vllm_experts.expert_parts(name, module, tensors, COLUMNS))
        elif isinstance(module, LinearBase):
            yield from _of_linear(module, _sources(name, packed), tensors)
        elif isinstance(module, ParallelLMHead):
            yield from _of_head(module, f"{name}.weight", tensors)
        elif isinstance(module, VocabParallelEmbedding):
            yield from _of_embedding(module, f"{name}.weight", tensors)
            if module is getattr(model, "lm_head", None):  # tied; the file may have it under both names all the same
                yield from _of_head(module, HEAD, tensors)
        else:
            yield from _of_vectors(name, module, tensors)


def _sources(name: str, packed: Mapping[str, list[str]]) -> list[str]:
    """Of which modules in the file this one is made: queries, keys and values are one in vLLM."""
    before, dot, last = name.rpartition(".")
    return [f"{before}{dot}{each}" for each in packed.get(last, [last])]


def _of_linear(module: Any, sources: list[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[Verified]:
    names = [f"{source}.weight" for source in sources]
    if any(name not in tensors for name in names):
        return
    width = module.input_size_per_partition if hasattr(module, "input_size_per_partition") else module.input_size
    columns = random.sample(range(width), min(COLUMNS, width))
    first = width * module.tp_rank if width < module.input_size else 0
    found = _columns(module, columns, width).split(module.output_partition_sizes, dim=1)
    for name, part in zip(names, found, strict=True):
        _refuse_other_shape(name, tensors[name], part.shape[1] * module.tp_size, module.input_size)
        rows = _own_rows(tensors[name].shape[0], part.shape[1], module)
        yield Verified(name, tensors[name][rows][:, [first + column for column in columns]].t(), part)
    yield from _of_biases(module, sources, tensors)


def _refuse_other_shape(name: str, wanted: torch.Tensor, most_rows: int, columns: int) -> None:
    """vLLM cuts what is larger than its own matrix without a word: heads of another size, for one."""
    rows, width = wanted.shape
    if rows > most_rows or width != columns:
        raise RuntimeError(
            f"the new {name} is a matrix of {rows} x {width}, but vLLM's is {most_rows} x {columns}: it computes this "
            "model's shape in another way than transformers (such as head_dim), so it cannot be served by it"
        )


def _columns(module: Any, columns: list[int], width: int) -> torch.Tensor:
    """These columns of its matrix: products with 0 and 1 are exact, however the matrix is stored."""
    dtype = getattr(module, "params_dtype", None) or module.weight.dtype
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    picked = torch.zeros(len(columns), width, dtype=dtype, device=device)
    picked[range(len(columns)), columns] = 1
    return module.quant_method.apply(module, picked)


def _own_rows(rows: int, own: int, module: Any) -> slice:
    """Which rows this rank has; key and value heads that are too few for all ranks are there several times."""
    parts = rows // own
    start = (module.tp_rank * parts // module.tp_size) * own
    return slice(start, start + own)


def _of_biases(module: Any, sources: list[str], tensors: Mapping[str, torch.Tensor]) -> Iterator[Verified]:
    bias = getattr(module, "bias", None)
    names = [f"{source}.bias" for source in sources]
    if bias is None or any(name not in tensors for name in names):
        return
    for name, part in zip(names, bias.data.split(module.output_partition_sizes), strict=True):
        yield Verified(name, tensors[name][_own_rows(tensors[name].shape[0], len(part), module)], part)


def _of_head(module: Any, name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[Verified]:
    """Where it is tied, the file has it as the embedding."""
    source = name if name in tensors else EMBEDDING
    if source not in tensors:
        return
    width = module.embedding_dim
    columns = random.sample(range(width), min(COLUMNS, width))
    start, end = _own_words(module)
    yield Verified(name, tensors[source][start:end][:, columns].t(), _columns(module, columns, width)[:, : end - start])


def _of_embedding(module: Any, name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[Verified]:
    if name not in tensors:
        return
    start, end = _own_words(module)
    rows = sorted(random.sample(range(end - start), min(ROWS, end - start)))
    yield Verified(name, tensors[name][[start + row for row in rows]], module.weight[rows])


def _own_words(module: Any) -> tuple[int, int]:
    indices = module.shard_indices
    return indices.org_vocab_start_index, indices.org_vocab_end_index


def _of_vectors(prefix: str, module: Any, tensors: Mapping[str, torch.Tensor]) -> Iterator[Verified]:
    """Norms and whatever else lies in vLLM as it does in the file."""
    for leaf, parameter in module.named_parameters(recurse=False):
        name = f"{prefix}.{leaf}"
        if name in tensors and tensors[name].shape == parameter.shape:
            yield Verified(name, tensors[name], parameter.data)
