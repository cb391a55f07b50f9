"""The tensors of a checkpoint, of one rank or of many: what there is, and any rows of it.

Saved by several ranks, a checkpoint has a file per rank (`rank-00002-of-00004.safetensors`), with the rows that this
rank owns, and `pieces.json`: for every tensor its pieces, each with its file and its first row. Saved by one, it is a
Hugging Face directory with `optimizer.safetensors` and `critic.safetensors`, whose tensors are pieces too, whole ones.
`SavedTensors` reads both, only the rows it is asked for, so the number of ranks may change. Nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tailrace.model.load import PIECES
from tailrace.trainer.manifest import CheckpointError
from tailrace.types import MALFORMED
from tailrace.weights.layout import WeightLayout
from tailrace.weights.shard import RowRange

Section = str  # model, optimizer or critic
Key = str  # SECTION/NAME
UNREADABLE = (OSError, SafetensorError, RuntimeError, LookupError, ValueError, TypeError, *MALFORMED)
ALONE = {"model": "model*.safetensors", "optimizer": "optimizer.safetensors", "critic": "critic.safetensors"}


class SavedPiece(msgspec.Struct, array_like=True, frozen=True):
    """Rows of a tensor: in this file, under the tensor's key, from `first` on of the whole."""

    file: str
    first: int
    shape: tuple[int, ...]

    @property
    def rows(self) -> RowRange:
        return RowRange(self.first, self.first + (self.shape[0] if self.shape else 1))


Pieces = dict[Key, list[SavedPiece]]


def read_pieces(folder: Path) -> Pieces:
    """CheckpointError if they cannot be read."""
    try:
        if not (folder / PIECES).is_file():
            return dict(_pieces_of_one_rank(folder))
        pieces = msgspec.json.decode((folder / PIECES).read_bytes(), type=Pieces)
        if not all(pieces.values()):
            raise ValueError("a tensor has no pieces")
        return pieces
    except UNREADABLE as error:
        raise unreadable(folder, error) from None


def unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be read ({error}); delete it to go on from an earlier one")


def _pieces_of_one_rank(folder: Path) -> Iterator[tuple[Key, list[SavedPiece]]]:
    for section, pattern in ALONE.items():
        for file in sorted(folder.glob(pattern)):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    shape = tuple(tensors.get_slice(name).get_shape())
                    yield f"{section}/{name}", [SavedPiece(file.name, 0, shape)]


class SavedTensors:
    """An open checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._pieces = folder, read_pieces(folder)
        self.sharded = (folder / PIECES).is_file()
        self._open = ExitStack()
        self._files: dict[str, Any] = {}

    def section(self, section: Section) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors, by name."""
        found: dict[str, tuple[int, ...]] = {}
        for key, pieces in self._pieces.items():
            if key.startswith(f"{section}/"):
                shape = pieces[0].shape
                rows = sum(piece.shape[0] for piece in pieces) if shape else 0
                found[key.removeprefix(f"{section}/")] = (rows, *shape[1:]) if shape else ()
        return found

    def read(self, section: Section, name: str, rows: RowRange, into: Tensor) -> None:
        """Copy rows of a tensor, which must be in its pieces."""
        try:
            for piece in self._pieces[f"{section}/{name}"]:
                first, last = max(rows.first, piece.rows.first), min(rows.last, piece.rows.last)
                if first < last:
                    source = self._slice(section, name, piece)
                    into[first - rows.first : last - rows.first].copy_(source[first - piece.first : last - piece.first])
        except UNREADABLE as error:
            raise unreadable(self._folder, error) from None

    def number(self, section: Section, name: str) -> Tensor:
        """A tensor without rows."""
        piece = self._pieces[f"{section}/{name}"][0]
        return self._file(piece).get_tensor(self._name(section, name))

    def _slice(self, section: Section, name: str, piece: SavedPiece) -> Any:
        return self._file(piece).get_slice(self._name(section, name))

    def _name(self, section: Section, name: str) -> str:
        return f"{section}/{name}" if self.sharded else name

    def _file(self, piece: SavedPiece) -> Any:
        if piece.file not in self._files:
            if Path(piece.file).name != piece.file:
                raise CheckpointError(f"{self._folder} is damaged: {piece.file[:80]!r} is not beside it")
            self._files[piece.file] = self._open.enter_context(safe_open(self._folder / piece.file, "pt"))
        return self._files[piece.file]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()


def whole(saved: SavedTensors, section: Section) -> dict[str, Tensor]:
    """All of its tensors, in memory."""
    found: dict[str, Tensor] = {}
    for name, shape in saved.section(section).items():
        found[name] = torch.empty(shape)
        if shape:
            saved.read(section, name, RowRange(0, shape[0]), found[name])
        else:
            found[name] = saved.number(section, name)
    return found


def file_of(rank: int, ranks: int) -> str:
    return f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def joined(parts: Iterable[Pieces]) -> Pieces:
    """Of all ranks."""
    found: Pieces = {}
    for part in parts:
        for key, pieces in part.items():
            found.setdefault(key, []).extend(pieces)
    return {key: sorted(pieces, key=lambda piece: piece.first) for key, pieces in found.items()}


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """As safetensors, one tensor after the other: what is in host memory is not copied there once more."""
    layout = WeightLayout.of_tensors(tensors)
    with file.open("wb") as target:
        target.write(layout.header)
        for name in layout.entries:
            data = tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8)
            target.write(memoryview(data.numpy()))  # pyright: ignore[reportArgumentType]
