"""Checkpoints in pieces, however many ranks wrote them, and the arithmetic of a publication."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from tailrace.config.errors import ConfigError
from tailrace.model.load import PIECES, model_folder
from tailrace.trainer.announcements import Announcements
from tailrace.trainer.checkpoint import newest, restore, save
from tailrace.trainer.manifest import CheckpointError
from tailrace.trainer.parallel import Together, by_host
from tailrace.trainer.rank_group import Complaint, NativeRankGroup, PublishRoute
from tailrace.trainer.saved_tensors import SavedPiece, SavedTensors, file_of, joined, whole, write_tensors
from tailrace.trainer.step import Learner
from tailrace.weights.shard import RowRange
from trainer_cases import settings, tiny_folder

TENSORS = {"a": torch.randn(7, 3), "b": torch.randn(2), "step/a": torch.tensor(5.0)}


def saved_by(ranks: int, folder: Path) -> Path:
    """As so many ranks write it; the number belongs to the first."""
    folder.mkdir()
    parts = []
    for rank in range(ranks):
        mine: dict[str, Tensor] = {}
        pieces: dict[str, list[SavedPiece]] = {}
        for name, tensor in TENSORS.items():
            each = -(-len(tensor) // ranks) if tensor.ndim else 1
            first = min(rank * each, len(tensor)) if tensor.ndim else 0
            rows = tensor[first : first + each] if tensor.ndim else tensor
            if (tensor.ndim and len(rows)) or (not tensor.ndim and rank == 0):
                mine[f"model/{name}"] = rows
                pieces[f"model/{name}"] = [SavedPiece(file_of(rank, ranks), first, tuple(rows.shape))]
        write_tensors(folder / file_of(rank, ranks), mine)
        parts.append(pieces)
    (folder / PIECES).write_bytes(msgspec.json.encode(joined(reversed(parts))))
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_any_rows_are_read_from_the_pieces_of_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    with SavedTensors(saved_by(ranks, tmp_path / "saved")) as saved:
        assert saved.section("model") == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
        for first in range(7):
            for last in range(first, 8):
                found = torch.full((last - first, 3), torch.nan)
                saved.read("model", "a", RowRange(first, last), found)
                assert torch.equal(found, TENSORS["a"][first:last])
        assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in whole(saved, "model").items())


def test_tensors_written_one_by_one_are_what_safetensors_reads(tmp_path: Path) -> None:
    tensors = {
        "x": torch.randn(3, 5).t(),
        "half": torch.randn(4).bfloat16(),
        "none": torch.zeros(0, 3),
        "one": TENSORS["step/a"],
    }
    write_tensors(tmp_path / "file.safetensors", tensors)
    found = load_file(tmp_path / "file.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_piece_in_another_folder_is_refused(tmp_path: Path) -> None:
    folder = saved_by(2, tmp_path / "saved")
    save_file({"model/a": TENSORS["a"]}, tmp_path / "elsewhere.safetensors")
    (folder / PIECES).write_bytes(msgspec.json.encode({"model/a": [SavedPiece("../elsewhere.safetensors", 0, (7, 3))]}))
    with SavedTensors(folder) as saved, pytest.raises(CheckpointError, match="is not beside it"):
        saved.read("model", "a", RowRange(0, 7), torch.empty(7, 3))
    (folder / PIECES).write_bytes(b"{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        SavedTensors(folder)


def test_a_checkpoint_of_several_ranks_is_no_model_and_says_how_to_get_one(tmp_path: Path) -> None:
    tiny_folder(tmp_path)
    (tmp_path / "model" / PIECES).write_text("{}")
    with pytest.raises(ConfigError, match=r"several trainer ranks; `tailrace export"):
        model_folder(str(tmp_path / "model"))


def test_moments_are_written_and_read_without_a_copy_of_everything(tmp_path: Path) -> None:
    learner = Learner(settings(tiny_folder(tmp_path)))
    learner.optimiser.set_zero_gradients()
    learner.optimiser.update()
    place = save(tmp_path / "checkpoints", learner)
    again = Learner(learner.config)
    restore(again, newest(tmp_path / "checkpoints") or place)
    mine, theirs = dict(again.optimiser.moments()), dict(learner.optimiser.moments())
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_hybrid_sharding_needs_as_many_ranks_on_every_host() -> None:
    assert by_host([0, 1, 0, 1]) == [[0, 2], [1, 3]]
    assert by_host([]) == []
    with pytest.raises(ConfigError, match=r'"hybrid" needs as many .* 2 on host 0, 1 on host 4; write "full"'):
        by_host([0, 0, 4])


def test_a_rank_that_cannot_send_its_part_tells_the_first_which_tells_control() -> None:
    board: Any = HashStore()
    first, second = (Together(rank, 2, "cpu", None, board, Announcements("")) for rank in range(2))  # pyright: ignore[reportArgumentType]
    told: list[tuple[int, str]] = []
    group = NativeRankGroup.__new__(NativeRankGroup)
    group.ranks, group._route = first, PublishRoute(3, {})
    group._give_up = lambda version, reason: told.append((version, reason))
    for master in (3, 4):  # the other one is no longer the master
        second.complain(msgspec.json.encode(Complaint(1, 7, master, "no room")).decode())
    for text in first.complaints():
        group._heed(msgspec.json.decode(text, type=Complaint))
    assert told == [(7, "rank 1: no room")]
    assert first.complaints() == []
