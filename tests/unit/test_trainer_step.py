"""The learner: gradients that do not depend on how work is cut, frozen policies, the critic, the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.config.tree import Groups, Trainer
from tailrace.trainer.advantages import gae
from tailrace.trainer.batch import plan_mini_batch, worth_a_pass
from tailrace.trainer.losses import value_loss
from tailrace.trainer.optim import Optimiser, rate_factor
from tailrace.trainer.packing import Pack, assign, lay_out, read
from tailrace.trainer.reader import in_memory
from tailrace.trainer.step import Learner
from tailrace.types import Segment, Trajectory
from trainer_cases import group, settings, tiny_folder

pytestmark = pytest.mark.filterwarnings("error:The given NumPy array is not writable")  # buffers are read only
GROUPS = [group(1), group(2), group(3)]
RECORDED: dict[str, tuple[dict[str, Any], list[float], float]] = {
    "grpo": ({}, [0.0134561732, 0.105481077, 0.0, 0.0105682565], 1824.2772223),
    "decoupled_ppo": (
        {"loss": "decoupled_ppo", "mini_batches": 2, "kl": 0.05},
        [0.0134561732, 0.160471175, 0.0070179142, 0.0931007266],
        1822.52426471,
    ),
    "gae": (
        {"loss": "ppo", "advantage": "gae", "mini_batches": 2},
        [-0.0703828838, -0.0632369546, -0.0200275704, -0.0801374055],
        1819.22119574,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


def gradients(learner: Learner) -> dict[str, torch.Tensor]:
    """Of one mini-batch, before clipping and the update."""
    learner._backward(learner._micro_batches(0, 0, plan_mini_batch(*in_memory(GROUPS), learner.settings)))
    return {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.weights()}


def all_logprobs(learner: Learner) -> torch.Tensor:
    return learner.scores(one_pack(GROUPS)).logprobs


def one_pack(groups: Sequence[Sequence[Trajectory]]) -> Pack:
    samples = [read(t) for g in groups for t in g]
    [members] = assign([len(s.inputs) for s in samples], range(len(samples)), 10**6)
    return lay_out([samples[i] for i in members], members)


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "decoupled_ppo"])
def test_the_token_budget_does_not_change_the_gradient(folder, loss):
    one, many = (
        gradients(Learner(settings(folder, loss=loss, tokens_per_batch=budget, entropy=0.01))) for budget in (10**6, 40)
    )
    for name in one:
        torch.testing.assert_close(many[name], one[name], atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize(("changes", "losses", "size"), RECORDED.values(), ids=RECORDED)
def test_losses_and_weights_after_some_steps_are_those_recorded(folder, changes, losses, size):
    """By a trainer that packed all samples, token by token, on every rank. What is recorded came out to the last bit on
    the machine that recorded it; others may round differently."""
    same = [Trajectory(t.id, 9, 9, t.segments, "stop", 0.1) for t in group(9)]
    parts = [[group(1), group(2)], [group(3), same], [same], [group(4, size=7), group(5)]]
    learner = Learner(settings(folder, **changes))
    found = [
        learner.train_mini_batch(n // 2, n % 2, *in_memory(groups)).get("loss", 0.0) for n, groups in enumerate(parts)
    ]
    assert found == pytest.approx(losses, rel=1e-4)
    assert sum(float((w.double() ** 2).sum()) for _, w in learner.weights()) == pytest.approx(size, rel=1e-6)


def test_recomputed_activations_do_not_change_the_gradient(folder):
    plain, again = (gradients(Learner(settings(folder, recompute=recompute))) for recompute in (False, True))
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], atol=1e-6, rtol=1e-4)


def test_samples_without_advantage_cost_no_pass_and_still_count_in_the_mean(folder):
    same = [Trajectory(t.id, 9, 9, t.segments, "stop", 0.1) for t in group(9)]
    learner = Learner(settings(folder, loss="grpo"))
    mixed, alone = (learner.train_mini_batch(0, 0, *in_memory(groups)) for groups in ([GROUPS[0], same], [same]))
    assert mixed["passed_tokens"] == sum(t.sampled_tokens for t in GROUPS[0])
    assert mixed["sequences"] == 8
    assert mixed["without_advantage"] == 0
    assert alone.keys() == {
        *("reward", "reward_std", "tokens", "sequences", "seconds", "lr"),
        *("passed_tokens", "without_advantage", "nonfinite_weights"),
    }  # what was not computed is not said to be 0
    assert (alone["passed_tokens"], alone["without_advantage"], alone["sequences"]) == (0, 1, 4)
    batches = [plan_mini_batch(*in_memory(groups), learner.settings) for groups in ([GROUPS[0], same], [GROUPS[0]])]
    half, whole = (learner._micro_batches(1, 0, batch)[0] for batch in batches)
    torch.testing.assert_close(half.weight * 2, whole.weight)


def test_an_update_without_advantage_is_that_of_a_gradient_of_zero(folder):
    same = [Trajectory(t.id, 9, 9, t.segments, "stop", 0.1) for t in group(9)]
    learner = Learner(settings(folder, loss="grpo", mini_batches=2))
    learner.train_mini_batch(0, 0, *in_memory(GROUPS))
    names = [name for name, _ in learner.model.named_parameters()]
    copies = {name: torch.nn.Parameter(p.detach().clone()) for name, p in learner.model.named_parameters()}
    optimiser = Optimiser(copies.items(), learner.settings.learning_rate, learner.settings, 8)
    optimiser.load(1, {name: tensor.clone() for name, tensor in learner.optimiser.moments()})
    for parameter in copies.values():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.update()
    learner.train_mini_batch(0, 1, *in_memory([same]))
    assert all(torch.equal(learner.model.get_parameter(name), copies[name]) for name in names)
    assert learner.optimiser.updates == 2


@pytest.mark.parametrize(("tolerance", "passes"), [(1e-6, False), (0.0, True)])
def test_rewards_that_differ_by_rounding_give_no_advantage(tolerance, passes):
    rewards = [0.3, 0.1 + 0.2, 0.3, 0.3]
    shaped = [Trajectory(t.id, 9, 9, t.segments, "stop", r) for t, r in zip(group(9), rewards, strict=True)]
    for advantage in ("grpo", "dr_grpo", "rloo"):
        chosen = Trainer(advantage=advantage)
        batch = plan_mini_batch(*in_memory([shaped]), chosen, Groups(reward_tolerance=tolerance))
        assert bool(worth_a_pass(batch, chosen)) == bool(batch.advantages.any()) == passes


def test_a_likely_answer_becomes_likelier_when_it_is_rewarded(folder):
    learner = Learner(settings(folder, loss="aipo"))
    good, bad = ((Segment.of(None, (1, 2)), Segment.of(0, (t,) * 4, (-3.0,) * 4)) for t in (5, 6))
    pair = [Trajectory(0, 0, 0, good, "stop", 1.0), Trajectory(1, 0, 0, bad, "stop", 0.0)]
    samples = one_pack([pair])
    before = learner.scores(samples).logprobs
    metrics = [learner.train_mini_batch(step, 0, *in_memory([pair])) for step in range(3)]
    change = learner.scores(samples).logprobs - before
    assert change[:4].mean() > 0.1
    assert change[4:].mean() < -0.1
    assert metrics[0]["reward"] == 0.5
    assert metrics[0]["tokens"] == 8
    assert learner.step == 3


def test_the_proximal_policy_is_that_of_the_start_of_the_step(folder):
    learner = Learner(settings(folder, loss="decoupled_ppo", mini_batches=2))
    start = all_logprobs(learner)
    batch = plan_mini_batch(*in_memory(GROUPS), learner.settings)
    assert all(each.proximal is None for each in learner._micro_batches(0, 0, batch))
    learner.train_mini_batch(0, 0, *in_memory(GROUPS))
    kept = {(int(s), i): p for x in learner._micro_batches(0, 1, batch) for s, i, p in _by_token(x)}
    wanted = torch.stack([kept[key] for key in _keys(one_pack(GROUPS).sequence)])
    torch.testing.assert_close(wanted, start, atol=1e-5, rtol=1e-5)
    assert (all_logprobs(learner) - start).abs().max() > 1e-3
    assert all(each.proximal is None for each in learner._micro_batches(1, 0, batch))  # the next step starts here


def _keys(sequence: np.ndarray) -> list[tuple[int, int]]:
    seen: dict[int, int] = {}
    keys = []
    for s in sequence.tolist():
        keys.append((s, seen.setdefault(s, 0)))
        seen[s] += 1
    return keys


def _by_token(each):
    assert each.proximal is not None
    return [(s, i, p) for (s, i), p in zip(_keys(each.pack.sequence), each.proximal, strict=True)]


def test_the_reference_holds_the_policy_back(folder):
    far, near = (Learner(settings(folder, kl=kl, learning_rate=1e-2)) for kl in (1e-9, 30.0))
    given = in_memory(GROUPS)
    free, held = ([learner.train_mini_batch(step, 0, *given)["kl"] for step in range(4)] for learner in (far, near))
    assert free[-1] > 2 * held[-1] > 0


def test_a_critic_learns_the_reward_and_leaves_the_trunk_alone(folder):
    rates = {"critic_learning_rate": 3e-2, "learning_rate": 1e-9}
    learner = Learner(settings(folder, loss="ppo", advantage="gae", gae_lambda=1.0, **rates))
    assert learner.critic is not None
    rewarded = [[Trajectory(t.id, 0, 0, t.segments, "stop", 1.0) for t in g] for g in GROUPS]
    before = weights(learner)
    metrics = [learner.train_mini_batch(step, 0, *in_memory(rewarded)) for step in range(12)]
    assert metrics[0]["value"] == 0
    assert metrics[0]["advantage"] == pytest.approx(1.0)
    assert metrics[-1]["value"] == pytest.approx(1.0, abs=0.2)
    assert all((tensor - before[name]).abs().max() < 1e-6 for name, tensor in learner.weights())


@pytest.mark.parametrize("loss", ["ppo", "decoupled_ppo"])
def test_old_values_are_those_of_the_start_of_the_step_so_that_clipping_them_acts(folder, loss):
    learner = Learner(settings(folder, loss=loss, advantage="gae", mini_batches=2, critic_learning_rate=0.3))
    batch = plan_mini_batch(*in_memory(GROUPS), learner.settings)
    learner.train_mini_batch(0, 0, *in_memory(GROUPS))
    micro_batches = learner._micro_batches(0, 1, batch)
    now = torch.cat([_values(learner, each) for each in micro_batches])
    assert now.abs().max() > learner.settings.clip_high  # one update has moved them further than they may
    old = torch.cat([x.credit.values for x in micro_batches if x.credit.values is not None])
    assert torch.equal(old, torch.zeros(int(batch.counts.sum())))  # a critic's start
    slow = [
        gae(reward, np.zeros(count), 1.0, 0.95)[0] for reward, count in zip(batch.rewards, batch.counts, strict=True)
    ]
    found = torch.cat([each.credit.advantages for each in micro_batches])
    members = [i for each in micro_batches for i in each.pack.members]
    assert found.numpy() == pytest.approx(np.concatenate([slow[i] for i in members]), abs=1e-5)
    held = [value_loss(learner._tokens(x, slice(None), *_scored(learner, x)), 0.2).loss for x in micro_batches]
    free = [value_loss(learner._tokens(x, slice(None), *_scored(learner, x)), 1e9).loss for x in micro_batches]
    assert torch.stack(held).sum() > torch.stack(free).sum() + 1e-3
    for each in learner._micro_batches(1, 0, batch):  # the next step starts here
        torch.testing.assert_close(each.credit.values, _values(learner, each))


def _scored(learner: Learner, each):
    scores = learner.scores(each.pack)
    return scores.logprobs, scores.entropy, _values(learner, each)


def _values(learner: Learner, each) -> torch.Tensor:
    assert learner.critic is not None
    with torch.no_grad():
        return learner.critic(learner.scores(each.pack).hidden)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_bfloat16_arithmetic_keeps_float32_weights(folder):
    learner = Learner(settings(folder, precision="bfloat16"))
    with torch.backends.mkldnn.flags(enabled=False):  # its kernels end the process where AMX is announced but forbidden
        metrics = learner.train_mini_batch(0, 0, *in_memory(GROUPS))
    assert metrics["skipped"] == 0
    assert {tensor.dtype for _, tensor in learner.weights()} == {torch.float32}


def test_tied_weights_are_given_out_once(tmp_path):
    learner = Learner(settings(tiny_folder(tmp_path, tie_word_embeddings=True)))
    names = [name for name, _ in learner.weights()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert names == [name for name, _ in learner.model.named_parameters()]


def test_mismatch_is_zero_when_the_trainer_agrees_with_the_engine(folder):
    learner = Learner(settings(folder))
    exact = [[_as_sampled_by(learner, t) for t in g] for g in GROUPS]
    metrics = learner.train_mini_batch(0, 0, *in_memory(exact))
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4)


def _as_sampled_by(learner: Learner, t: Trajectory) -> Trajectory:
    found = iter(learner.scores(one_pack([[t]])).logprobs.tolist())
    segments = [
        s if s.version is None else Segment.of(s.version, s.ids, [next(found) for _ in range(len(s))])
        for s in t.segments
    ]
    return Trajectory(t.id, t.group, t.prompt, tuple(segments), t.finish, t.reward)


def test_a_gradient_that_is_not_finite_changes_nothing():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimiser = Optimiser([("p", parameter)], 0.1, Trainer(), 10)
    parameter.grad = torch.tensor([1.0, float("nan")])
    assert optimiser.update().skipped
    assert parameter.tolist() == [1.0, 1.0]
    parameter.grad = torch.ones(2)
    assert not optimiser.update().skipped
    assert parameter.tolist() != [1.0, 1.0]


def test_gradients_are_clipped_to_the_norm():
    parameter = torch.nn.Parameter(torch.zeros(4))
    optimiser = Optimiser([("p", parameter)], 0.1, Trainer(max_grad_norm=0.5), 10)
    parameter.grad = torch.full((4,), 5.0)
    assert optimiser.update().grad_norm == pytest.approx(10.0)
    assert dict(optimiser.moments())["exp_avg/p"] == pytest.approx(torch.full((4,), 0.1 * 0.25), rel=1e-4)


def test_the_learning_rate_warms_up_and_decays():
    flat, line, wave = (Trainer(warmup_steps=2, decay=kind) for kind in ("constant", "linear", "cosine"))
    assert [rate_factor(flat, u, 6) for u in range(4)] == [0.5, 1.0, 1.0, 1.0]
    assert [rate_factor(line, u, 6) for u in (2, 4, 6, 9)] == [1.0, 0.5, 0.0, 0.0]
    assert [rate_factor(wave, u, 6) for u in (2, 4, 6)] == pytest.approx([1.0, 0.5, 0.0])


@pytest.mark.parametrize(("reward", "segments"), [(None, 2), (float("nan"), 2), (1.0, 1)])
def test_a_group_that_cannot_be_trained_on_is_refused_before_anything_changes(folder, reward, segments):
    learner = Learner(settings(folder))
    parts = (Segment.of(None, (1,)), Segment.of(0, (2,), (-1.0,)))[:segments]
    with pytest.raises(ValueError, match=r"no finite reward|has a sampled token"):
        learner.train_mini_batch(0, 0, *in_memory([[Trajectory(0, 0, 0, parts, "stop", reward)]]))
    assert learner.step == 0
