"""Checkpoints: a learner on disk, as a Hugging Face model directory with what resumption needs beside it.

    FOLDER/step-00000012/   config.json, tokenizer, model.safetensors    what transformers loads
                            optimizer.safetensors [critic.safetensors]   moments; the critic and its moments
                            state.json                 step, number of updates, of every file its size and checksum,
                                                       and its own checksum

`worker.py` calls `save` after a step and `restore` at its start. A checkpoint is written beside its path, flushed, and
renamed: what has the name is whole. `newest` still looks, since disks and copies fail: one that is cut short or changed
is passed over, with a line in the log, and never trained on. If the disk is full the half-written one is taken away and
the others stay as they are. Nothing is pickled. With several ranks all of them call; the first one writes.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tailrace.model.load import load_model, model_folder
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER
from tailrace.trainer.manifest import (
    PREFIX,
    CheckpointError,
    TrainerState,
    check,
    described,
    found_in,
    read_state,
    step_of,
)
from tailrace.trainer.optim import Optimiser
from tailrace.trainer.sealed import sealed
from tailrace.trainer.step import Learner

log = logging.getLogger(__name__)

WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack"}


def save(folder: Path, learner: Learner) -> Path:
    """Write the learner as it is now. Returns where."""
    path = folder / f"{PREFIX}{learner.step:08d}"
    tensors = _gather(learner)
    trouble = _try_to_write(path, learner, tensors).encode() if learner.ranks.rank == 0 else None
    trouble = learner.ranks.broadcast_bytes(trouble).decode()
    if trouble:
        raise CheckpointError(trouble)
    return path


def newest(folder: Path, at_most_step: int | None = None) -> Path | None:
    """The whole checkpoint with the largest step, or the largest up to a limit."""
    for path in reversed(found_in(folder)):
        if at_most_step is not None and step_of(path) > at_most_step:
            continue
        try:
            check(path)
        except CheckpointError as error:
            log.warning("%s; an earlier checkpoint is looked for", error)
            continue
        return path
    return None


def prune(folder: Path, keep: int, archive_every: int = 0, good: int = -1) -> None:
    """Delete all but the newest, those to be kept for good and the newest up to step `good`, and what an interrupted
    save has left."""
    found = found_in(folder)
    kept = [*found[-keep:], *[path for path in found if step_of(path) <= good][-1:]]
    old = [path for path in found if path not in kept and (not archive_every or step_of(path) % archive_every)]
    for path in [*old, *folder.glob(f".{PREFIX}*")]:
        shutil.rmtree(path, ignore_errors=True)


def restore(learner: Learner, folder: Path) -> None:
    """Put the learner where it was when this checkpoint was saved."""
    state = read_state(folder)
    saved = load_model(str(folder), "float32", "cpu")
    parameters = dict(learner.model.named_parameters())
    _copy(learner, parameters, dict(saved.named_parameters()), folder)
    _load_moments(learner, learner.optimiser, state, parameters, _read(folder / "optimizer.safetensors"))
    if learner.critic is not None:
        parameters, tensors = dict(learner.critic.named_parameters()), _read(folder / "critic.safetensors")
        _copy(learner, parameters, tensors, folder)
        _load_moments(learner, learner.critic.optimiser, state, parameters, tensors)
    learner.step = state.step


# ------------------------------------------------------------------------------------------------------------- writing


def _gather(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """The tensors of each file, whole, on the rank that writes."""
    files: dict[str, Iterable[tuple[str, Tensor]]] = {
        "model": _tied_once(learner.model.state_dict(keep_vars=True)),
        "optimizer": learner.optimiser.moments(),
    }
    if learner.critic is not None:
        files["critic"] = chain(learner.critic.state_dict().items(), learner.critic.optimiser.moments())
    return {file: _whole(learner, tensors) for file, tensors in files.items()}


def _tied_once(tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Gathered from several ranks, tied tensors would be copies that nobody knows to be tied."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _whole(learner: Learner, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    whole = ((name, learner.ranks.full(tensor.detach())) for name, tensor in tensors)
    return {name: tensor.cpu() for name, tensor in whole if learner.ranks.rank == 0}


def _try_to_write(path: Path, learner: Learner, files: dict[str, dict[str, Tensor]]) -> str:
    """Write it or say what went wrong; in no case leave anything half done."""
    draft = path.with_name(f".{path.name}")
    try:
        _check_room(path.parent, sum(t.nbytes for tensors in files.values() for t in tensors.values()))
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(PRIVATE_FOLDER)
        _write(draft, learner, files)
        _move_to(draft, path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        return f"the checkpoint {path} could not be written ({error}); make room on that disk, earlier ones are intact"
    return ""


def _check_room(folder: Path, needed: int) -> None:
    folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it takes {needed / 1e6:.0f} MB and {free / 1e6:.0f} MB are free")


def _write(draft: Path, learner: Learner, files: dict[str, dict[str, Tensor]]) -> None:
    for file in model_folder(learner.config.model.path).iterdir():
        if file.is_file() and file.suffix not in WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copyfile(file, draft / file.name)
    learner.model.save_pretrained(draft, state_dict=files["model"])
    for name in files.keys() - {"model"}:
        save_file(files[name], draft / f"{name}.safetensors")
    sums = {file.name: described(file) for file in sorted(draft.iterdir())}
    state = TrainerState(learner.step, learner.optimiser.updates, files=sums)
    (draft / "state.json").write_bytes(sealed(state))


def _move_to(draft: Path, path: Path) -> None:
    for file in draft.iterdir():
        file.chmod(PRIVATE)
        _flush(file)
    _flush(draft)
    replaced = path.with_name(f".{path.name}.old")
    if path.exists():  # of a step that is trained for the second time
        path.rename(replaced)
    draft.rename(path)
    _flush(path.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ------------------------------------------------------------------------------------------------------------- reading


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read ({error}); delete its folder to go on from an earlier one"
        ) from None


@torch.no_grad()
def _copy(learner: Learner, into: Mapping[str, Tensor], saved: Mapping[str, Tensor], folder: Path) -> None:
    for name, live in into.items():
        if name not in saved or saved[name].shape != live.shape:
            raise CheckpointError(f"{folder} holds another model: its {name} is missing or has another shape")
        live.copy_(learner.ranks.shard_like(saved[name], live))


def _load_moments(
    learner: Learner,
    optimiser: Optimiser,
    state: TrainerState,
    parameters: Mapping[str, Tensor],
    saved: Mapping[str, Tensor],
) -> None:
    def placed(key: str) -> Tensor:
        moment, _, name = key.partition("/")
        return saved[key] if moment == "step" else learner.ranks.shard_like(saved[key], parameters[name])

    optimiser.load(state.updates, {key: placed(key) for key in saved if "/" in key})
