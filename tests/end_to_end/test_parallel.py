"""Real ranks over loopback train, publish and save like one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import trainer_cases
from relays import TOKEN, nodes, until
from tailrace.config.tree import Config
from tailrace.trainer.batch import plan_mini_batch
from tailrace.trainer.checkpoint import CheckpointError, newest, restore, save
from tailrace.trainer.emulated import EmulatedLearner
from tailrace.trainer.export import write_model
from tailrace.trainer.parallel import MeetingError, by_host, join, meet
from tailrace.trainer.policies import local
from tailrace.trainer.ranks import Ranks
from tailrace.trainer.reader import in_memory
from tailrace.trainer.sending import ParameterSender, PublishRoute
from tailrace.trainer.step import Learner
from tailrace.wire.messages import ComponentSpec
from trainer_cases import Watched, group, poisoned, settings, tiny_folder

DEADLINE_S = 300
GROUPS = [group(1), group(2), group(3, size=3)]


def everything(model: Path) -> Config:
    """Whatever needs the ranks to agree: sharded snapshots, recomputation, a critic, tied weights, fillers."""
    return settings(
        model, mini_batches=2, loss="decoupled_ppo", advantage="gae", kl=0.05, recompute=True, tokens_per_batch=64
    )


def train(folder: Path, ranks: Ranks | None = None) -> Learner:
    """Two parts of a step; leaves first gradients and metrics in the folder."""
    learner = Learner(everything(folder / "model"), ranks)
    learner._backward(learner._micro_batches(7, 0, plan_mini_batch(*in_memory(GROUPS), learner.settings)))
    grads = {name: learner.ranks.full(p.grad) for name, p in learner.model.named_parameters() if p.grad is not None}
    learner.model.zero_grad()
    assert learner.critic is not None
    learner.critic.zero_grad()
    metrics = [learner.train_mini_batch(0, part, *in_memory([GROUPS[part]])) for part in range(2)]
    if learner.ranks.rank == 0:
        name = f"of_{learner.ranks.size}"
        save_file(grads, folder / f"{name}.safetensors")
        (folder / f"{name}.json").write_text(json.dumps(metrics))
    return learner


def passes(folder: Path, precision: str, ranks: Ranks | None = None) -> None:
    """A mini-batch under weights that are those of no other policy; leaves the loss, its gradients and, of each sample,
    log-probs of other policies and values in the folder."""
    config = everything(folder / "model")
    unclipped = {"clip_low": 1e9, "clip_high": 1e9, "dual_clip": 0.0}  # else rounding moves tokens over the edge
    trainer = msgspec.structs.replace(config.trainer, precision=precision, **unclipped)
    learner = Learner(msgspec.structs.replace(config, trainer=trainer), ranks)
    assert learner.critic is not None
    head = learner.critic.net[-1]
    assert isinstance(head, torch.nn.Linear)
    torch.nn.init.eye_(head.weight)
    learner._proximal.at(0, 0)
    for parameter in learner.model.parameters():
        local(parameter.data).mul_(1.02)
    used = set[torch.dtype]()
    (*_, matrix) = (each for each in learner.policy.model.modules() if isinstance(each, torch.nn.Linear))
    matrix.register_forward_pre_hook(lambda *_: used.add(matrix.weight.dtype))
    micro_batches = learner._micro_batches(0, 1, plan_mini_batch(*in_memory(GROUPS), learner.settings))
    sums, _ = learner._backward(micro_batches)
    assert used == {getattr(torch, precision)}
    found = {name: learner.ranks.full(p.grad) for name, p in learner.model.named_parameters() if p.grad is not None}
    found["loss"] = torch.tensor(sums["loss"])
    for each in micro_batches:
        for name, tensor in {"old": each.proximal, "reference": each.reference, "value": each.credit.values}.items():
            assert tensor is not None
            pieces = zip(each.pack.members, tensor.split(each.pack.counts), strict=True)
            found |= {f"{name}/{member}": piece.clone() for member, piece in pieces}
    save_file(found, folder / f"{precision}_{learner.ranks.size}_{learner.ranks.rank}.safetensors")


def emulate(folder: Path, ranks: Ranks) -> None:
    """An emulated trainer's part; leaves what this rank has read in the folder."""
    infos, reader = in_memory(GROUPS)
    watched = Watched(reader)
    measured = EmulatedLearner(settings(folder / "model"), ranks).train_mini_batch(0, 0, infos, watched)
    assert measured["sequences"] == len(infos)
    (folder / f"read_by_{ranks.rank}.json").write_text(json.dumps(watched.asked))


def be_a_rank(rank: int, size: int, meeting: str, folder: Path, sharding: str) -> None:
    torch.set_num_threads(1)
    ranks = join(rank, size, meeting, deadline_s=DEADLINE_S, idle_s=DEADLINE_S)
    if sharding == "hybrid":
        ranks.ranks_by_host = by_host([rank % 2 for rank in range(size)])
    heard = [ranks.broadcast_bytes(data if rank == 0 else None) for data in (b"", b"train \x00\xff" * 1000)]
    assert heard == [b"", b"train \x00\xff" * 1000]
    assert ranks.gather_bytes(b"x" * rank) == [b"x" * each for each in range(size)]
    emulate(folder, ranks)
    passes(folder, "bfloat16", ranks)
    learner = train(folder, ranks)
    publish(folder, learner)
    place = save(folder / "checkpoints", learner)
    again = Learner(learner.config, ranks)
    restore(again, place)
    same(again, learner)
    before = [tensor.clone() for _, tensor in learner.weights()]
    measured = learner.train_mini_batch(
        1, 0, *in_memory([poisoned(4)])
    )  # one rank alone has the sample that is not finite
    assert (measured["skipped"], measured["nonfinite_weights"]) == (1, 0)
    assert all(torch.equal(mine, old) for (_, mine), old in zip(learner.weights(), before, strict=True))
    (folder / "full").touch()  # a file where the next checkpoint's folder should be
    with pytest.raises(CheckpointError, match="could not be written"):  # on every rank, though only one begins it
        save(folder / "full", learner)
    restore(again, newest(folder / "of_one_rank") or folder)
    for name, whole in again.weights():  # of a model that one rank has saved, each takes its rows
        assert torch.equal(whole, load_file(folder / "of_one_rank/step-00000001/model.safetensors")[name]), name
    ranks.leave()


def same(one: Learner, other: Learner) -> None:
    """Weights and moments, of this rank."""
    for get in (lambda each: each.model.named_parameters(), lambda each: each.optimiser.moments()):
        for (name, mine), (_, theirs) in zip(get(one), get(other), strict=True):
            assert torch.equal(local(mine), local(theirs)), name


def publish(folder: Path, learner: Learner) -> None:
    """As version 1, each rank to the relay of its host; the last of the two relays is the master."""
    ranks, addresses = learner.ranks, json.loads((folder / "relays.json").read_text())
    hosts = tuple(rank % 2 for rank in range(ranks.size))
    spec = ComponentSpec("trainer", 0, 1, "", TOKEN.decode(), "", learner.config, rank=ranks.rank, rank_hosts=hosts)
    sender = ParameterSender(spec, learner.model.named_parameters())
    sender.snapshot(1, learner.model.named_parameters(), ranks.broadcast_bytes(b"all").decode())
    troubles: list[str] = []
    route = PublishRoute(1, {int(id): address for id, address in addresses.items()})
    sender.send(1, route, lambda _, reason: troubles.append(reason))
    until(lambda: sender._under_way is None, "the publication")
    assert not troubles
    whole = sum(each.numel() * 4 for each in learner.model.parameters())
    sharers = ranks.size // 2 if getattr(ranks, "ranks_by_host", ()) else ranks.size
    assert sender.publisher.snapshot_bytes < whole / sharers + 20_000  # the header, and rows that cannot be halved
    sender.publisher.close()


def start_rank(rank: int, size: int, meeting: str, folder: Path, sharding: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, str(size), meeting, str(folder), str(rank), sharding]
    paths = [str(Path(trainer_cases.__file__).parent), os.environ.get("PYTHONPATH", "")]
    shared = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(command, env=shared, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


LONG = [pytest.param(*case, marks=pytest.mark.soak) for case in ((3, "full"), (4, "full"), (4, "hybrid"))]


@pytest.mark.parametrize(("size", "sharding"), [(2, "full"), *LONG])
def test_several_ranks_have_the_gradients_weights_versions_and_checkpoints_of_one(tmp_path, size, sharding):
    tiny_folder(tmp_path, tie_word_embeddings=True)
    alone = train(tmp_path)
    passes(tmp_path, "float32")
    passes(tmp_path, "bfloat16")
    save(tmp_path / "of_one_rank", alone)
    with nodes(2, tmp_path) as relays:
        addresses = {relay.id: str(relay.address) for relay in relays}
        (tmp_path / "relays.json").write_text(json.dumps(addresses))
        others = [start_rank(rank, size, f"file://{tmp_path}/meeting", tmp_path, sharding) for rank in range(size)]
        try:
            for process in others:
                output, _ = process.communicate(timeout=DEADLINE_S)
                assert process.returncode == 0, output[-3000:]
        finally:
            for process in others:
                process.kill()
        published = bytes(relays[1].memory.open(1).buffer)

    shares = [json.loads((tmp_path / f"read_by_{rank}.json").read_text()) for rank in range(size)]
    assert sorted(id for share in shares for id in share) == [t.id for group in GROUPS for t in group]
    assert all(shares)
    near_in_bfloat16(tmp_path, size)
    one, two = (load_file(tmp_path / f"of_{n}.safetensors") for n in (1, size))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-6, rtol=1e-4)
    for mine, theirs in zip(*(json.loads((tmp_path / f"of_{n}.json").read_text()) for n in (1, size)), strict=True):
        assert {k: v for k, v in mine.items() if k != "seconds"} == pytest.approx(
            {k: v for k, v in theirs.items() if k != "seconds"}, rel=1e-3, abs=1e-5
        )
    place = newest(tmp_path / "checkpoints")
    assert place is not None
    together = Learner(everything(tmp_path / "model"))  # what two ranks saved, one rank goes on with
    restore(together, place)
    for (name, mine), (_, theirs) in zip(together.weights(), alone.weights(), strict=True):
        # where a gradient is next to nothing, Adam makes a share of the learning rate (0.01) of its rounding
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-3, msg=name)
    assert published == _as_published(together)
    _is_exported_as_one_rank_saves(place, alone, together, tmp_path)


def near_in_bfloat16(folder: Path, size: int) -> None:
    exact, alone = (load_file(folder / f"{precision}_1_0.safetensors") for precision in ("float32", "bfloat16"))
    together: dict[str, torch.Tensor] = {}
    for rank in range(size):
        together |= load_file(folder / f"bfloat16_{size}_{rank}.safetensors")
    assert exact.keys() == alone.keys() == together.keys()
    for name in exact:
        logprobs = name.startswith(("old/", "reference/"))
        assert off(together[name], alone[name]) < (0.01 if logprobs else 0.05), name
        assert off(together[name], exact[name]) < (0.03 if logprobs else 0.2), name


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _as_published(learner: Learner) -> bytes:
    """By one rank."""
    spec = ComponentSpec("trainer", 0, 1, "", TOKEN.decode(), "", learner.config)
    sender = ParameterSender(spec, learner.model.named_parameters())
    sender.snapshot(1, learner.model.named_parameters(), "")
    assert sender.publisher._latest is not None
    return bytes(sender.publisher._latest.ready(0))


def _is_exported_as_one_rank_saves(place: Path, alone: Learner, together: Learner, folder: Path) -> None:
    """The same tensors under the same names: tied ones once."""
    assert not (place / "model.safetensors").exists()
    write_model(place, folder / "exported")
    theirs = load_file(save(folder / "again", alone) / "model.safetensors")
    mine = load_file(folder / "exported" / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert "lm_head.weight" not in mine
    assert all(torch.equal(mine[name], tensor) for name, tensor in together.weights())
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "exported")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert {file.name for file in (folder / "exported").iterdir()} >= {"config.json", "tokenizer.json"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_the_store_of_the_ranks_listens_at_one_address_and_no_other():
    """By default torch would listen at all of them."""
    port = free_port()
    board = meet(0, 1, f"tcp://127.0.0.1:{port}", timedelta(seconds=20))
    board.set("a", "b")
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    assert [row[1] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"] == [f"0100007F:{port:04X}"]


def test_ranks_that_do_not_meet_say_so():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(MeetingError, match="rank 0 cannot listen"):
        meet(0, 2, f"tcp://127.0.0.1:{taken.getsockname()[1]}", timedelta(seconds=5))
    with pytest.raises(MeetingError, match=r"rank 1 has not met the others at 127.0.0.1:.* trainer.interface"):
        meet(1, 2, f"tcp://127.0.0.1:{free_port()}", timedelta(seconds=1))


if __name__ == "__main__":
    be_a_rank(int(sys.argv[4]), int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[5])
