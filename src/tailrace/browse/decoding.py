"""Tokens of a run as text: by the tokenizer of its model, or of one of its checkpoints.

`pieces` gives the text of each token, for colours per token. A letter that takes several tokens belongs to the last of
them. Where no tokenizer is at hand, tokens are shown by their numbers; those of an emulated engine are letters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tailrace.config.tree import Config
from tailrace.errors import TailraceError

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for a letter that is not complete
FIRST_SURROGATE = 0xD800  # from here on a number may be no letter
LONGEST_LETTER = 8  # tokens; what is broken for longer is no letter

Decode = Callable[[Sequence[int]], str]


class TokenDecoder:
    def __init__(self, decode: Decode, known: bool) -> None:
        self.text = decode
        self.known = known  # by a tokenizer; else these are numbers

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """One text per token, which together are the text of all."""
        found: list[str] = []
        start = 0  # of the tokens that are decoded together: what was before the last whole letter gives them context
        whole = 0  # letters of these that were given out
        for end in range(1, len(ids) + 1):
            text = self.text(ids[start:end])
            if text.endswith(BROKEN) and end - start <= LONGEST_LETTER and end < len(ids):
                found.append("")
                continue
            found.append(text[whole:])
            start, whole = end - 1, len(self.text(ids[end - 1 : end]))
        return found


def decoder_of(config: Config, folder: Path) -> TokenDecoder:
    """For a run in this folder."""
    for path in _candidates(config, folder):
        found = _tokenizer(path)
        if found is not None:
            return TokenDecoder(found, known=True)
    return TokenDecoder(_letters if config.rollout.engine == "emulated" else _numbers, known=False)


def _candidates(config: Config, folder: Path) -> list[str]:
    """Where a tokenizer may lie: the model may not be on this machine any more."""
    saved = sorted((folder / "checkpoints").glob("step-*"), reverse=True)
    return [*filter(None, [config.model.path]), *map(str, saved[:1])]


def _tokenizer(path: str) -> Decode | None:
    from tailrace.model.load import load_tokenizer, model_folder

    try:
        file = model_folder(path) / "tokenizer.json"
        if file.is_file():
            return _fast(file)
        tokenizer: Any = load_tokenizer(path)
    except (TailraceError, OSError):
        return None
    return lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _fast(file: Path) -> Decode | None:
    """Without transformers, which takes seconds and hundreds of megabytes."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # a library that parses foreign files may raise anything
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def _letters(ids: Sequence[int]) -> str:
    return "".join(chr(id) if 0 <= id < FIRST_SURROGATE else BROKEN for id in ids)


def _numbers(ids: Sequence[int]) -> str:
    return "".join(f"{id} " for id in ids)
