"""A version in memory is a safetensors file, and its tensors are windows onto it."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load

from tailrace.weights.layout import LayoutError, WeightLayout

TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "embed.weight": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    "norm": torch.randn(7, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16),
    "scale": torch.tensor(0.5, dtype=torch.float64),
    "none": torch.zeros(0, 4),
    "steps": torch.arange(3),
}


def filled() -> tuple[WeightLayout, bytearray]:
    layout = WeightLayout.of_tensors(TENSORS)
    buffer = bytearray(layout.size)
    buffer[: len(layout.header)] = layout.header
    for name, view in layout.views(buffer).items():
        view.copy_(TENSORS[name])
    return layout, buffer


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in TENSORS.items()
    )


def test_what_is_written_through_the_views_is_a_valid_safetensors_file() -> None:
    _, buffer = filled()
    assert same(load(bytes(buffer)))


def test_a_reader_finds_the_layout_in_the_bytes_and_copies_nothing() -> None:
    layout, buffer = filled()
    found = WeightLayout.read(buffer)
    assert found == layout
    assert same(found.views(buffer))
    buffer[-1] = 0  # the last flag
    assert not found.views(buffer)["flags"][-1]


def test_read_only_bytes_give_views_without_a_warning() -> None:
    layout, buffer = filled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(layout.views(memoryview(bytes(buffer))))


def test_numpy_views_show_the_bits_of_what_numpy_does_not_know() -> None:
    layout, buffer = filled()
    arrays = layout.arrays(buffer)
    assert arrays["embed.weight"].tolist() == TENSORS["embed.weight"].tolist()
    assert arrays["norm"].tolist() == TENSORS["norm"].view(torch.uint16).tolist()


def test_data_starts_at_a_multiple_of_64_and_every_tensor_at_one_of_its_element() -> None:
    layout, _ = filled()
    assert len(layout.header) % 64 == 0
    assert all(entry.data_offsets[0] % TENSORS[name].element_size() == 0 for name, entry in layout.entries.items())


def test_names_of_dtypes_do_as_well_as_dtypes() -> None:
    assert WeightLayout.of(["a"], ["bfloat16"], [(2, 3)]) == WeightLayout.of(["a"], [torch.bfloat16], [(2, 3)])


def test_what_cannot_be_laid_out_is_refused_with_a_sentence() -> None:
    with pytest.raises(LayoutError, match="same name"):
        WeightLayout.of(["a", "a"], ["float32"] * 2, [(1,), (2,)])
    with pytest.raises(LayoutError, match="'a' is of type complex64"):
        WeightLayout.of(["a"], ["complex64"], [(1,)])


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "do not start with"),
        (b"\xff" * 64, "do not start with"),
        ((5).to_bytes(8, "little") + b"{nope", "header is damaged"),
        (header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}), "describes"),
        (header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}) + b"0000", "do not match"),
        (header(a={"dtype": "F32", "shape": [1], "data_offsets": [2, 6]}) + b"000000", "do not match"),
        (header(a={"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}) + b"0000", "not known here"),
    ],
)
def test_bytes_that_are_no_layout_are_refused_with_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(LayoutError, match=sentence):
        WeightLayout.read(data)
