"""How named tensors lie in one flat buffer: as in a safetensors file, so that a version in memory is such a file.

    8 bytes: length of the header | header (JSON), padded so that the data starts at a multiple of 64 | data

The trainer lays its weights out with `Layout.of`; whoever maps a version reads the layout from its first bytes. Tensors
lie by falling element size and without gaps, as the format demands, so each one is aligned to its elements. `views` are
windows onto the buffer: nothing is copied, and torch or numpy are imported only when they are asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import msgspec

from tailrace.errors import TailraceError
from tailrace.types import MALFORMED, Struct

if TYPE_CHECKING:
    import numpy as np
    import torch

Buffer = bytes | bytearray | memoryview

ALIGNMENT = 64
LONGEST_HEADER = 100_000_000  # the format's own limit


class Kind(Struct):
    """An element type: its name in the format, in torch and in numpy, and its bytes."""

    code: str
    torch: str
    numpy: str
    width: int


KINDS = [
    Kind("F64", "float64", "float64", 8),
    Kind("F32", "float32", "float32", 4),
    Kind("F16", "float16", "float16", 2),
    Kind("BF16", "bfloat16", "uint16", 2),  # numpy has no bfloat16: the raw bits
    Kind("F8_E4M3", "float8_e4m3fn", "uint8", 1),
    Kind("F8_E5M2", "float8_e5m2", "uint8", 1),
    Kind("I64", "int64", "int64", 8),
    Kind("I32", "int32", "int32", 4),
    Kind("I16", "int16", "int16", 2),
    Kind("I8", "int8", "int8", 1),
    Kind("U8", "uint8", "uint8", 1),
    Kind("BOOL", "bool", "bool", 1),
]
BY_CODE = {kind.code: kind for kind in KINDS}
BY_NAME = {kind.torch: kind for kind in KINDS}


class LayoutError(TailraceError):
    """These tensors cannot be laid out, or these bytes are no layout."""


class Place(Struct):
    """Where one tensor lies, in the words of the format; offsets count from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Layout(Struct):
    """`header` is the first `len(header)` bytes of every version; `size` is all of a version."""

    header: bytes
    places: dict[str, Place]
    size: int

    @classmethod
    def of(cls, names: Sequence[str], dtypes: Sequence[object], shapes: Iterable[Iterable[int]]) -> Layout:
        """Lay tensors out. A dtype is a torch dtype or its name (`torch.bfloat16`, "bfloat16")."""
        rows = [(n, _kind(n, d), tuple(s)) for n, d, s in zip(names, dtypes, shapes, strict=True)]
        if len({name for name, _, _ in rows}) < len(rows):
            raise LayoutError("two tensors have the same name: give every tensor a name of its own")
        rows.sort(key=lambda row: (-row[1].width, row[0]))
        places: dict[str, Place] = {}
        end = 0
        for name, kind, shape in rows:
            start, end = end, end + kind.width * prod(shape)
            places[name] = Place(kind.code, shape, (start, end))
        header = _header(places)
        return cls(header, places, len(header) + end)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, torch.Tensor], dtype: object = None) -> Layout:
        """The layout of these tensors, or of their copies in another dtype."""
        dtypes = [dtype or tensor.dtype for tensor in tensors.values()]
        return cls.of(list(tensors), dtypes, [tensor.shape for tensor in tensors.values()])

    @classmethod
    def read(cls, buffer: Buffer) -> Layout:
        """The layout that a version itself tells in its first bytes."""
        whole = memoryview(buffer).cast("B")
        length = int.from_bytes(whole[:8], "little")
        if len(whole) < 8 + length or not 2 <= length <= LONGEST_HEADER:
            raise LayoutError("these bytes do not start with a safetensors header")
        header = bytes(whole[: 8 + length])
        places = _places(header[8:])
        layout = cls(header, places, len(header) + max((p.data_offsets[1] for p in places.values()), default=0))
        if layout.size != len(whole):
            raise LayoutError(f"the header describes {layout.size:,} bytes, but there are {len(whole):,}")
        return layout

    def views(self, buffer: Buffer) -> dict[str, torch.Tensor]:
        """The tensors, as windows onto `buffer`, which must be kept unchanged or be known to change under them."""
        import torch

        with warnings.catch_warnings():  # a read-only buffer is what we want here
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return self.windows(torch.frombuffer(memoryview(buffer), dtype=torch.uint8))

    def windows(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same onto the bytes of a version wherever they are, a GPU perhaps."""
        import torch

        data = whole[len(self.header) :]
        return {
            name: data[slice(*place.data_offsets)].view(getattr(torch, BY_CODE[place.dtype].torch)).view(place.shape)
            for name, place in self.places.items()
        }

    def arrays(self, buffer: Buffer) -> dict[str, np.ndarray[Any, Any]]:
        """The same for numpy, where bfloat16 and the 8-bit floats appear as their bits."""
        import numpy as np

        data = np.frombuffer(memoryview(buffer), dtype=np.uint8)[len(self.header) :]
        return {
            name: data[slice(*place.data_offsets)].view(BY_CODE[place.dtype].numpy).reshape(place.shape)
            for name, place in self.places.items()
        }


def _kind(name: str, dtype: object) -> Kind:
    kind = BY_NAME.get(str(dtype).removeprefix("torch."))
    if kind is None:
        raise LayoutError(f"tensor '{name}' is of type {dtype}; one of {', '.join(BY_NAME)} can be published")
    return kind


def _header(places: Mapping[str, Place]) -> bytes:
    text = msgspec.json.encode({"__metadata__": {"format": "pt"}, **places})
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _places(text: bytes) -> dict[str, Place]:
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        places = {name: msgspec.json.decode(raw, type=Place) for name, raw in entries.items()}
    except MALFORMED as error:
        raise LayoutError(f"the safetensors header is damaged: {error}") from None
    for name, place in places.items():
        _check(name, place)
    return places


def _check(name: str, place: Place) -> None:
    kind, (start, end) = BY_CODE.get(place.dtype), place.data_offsets
    if kind is None:
        raise LayoutError(f"tensor '{name}' is of type {place.dtype}, which is not known here")
    empty_or_more = all(size >= 0 for size in place.shape)
    if not empty_or_more or start < 0 or start % kind.width or end - start != kind.width * prod(place.shape):
        raise LayoutError(f"tensor '{name}' does not lie where its shape and type say")
