"""Prompts by place, and text into tokens: through a chat template, as plain text, and between turns."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tailrace.config.errors import ConfigError
from tailrace.config.tree import Config, Run, TaskSettings, Workload
from tailrace.envs.base import Row, Scored, Turn
from tailrace.envs.prompts import Prompts, order
from tailrace.envs.rendering import Rendering
from tailrace.scoring import EvalSet
from tailrace.types import EVALUATION

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}[{{ m['role'] }}]{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
MARKS = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
START, END = 256, 257


def tokenizer(template: str | None = CHATML, limit: int = 10**30) -> PreTrainedTokenizerFast:
    """Bytes, with a start and an end token; as plain text it begins with the start token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", *MARKS])
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", START)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=template,
        model_max_length=limit,
    )


def spaced(template: str | None, prepend: bool = True) -> PreTrainedTokenizerFast:
    """As SentencePiece has it: spaces are letters, one is put in front and taken away again, the rest is bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"aerstx2[]/<>|_\n", "▁x", "▁2"]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = models.BPE(vocabulary, [("▁", "x"), ("▁", "2")], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    steps = [*([normalizers.Prepend("▁")] if prepend else []), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    trimmed = [decoders.Strip(" ", 1, 0)] if prepend else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *trimmed]
    )
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>", *MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def text_of(tokens: tuple[int, ...]) -> str:
    return str(tokenizer().decode(list(tokens)))


class Numbered:
    """Rows 0 to `size`, two held out."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def row(self, index: int) -> dict[str, Any]:
        return {"prompt": f"row {index}", "answer": str(index)}

    def held_out(self) -> list[dict[str, Any]]:
        return [self.row(self.size), self.row(self.size + 1)]

    def respond(self, row: Row, transcript: tuple[Turn, ...]) -> Scored:
        return Scored(0.0)


def prompts(size: int = 5, completion: int = 10, context: int | None = None, seed: int = 0, **settings) -> Prompts:
    config = Config(
        task=TaskSettings(**settings), run=Run(seed=seed), workload=Workload(max_completion_tokens=completion)
    )
    return Prompts(Numbered(size), tokenizer(), config, context)


@given(st.integers(0, 2**40), st.integers(0, 100), st.integers(1, 200))
def test_an_epoch_shows_every_row_once(seed: int, attempt: int, size: int) -> None:
    assert sorted(order(seed, attempt, size)) == list(range(size))


@given(st.integers(0, 40), st.integers(1, 40))
def test_a_row_depends_on_its_place_alone(start: int, count: int) -> None:
    source = prompts(size=7)
    rows = source.rows(start, count)
    assert [row.id for row in rows] == list(range(start, start + count))
    assert rows == [source.rows(place, 1)[0] for place in range(start, start + count)]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    assert len({order(seed, attempt, 50) for seed in range(4) for attempt in range(4)}) == 16
    in_order = prompts(shuffle=False).rows(3, 4)
    assert [row.columns["answer"] for row in in_order] == ["3", "4", "0", "1"]


def test_held_out_rows_have_ids_that_are_no_places() -> None:
    source = prompts()
    rows = source.held_out()
    assert [(row.id, row.prompt) for row in rows] == [(EVALUATION, "row 5"), (EVALUATION + 1, "row 6")]
    assert source.eval_rows(EVALUATION + 1, 1) == rows[1:]
    assert source.eval_sets == (EvalSet("held_out", 2),)


def test_a_prompt_goes_through_the_chat_template() -> None:
    row = prompts(system="Be brief.").rows(0, 1)[0]
    text = text_of(row.ids.tolist())
    assert (
        text
        == f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{row.prompt}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages_keep_their_own_system_message() -> None:
    messages = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hi"}]
    tokens = Rendering(tokenizer(), TaskSettings(system="Yours.")).prompt_tokens(messages)
    text = text_of(tokens)
    assert "Mine." in text
    assert "Yours." not in text


def test_plain_text_begins_as_the_tokenizer_likes_it() -> None:
    for rendering in (
        Rendering(tokenizer(template=None), TaskSettings(system="Add.")),
        Rendering(tokenizer(), TaskSettings(chat=False, system="Add.")),
    ):
        tokens = rendering.prompt_tokens("1 + 1 =")
        assert tokens[0] == START
        assert text_of(tokens[1:]) == "Add.\n\n1 + 1 ="


@pytest.mark.parametrize("template", [CHATML, STRICT])
def test_turns_joined_by_tokens_read_as_the_template_has_them(template: str) -> None:
    rendering = Rendering(tokenizer(template), TaskSettings())
    turns = ["<tool>1+1</tool>", "<tool>2+2</tool>", "done"]
    tokens = rendering.prompt_tokens("Go")
    messages = [{"role": "user", "content": "Go"}]
    for number, turn in enumerate(turns):
        said = rendering._tokens(turn) + ((END,) if number == 1 else ())  # once it ends its turn by itself
        tokens += said + rendering.observation_tokens(f"result {number}", said)
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": f"result {number}"}]
    assert tokens == rendering.prompt_tokens(messages)


def test_plain_turns_are_joined_by_marks() -> None:
    rendering = Rendering(tokenizer(template=None), TaskSettings())
    assert text_of(rendering.observation_tokens("4")) == "\n<result>4</result>\n"


IN_BYTES = [tokenizer(template) for template in (None, CHATML, STRICT, LLAMA3, GEMMA, MISTRAL)]
SPACED = [*[spaced(template) for template in (None, CHATML, LLAMA3, MISTRAL)], spaced(GEMMA, prepend=False)]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))  # the letter that stands for a space


@pytest.mark.parametrize("tokenizer", [*IN_BYTES, *SPACED])
@example(["2", " 2 ", "2\n", "\n2", "", "a , b .", "x</result>\n", "user\n2\nassistant\n", "x [/INST]"])
@given(st.lists(TEXTS, max_size=3))
def test_an_observation_comes_back_from_its_tokens_as_it_was_written(tokenizer: Any, texts: list[str]) -> None:
    rendering = Rendering(tokenizer, TaskSettings())
    for text in [*texts, "<|im_end|>"] if tokenizer in IN_BYTES else texts:
        whole = rendering.observation_tokens(text)
        shortened = rendering.observation_tokens(text, whole[:1])  # behind a turn that ended with the template's token
        for tokens in (whole, shortened):
            assert rendering.observation_text(tokens) == text
            for cut in range(0, len(tokens), 3):
                assert text.startswith(rendering.observation_text(tokens[:cut])), "as much of it as fitted"


def test_a_turn_is_text_without_the_token_that_ended_it() -> None:
    rendering = Rendering(tokenizer(), TaskSettings())
    said = rendering._tokens("a , b <tool>1</tool>")
    assert rendering.turn_text((*said, END)) == rendering.turn_text(said) == "a , b <tool>1</tool>"
    marked = rendering._tokens("2~")  # an end token that the tokenizer does not know to be special
    assert rendering.turn_text(marked, ends={marked[-1]}) == "2"


def test_what_cannot_be_rendered_is_refused() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ConfigError, match=r"no chat template; write task.chat = false"):
        Rendering(tokenizer(template=None), TaskSettings(chat=True))
    with pytest.raises(ConfigError, match="list of messages, but there is no chat template"):
        Rendering(tokenizer(template=None), TaskSettings()).prompt_tokens(messages)
    with pytest.raises(ConfigError, match="refuses messages of system, user: no system role"):
        Rendering(tokenizer(STRICT), TaskSettings(system="Be brief.")).prompt_tokens(messages)
    with pytest.raises(ConfigError, match="turns cannot be joined"):
        Rendering(tokenizer("{{ messages[0]['content'] }}"), TaskSettings()).observation_tokens("4")


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused() -> None:
    fits = prompts().rows(0, 1)[0].length + 10
    prompts(context=fits).rows(0, 5)
    with pytest.raises(
        ConfigError, match=rf"max_completion_tokens = 11 that is more than the model's context of {fits}"
    ):
        prompts(context=fits, completion=11).rows(0, 1)
    long = prompts(size=11, context=fits)
    with pytest.raises(ConfigError, match="the prompt of training row 11 has"):
        long.check(range(11))
    with pytest.raises(ConfigError, match="the prompt of held-out row 1 has"):
        prompts(size=10, context=fits).check(range(10))
    prompts(size=8, context=fits).check(range(8))


def test_a_column_that_cannot_travel_is_refused() -> None:
    source = prompts()
    source.task.row = lambda index: {"prompt": "a", "answer": {1, 2}, "size": object()}
    with pytest.raises(ConfigError, match="column 'size' of a row cannot be sent"):
        source.check(range(5))


def test_a_row_that_comes_up_again_is_not_rendered_again(monkeypatch):
    prompts = Prompts(Numbered(3), tokenizer(), Config(task=TaskSettings(shuffle=False)))
    first = prompts.rows(0, 3)
    monkeypatch.setattr(prompts.rendering, "prompt_tokens", lambda prompt: pytest.fail("rendered twice"))
    again = prompts.rows(3, 3)
    assert [row.id for row in again] == [3, 4, 5]
    assert [row.tokens for row in again] == [row.tokens for row in first]


def test_what_is_kept_of_rendered_rows_is_bounded(monkeypatch):
    monkeypatch.setattr("tailrace.envs.prompts.KEPT_BYTES", 1)
    prompts = Prompts(Numbered(3), tokenizer(), Config(task=TaskSettings(shuffle=False)))
    first = prompts.rows(0, 3)
    assert [row.tokens for row in prompts.rows(3, 3)] == [row.tokens for row in first]
    assert len(prompts._kept) == 1
