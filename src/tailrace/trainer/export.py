"""A checkpoint as one Hugging Face directory, whoever saved it.

`tailrace export` and every evaluation ask. What one rank saved is one already. What several saved is put together, for
which the whole model has to fit into host memory once.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tailrace.model.load import PIECES
from tailrace.store.folder import PRIVATE
from tailrace.trainer.manifest import PREFIX

INTERNAL = {"state.json", PIECES, "optimizer.safetensors", "critic.safetensors"}  # for resumption alone


def write_model(checkpoint: Path, into: Path) -> None:
    """Into a new directory: the files that lie there themselves. Hugging Face's cache has links to files, which are
    read; folders are not."""
    into.mkdir()
    sharded = is_sharded(checkpoint)
    for file in checkpoint.iterdir():
        if file.is_file() and file.name not in INTERNAL and not (sharded and file.suffix == ".safetensors"):
            shutil.copyfile(file, into / file.name)
    if sharded:
        _assemble(checkpoint, into)


def is_sharded(checkpoint: Path) -> bool:
    return (checkpoint / PIECES).is_file()


@contextmanager
def as_model_folder(checkpoint: Path) -> Iterator[Path]:
    """The checkpoint itself, or a model directory beside it for as long as this is open."""
    if not is_sharded(checkpoint):
        yield checkpoint
        return
    with tempfile.TemporaryDirectory(prefix=f".{PREFIX}", dir=checkpoint.parent) as folder:
        place = Path(folder) / checkpoint.name
        write_model(checkpoint, place)
        yield place


def _assemble(checkpoint: Path, into: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tailrace.trainer.saved_tensors import SavedTensors, whole

    config = AutoConfig.from_pretrained(into, local_files_only=True)
    with SavedTensors(checkpoint) as saved:
        tensors = whole(saved, "model")
    with torch.device("meta"):
        family = type(AutoModelForCausalLM.from_config(config))
    family.from_pretrained(None, config=config, state_dict=tensors, dtype="float32").save_pretrained(into)
    for file in into.iterdir():
        file.chmod(PRIVATE)
