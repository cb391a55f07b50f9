"""Text into tokens, once: prompts through the chat template or as they are, and what the policy reads between turns.

Token in, token out: what the policy sampled is never turned into text and back. An observation is tokenised alone,
together with the words of the template that stand between the end of an assistant's turn and the start of its next.
Whoever judges a transcript gets the other direction: text without the template's words, from the tokens alone, so that
an episode can be taken up anywhere. Used by `prompts.py` in the controller and by the episodes of a replica. No tensor
library is needed.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tailrace.config.errors import ConfigError
from tailrace.config.tree import TaskSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = tuple[int, ...]

# Stand-ins for contents while the words around them are cut out of a rendered conversation: plain letters, because a
# template may strip or rewrite anything else.
QUESTION, ANSWER, OBSERVATION = "TAILRACEQUESTION", "TAILRACEANSWER", "TAILRACEOBSERVATION"


class Rendering:
    """One tokenizer, used as the task's settings say."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TaskSettings) -> None:
        has_template = bool(tokenizer.chat_template)
        if settings.chat and not has_template:
            raise ConfigError("task.chat is true, but the tokenizer has no chat template; write task.chat = false")
        self.tokenizer, self.system = tokenizer, settings.system
        self.chat = has_template if settings.chat is None else settings.chat

    def prompt_tokens(self, prompt: str | list[dict[str, Any]]) -> Tokens:
        """What the policy goes on from."""
        if self.chat:
            return self._tokens(self._conversation(self._messages(prompt)))
        if not isinstance(prompt, str):
            raise ConfigError(
                "a prompt is a list of messages, but there is no chat template to render it through; "
                "write prompts as text, or use a tokenizer with a template"
            )
        text = f"{self.system}\n\n{prompt}" if self.system else prompt
        return tuple(self.tokenizer(text)["input_ids"])  # type: ignore[arg-type]

    def observation_tokens(self, text: str, after: Sequence[int] = ()) -> Tokens:
        """What to put behind a policy's turn (`after`) so that it reads the text and has the next turn."""
        before, behind = self._glue
        tokens = self._tokens(before + text + behind)
        closed = tokens and after and after[-1] == tokens[0] and tokens[0] in self._ends
        return tokens[1:] if closed else tokens  # the policy has ended its turn with the template's own token

    def observation_text(self, tokens: Sequence[int]) -> str:
        """What `observation_tokens` was given for these; of those that were cut at their end, as much as they show."""
        before, behind = self._decoded_glue
        opening = self._marked[0]
        missing = opening in self._ends and [*tokens[:1]] != [opening]  # it was the policy's own last token
        text = self._decoded((opening, *tokens) if missing else tokens)
        if before.startswith(text):
            return ""
        text = text.removeprefix(before)
        return text.removesuffix(behind) if text.endswith(behind) else _without_beginning_of(behind, text)

    def turn_text(self, tokens: Sequence[int], ends: Container[int] = ()) -> str:
        """What the policy wrote, without the token that ended its turn (one of `ends`) and other special ones."""
        said = list(tokens[:-1] if tokens and tokens[-1] in ends else tokens)
        return str(self.tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @cached_property
    def _marked(self) -> Tokens:
        """An observation that is only a mark."""
        before, behind = self._glue
        return self._tokens(before + OBSERVATION + behind)

    @cached_property
    def _decoded_glue(self) -> tuple[str, str]:
        """The words around an observation as they come back from tokens: a tokenizer may add or drop a space there."""
        before, found, behind = self._decoded(self._marked).partition(OBSERVATION)
        return (before, behind) if found else self._glue

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def _glue(self) -> tuple[str, str]:
        if not self.chat:
            return "\n<result>", "</result>\n"
        turns = [_message("user", QUESTION), _message("assistant", ANSWER), _message("user", OBSERVATION)]
        rendered = self._conversation(turns)
        before, found, behind = rendered.rpartition(ANSWER)[2].partition(OBSERVATION)
        if not found:
            raise ConfigError(
                "the tokenizer's chat template does not show a message that follows the assistant's, so turns cannot "
                "be joined; write task.chat = false"
            )
        return before, behind

    @cached_property
    def _ends(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids)

    def _messages(self, prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        messages = [_message("user", prompt)] if isinstance(prompt, str) else prompt
        has_system = messages[0]["role"] == "system"
        return [_message("system", self.system), *messages] if self.system and not has_system else messages

    def _conversation(self, messages: list[dict[str, Any]]) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ConfigError(f"the tokenizer's chat template refuses messages of {roles}: {error}") from None
        assert isinstance(text, str)
        return text

    def _tokens(self, text: str) -> Tokens:
        """Without the tokenizer's own start token: a template writes what it wants."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])  # type: ignore[arg-type]


def _without_beginning_of(behind: str, text: str) -> str:
    """A text that was cut, perhaps in the middle of what follows it, or in the middle of a letter."""
    size = next((size for size in range(len(behind), 0, -1) if text.endswith(behind[:size])), 0)
    return text[: len(text) - size].rstrip("\ufffd")


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
