"""The experts of a mixture in vLLM: the names that it loads them by, and what each rank should have of them.

transformers has all experts of a layer in two tensors, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`, and so
has a published version. vLLM takes each expert by itself, as checkpoints have them, and puts them together again: split
over ranks by expert (expert parallelism) or by intermediate size (tensor parallelism), on a CPU packed for its kernel.
`vllm_weights.py` calls this.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in another environment.
from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

IN_LAYER, GATE_UP, DOWN = ".mlp.", "experts.gate_up_proj", "experts.down_proj"
PLAIN, PACKED = ("TRITON", "BATCHED_TRITON"), "CPU"  # how vLLM's kernels want experts: as they were loaded, or not


class ExpertNames(NamedTuple):
    """In the checkpoints of a family: the block of a layer, and the matrices of an expert."""

    block: str
    gate: str
    up: str
    down: str


QWEN = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")  # and most others
MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def names_in(model: Any) -> ExpertNames:
    return MIXTRAL if any(name.endswith(MIXTRAL.block) for name, _ in model.named_modules()) else QWEN


def in_file(name: str) -> str:
    """What transformers calls a module that vLLM calls so."""
    return name.removesuffix(".routed_experts").replace(f".{MIXTRAL.block}", IN_LAYER.removesuffix("."))


def as_checkpoint(
    name: str, tensors: Mapping[str, torch.Tensor], names: ExpertNames
) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of the file under the names of a checkpoint: the experts one by one."""
    layer, found, leaf = name.partition(IN_LAYER)
    block = f"{layer}.{names.block}."
    if not found:
        yield name, tensors[name]
    elif leaf == GATE_UP and _expert_major(name, tensors):
        for number, expert in enumerate(tensors[name]):
            gate, up = expert.chunk(2)
            yield f"{block}experts.{number}.{names.gate}.weight", gate
            yield f"{block}experts.{number}.{names.up}.weight", up
    elif leaf == DOWN and _expert_major(name, tensors):
        for number, expert in enumerate(tensors[name]):
            yield f"{block}experts.{number}.{names.down}.weight", expert
    else:
        yield f"{block}{leaf}", tensors[name]


def _expert_major(name: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether experts are (expert, out, in), as linear layers are; a few families have them the other way round."""
    layer = name.partition(IN_LAYER)[0] + IN_LAYER
    gate_up, down = tensors.get(layer + GATE_UP), tensors.get(layer + DOWN)
    return gate_up is not None and down is not None and gate_up.dim() == 3 and gate_up.shape[2] == down.shape[1]


def pack_again(model: Any) -> None:
    """Before an update: vLLM's CPU kernel packs experts when it is made, and would compute with unpacked ones after."""
    for module in model.modules():
        if has_experts(module) and _layout(module) == PACKED:
            module.quant_method.moe_kernel = None


def has_experts(module: Any) -> bool:
    return hasattr(module, "w13_weight") and hasattr(module, "w2_weight")


def _layout(module: Any) -> str:
    return getattr(getattr(module.quant_method, "unquantized_backend", None), "name", "")


class OwnExperts(NamedTuple):
    """What a rank has of a layer's experts."""

    numbers: list[int]  # in the order in which it has them
    part: slice  # of their intermediate size
    padded: int  # to this size

    def gate_up(self, whole: torch.Tensor) -> torch.Tensor:
        """(experts, gates and ups, some columns)"""
        halves = [half[:, self.part].transpose(1, 2) for half in whole[self.numbers].chunk(2, dim=1)]
        return torch.cat([self._pad(half) for half in halves], dim=2).transpose(1, 2)

    def down(self, whole: torch.Tensor) -> torch.Tensor:
        """(experts, some rows, intermediate size)"""
        return self._pad(whole[self.numbers][:, :, self.part])

    def _pad(self, last: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(last, (0, self.padded - last.shape[2]))


def expert_parts(
    prefix: str, module: Any, tensors: Mapping[str, torch.Tensor], sample: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Names in the file, what vLLM should have of them on this rank and what it has: all of it where it is packed, else
    so many columns and rows of every expert. Nothing where it is not known how its kernel reads them."""
    names = f"{prefix}.gate_up_proj", f"{prefix}.down_proj"
    if not _expert_major(names[0], tensors):
        return
    gate_up, down = tensors[names[0]], tensors[names[1]]
    own = _own(module, *down.shape)
    if own is None:
        return
    found, dtype = (module.w13_weight.data, module.w2_weight.data), module.w13_weight.dtype
    if _layout(module) in PLAIN:
        some = random.sample(range(down.shape[1]), min(sample, down.shape[1]))
        wanted = own.gate_up(gate_up[:, :, some]), own.down(down[:, some])
        found = found[0][:, :, some], found[1][:, some]
    else:
        wanted = _packed(module, own.gate_up(gate_up).to(dtype)), _packed(module, own.down(down).to(dtype))
    yield from zip(names, wanted, found, strict=True)


def _own(module: Any, experts: int, _: int, intermediate: int) -> OwnExperts | None:
    layout, places = _layout(module), module.expert_map  # -1 for those of another rank
    if layout not in (*PLAIN, PACKED) or (places is not None and len(places) != experts):
        return None
    at = range(experts) if places is None else places.tolist()
    numbers = sorted((one for one in range(experts) if at[one] >= 0), key=lambda one: at[one])
    ranks = module.moe_config.moe_parallel_config
    size = intermediate // ranks.tp_size
    return OwnExperts(numbers, slice(ranks.tp_rank * size, (ranks.tp_rank + 1) * size), module.w2_weight.shape[2])


def _packed(module: Any, weight: torch.Tensor) -> torch.Tensor:
    from vllm._custom_ops import cpu_prepack_moe_weight

    return cpu_prepack_moe_weight(weight.contiguous(), module.quant_method.moe_kernel.fused_experts.isa)
