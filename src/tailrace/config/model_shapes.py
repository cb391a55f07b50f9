"""Published shapes of well-known models, and how `model` gets its figures: from a preset, from a config.json, by hand.

Parameters are the exact counts of the published checkpoints, tied embeddings counted once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from tailrace.config.errors import ConfigError
from tailrace.config.files import PACKAGE
from tailrace.config.hf_config import Shape, read_shape
from tailrace.config.spelling import near
from tailrace.config.tree import Model

SHAPE_FIELDS = Shape._fields

_QWEN_7B = Shape(7_615_616_512, 28, 3584, 28, 4, 128)
_QWEN_14B = Shape(14_770_033_664, 48, 5120, 40, 8, 128)
_QWEN_32B = Shape(32_763_876_352, 64, 5120, 40, 8, 128)

SHAPES: dict[str, Shape] = {
    #                        parameters  layers hidden heads kv width (active) (context, where it is short)
    "qwen2.5-0.5b": Shape(494_032_768, 24, 896, 14, 2, 64),
    "qwen2.5-1.5b": Shape(1_543_714_304, 28, 1536, 12, 2, 128),
    "qwen2.5-3b": Shape(3_085_938_688, 36, 2048, 16, 2, 128),
    "qwen2.5-7b": _QWEN_7B,
    "qwen2.5-14b": _QWEN_14B,
    "qwen2.5-32b": _QWEN_32B,
    "qwen2.5-72b": Shape(72_706_203_648, 80, 8192, 64, 8, 128),
    "qwen2.5-math-7b": _QWEN_7B,
    "r1-distill-qwen-1.5b": Shape(1_777_088_000, 28, 1536, 12, 2, 128),
    "r1-distill-qwen-7b": _QWEN_7B,
    "r1-distill-qwen-14b": _QWEN_14B,
    "r1-distill-qwen-32b": _QWEN_32B,
    "qwen3-0.6b": Shape(596_049_920, 28, 1024, 16, 8, 128),
    "qwen3-1.7b": Shape(1_720_574_976, 28, 2048, 16, 8, 128),
    "qwen3-4b": Shape(4_022_468_096, 36, 2560, 32, 8, 128),
    "qwen3-8b": Shape(8_190_735_360, 36, 4096, 32, 8, 128),
    "qwen3-14b": Shape(14_768_307_200, 40, 5120, 40, 8, 128),
    "qwen3-32b": Shape(32_762_123_264, 64, 5120, 64, 8, 128),
    "qwen3-30b-a3b": Shape(30_532_122_624, 48, 2048, 32, 4, 128, 3_353_032_704, experts=128, experts_per_token=8),
    "qwen3-235b-a22b": Shape(235_093_634_560, 94, 4096, 64, 4, 128, 22_190_763_520, experts=128, experts_per_token=8),
    "llama-3.1-8b": Shape(8_030_261_248, 32, 4096, 32, 8, 128),
    "llama-3.1-70b": Shape(70_553_706_496, 80, 8192, 64, 8, 128),
    "llama-3.1-405b": Shape(405_853_388_800, 126, 16384, 128, 8, 128),
    "llama-3.2-1b": Shape(1_235_814_400, 16, 2048, 32, 8, 64),
    "llama-3.2-3b": Shape(3_212_749_824, 28, 3072, 24, 8, 128),
    "smollm2-135m": Shape(134_515_008, 30, 576, 9, 3, 64, context=8192),
    "smollm2-360m": Shape(361_821_120, 32, 960, 15, 5, 64, context=8192),
    "smollm2-1.7b": Shape(1_711_376_384, 24, 2048, 32, 32, 64, context=8192),
    "mistral-7b": Shape(7_241_732_096, 32, 4096, 32, 8, 128),
    "gemma-2-2b": Shape(2_614_341_888, 26, 2304, 8, 4, 256, context=8192),
    "gemma-2-9b": Shape(9_241_705_984, 42, 3584, 16, 8, 256, context=8192),
    "gemma-2-27b": Shape(27_227_128_320, 46, 4608, 32, 16, 128, context=8192),
}


def resolve(model: Model) -> Model:
    """The model with every figure its preset or its config.json knows; what is written out stays as it is."""
    known = _origin(model)
    return msgspec.structs.replace(model, **{name: known[name] for name in known if not getattr(model, name)})


def origin_shape(model: Model) -> dict[str, Any]:
    """The figures that came with the preset or file; none where there is neither, or the file is no longer there."""
    try:
        return _origin(model)
    except ConfigError:
        return {}


def lookup(preset: str) -> Shape:
    """A published shape, also by the model's name on the hub ("Qwen/Qwen2.5-7B-Instruct")."""
    name = _canonical(preset)
    if name in SHAPES:
        return SHAPES[name]
    close = near(name, [shape for shape in SHAPES if _digits(shape) == _digits(name)])
    advice = f"did you mean '{close}'?" if close else f"known are {', '.join(SHAPES)}; for another, model.hf_config"
    raise ConfigError(f"model.preset is '{preset}', which is not a known shape; {advice}")


def _origin(model: Model) -> dict[str, Any]:
    if model.preset and model.hf_config:
        raise ConfigError("model.preset and model.hf_config both name a shape; remove one of them")
    if model.preset:
        return lookup(model.preset)._asdict()
    described = model.hf_config or _described_by(model.path)
    if described:
        return read_shape(described)._asdict()
    if model.path and not model.parameters and not is_gguf(model.path):
        raise ConfigError(why_no_model(model.path))
    return {}


def _described_by(path: str) -> str:
    """The config.json of a model directory, if that is what the path names."""
    config = Path(path).expanduser() / "config.json"
    return str(config) if path and config.is_file() else ""


def is_gguf(path: str) -> bool:
    """A file that is converted before it is used, so its shape is not at hand."""
    return path.startswith(PACKAGE) or (path.endswith(".gguf") and Path(path).expanduser().is_file())


def why_no_model(path: str) -> str:
    """What is wrong with a path that is no model directory, and how to get one."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        return f"model.path: {directory} has no config.json, so it is not a Hugging Face model directory"
    if directory.exists():
        return f"model.path: {directory} is neither a directory nor a .gguf file; name a Hugging Face model directory"
    name = "/".join(directory.parts[-2:]) if _canonical(directory.name) in SHAPES else "ORGANISATION/MODEL"
    return (
        f"model.path: there is no directory {directory}, and models are not downloaded; "
        f"get it first: hf download {name} --local-dir {directory}"
    )


def _digits(name: str) -> str:
    """Another number is another model."""
    return "".join(letter for letter in name if letter.isdigit())


def _canonical(preset: str) -> str:
    name = preset.lower().rpartition("/")[2].replace("_", "-")
    return re.sub(r"^(deepseek|meta)-|(-instruct|-it|-base)?(-v\d[\d.]*)?$", "", name)
