"""What a GPU runs and a CPU can check: the head in one go, rows, compiled blocks, the bfloat16 copy, lack of memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from tailrace.model.packed import hidden_states, install, layout
from tailrace.model.varlen import attend_row, attend_row_backward
from tailrace.trainer import checkpoint
from tailrace.trainer.batch import plan_mini_batch, read_packs
from tailrace.trainer.compiled import Blocks, padded
from tailrace.trainer.head import chunk_that_fits
from tailrace.trainer.memory import DoesNotFitError
from tailrace.trainer.reader import in_memory
from tailrace.trainer.step import Learner
from trainer_cases import VOCABULARY, group, long_rope, settings, tiny_folder, tiny_model

GROUPS = [group(1), group(2), group(3)]
LENGTHS = (19, 7, 1, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("fast"))


@pytest.fixture(scope="module")
def rows_on_the_cpu() -> None:
    """The operator that reads rows, sequence by sequence; the flash kernel itself needs a GPU."""
    attend_row.register_kernel("cpu", _attend)
    attend_row_backward.register_kernel("cpu", _attend_backward)


def _attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, sizes: Tensor, scale: float, window: int) -> Any:
    out = torch.zeros_like(q)
    for here in _sequences(bounds):
        out[here] = (_shares(q[here], k[here], scale, window) @ _heads(v[here], q)).transpose(0, 1)
    return out, torch.zeros(q.shape[1], q.shape[0])


def _attend_backward(
    by_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, bounds: Tensor, sizes: Tensor,
    scale: float, window: int,
) -> Any:  # fmt: skip
    by_q, by_k, by_v = (torch.zeros_like(x) for x in (q, k, v))
    for here in _sequences(bounds):
        shares, pull = _shares(q[here], k[here], scale, window), by_out[here].transpose(0, 1)
        by_shares = pull @ _heads(v[here], q).transpose(1, 2)
        by_scores = scale * shares * (by_shares - (by_shares * shares).sum(-1, keepdim=True))
        by_q[here] = (by_scores @ _heads(k[here], q)).transpose(0, 1)
        for whole, one in ((by_k, by_scores.transpose(1, 2) @ q[here].transpose(0, 1)), (by_v, shares.mT @ pull)):
            whole[here] = one.unflatten(0, (k.shape[1], -1)).sum(1).transpose(0, 1)
    return by_q, by_k, by_v


def _sequences(bounds: Tensor) -> list[slice]:
    return [slice(start, end) for start, end in pairwise(bounds.tolist())]


def _heads(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).transpose(0, 1)


def _shares(q: Tensor, k: Tensor, scale: float, window: int) -> Tensor:
    age = torch.arange(len(q))[:, None] - torch.arange(len(q))
    scores = scale * q.transpose(0, 1) @ _heads(k, q).transpose(1, 2)
    return scores.masked_fill((age < 0) | (age >= (window or len(q))), -torch.inf).softmax(-1)


def gradients(learner: Learner) -> dict[str, Tensor]:
    learner._backward(learner._micro_batches(0, 0, plan_mini_batch(*in_memory(GROUPS), learner.settings)))
    return {name: p.grad for name, p in learner.model.named_parameters() if p.grad is not None}


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=1e-4, msg=name)


# ------------------------------------------------------------------------------------------------------------ the head


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("loss", ["grpo", "decoupled_ppo"])
def test_the_head_in_one_go_gives_the_loss_and_the_gradient_of_autograd(tmp_path, loss, tied):
    model = tiny_folder(tmp_path, tie_word_embeddings=tied)
    plain, fast = (Learner(settings(model, loss=loss, entropy=0.1, kl=0.1)) for _ in range(2))
    fast.policy.at_once = True
    assert fast.policy.has_plain_head()
    assert_same(gradients(fast), gradients(plain))
    for learner in (plain, fast):
        learner.model.zero_grad()
    mine, theirs = (learner.train_mini_batch(0, 0, *in_memory(GROUPS)) for learner in (fast, plain))
    assert mine | {"seconds": 0} == pytest.approx(theirs | {"seconds": 0}, rel=1e-4, abs=1e-6)


def test_a_head_with_a_soft_cap_is_not_plain(tmp_path):
    capped = tiny_folder(tmp_path, "gemma2", final_logit_softcapping=2.0)
    assert not Learner(settings(capped)).policy.has_plain_head()


@pytest.mark.parametrize(("vocabulary", "tokens"), [(151936, 4096), (49152, 16384), (2**31, 1)])
def test_a_chunk_of_logits_is_a_power_of_two_that_fits(vocabulary, tokens):
    assert chunk_that_fits(vocabulary) == tokens


# ------------------------------------------------------------------------------------------------------ rows and blocks


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen2", {}), ("mistral", {"sliding_window": 5}), ("phi3", long_rope(10))]
)
def test_a_padded_row_gives_the_hidden_states_and_gradients_of_a_pack(rows_on_the_cpu, family, changes):
    model = install(tiny_model(family, **changes))
    tokens = torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    spread = hidden_states(model, tokens, layout(LENGTHS))
    row = hidden_states(model, pad(tokens, (0, 9)), layout(LENGTHS, room=len(tokens) + 9))[: len(tokens)]
    torch.testing.assert_close(row, spread, atol=1e-5, rtol=1e-5)
    found = [
        torch.autograd.grad((h * h.detach().cos()).sum(), list(model.parameters()), allow_unused=True)
        for h in (row, spread)
    ]
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_serve_packs_of_any_size_with_the_gradients_of_plain_ones(folder, rows_on_the_cpu, recompute):
    plain, fast = (Learner(settings(folder, recompute=recompute, tokens_per_batch=96)) for _ in range(2))
    compile_rows(fast)
    assert_same(gradients(fast), gradients(plain))
    sizes = {fast._room(n) for n in (len(p.inputs) for p in _packs(fast))}
    assert len(sizes) > 1
    assert graphs_compiled() == 1  # all layers and packs share it
    fast.train_mini_batch(0, 0, *in_memory(GROUPS))


def test_after_a_warm_up_nothing_is_compiled_and_nothing_has_changed(folder, rows_on_the_cpu):
    plain, fast = (Learner(settings(folder, mini_batches=2, loss="decoupled_ppo")) for _ in range(2))
    compile_rows(fast)
    fast.warm_up()
    before = graphs_compiled()
    for step, part in ((0, 0), (0, 1), (1, 0)):
        mine, theirs = (learner.train_mini_batch(step, part, *in_memory(GROUPS)) for learner in (fast, plain))
        assert mine | {"seconds": 0} == pytest.approx(theirs | {"seconds": 0}, rel=1e-3, abs=1e-5)
    assert graphs_compiled() == before


def compile_rows(learner: Learner) -> None:
    torch._dynamo.reset()
    learner._rows, learner.policy.at_once = True, True
    learner._blocks = Blocks(learner.policy.model, backend="aot_eager")
    torch._dynamo.utils.counters.clear()


def graphs_compiled() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _packs(learner: Learner) -> list[Any]:
    batch = plan_mini_batch(*in_memory(GROUPS), learner.settings)
    return list(read_packs(batch, range(len(batch.samples)), learner.budget.tokens, fold=False))


@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (64, 64), (65, 128), (5000, 5056), (32768, 32768)])
def test_rows_of_compiled_blocks_are_padded_to_whole_tiles(tokens, size):
    assert padded(tokens) == size


def test_blocks_that_cannot_be_compiled_run_plain_and_say_so_once(folder, rows_on_the_cpu, caplog):
    torch._dynamo.reset()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such luck")

    plain, fast = (Learner(settings(folder)) for _ in range(2))
    fast._rows, fast._blocks = True, Blocks(fast.policy.model, backend=broken)  # type: ignore[arg-type]
    mine, theirs = (learner.train_mini_batch(0, 0, *in_memory(GROUPS)) for learner in (fast, plain))
    fast.train_mini_batch(1, 0, *in_memory(GROUPS))
    assert caplog.text.count("run uncompiled") == 1
    assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
    assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


# -------------------------------------------------------------------------------------------------- the bfloat16 copy


@pytest.fixture
def plain_products():
    with torch.backends.mkldnn.flags(enabled=False):  # its kernels end the process where AMX is announced but forbidden
        yield


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_copy_gives_float32_gradients_close_to_those_of_float32(folder, plain_products):
    exact, half = (gradients(Learner(settings(folder, precision=p))) for p in ("float32", "bfloat16"))
    assert {g.dtype for g in half.values()} == {torch.float32}
    for name, theirs in exact.items():
        assert (half[name] - theirs).norm() < 0.1 * theirs.norm(), name


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_copy_follows_updates_snapshots_and_checkpoints(folder, tmp_path, plain_products):
    learner = Learner(settings(folder, precision="bfloat16", kl=0.1, mini_batches=2))
    pack = _packs(learner)[0]
    start = learner.scores(pack).logprobs
    place = checkpoint.save(tmp_path, learner)
    learner.train_mini_batch(0, 0, *in_memory(GROUPS))
    moved = learner.scores(pack).logprobs
    assert (moved - start).abs().max() > 1e-2
    assert learner._reference is not None
    with learner._reference.in_place():
        assert torch.equal(learner.scores(pack).logprobs, start)
    assert torch.equal(learner.scores(pack).logprobs, moved)
    checkpoint.restore(learner, place)
    assert torch.equal(learner.scores(pack).logprobs, start)


# ------------------------------------------------------------------------------------------------- memory running out


def _short_of_memory(learner: Learner, most: int) -> list[int]:
    """A policy that has memory for so many tokens at once; returns what it was asked for."""
    passes, forward = [], learner.policy.forward

    def narrow(tokens: Tensor, *rest: Any) -> Any:
        passes.append(len(tokens))
        if len(tokens) > most:
            raise torch.OutOfMemoryError("no memory")
        return forward(tokens, *rest)

    learner.policy.forward = narrow  # type: ignore[method-assign]
    return passes


def test_a_mini_batch_that_runs_out_of_memory_is_repeated_with_half_of_the_tokens(folder, caplog):
    short, roomy = (Learner(settings(folder, tokens_per_batch=400, kl=0.1, loss="ppo")) for _ in range(2))
    passes = _short_of_memory(short, most=60)
    mine, theirs = (learner.train_mini_batch(0, 0, *in_memory(GROUPS)) for learner in (short, roomy))
    assert short.budget.tokens == 50
    assert caplog.text.count("nothing is lost") == 3
    assert mine | {"seconds": 0} == pytest.approx(theirs | {"seconds": 0}, rel=1e-3, abs=1e-6)
    for (name, weight), (_, other) in zip(short.weights(), roomy.weights(), strict=True):
        torch.testing.assert_close(weight, other, atol=1e-4, rtol=1e-3, msg=name)
    passes.clear()
    short.train_mini_batch(1, 0, *in_memory(GROUPS))
    assert max(passes) <= 50


def test_a_sequence_that_does_not_fit_is_refused_with_what_to_change(folder):
    learner = Learner(settings(folder))
    _short_of_memory(learner, most=10)
    with pytest.raises(DoesNotFitError, match=r"one sequence of \d+ tokens .* trainer.recompute = true"):
        learner.train_mini_batch(0, 0, *in_memory(GROUPS))
    assert learner.step == 0
