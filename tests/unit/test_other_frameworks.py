"""What somebody from TRL, verl or prime-rl types first gets the right answer: in a file, as an option, as a keyword."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from runs import START
from tailrace.config import ConfigError, from_keywords, load
from tailrace.config.fields import fields
from tailrace.config.files import flat
from tailrace.config.keywords import BARE

SAMPLES, TOKENS = "workload.group_size", "workload.max_completion_tokens"
EVALUATED = ("eval.every", "") if "eval.every" in fields() else ("", "accuracy is measured")
REPORTED = ("log.to", "") if "log.to" in fields() else ("", "run.db")
# the name, our setting (empty: none), and words without which the answer would be wrong
ANSWERS = [
    ("lr", "trainer.learning_rate", ""),
    ("learning_rate", "trainer.learning_rate", ""),
    ("beta", "trainer.kl", ""),
    ("kl_coef", "trainer.kl", "in the loss, not in the reward"),
    ("epsilon", "trainer.clip_low", "the same for trainer.clip_high"),
    ("epsilon_high", "trainer.clip_high", ""),
    ("clip_ratio_low", "trainer.clip_low", ""),
    ("clip_ratio_high", "trainer.clip_high", ""),
    ("loss_type", "trainer.loss", "'dapo' over tokens"),
    ("scale_rewards", "trainer.advantage", "'dr_grpo' does not"),
    ("num_iterations", "", "every sample is trained once"),
    ("ppo_epochs", "", "every sample is trained once"),
    ("ppo_mini_batch_size", "trainer.mini_batches", "train_batch_size / ppo_mini_batch_size"),
    ("ppo_micro_batch_size_per_gpu", "trainer.tokens_per_batch", "in tokens, not sequences"),
    ("per_device_train_batch_size", "workload.prompts_per_step", "/ num_generations"),
    ("gradient_accumulation_steps", "workload.prompts_per_step", "gradient_accumulation_steps / num_generations"),
    ("steps_per_generation", "trainer.mini_batches", "steps_per_generation / gradient_accumulation_steps"),
    ("warmup_ratio", "trainer.warmup_steps", "× run.steps × trainer.mini_batches"),
    ("lr_warmup_steps", "trainer.warmup_steps", "× trainer.mini_batches"),
    ("lr_scheduler_type", "trainer.decay", "'linear'"),
    ("num_generations", SAMPLES, ""),
    ("rollout.n", SAMPLES, ""),
    ("max_completion_length", TOKENS, ""),
    ("max_prompt_length", "workload.prompt_tokens", "prompts are never cut"),
    ("max_response_length", TOKENS, ""),
    ("num_train_epochs", "task.epochs", "whichever comes first"),
    ("total_epochs", "task.epochs", "whichever comes first"),
    ("eval_steps", *EVALUATED),
    ("test_freq", *EVALUATED),
    ("eval_strategy", *EVALUATED),
    ("trainer.val_before_train", "run.evaluate", "while it trains: eval.every"),
    ("actor_rollout_ref.rollout.val_kwargs.n", "eval.samples", ""),
    ("actor_rollout_ref.rollout.val_kwargs.temperature", "eval.temperature", ""),
    ("actor_rollout_ref.rollout.val_kwargs.do_sample", "eval.temperature", "0 is greedy"),
    ("actor_rollout_ref.rollout.val_kwargs.top_p", "", "as training does"),
    ("num_generations_eval", "eval.samples", ""),
    ("early_stopping_patience", "eval.patience", ""),
    ("load_best_model_at_end", "eval.keep_best", "--version best"),
    ("trainer.log_val_generations", "log.samples", ""),
    ("log_completions", "log.samples", "every completion is kept"),
    ("trainer.project_name", "log.project", ""),
    ("data.shuffle", "task.shuffle", ""),
    ("use_kl_in_reward", "trainer.kl", "not in the reward"),
    ("save_steps", "trainer.checkpoint_every", "in training steps"),
    ("save_freq", "trainer.checkpoint_every", "trainer.archive_every = N keeps every Nth"),
    ("save_total_limit", "trainer.keep_checkpoints", "2 or more"),
    ("output_dir", "run.folder", "run.folder/run.name"),
    ("logging_steps", "", "every step"),
    ("report_to", *REPORTED),
    ("train_files", "task.data", "parquet"),
    ("val_files", "task.eval_data", "parquet"),
    ("model_name_or_path", "model.path", "nothing is downloaded"),
    ("reward_funcs", "task.reward", "one function"),
    ("gpu_memory_utilization", "rollout.memory", ""),
    ("tensor_model_parallel_size", "", "rollout.vllm.tensor_parallel_size; to simulate, SPELT(split.tensor_parallel)"),
    ("nnodes", "", "to simulate, SPELT(cluster.gpus)"),
    ("n_gpus_per_node", "", "all GPUs of this machine are used"),
    ("vllm_mode", "", "to simulate, SPELT(split.colocated)"),
    ("use_peft", "", "all weights are trained"),
    ("mask_truncated_completions", "", "trained on like any other"),
    ("actor_rollout_ref.actor.clip_ratio_low", "trainer.clip_low", ""),
    ("actor_rollout_ref.actor.optim.lr", "trainer.learning_rate", ""),
    ("actor_rollout_ref.rollout.n", SAMPLES, ""),
    ("data.max_response_length", TOKENS, ""),
    ("trainer.nnodes", "", "tailrace worker --join"),
    ("orchestrator.group_size", SAMPLES, ""),
    ("ckpt.interval", "trainer.checkpoint_every", ""),
    ("ckpt.keep_last", "trainer.keep_checkpoints", ""),
]
KEYWORDS = {
    "split.tensor_parallel": "tensor_parallel=...",
    "split.colocated": 'split={"colocated": ...}',
    "model.path": "model=...",
    "workload.prompt_tokens": "prompt_tokens=...",
}


def as_keyword(key: str) -> str:
    section, word = key.rsplit(".", 1)
    return KEYWORDS.get(key) or (f"{section}_{word}=..." if section in BARE else f"{word}=...")


def refusal_in_a_file(name: str, folder: Path) -> str:
    file = folder / "mine.toml"
    file.write_text(f"{name} = 1\n")
    with pytest.raises(ConfigError) as caught:
        load([file])
    return str(caught.value)


def refusal_of_an_option(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load([], [f"--{name}", "1"])
    return str(caught.value)


def refusal_of_a_keyword(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        from_keywords({name: 1})
    return str(caught.value)


def expected(key: str, words: str, spell) -> list[str]:
    spelt = words
    for one in ("split.tensor_parallel", "cluster.gpus", "split.colocated"):
        spelt = spelt.replace(f"SPELT({one})", spell(one))
    advice = f"write {spell(key)}" if key else ""
    return [spelt, advice]


def says(sentence: str, parts: list[str]) -> bool:
    return all(part in sentence or part.replace("write ", "did you mean ") in sentence for part in parts)


@pytest.mark.parametrize(("name", "key", "words"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_a_name_of_another_framework_gets_the_right_answer(name: str, key: str, words: str, tmp_path: Path) -> None:
    in_a_file, option = refusal_in_a_file(name, tmp_path), refusal_of_an_option(name)
    assert says(in_a_file, expected(key, words, lambda each: each)), in_a_file
    assert says(option, expected(key, words, lambda each: f"--{each}")), option
    if name != "learning_rate":  # which is ours, as a keyword
        keyword = refusal_of_a_keyword(name)
        assert says(keyword, expected(key, words, as_keyword)), keyword


def test_keywords_are_settings_by_section_by_dotted_key_and_by_a_name_that_one_section_has() -> None:
    config = from_keywords(
        {"workload": {"group_size": 4, "lengths": {"sigma": 0.5}}, "trainer.kl": 0.1, "learning_rate": 1e-5, "seed": 7}
        | {"model": {"preset": "qwen2.5-7b"}, "stop": ("</answer>",), "rollout_threads": 3}
    )
    assert (config.workload.group_size, config.workload.lengths.sigma, config.trainer.kl) == (4, 0.5, 0.1)
    assert (config.trainer.learning_rate, config.run.seed, config.sampling.stop) == (1e-5, 7, ("</answer>",))
    assert config.rollout.threads == 3


def test_a_keyword_that_several_sections_have_is_refused_with_what_to_write() -> None:
    sentence = refusal_of_a_keyword("threads")
    assert 'rollout={"threads": ...}' in sentence
    assert 'trainer={"threads": ...}' in sentence


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("--trainer.loss bnpo", "write 'dapo'"),
        ("--trainer.loss rloo", "trainer.advantage = 'rloo'"),
        ("--trainer.loss luspo", "not here"),
        ("--trainer.decay constant_with_warmup", "trainer.warmup_steps"),
    ],
)
def test_a_value_of_another_framework_gets_the_right_answer(option: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        load([], option.split())


GUIDE = (Path(__file__).parents[2] / "docs" / "from_other_frameworks.md").read_text()


def test_the_tables_of_the_guide_say_what_the_answers_say() -> None:
    rows = [line.split("|")[1:3] for line in GUIDE.splitlines() if line.startswith("| `")]
    pairs = [(name, key.strip().strip("`")) for names, key in rows for name in names.replace("`", "").split(",")]
    assert len(pairs) > 80
    for name, key in pairs:
        if key in fields():
            sentence = refusal_of_an_option(name.strip()) if name.strip() != "learning_rate" else f"--{key}"
            assert f"--{key}" in sentence, (name, sentence)


def test_the_ports_of_the_guide_are_settings() -> None:
    blocks = GUIDE.split("```toml\n")[1:]
    assert len(blocks) == 3
    for block in blocks:
        values = dict(flat(tomllib.loads(block.partition("```")[0])))
        assert from_keywords(values | {"model.path": START}).workload.group_size in (8, 16)


def test_the_port_to_python_has_settings_that_exist() -> None:
    trainer = {"learning_rate": 2e-6, "kl": 0.01, "clip_low": 0.2, "clip_high": 0.28, "loss": "dapo"}
    given = {"prompts_per_step": 8, "group_size": 8, "max_completion_tokens": 512, "mini_batches": 1, "steps": 200}
    config = from_keywords(
        given | {"trainer": trainer | {"checkpoint_every": 50}, "kind": "sync", "model": {"preset": "qwen2.5-7b"}}
    )
    assert (config.schedule.kind, config.trainer.mini_batches, config.trainer.clip_high) == ("sync", 1, 0.28)
