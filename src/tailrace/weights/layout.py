"""The layout of a weight version: named tensors in one flat buffer, which is a valid safetensors file.

    8 bytes: length of the header | header (JSON), padded so that the data starts at a multiple of 64 | data

The trainer creates it with `WeightLayout.of`; readers parse it from a version's first bytes. Tensors are sorted by
falling element size and have no gaps, as the format demands, so each one is aligned to its elements. Views copy
nothing; torch and numpy are imported only when their views are asked for.
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


class ElementType(Struct):
    """The name of an element type in safetensors, torch and numpy, and its bytes."""

    code: str
    torch: str
    numpy: str
    width: int


ELEMENT_TYPES = [
    ElementType("F64", "float64", "float64", 8),
    ElementType("F32", "float32", "float32", 4),
    ElementType("F16", "float16", "float16", 2),
    ElementType("BF16", "bfloat16", "uint16", 2),  # numpy has no bfloat16: the raw bits
    ElementType("F8_E4M3", "float8_e4m3fn", "uint8", 1),
    ElementType("F8_E5M2", "float8_e5m2", "uint8", 1),
    ElementType("I64", "int64", "int64", 8),
    ElementType("I32", "int32", "int32", 4),
    ElementType("I16", "int16", "int16", 2),
    ElementType("I8", "int8", "int8", 1),
    ElementType("U8", "uint8", "uint8", 1),
    ElementType("BOOL", "bool", "bool", 1),
]
BY_CODE = {element.code: element for element in ELEMENT_TYPES}
BY_NAME = {element.torch: element for element in ELEMENT_TYPES}


class LayoutError(TailraceError):
    """These tensors have no layout, or these bytes are not a valid layout."""


class TensorEntry(Struct):
    """One tensor in the safetensors header; offsets count from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class WeightLayout(Struct):
    """`header` is the first `len(header)` bytes of every version; `size` is all of a version."""

    header: bytes
    entries: dict[str, TensorEntry]
    size: int

    @classmethod
    def of(cls, names: Sequence[str], dtypes: Sequence[object], shapes: Iterable[Iterable[int]]) -> WeightLayout:
        """Of tensors by name. A dtype is a torch dtype or its name (`torch.bfloat16`, "bfloat16")."""
        rows = [(n, _element_type(n, d), tuple(s)) for n, d, s in zip(names, dtypes, shapes, strict=True)]
        if len({name for name, _, _ in rows}) < len(rows):
            raise LayoutError("two tensors have the same name: give every tensor a name of its own")
        rows.sort(key=lambda row: (-row[1].width, row[0]))
        entries: dict[str, TensorEntry] = {}
        end = 0
        for name, element, shape in rows:
            start, end = end, end + element.width * prod(shape)
            entries[name] = TensorEntry(element.code, shape, (start, end))
        header = _header(entries)
        return cls(header, entries, len(header) + end)

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Any], dtype: object = None) -> WeightLayout:
        """The layout of these tensors, of torch or of numpy, or of their copies in another dtype."""
        dtypes = [dtype or tensor.dtype for tensor in tensors.values()]
        return cls.of(list(tensors), dtypes, [tensor.shape for tensor in tensors.values()])

    @classmethod
    def read(cls, buffer: Buffer) -> WeightLayout:
        """Parse the header of a version."""
        whole = memoryview(buffer).cast("B")
        length = int.from_bytes(whole[:8], "little")
        if len(whole) < 8 + length or not 2 <= length <= LONGEST_HEADER:
            raise LayoutError("these bytes do not start with a safetensors header")
        header = bytes(whole[: 8 + length])
        entries = _entries(header[8:])
        layout = cls(header, entries, len(header) + max((p.data_offsets[1] for p in entries.values()), default=0))
        if layout.size != len(whole):
            raise LayoutError(f"the header describes {layout.size:,} bytes, but there are {len(whole):,}")
        return layout

    def views(self, buffer: Buffer) -> dict[str, torch.Tensor]:
        """Tensors that share the memory of `buffer`."""
        import torch

        with warnings.catch_warnings():  # a read-only buffer is what we want here
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return self.views_of(torch.frombuffer(memoryview(buffer), dtype=torch.uint8))

    def views_of(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same for a version that is a tensor of bytes, on any device."""
        import torch

        data = whole[len(self.header) :]
        return {
            name: data[slice(*entry.data_offsets)].view(getattr(torch, BY_CODE[entry.dtype].torch)).view(entry.shape)
            for name, entry in self.entries.items()
        }

    def arrays(self, buffer: Buffer) -> dict[str, np.ndarray[Any, Any]]:
        """The same as numpy arrays; bfloat16 and 8-bit floats appear as their bits."""
        import numpy as np

        data = np.frombuffer(memoryview(buffer), dtype=np.uint8)[len(self.header) :]
        return {
            name: data[slice(*entry.data_offsets)].view(BY_CODE[entry.dtype].numpy).reshape(entry.shape)
            for name, entry in self.entries.items()
        }


def _element_type(name: str, dtype: object) -> ElementType:
    element = BY_NAME.get(str(dtype).removeprefix("torch."))
    if element is None:
        raise LayoutError(f"tensor '{name}' is of type {dtype}; one of {', '.join(BY_NAME)} can be published")
    return element


def _header(entries: Mapping[str, TensorEntry]) -> bytes:
    text = msgspec.json.encode({"__metadata__": {"format": "pt"}, **entries})
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _entries(text: bytes) -> dict[str, TensorEntry]:
    try:
        entries = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=TensorEntry) for name, raw in entries.items()}
    except MALFORMED as error:
        raise LayoutError(f"the safetensors header is damaged: {error}") from None
    for name, entry in entries.items():
        _check(name, entry)
    return entries


def _check(name: str, entry: TensorEntry) -> None:
    element, (start, end) = BY_CODE.get(entry.dtype), entry.data_offsets
    if element is None:
        raise LayoutError(f"tensor '{name}' is of type {entry.dtype}, which is not known here")
    valid_shape = all(size >= 0 for size in entry.shape)
    if not valid_shape or start < 0 or start % element.width or end - start != element.width * prod(entry.shape):
        raise LayoutError(f"tensor '{name}' has offsets that do not match its shape and type")
