"""Settings: how files and options compose, what is refused and with which words, and that TOML round-trips."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config import Config, ConfigError, load, render, with_values
from tailrace.config.check import check
from tailrace.config.fields import fields, leaf
from tailrace.config.hf_config import shape_of
from tailrace.config.model_shapes import SHAPES, lookup
from tailrace.config.other_frameworks import FRAMEWORK_NAMES, VALUES
from tailrace.sim.cost_model import check_fit

MODEL = ["--model.preset", "qwen2.5-7b"]


def file(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refusal(paths: list[Path], words: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(paths, words)
    return str(caught.value)


# --- composing -------------------------------------------------------------------------------------------------------


def test_defaults_with_a_model() -> None:
    config = load([], MODEL)
    assert config == Config(model=config.model)
    assert config.model.parameters == 7_615_616_512
    assert config.model.kv_bytes_per_token == 2 * 28 * 4 * 128 * 2


def test_files_compose_left_to_right_and_options_come_last(tmp_path: Path) -> None:
    base = file(tmp_path, 'model.preset = "qwen3-8b"\n[schedule]\nkind = "sync"\nmax_staleness = 1\n', "base.toml")
    mine = file(tmp_path, '[schedule]\nkind = "partial"\n[run]\nsteps = 3\n', "mine.toml")
    config = load([base, mine], ["--run.steps", "7"])
    assert (config.schedule.kind, config.schedule.max_staleness, config.run.steps) == ("partial", 1, 7)


def test_extends_is_relative_to_the_file_and_comes_first(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    file(tmp_path, 'model.preset = "qwen3-8b"\nrun.steps = 2\nrun.seed = 9\n', "shared/base.toml")
    file(tmp_path, 'extends = "base.toml"\nrun.steps = 3\n', "shared/more.toml")
    mine = file(tmp_path, 'extends = ["shared/base.toml", "shared/more.toml"]\nschedule.kind = "sync"\n')
    config = load([mine], [])
    assert (config.run.steps, config.run.seed, config.schedule.kind) == (3, 9, "sync")


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["--schedule.kind", "sync"], "schedule.kind", "sync"),
        (["--schedule.kind=sync"], "schedule.kind", "sync"),
        (["--schedule.kind='sync'"], "schedule.kind", "sync"),
        (["--schedule.max-staleness", "2"], "schedule.max_staleness", 2),
        (["--repack.enabled", "false"], "repack.enabled", False),
        (["--repack.enabled", "false", "--repack.enabled"], "repack.enabled", True),
        (["--repack.enabled", "--run.steps", "4"], "run.steps", 4),
        (["--split.colocated"], "split.colocated", True),
        (["--split.colocated", "true", "--split.colocated", "unset"], "split.colocated", None),
        (["--schedule.steps_ahead", "1"], "schedule.steps_ahead", 1.0),
        (["--cluster.gpus", "1e3"], "cluster.gpus", 1000),
        (["--cluster.gpus", "1_024"], "cluster.gpus", 1024),
        (["--split.trainer_share", ".25"], "split.trainer_share", 0.25),
        (["--workload.lengths.drift_per_step", "-0.01"], "workload.lengths.drift_per_step", -0.01),
        (["--run.name", "7"], "run.name", "7"),
        (["--run.name", "true"], "run.name", "true"),
        (["--run.name="], "run.name", ""),
        (["--run.name=a=b"], "run.name", "a=b"),
    ],
)
def test_options(words: list[str], key: str, value: object) -> None:
    read: Any = load([], [*MODEL, *words])
    for name in key.split("."):
        read = getattr(read, name)
    assert read == value
    assert type(read) is type(value)


def test_the_default_law_of_lengths_stays_until_two_figures_are_given() -> None:
    assert load([], [*MODEL, "--workload.lengths.correlation", "0.1"]).workload.lengths.median == 2000
    given_law = ["--workload.lengths.mean", "3000", "--workload.lengths.p99", "30000"]
    assert load([], MODEL + given_law).workload.lengths.median == 0


# --- refusing --------------------------------------------------------------------------------------------------------

BAD_OPTIONS = [
    ("--schedule.max_stalenes 3", "--schedule.max_stalenes is not an option; did you mean --schedule.max_staleness?"),
    ("--max_staleness 3", "did you mean --schedule.max_staleness?"),
    ("--rollout.max_staleness 3", "did you mean --schedule.max_staleness?"),
    ("--lengths.sigma 3", "did you mean --workload.lengths.sigma?"),
    ("--turns.mean 3", "did you mean --workload.turns.mean?"),
    ("--zzz.qqq 3", "--dry-run prints every setting"),
    ("--schedule sync", "--schedule is a section, not a setting; write one of its settings"),
    ("--schedule.max_staleness", "--schedule.max_staleness has no value"),
    ("--schedule.max_staleness four", "'four'; it wants a whole number of 0 or more"),
    ("--schedule.max_staleness -1", "is -1; it wants a whole number of 0 or more"),
    ("--schedule.max_staleness 1.5", "is 1.5; it wants a whole number"),
    ("--schedule.max_staleness true", "is 'true'; it wants a whole number"),
    (
        "--schedule.kind Trajectry",
        "'Trajectry'; it wants 'sync', 'one_step', 'stream', 'partial', 'trajectory' or 'adaptive'",
    ),
    ("--schedule.kind trajectry", "did you mean 'trajectory'?"),
    ("--repack.enabled maybe", "--repack.enabled is 'maybe'; it wants true or false"),
    ("--repack.every_s 0", "it wants a number of 0.01 or more"),
    ("--split.trainer_share 1.2", "it wants a number from 0 to 1"),
    ("--split.colocated 2", "it wants true or false (or 'unset')"),
    ("--workload.reward_s nan", "finite"),
    ("--workload.reward_s inf", "finite"),
    ("--workload.lengths.drift_per_step nan", "finite"),
    ("schedule.kind sync", "'schedule.kind' is not an option"),
    ("-s sync", "two dashes"),
    ("--run.stepz 1 --run.sede 2 --run.nam x", "did you mean --run.steps? (and 2 more)"),
    ("--num_generations 8", "--num_generations is TRL's name, not an option here; write --workload.group_size"),
    ("--num-generations 8", "write --workload.group_size"),
    ("--actor_rollout_ref.rollout.n 8", "verl's name, not an option here; write --workload.group_size"),
    ("--max_off_policy_steps 8", "prime-rl's name, not an option here; write --schedule.max_staleness"),
    ("--async_training.staleness_threshold 0.5", "--schedule.steps_ahead (max_staleness is the bound in versions)"),
    ("--max_head_offpolicyness 4", "--schedule.max_staleness (and the same for schedule.steps_ahead)"),
    ("--cluster.network_gbytes_per_s 0", "it wants a number above 0"),
    ("--partial_rollout", "schedule.kind (write schedule.kind = 'partial')"),
]


@pytest.mark.parametrize(("words", "expected"), BAD_OPTIONS)
def test_bad_options_are_refused_with_a_way_out(words: str, expected: str) -> None:
    assert expected in refusal([], MODEL + words.split())


BAD_RULES = [
    ("--relay.listen everywhere", 'relay.listen is "everywhere", which is no address'),
    ("--relay.listen 0.0.0.0", 'relay.listen is "0.0.0.0", which is everywhere; write the network of your hosts'),
    ("--model.parameters 0 --model.preset=", "no model is given; write model.path"),
    ("--model.preset= --model.parameters 7e9", "model.layers is missing"),
    ("--model.preset qwen2.5-7", "model.preset is 'qwen2.5-7', which is not a known shape; did you mean 'qwen2.5-7b'?"),
    ("--model.preset gpt", "known"),
    ("--model.hf_config x.json", "model.preset and model.hf_config both"),
    ("--model.kv_heads 3", "model.heads is 28, which 3 kv_heads cannot share"),
    ("--model.active_parameters 8e9", "active_parameters is more than model.parameters"),
    ("--model.bytes_per_kv 0", "write 2 for bfloat16"),
    ("--cluster.gpus 8 --split.trainer_gpus 9", "split.trainer_gpus is 9 but cluster.gpus is 8"),
    ("--cluster.gpus 8 --split.trainer_gpus 8", "split.trainer_gpus gives the trainer all 8 GPUs"),
    ("--split.trainer_share 1", "split.trainer_share gives the trainer all 8 GPUs"),
    ("--cluster.gpus 1 --split.colocated false", "split.colocated = true"),
    ("--cluster.gpus 8 --split.trainer_gpus 7 --split.tensor_parallel 2", "only 1 GPUs generate, so no replica fits"),
    (
        "--cluster.gpus 64 --cluster.gpus_per_host 8 --split.tensor_parallel 14",
        "neither within a host of 8 GPUs nor whole hosts",
    ),
    ("--split.tensor_parallel 3", "does not divide the model's heads; write one of 1, 2, 4, 7, 14, 28"),
    (
        "--split.trainer_gpus 4 --split.trainer_parallel 3",
        "split.trainer_parallel is 3, which does not divide the trainer's 4 GPUs",
    ),
    (
        "--workload.prompts_per_step 2 --trainer.mini_batches 4",
        "trainer.mini_batches is 4, more than workload.prompts_per_step",
    ),
    ("--workload.group_size 1 --groups.min_survivors 2", "min_survivors is 2, more than workload.group_size; write 1"),
    ("--workload.group_size 1 --groups.filter zero_advantage", "every group would be left out; write larger groups"),
    ("--groups.max_filtered 9 --groups.filter none", "groups.max_filtered is used with a groups.filter alone"),
    (
        "--workload.lengths.mean 9 --workload.lengths.median 8 --workload.lengths.sigma 1",
        "has median and mean and sigma; two determine the law, so set the others to 0",
    ),
    ("--workload.lengths.mean 9 --workload.lengths.median 10", "mean is below the median"),
    ("--workload.lengths.p99 9 --workload.lengths.median 10", "p99 is not above"),
    ("--workload.lengths.law fixed --workload.lengths.mean 1 --workload.lengths.median 1", "set one of them to 0"),
    ("--workload.lengths.law lognormal --workload.lengths.tail_share 0.1", "law = 'mixture'"),
    ("--workload.lengths.median 9 --workload.lengths.sigma 1 --workload.lengths.file x", "law = 'empirical'"),
    ("--workload.lengths.law empirical", "no workload.lengths.file"),
    ("--workload.lengths.drift_per_step -1", "above -1"),
    ("--workload.turns.mean 3 --workload.turns.maximum 2", "raise the maximum"),
    ("--schedule.kind one_step --schedule.max_staleness 0", "'one_step' trains one version behind"),
    (
        "--schedule.kind stream --schedule.steps_ahead 5 --schedule.max_staleness 4",
        "below steps_ahead, so 'stream' never trains; write 5 or more",
    ),
    ("--schedule.publish_every 6 --schedule.max_staleness 4", "too few until the next publish; write 5 or more"),
    ("--health.backoff_s 90 --health.backoff_max_s 60", "health.backoff_max_s is below"),
    ("--relay.transport nixl", "which neither authenticates nor encrypts; write relay.interface"),
    ("--relay.transport nixl --relay.interface 10.0.0/24x", 'relay.interface is "10.0.0/24x", which is no network'),
    ("--trainer.dual_clip 0.9", "trainer.dual_clip is 0.9, so that bad tokens of fresh data would teach nothing"),
]


@pytest.mark.parametrize(("words", "expected"), BAD_RULES)
def test_settings_that_cannot_work_together(words: str, expected: str) -> None:
    assert expected in refusal([], MODEL + words.split())


def test_a_pareto_tail_without_a_mean_is_refused() -> None:
    lengths = ["--workload.lengths.law=mixture", "--workload.lengths.median=900", "--workload.lengths.sigma=1"]
    tail = ["--workload.lengths.tail_share", "0.1", "--workload.lengths.tail_alpha"]
    assert load([], [*MODEL, *lengths, *tail, "1.5"]).workload.lengths.tail_alpha == 1.5
    assert "tail_alpha = 0.9 has no finite mean; write a value above 1" in refusal([], [*MODEL, *lengths, *tail, "0.9"])


BAD_FILES = [
    ("[schedule\n", "run.toml is not valid TOML", "line 1"),
    ("[schedule]\nkind = \n", "run.toml is not valid TOML", "line 2"),
    ("[schedul]\nkind = 'sync'\n", "run.toml: schedul.kind is not a setting", "did you mean schedule.kind?"),
    ("[schedul]\n", "run.toml: schedul is not a setting", ""),
    ("schedule = 'sync'\n", "run.toml: schedule is a section", "for example schedule.kind"),
    ("[schedule.kind]\nname = 'sync'\n", "schedule.kind is a single value", "write schedule.kind = ..."),
    ("[schedule]\nmax_staleness = 'four'\n", "run.toml: schedule.max_staleness is 'four'", "0 or more"),
    ("[schedule]\nmax_staleness = [1]\n", "schedule.max_staleness is a list", "whole number"),
    ("[run]\nname = 3\n", "run.name is 3", "text in quotes"),
    ("[repack]\nenabled = 'true'\n", "repack.enabled is 'true'", "true or false"),
    ("[faults]\ndelay_s = nan\n", "faults.delay_s is nan", "finite"),
    (
        "[task]\nreward = ['a.py:f', 'b.py:g']\n",
        "run.toml: task.reward is a list",
        "write one function that calls the others",
    ),
    ("[task]\nname = ['a.py:f', 'b.py:g']\n", "run.toml: task.name is a list", "text in quotes"),
    ("[log]\nto = ['jsonl', 'tensorbord']\n", "log.to has 'tensorbord'", "did you mean 'tensorboard'?"),
    ("[rollout]\nprices = [1, 'free']\n", "rollout.prices has 'free'", "it wants"),
    ("[task]\ndata = 2020-01-01\n", "task.data is a date or time", "text in quotes"),
    ('[task]\ndata = "a\\u0000b"\n', "task.data is 'a\\x00b'", "it has a zero byte"),
    (f"[cluster]\ngpus = 1{'0' * 400}\n", "cluster.gpus is a number of more than 100 digits", "none above 1e+15"),
    (f"[task]\ntools = '{'x' * 400}'\n", "task.tools is 'xxx", "...; it wants"),
    ("[data]\ntrain_batch_size = 8\n", "verl and SkyRL's name", "write workload.prompts_per_step"),
    ("extends = 3\n", "run.toml: extends wants a file name", "base.toml"),
    ("extends = 'run.toml'\n", "run.toml extends itself", "run.toml -> run.toml"),
    ("extends = 'bsae.toml'\n", "bsae.toml does not exist", "base.toml?"),
]


@pytest.mark.parametrize(("text", "expected", "also"), BAD_FILES)
def test_bad_files_are_named(tmp_path: Path, text: str, expected: str, also: str) -> None:
    file(tmp_path, "", "base.toml")
    message = refusal([file(tmp_path, text)], MODEL)
    assert expected in message
    assert also in message


WRONG = ("true", '["a.py:f", "b.py:g"]', "{a = 1}", "2020-01-01", '"\\u0000"', f"1{'0' * 400}")


def test_a_value_of_the_wrong_kind_is_never_a_traceback(tmp_path: Path) -> None:
    for key in (*fields(), "task.options.x", "extends"):
        for value in WRONG:
            with suppress(ConfigError):  # or it is one that this setting takes
                load([file(tmp_path, f"{key} = {value}\n")], MODEL if not key.startswith("model.") else ())


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "is a directory" in refusal([tmp_path], MODEL)
    assert "did you mean" in refusal([file(tmp_path, "").with_name("rum.toml")], MODEL)
    assert "nor does the directory" in refusal([tmp_path / "none" / "run.toml"], MODEL)
    (tmp_path / "latin.toml").write_bytes('run.name = "é"'.encode("latin-1"))
    assert "is not UTF-8" in refusal([tmp_path / "latin.toml"], MODEL)


def test_check_refuses_what_was_built_by_hand() -> None:
    good = load([], MODEL)
    bad = msgspec.structs.replace(good, run=msgspec.structs.replace(good.run, steps=0))
    with pytest.raises(ConfigError, match=r"run\.steps is 0; it wants a whole number of 1 or more"):
        check(bad)


def test_a_low_cap_may_pull_the_mean_below_the_median() -> None:
    lengths = ["--workload.lengths.mean", "9", "--workload.lengths.median", "10"]
    assert load([], [*MODEL, *lengths, "--workload.max_completion_tokens", "12"]).workload.lengths.mean == 9


# --- models ----------------------------------------------------------------------------------------------------------


def hf(kind: str, tied: bool, **sizes: int) -> dict[str, object]:
    return {"model_type": kind, "tie_word_embeddings": tied, **sizes}


def sizes(layers: int, hidden: int, heads: int, kv: int, mlp: int, vocab: int) -> dict[str, int]:
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
    return dict(zip(names, (layers, hidden, heads, kv), strict=True)) | {"intermediate_size": mlp, "vocab_size": vocab}


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}

PUBLISHED = {
    "qwen2.5-7b": hf("qwen2", False, **sizes(28, 3584, 28, 4, 18944, 152064)),
    "qwen2.5-0.5b": hf("qwen2", True, **sizes(24, 896, 14, 2, 4864, 151936)),
    "qwen3-4b": hf("qwen3", True, **sizes(36, 2560, 32, 8, 9728, 151936), head_dim=128),
    "qwen3-30b-a3b": hf("qwen3_moe", False, **sizes(48, 2048, 32, 4, 6144, 151936), **EXPERTS),
    "llama-3.1-405b": hf("llama", False, **sizes(126, 16384, 128, 8, 53248, 128256)),
    "smollm2-135m": hf("llama", True, **sizes(30, 576, 9, 3, 1536, 49152), max_position_embeddings=8192),
    "mistral-7b": hf("mistral", False, **sizes(32, 4096, 32, 8, 14336, 32000)),
    "gemma-2-9b": hf(
        "gemma2", True, **sizes(42, 3584, 16, 8, 14336, 256000), head_dim=256, max_position_embeddings=8192
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counting_parameters_gives_the_published_number(name: str) -> None:
    assert shape_of(PUBLISHED[name]) == SHAPES[name]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "r1-distill-qwen-1.5b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b"),
    ],
)
def test_presets_go_by_their_name_on_the_hub(written: str, name: str) -> None:
    assert lookup(written) is SHAPES[name]


def test_hf_config_is_relative_to_the_file_and_figures_override_it(tmp_path: Path) -> None:
    file(tmp_path, json.dumps({"text_config": PUBLISHED["qwen3-4b"]}), "config.json")
    config = load([file(tmp_path, '[model]\nhf_config = "config.json"\nlayers = 2\n')], [])
    assert (config.model.hidden, config.model.layers) == (2560, 2)
    assert load([file(tmp_path, render(config), "again.toml")], []) == config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not valid JSON (line 1)"),
        ("[]", "wants a JSON object"),
        ("{}", "num_hidden_layers is missing"),
        (json.dumps(PUBLISHED["qwen3-4b"] | {"hidden_size": "x"}), "hidden_size is x; it wants a whole number"),
        (json.dumps(PUBLISHED["qwen3-4b"] | {"num_key_value_heads": -1}), "num_key_value_heads is -1"),
        (json.dumps(PUBLISHED["qwen3-4b"] | {"num_experts": "many"}), "num_experts is many"),
        (json.dumps(PUBLISHED["qwen3-4b"] | {"kv_lora_rank": 512}), "latent attention"),
    ],
)
def test_bad_hf_config(tmp_path: Path, text: str, expected: str) -> None:
    file(tmp_path, text, "config.json")
    assert expected in refusal([file(tmp_path, 'model.hf_config = "config.json"')], [])


def test_a_model_that_is_not_there_is_named_with_the_way_to_get_it(tmp_path: Path) -> None:
    mine = refusal([file(tmp_path, 'model.path = "models/my-model"')], [])
    assert f"there is no directory {tmp_path}/models/my-model, and models are not downloaded" in mine
    server = refusal([file(tmp_path, 'model.path = "Qwen/Qwen2.5-1.5B"')], [])
    assert f"hf download Qwen/Qwen2.5-1.5B --local-dir {tmp_path}/Qwen/Qwen2.5-1.5B" in server
    assert "has no config.json" in refusal([file(tmp_path, 'model.path = "."')], [])
    assert "neither a directory nor a .gguf file" in refusal([file(tmp_path, 'model.path = "run.toml"')], [])
    assert "no model is given; write model.path" in refusal([file(tmp_path, "")], [])


def test_a_gguf_file_is_trained_without_a_shape_and_simulated_with_one(tmp_path: Path) -> None:
    file(tmp_path, "", "tiny.gguf")
    config = load([file(tmp_path, 'model.path = "tiny.gguf"')], [])
    with pytest.raises(ConfigError, match=r"write model\.preset as well"):
        check_fit(config)


def test_a_path_may_begin_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = load([file(tmp_path, 'model.preset = "qwen3-8b"\nmodel.path = "~/my-model"')], [])
    assert config.model.path == str(tmp_path / "home/my-model")


def test_settings_that_stand_alone_need_no_model_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    shape = file(tmp_path / "model", json.dumps(PUBLISHED["qwen3-4b"]), "config.json")
    config = load([file(tmp_path, 'model.path = "model"')], [])
    text = render(config, alone=True)
    shape.unlink()
    assert load([file(tmp_path, text, "again.toml")], []) == config


# --- other frameworks' names-----------------------------------------------------------------------------------------


def test_names_of_other_frameworks_point_at_settings_that_exist_and_are_not_ours() -> None:
    ours = {leaf(key) for key in fields()}
    assert {name.key for name in FRAMEWORK_NAMES.values() if name.key} <= set(fields())
    assert all(name.key or name.note for name in FRAMEWORK_NAMES.values())
    assert not {name for name in FRAMEWORK_NAMES if name in ours or name in fields()}
    for key, words in VALUES.items():
        assert not words.keys() & set(get_args(fields()[key].annotation))


HINTS = [
    ("--beta 0.04", "TRL's name, not an option here; write --trainer.kl"),
    ("--trainer.lr 1e-6", "write --trainer.learning_rate"),
    ("--actor_rollout_ref.actor.optim.lr 1e-6", "write --trainer.learning_rate"),
    ("--critic.optim.lr 1e-6", "write --trainer.critic_learning_rate"),
    ("--ppo_epochs 2", "verl's name, and there is nothing like it here: every sample is trained once"),
    ("--num_iterations 2", "there is nothing like it here: every sample is trained once"),
    ("--total_epochs 2", "write --task.epochs"),
    ("--filter_groups.max_num_gen_batches 10", "write --groups.max_filtered (groups in a row, not batches"),
    ("--dynamic-sampling-filter-path a.b", "slime's name, not an option here; write --groups.filter"),
    ("--trainer.algorithm.dynamic_sampling.type filter", "write --groups.filter ('zero_advantage' is its 'filter'"),
    ("--grpo.dynamic_sampling_max_gen_batches 5", "NeMo-RL's name, not an option here; write --groups.max_filtered"),
    ("--orchestrator.buffer.online_difficulty_filtering true", "prime-rl's name"),
    ("--groups.filter greso", "write 'all'"),
    ("--model_name_or_path my-model", "write --model.path (a directory"),
    ("--actor_rollout_ref.model.path my-model", "did you mean --model.path?"),
    ("--model my-model", "for example --model.path"),
    ("--num_generation 8", "num_generations is TRL's name, not an option here; write --workload.group_size"),
    ("--trainer.num_train_epoch 3", "num_train_epochs is TRL's name, not an option here; write --task.epochs"),
    ("--temprature 0.7", "did you mean --sampling.temperature?"),
    ("--algorithm.kl_ctrl.kl_coef 0.1", "write --trainer.kl (in the loss, not in the reward)"),
    ("--schedule.kind async", "asynchronous are 'one_step', 'stream', 'partial' and 'trajectory'"),
    ("--schedule.kind fully-async", "write 'partial', or 'stream'"),
    ("--schedule.kind one_step_off", "write 'one_step'"),
    ("--schedule.kind laminar", "write 'trajectory'"),
    ("--trainer.loss gpro", "did you mean 'grpo'?"),
    ("--rollout.precision bf16", "write 'bfloat16'"),
    ("--rollout.temperature 1", "did you mean --sampling.temperature?"),
]


@pytest.mark.parametrize(("words", "expected"), HINTS)
def test_a_name_from_elsewhere_leads_to_the_right_setting(words: str, expected: str) -> None:
    assert expected in refusal([], MODEL + words.split())


UNSURE = [
    *("--beta3 1", "--trainer.bet 1", "--data.path x", "--kv_tokens 8", "--name x", "--mean 3", "--trainer.attempt 1"),
    *("--trainer.loss gspo", "--trainer.loss dpo", "--schedule.kind asyn", "--model.preset qwen2-7b"),
    *("--cluster.gpu H900", "--trainer.lrr 1", "--sampling.top 4", "--trainer.kll 1"),
]


@pytest.mark.parametrize("words", UNSURE)
def test_where_nothing_is_certain_nothing_is_suggested(words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fit(load([], MODEL + words.split()))
    assert "did you mean" not in str(caught.value)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_only_changes_are_rendered() -> None:
    config = load([], [*MODEL, "--schedule.kind", "sync", "--workload.turns.maximum", "4"])
    expected = '[model]\npreset = "qwen2.5-7b"\n\n[workload.turns]\nmaximum = 4\n\n[schedule]\nkind = "sync"\n'
    assert render(config, only_changed=True) == expected


def test_everything_is_rendered_and_the_preset_is_not_repeated() -> None:
    text = render(load([], MODEL))
    assert "# parameters = 7615616512" in text
    assert 'colocated = "unset"' in text
    assert all(f"\n{leaf(key)} = " in text or f"\n# {leaf(key)} = " in text for key in fields())


def test_with_values_checks_and_replaces_the_preset() -> None:
    config = load([], MODEL)
    other = with_values(config, {"model.preset": "qwen3-8b", "schedule.kind": "sync"})
    assert (other.model.layers, other.schedule.kind) == (36, "sync")
    with pytest.raises(ConfigError, match=r"^schedule\.kind is 'snyc'.*did you mean 'sync'"):
        with_values(config, {"schedule.kind": "snyc"})
    with pytest.raises(ConfigError, match=r"^schedule\.knd is not a setting; did you mean schedule\.kind"):
        with_values(config, {"schedule.knd": "sync"})


amounts = st.floats(0, 1e12, allow_nan=False)
shares = st.floats(0, 1)
changed = st.fixed_dictionaries(
    {},
    optional={
        "run.name": st.text(st.characters(exclude_categories=["Cs"])),
        "run.seed": st.integers(0, 2**70),
        "model.preset": st.sampled_from(list(SHAPES)),
        "model.parameters": st.floats(1e12, 1e13),  # above the active ones of every preset
        "model.hidden": st.integers(1, 10**5),
        "cluster.network_gbytes_per_s": st.floats(0, 1e12, exclude_min=True),
        "cluster.collective_gbytes_per_s": amounts,
        "split.colocated": st.sampled_from([None, True, False]),
        "schedule.kind": st.sampled_from(["sync", "stream", "partial", "trajectory"]),
        "schedule.steps_ahead": st.none() | st.floats(0, 4),
        "workload.lengths.correlation": shares,
        "workload.lengths.drift_per_step": st.floats(-0.99, 10),
        "faults.delay_s": amounts,
        "repack.enabled": st.booleans(),
    },
)
laws = st.sampled_from(
    [
        {},
        {"law": "lognormal", "median": 2000.0, "sigma": 1.0},
        {"law": "lognormal", "mean": 3000.5, "p99": 2e4},
        {"law": "fixed", "mean": 100.0},
        {"law": "empirical", "file": "/tmp/lengths.json"},
    ]
)


@settings(max_examples=80, deadline=None)
@given(values=changed, law=laws, only_changed=st.booleans())
def test_rendered_settings_load_as_the_same_settings(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], law: dict[str, Any], only_changed: bool
) -> None:
    by_key = {f"workload.lengths.{name}": value for name, value in law.items()}
    config = with_values(load([], MODEL), values | by_key)
    path = tmp_path_factory.getbasetemp() / "round-trip.toml"
    path.write_text(render(config, only_changed), encoding="utf-8")
    assert load([path], []) == config
