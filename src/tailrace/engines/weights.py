"""New weights for a model that goes on computing: found by name, checked, and copied into its parameters in place.

The native engine calls `replace_weights` between two steps. On a GPU the way there is the long part: `Staging` brings
the weights to a second place on the device while steps go on, and replacing is then a copy within the device, a few
milliseconds. Parameters never move, so whatever was captured with their addresses stays valid.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from tailrace.model.haul import Hauler

log = logging.getLogger(__name__)

ALIGNMENT = 256  # of every tensor in the second place, for wide loads
NO_ROOM = (
    "no room on the GPU for a second set of weights ({gb:.1f} GB): generation stands still while new ones are copied; "
    "lower rollout.kv_tokens to leave room"
)


class Pair(NamedTuple):
    """A parameter and what it is to become."""

    target: torch.Tensor
    source: torch.Tensor


class Staged:
    """Weights that lie on the device, ready to be taken over."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs

    @torch.no_grad()
    def take_over(self) -> None:
        """Nothing may be launched meanwhile. Streams need no care: all of them are idle before and after."""
        device = self._pairs[0].target.device
        _settle(device)
        targets, sources = [pair.target.data for pair in self._pairs], [pair.source for pair in self._pairs]
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        _settle(device)


class Staging:
    """The second place of one model. It is claimed with the first weights that come, and kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._room: torch.Tensor | None = None
        self._full = False  # there was no room
        self._hauler: Hauler | None = None

    def bring(self, tensors: Mapping[str, Any]) -> Staged | None:
        """Returns when everything is on the device, or None when there is no room. For a thread of its own: steps may
        go on. One call at a time, and none before the weights of the last one have been taken over or given up."""
        pairs = matching_pairs(self._model, tensors)
        sources = [pair.source.contiguous() for pair in pairs]
        places = self._places(sources)
        if places is None:
            return None
        self._hauler = self._hauler or Hauler(self._model.device)
        for _ in self._hauler.copy_in(zip(places, sources, strict=True)):
            pass
        return Staged([Pair(pair.target, place) for pair, place in zip(pairs, places, strict=True)])

    def _places(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        starts, size = [], 0
        for source in sources:
            starts.append(size)
            size += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        room = self._claim(size)
        if room is None:
            return None
        pieces = [room[start : start + one.nbytes] for start, one in zip(starts, sources, strict=True)]
        return [piece.view(one.dtype).view(one.shape) for piece, one in zip(pieces, sources, strict=True)]

    def _claim(self, size: int) -> torch.Tensor | None:
        if self._room is None and not self._full:
            try:
                self._room = _allocate(size, self._model.device)
            except torch.OutOfMemoryError:
                self._full = True
                log.warning(NO_ROOM.format(gb=size / 1e9))
        return self._room


def staging_for(model: PreTrainedModel) -> Staging | None:
    """None on a CPU, where weights are in host memory already."""
    return Staging(model) if model.device.type == "cuda" else None


def _allocate(size: int, device: torch.device) -> torch.Tensor:
    """For streams other than the current one, which may still have work to do on memory that was freed."""
    room = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return room


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def replace_weights(model: PreTrainedModel, tensors: Mapping[str, Any] | Staged) -> None:
    """Copy into the parameters where they are: their layout and their ties stay. All names are checked first."""
    if isinstance(tensors, Staged):
        tensors.take_over()
        return
    pairs = matching_pairs(model, tensors)
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def matching_pairs(model: PreTrainedModel, tensors: Mapping[str, Any]) -> list[Pair]:
    """Every piece of the model's trained memory once, with its new content; or an error that names what is wrong."""
    state = dict(model.named_parameters(remove_duplicate=False))  # buffers are not trained, so they never change
    names: dict[int, list[str]] = {}  # of one piece of memory: tied weights have several
    for name, target in state.items():
        names.setdefault(target.data_ptr(), []).append(name)
    unknown = next((name for name in tensors if name not in state), None)
    if unknown is not None:
        raise ValueError(f"the new weights have '{unknown}', which this model has not")
    return [_matching(alike, state, tensors) for alike in names.values()]


def _matching(alike: Sequence[str], state: Mapping[str, torch.Tensor], tensors: Mapping[str, Any]) -> Pair:
    given = next((name for name in alike if name in tensors), None)
    if given is None:
        raise ValueError(f"the new weights lack '{alike[0]}'")
    target, source = state[given], torch.as_tensor(tensors[given])
    if target.shape != source.shape:
        wanted, found = list(target.shape), list(source.shape)
        raise ValueError(f"the new weights have '{given}' as {found}, but this model needs {wanted}")
    return Pair(target, source)
