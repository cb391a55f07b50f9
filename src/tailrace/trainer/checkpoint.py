"""Checkpoints: a learner on disk, with what resumption needs.

    FOLDER/step-00000012/   config.json, tokenizer
        of one rank:        model.safetensors          what transformers loads, with the two above
                            optimizer.safetensors [critic.safetensors]   moments; the critic and its moments
        of several:         rank-00000-of-00004.safetensors, ...         the rows of all these that a rank owns
                            pieces.json                where every row is (`saved_tensors.py`)
                            state.json                 step, number of updates, of every file its size and checksum,
                                                       and its own checksum

`rank_group.py` calls `save` after a step and `restore` at its start, in all ranks; each writes its own rows, and reads
those that it holds now, however many ranks there were. A checkpoint is written beside its path, flushed, and renamed
when all ranks are done: what has the name is whole. `newest` still looks, since disks and copies fail: one that is cut
short or changed is passed over, with a line in the log, and never trained on. If the disk is full the half-written one
is taken away and the others stay as they are. Nothing is pickled. Ranks on several hosts need a folder that all of them
see.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from tailrace.model.load import PIECES, load_model, model_folder
from tailrace.store.folder import PRIVATE, PRIVATE_FOLDER
from tailrace.trainer.manifest import (
    PREFIX,
    CheckpointError,
    File,
    TrainerState,
    check,
    described,
    found_in,
    read_state,
    step_of,
)
from tailrace.trainer.policies import local
from tailrace.trainer.saved_tensors import Key, Pieces, SavedPiece, SavedTensors, file_of, joined, write_tensors
from tailrace.trainer.sealed import sealed
from tailrace.trainer.shards import held_rows, owned_rows
from tailrace.trainer.spared import NONE_SPARED, SparedSteps
from tailrace.trainer.step import Learner

log = logging.getLogger(__name__)

WEIGHTS = {".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack"}


class RankReport(msgspec.Struct):
    """What a rank has written, or why it could not."""

    trouble: str = ""
    files: dict[str, File] = {}
    pieces: Pieces = {}


def save(folder: Path, learner: Learner) -> Path:
    """Write the learner as it is now. Returns where."""
    path = folder / f"{PREFIX}{learner.step:08d}"
    draft, first = path.with_name(f".{path.name}"), learner.ranks.rank == 0
    tensors = dict(_tensors(learner))
    _each(learner, path, lambda: _begin(draft, sum(one.nbytes for one in tensors.values())) if first else RankReport())
    reports = _each(learner, path, lambda: _write(draft, learner, tensors))
    _each(learner, path, lambda: _finish(draft, path, learner, reports) if first else RankReport())
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


def prune(folder: Path, keep: int, archive_every: int = 0, good: int = -1, spared: SparedSteps = NONE_SPARED) -> None:
    """Delete all but the newest, those to be kept for good, those `spared` and the newest up to step `good`, and what
    an interrupted save has left."""
    found = found_in(folder)
    kept = [*found[-keep:], *[path for path in found if step_of(path) <= good][-1:]]
    kept += [path for path in found if spared.spares(step_of(path))]
    old = [path for path in found if path not in kept and (not archive_every or step_of(path) % archive_every)]
    for path in [*old, *folder.glob(f".{PREFIX}*")]:
        shutil.rmtree(path, ignore_errors=True)


def restore(learner: Learner, folder: Path, anew: bool = False) -> None:
    """Put the learner where it was when this checkpoint was saved. `anew`: it is another run's, so steps are counted
    from 0, the schedule of the learning rate begins, and there may be a critic that the other had not."""
    state = read_state(folder)
    if anew:
        state = msgspec.structs.replace(state, step=0, updates=0)
    with SavedTensors(folder) as saved:
        parameters = dict(learner.model.named_parameters())
        _read_weights(saved, "model", parameters, folder)
        learner.optimiser.load(state.updates, dict(_moments(saved, "optimizer", parameters)))
        if learner.critic is not None and not (anew and not saved.section("critic")):
            parameters = dict(learner.critic.named_parameters())
            _read_weights(saved, "critic", parameters, folder)
            learner.critic.optimiser.load(state.updates, dict(_moments(saved, "critic", parameters)))
    learner.step = state.step


# ------------------------------------------------------------------------------------------------------------- writing


def _tensors(learner: Learner) -> Iterator[tuple[Key, Tensor]]:
    """Everything that is saved, by section and name, sharded where it is; tied tensors once."""
    sections: dict[str, Iterable[tuple[str, Tensor]]] = {
        "model": _tied_once(learner.model.state_dict(keep_vars=True)),
        "optimizer": learner.optimiser.moments(),
    }
    if learner.critic is not None:
        sections["critic"] = chain(learner.critic.state_dict().items(), learner.critic.optimiser.moments())
    for section, tensors in sections.items():
        for name, tensor in tensors:
            yield f"{section}/{name}", tensor.detach()


def _tied_once(tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _each(learner: Learner, path: Path, act: Callable[[], RankReport]) -> list[RankReport]:
    """All ranks act and hear of each other. If one of them could not, nothing is left half done."""
    try:
        mine = act()
    except (OSError, SafetensorError) as error:
        mine = RankReport(str(error) or type(error).__name__)
    reports = [
        msgspec.json.decode(each, type=RankReport) for each in learner.ranks.gather_bytes(msgspec.json.encode(mine))
    ]
    trouble = next((report.trouble for report in reports if report.trouble), "")
    if trouble:
        shutil.rmtree(path.with_name(f".{path.name}"), ignore_errors=True)
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({trouble}); make room on that disk, earlier ones are intact"
        )
    return reports


def _begin(draft: Path, needed: int) -> RankReport:
    _check_room(draft.parent, needed)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(PRIVATE_FOLDER)
    return RankReport()


def _check_room(folder: Path, needed: int) -> None:
    folder.mkdir(PRIVATE_FOLDER, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"it takes {needed / 1e6:.0f} MB and {free / 1e6:.0f} MB are free")


def _write(draft: Path, learner: Learner, tensors: Mapping[Key, Tensor]) -> RankReport:
    if learner.ranks.size > 1:
        return _write_rows(draft / file_of(learner.ranks.rank, learner.ranks.size), learner.ranks.rank, tensors)
    sections: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        section, _, name = key.partition("/")
        sections.setdefault(section, {})[name] = tensor.cpu()
    _copy_beside(draft, learner)
    learner.model.save_pretrained(draft, state_dict=sections.pop("model"))
    for section, its in sections.items():
        write_tensors(draft / f"{section}.safetensors", its)
    return RankReport()


def _write_rows(file: Path, rank: int, tensors: Mapping[Key, Tensor]) -> RankReport:
    """What this rank owns, in one file."""
    rows = {key: owned_rows(tensor, rank) for key, tensor in tensors.items()}
    mine = {key: local(tensor) for key, tensor in tensors.items() if rows[key].first < rows[key].last}
    write_tensors(file, mine)
    _flush(file)
    pieces = {key: [SavedPiece(file.name, rows[key].first, tuple(tensor.shape))] for key, tensor in mine.items()}
    return RankReport(files={file.name: described(file)}, pieces=pieces)


def _copy_beside(draft: Path, learner: Learner) -> None:
    """What is not weights."""
    for file in model_folder(learner.config.model.path).iterdir():
        if file.is_file() and file.suffix not in WEIGHTS and not file.name.endswith(".index.json"):
            shutil.copyfile(file, draft / file.name)


def _finish(draft: Path, path: Path, learner: Learner, reports: list[RankReport]) -> RankReport:
    """By the first rank, when all have written."""
    files = {name: file for report in reports for name, file in report.files.items()}
    if files:
        _copy_beside(draft, learner)
        learner.model.config.save_pretrained(draft)
        (draft / PIECES).write_bytes(msgspec.json.encode(joined(report.pieces for report in reports)))
    missing = next((name for name in files if not (draft / name).is_file()), "")
    if missing:
        raise OSError(f"{missing} was written on a host with other disks; ranks on several hosts need a shared folder")
    sums = files | {file.name: described(file) for file in sorted(draft.iterdir()) if file.name not in files}
    state = TrainerState(learner.step, learner.optimiser.updates, files=sums)
    (draft / "state.json").write_bytes(sealed(state))
    _move_to(draft, path)
    return RankReport()


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


@torch.no_grad()
def _read_weights(saved: SavedTensors, section: str, into: Mapping[str, Tensor], folder: Path) -> None:
    shapes = saved.section(section)
    if section == "model" and not saved.sharded and not into.keys() <= shapes.keys():
        _read_converted(into, folder)
        return
    for name, live in into.items():
        _check_shape(name, live, shapes.get(name), folder)
        saved.read(section, name, held_rows(live), local(live))


def _read_converted(into: Mapping[str, Tensor], folder: Path) -> None:
    """Some families have other tensors in memory than in files. Only transformers knows how they become each other."""
    whole = dict(load_model(str(folder), "float32", "cpu").named_parameters())
    for name, live in into.items():
        _check_shape(name, live, tuple(whole[name].shape) if name in whole else None, folder)
        local(live).copy_(whole[name][slice(*held_rows(live))] if live.ndim else whole[name])


def _check_shape(name: str, live: Tensor, found: tuple[int, ...] | None, folder: Path) -> None:
    if found != tuple(live.shape):
        raise CheckpointError(f"{folder} holds another model: its {name} is missing or has another shape")


@torch.no_grad()
def _moments(saved: SavedTensors, section: str, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for key in saved.section(section):
        moment, _, name = key.partition("/")
        if moment == "step":
            yield key, saved.number(section, key)
        elif name:
            laid_out = torch.empty_like(parameters[name].detach())
            saved.read(section, key, held_rows(laid_out), local(laid_out))
            yield key, laid_out
