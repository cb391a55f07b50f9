"""Samples of a run as text: read from `run.db` and from the files of its sample stores, and decoded.

What is not there, because its store is on another machine or its tokens were deleted, is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from tailrace.config.tree import Config
from tailrace.samples.messages import StoredSample
from tailrace.samples.reader import SampleReader
from tailrace.samples.schema import sample_file
from tailrace.sinks.base import SampleText
from tailrace.store.errors import JournalError
from tailrace.store.trajectories import KnownTrajectory, trajectories_among
from tailrace.types import StoreId, TrajectoryId, token_ids

Decode = Callable[[Sequence[int]], str]


class SampleTexts:
    def __init__(self, run: Path, config: Config) -> None:
        self._run = run
        self._config = config
        self._readers: dict[StoreId, SampleReader | None] = {}

    @cached_property
    def _decode(self) -> Decode:
        """With the first sample: a simulated run has none, and no tokenizer."""
        return decoder(self._config)

    def read(self, step: int, ids: Sequence[TrajectoryId]) -> Iterator[SampleText]:
        for known in trajectories_among(self._run, ids):
            stored = self.stored(known)
            if stored is not None:
                yield self._text(step, known, stored)

    def stored(self, known: KnownTrajectory) -> StoredSample | None:
        """Its tokens, if they are to be had."""
        try:
            if known.store not in self._readers:
                self._readers[known.store] = self._reader(known.store)
            reader = self._readers[known.store]
            return reader.read([known.id])[0] if reader is not None else None
        except JournalError:
            return None

    def text(self, stored: StoredSample) -> tuple[str, str]:
        """Prompt and completion."""
        prompt, *pieces = [token_ids(bytes(piece.tokens)).tolist() for piece in stored.pieces]
        return self._decode(prompt), self._decode([token for piece in pieces for token in piece])

    def _text(self, step: int, known: KnownTrajectory, stored: StoredSample) -> SampleText:
        figures = (known.reward, known.tokens or 0, known.finish)
        return SampleText(step, known.id, known.group, *self.text(stored), *figures)

    def _reader(self, store: StoreId) -> SampleReader | None:
        path = sample_file(self._run, store)
        return SampleReader(path) if path.exists() else None

    def close(self) -> None:
        for reader in self._readers.values():
            if reader is not None:
                reader.close()


def decoder(config: Config) -> Decode:
    """Tokens into text; the numbers themselves where an emulated engine made them."""
    if config.rollout.engine == "emulated":
        return lambda tokens: " ".join(map(str, tokens))
    from tailrace.model.load import load_tokenizer

    tokenizer = load_tokenizer(config.model.path)
    return lambda tokens: str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
