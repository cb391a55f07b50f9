"""Loads new weights into a model in place: found by name, checked, copied into its parameters.

The native engine calls `replace_weights` between two steps. On a GPU the host-to-device copy is the slow part:
`Staging` copies the weights to a second buffer on the device while steps go on, and replacing is then a copy within the
device, a few milliseconds. Parameters keep their addresses, so captured CUDA graphs stay valid.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tailrace.weights.pinned_copy import PinnedCopier

log = logging.getLogger(__name__)

ALIGNMENT = 256  # of every tensor in the staging buffer, for wide loads
NO_ROOM = (
    "no room on the GPU for a second set of weights ({gb:.1f} GB): generation stops while new weights are copied; "
    "lower rollout.kv_tokens to leave room"
)


class ParameterUpdate(NamedTuple):
    """A parameter and its new value."""

    target: torch.Tensor
    source: torch.Tensor


class StagedWeights:
    """New weights on the device."""

    def __init__(self, updates: Sequence[ParameterUpdate]) -> None:
        self._updates = updates

    @torch.no_grad()
    def apply(self) -> None:
        """Nothing may be launched meanwhile. All streams are idle before and after."""
        device = self._updates[0].target.device
        _synchronize(device)
        targets, sources = [one.target.data for one in self._updates], [one.source for one in self._updates]
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        _synchronize(device)


class Staging:
    """The staging buffer of one model. It is allocated with the first weights, and kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._buffer: torch.Tensor | None = None
        self._no_room = False
        self._copier = PinnedCopier(model.device)

    def stage(self, tensors: Mapping[str, Any]) -> StagedWeights | None:
        """Returns when all weights are on the device, or None if there is no room. Call it from a background thread,
        one call at a time, and not before the weights of the last call are applied or given up."""
        updates = parameter_updates(self._model, tensors)
        sources = [one.source.contiguous() for one in updates]
        staged = self._allocate(sources)
        if staged is None:
            return None
        for _ in self._copier.to_device(zip(staged, sources, strict=True)):
            pass
        return StagedWeights([ParameterUpdate(one.target, new) for one, new in zip(updates, staged, strict=True)])

    def _allocate(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Views of the staging buffer with the shapes and types of the sources."""
        starts, size = [], 0
        for source in sources:
            starts.append(size)
            size += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        buffer = self._buffer_of(size)
        if buffer is None:
            return None
        views = [buffer[start : start + one.nbytes] for start, one in zip(starts, sources, strict=True)]
        return [view.view(one.dtype).view(one.shape) for view, one in zip(views, sources, strict=True)]

    def _buffer_of(self, size: int) -> torch.Tensor | None:
        if self._buffer is None and not self._no_room:
            try:
                self._buffer = _device_memory(size, self._model.device)
            except torch.OutOfMemoryError:
                self._no_room = True
                log.warning(NO_ROOM.format(gb=size / 1e9))
        return self._buffer


def staging_for(model: PreTrainedModel) -> Staging | None:
    """None on a CPU, where weights are in host memory already."""
    return Staging(model) if model.device.type == "cuda" else None


def _device_memory(size: int, device: torch.device) -> torch.Tensor:
    """For streams other than the current one, which may still use memory that was freed."""
    memory = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return memory


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replace_weights(model: PreTrainedModel, tensors: Mapping[str, Any] | StagedWeights) -> None:
    """Copy into the parameters where they are: their memory and their ties stay. All names are checked first."""
    if isinstance(tensors, StagedWeights):
        tensors.apply()
        return
    updates = parameter_updates(model, tensors)
    with torch.no_grad():
        for target, source in updates:
            target.copy_(source)


def parameter_updates(model: PreTrainedModel, tensors: Mapping[str, Any]) -> list[ParameterUpdate]:
    """One for each parameter, tied ones once; or an error that names what is wrong."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # buffers are not trained, so they never change
    tied: dict[int, list[str]] = {}  # names by memory address
    for name, target in parameters.items():
        tied.setdefault(target.data_ptr(), []).append(name)
    unknown = next((name for name in tensors if name not in parameters), None)
    if unknown is not None:
        raise ValueError(f"the new weights have '{unknown}', which this model does not have")
    return [_update(names, parameters, tensors) for names in tied.values()]


def _update(
    names: Sequence[str], parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]
) -> ParameterUpdate:
    given = next((name for name in names if name in tensors), None)
    if given is None:
        raise ValueError(f"the new weights lack '{names[0]}'")
    target, source = parameters[given], torch.as_tensor(tensors[given])
    if target.shape != source.shape:
        wanted, found = list(target.shape), list(source.shape)
        raise ValueError(f"the new weights have '{given}' as {found}, but this model needs {wanted}")
    return ParameterUpdate(target, source)
