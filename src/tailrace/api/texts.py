"""The words of a run's samples: prompts as they were written, completions decoded by the model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tailrace.config.tree import Config
from tailrace.samples.messages import Piece
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import PromptGoneError, SampleGoneError
from tailrace.types import token_ids

Sample = dict[str, Any]


def with_texts(run: Path, config: Config, samples: Iterable[Sample]) -> Iterator[Sample]:
    """The same rows with `prompt`, `completion` and the columns of the data; None where tokens were deleted."""
    from tailrace.model.load import load_tokenizer

    tokenizer = load_tokenizer(config.model.path) if config.rollout.engine != "emulated" else None
    readers: dict[int, SampleReader] = {}
    try:
        for sample in samples:
            store = sample["store"]
            if store not in readers:
                readers[store] = SampleReader(run / f"samples-{store}.db")
            yield _columns(readers[store], sample) | sample | _texts(readers[store], sample, tokenizer)
    finally:
        for reader in readers.values():
            reader.close()


def _columns(reader: SampleReader, sample: Sample) -> Sample:
    """Those of the data; what a sample has of the same name is the sample's."""
    try:
        return reader.row(sample["prompt_id"]).columns
    except PromptGoneError:
        return {}


def _pieces(reader: SampleReader, sample: Sample) -> Sequence[Piece]:
    """After the prompt; of an attempt that failed, what it failed on."""
    if sample["state"] != "failed":
        return reader.prefix(sample["id"])
    stored = reader.failed(sample["id"], sample["attempt"], sample["prompt_id"])
    return stored.pieces[1:] if stored is not None else ()


def _texts(reader: SampleReader, sample: Sample, tokenizer: Any) -> Sample:
    try:
        prompt = reader.row(sample["prompt_id"]).prompt
        pieces = _pieces(reader, sample)
    except (PromptGoneError, SampleGoneError):
        return {"prompt": None, "completion": None}
    ids = [int(id) for piece in pieces for id in token_ids(piece.tokens)]
    text = tokenizer.decode(ids, skip_special_tokens=True) if tokenizer is not None else None
    return {"prompt": prompt, "completion": text}
