"""What an unknown name was meant to be: the nearest key of ours, or the key that a peer's name stands for.

The table is keyed by the tail of the peer's dotted path, so `actor_rollout_ref.rollout.n` is found as `rollout.n`.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

from tailrace.config.fields import fields, leaf


class PeerName(NamedTuple):
    """Whose name it is, our key, and how to convert where the meaning differs."""

    peer: str
    key: str
    note: str = ""


_PROMPTS_FROM_SAMPLES = "prompts, not samples: divide by workload.group_size"
_MINI_BATCHES = "the number of mini-batches, not their size: step size / mini-batch size"
_GPUS = "all GPUs of the run together: hosts × GPUs per host"
_NUMBER_OF_REPLICAS = "the number of replicas follows: rollout GPUs / split.tensor_parallel"
_MODEL = "a known shape; or point model.hf_config at its config.json"
_PARTIAL = "write schedule.kind = 'partial'"
_COLOCATED = "true or false"

PEERS: dict[str, PeerName] = {
    # samples per prompt
    "rollout.n": PeerName("verl", "workload.group_size"),
    "num_generations": PeerName("TRL", "workload.group_size"),
    "n_samples_per_prompt": PeerName("slime, OpenRLHF and SkyRL", "workload.group_size"),
    "num_generations_per_prompt": PeerName("NeMo-RL", "workload.group_size"),
    "rollouts_per_example": PeerName("prime-rl", "workload.group_size"),
    "gconfig.n_samples": PeerName("AReaL", "workload.group_size"),
    "n_samples": PeerName("AReaL", "workload.group_size"),
    # prompts per step
    "train_batch_size": PeerName("verl and SkyRL", "workload.prompts_per_step", "OpenRLHF counts samples: divide"),
    "rollout_batch_size": PeerName("slime and OpenRLHF", "workload.prompts_per_step"),
    "num_prompts_per_step": PeerName("NeMo-RL", "workload.prompts_per_step"),
    "batch_size": PeerName("prime-rl", "workload.prompts_per_step", _PROMPTS_FROM_SAMPLES),
    "train_dataset.batch_size": PeerName("AReaL", "workload.prompts_per_step"),
    "consumer_batch_size": PeerName("AReaL", "workload.prompts_per_step", _PROMPTS_FROM_SAMPLES),
    "generation_batch_size": PeerName("TRL", "workload.prompts_per_step", _PROMPTS_FROM_SAMPLES),
    "per_device_train_batch_size": PeerName("TRL", "workload.prompts_per_step", "for all devices together"),
    # mini-batches
    "ppo_mini_batch_size": PeerName("verl", "trainer.mini_batches", _MINI_BATCHES),
    "policy_mini_batch_size": PeerName("SkyRL", "trainer.mini_batches", _MINI_BATCHES),
    "global_batch_size": PeerName("slime", "trainer.mini_batches", _MINI_BATCHES),
    "train_global_batch_size": PeerName("NeMo-RL", "trainer.mini_batches", _MINI_BATCHES),
    "ppo_n_minibatches": PeerName("AReaL", "trainer.mini_batches"),
    "num_steps_per_rollout": PeerName("slime", "trainer.mini_batches"),
    "steps_per_generation": PeerName("TRL", "trainer.mini_batches"),
    "require_batches": PeerName("verl", "trainer.mini_batches", "it fetches mini-batches; here groups stream in"),
    # lengths
    "max_response_length": PeerName("verl", "workload.max_completion_tokens"),
    "max_completion_length": PeerName("TRL", "workload.max_completion_tokens"),
    "max_new_tokens": PeerName("AReaL", "workload.max_completion_tokens"),
    "sampling.max_tokens": PeerName("prime-rl", "workload.max_completion_tokens"),
    "max_tokens": PeerName("prime-rl", "workload.max_completion_tokens"),
    "rollout_max_response_len": PeerName("slime", "workload.max_completion_tokens"),
    "generate_max_len": PeerName("OpenRLHF", "workload.max_completion_tokens"),
    "max_generate_length": PeerName("SkyRL", "workload.max_completion_tokens"),
    "seq_len": PeerName("prime-rl", "workload.max_completion_tokens", "without the prompt"),
    "max_total_sequence_length": PeerName("NeMo-RL", "workload.max_completion_tokens", "without the prompt"),
    "max_prompt_length": PeerName("verl and TRL", "workload.prompt_tokens", "the usual length, not the limit"),
    "prompt_max_len": PeerName("OpenRLHF", "workload.prompt_tokens", "the usual length, not the limit"),
    "rollout_max_prompt_len": PeerName("slime", "workload.prompt_tokens", "the usual length, not the limit"),
    # staleness
    "max_off_policy_steps": PeerName("prime-rl", "schedule.max_staleness"),
    "max_head_offpolicyness": PeerName("AReaL", "schedule.max_staleness", "and the same for schedule.steps_ahead"),
    "staleness_threshold": PeerName("verl", "schedule.steps_ahead", "max_staleness is the bound in versions"),
    "max_trajectory_age_steps": PeerName("NeMo-RL", "schedule.max_staleness"),
    "max_staleness_steps": PeerName("SkyRL", "schedule.max_staleness"),
    "max_lag": PeerName("PipelineRL", "schedule.max_staleness", "in versions, not in samples"),
    "max_async_level": PeerName("prime-rl", "schedule.steps_ahead"),
    "async_queue_size": PeerName("OpenRLHF", "schedule.steps_ahead"),
    # schedule
    "trigger_parameter_sync_step": PeerName("verl", "schedule.publish_every"),
    "update_weights_interval": PeerName("slime", "schedule.publish_every"),
    "weight_sync_steps": PeerName("TRL", "schedule.publish_every"),
    "partial_rollout": PeerName("verl, slime and OpenRLHF", "schedule.kind", _PARTIAL),
    "in_flight_weight_updates": PeerName("NeMo-RL", "schedule.kind", _PARTIAL),
    "async_train": PeerName("OpenRLHF", "schedule.kind", "write 'one_step', 'partial' or 'trajectory'"),
    "async_grpo.enabled": PeerName("NeMo-RL", "schedule.kind", "write 'one_step', 'partial' or 'trajectory'"),
    "recompute_kv_cache_after_weight_updates": PeerName("NeMo-RL", "schedule.in_flight_kv", "'recompute' or 'keep'"),
    "max_concurrent_rollouts": PeerName("AReaL", "schedule.max_inflight"),
    "max_inflight_rollouts": PeerName("prime-rl", "schedule.max_inflight"),
    "max_inflight_tasks": PeerName("TRL", "schedule.max_inflight"),
    "num_parallel_generation_workers": PeerName("SkyRL", "schedule.max_inflight", "in trajectories, not groups"),
    "over_sampling_batch_size": PeerName("slime", "schedule.max_inflight", "in trajectories, not prompts"),
    "request_timeout": PeerName("AReaL", "groups.deadline_s"),
    # machines
    "nnodes": PeerName("verl", "cluster.gpus", _GPUS),
    "n_nodes": PeerName("AReaL", "cluster.gpus", _GPUS),
    "num_nodes": PeerName("NeMo-RL", "cluster.gpus", _GPUS),
    "n_gpus_per_node": PeerName("verl and AReaL", "cluster.gpus_per_host"),
    "gpus_per_node": PeerName("NeMo-RL", "cluster.gpus_per_host"),
    "num_gpus_per_node": PeerName("slime", "cluster.gpus_per_host"),
    "actor_num_nodes": PeerName("slime", "split.trainer_gpus", "in GPUs, not in hosts"),
    "actor_num_gpus_per_node": PeerName("slime", "split.trainer_gpus", "over all hosts together"),
    "rollout_num_gpus": PeerName("slime", "split.trainer_gpus", "the GPUs that are left generate"),
    "allocation_mode": PeerName("AReaL", "split.trainer_gpus", "and split.tensor_parallel for a replica"),
    "gen_tp": PeerName("verl", "split.tensor_parallel"),
    "tensor_model_parallel_size": PeerName("verl", "split.tensor_parallel", "the trainer's is split.trainer_parallel"),
    "tensor_parallel_size": PeerName("vLLM", "split.tensor_parallel"),
    "vllm_tensor_parallel_size": PeerName("TRL and OpenRLHF", "split.tensor_parallel"),
    "inference_engine_tensor_parallel_size": PeerName("SkyRL", "split.tensor_parallel"),
    "rollout_num_gpus_per_engine": PeerName("slime", "split.tensor_parallel"),
    "vllm_num_engines": PeerName("OpenRLHF", "split.tensor_parallel", _NUMBER_OF_REPLICAS),
    "num_inference_engines": PeerName("SkyRL", "split.tensor_parallel", _NUMBER_OF_REPLICAS),
    "train_tp": PeerName("verl", "split.trainer_parallel"),
    "ulysses_sequence_parallel_size": PeerName("verl", "split.trainer_parallel"),
    "context_parallel_size": PeerName("slime and NeMo-RL", "split.trainer_parallel"),
    "ring_attn_size": PeerName("OpenRLHF", "split.trainer_parallel"),
    "colocate": PeerName("slime", "split.colocated", _COLOCATED),
    "colocate_all": PeerName("SkyRL", "split.colocated", _COLOCATED),
    "colocate_all_models": PeerName("OpenRLHF", "split.colocated", _COLOCATED),
    "colocated.enabled": PeerName("NeMo-RL", "split.colocated", _COLOCATED),
    "vllm_mode": PeerName("TRL", "split.colocated", _COLOCATED),
    "max_num_seqs": PeerName("vLLM", "rollout.max_running"),
    "max_running_requests": PeerName("SGLang", "rollout.max_running"),
    "sglang_server_concurrency": PeerName("slime", "rollout.max_running"),
    # the loss
    "clip_ratio_c": PeerName("verl", "trainer.dual_clip"),
    "c_clip": PeerName("AReaL", "trainer.dual_clip"),
    # the run
    "total_training_steps": PeerName("verl", "run.steps"),
    "total_train_steps": PeerName("AReaL", "run.steps"),
    "max_steps": PeerName("TRL and prime-rl", "run.steps"),
    "max_num_steps": PeerName("NeMo-RL", "run.steps"),
    "num_rollout": PeerName("slime", "run.steps"),
    "save_freq": PeerName("verl", "trainer.checkpoint_every"),
    "save_interval": PeerName("slime", "trainer.checkpoint_every"),
    "save_steps": PeerName("TRL", "trainer.checkpoint_every"),
    "experiment_name": PeerName("verl and AReaL", "run.name"),
    "trial_name": PeerName("AReaL", "run.name"),
    "run_name": PeerName("TRL", "run.name"),
    "rollout_seed": PeerName("slime", "run.seed"),
    # the model
    "model.name": PeerName("prime-rl", "model.preset", _MODEL),
    "model_name": PeerName("NeMo-RL", "model.preset", _MODEL),
    "model_name_or_path": PeerName("TRL", "model.preset", _MODEL),
    "hf_checkpoint": PeerName("slime", "model.preset", _MODEL),
    "pretrain": PeerName("OpenRLHF", "model.preset", _MODEL),
}


def unknown(key: str, dashes: str = "") -> str:
    """A sentence about a key that is not ours: whose name it is, or the nearest key. Options get their `dashes`."""
    written, kind = dashes + key, "an option" if dashes else "a setting"
    peer = _peer(key)
    if peer:
        note = f" ({peer.note})" if peer.note else ""
        return f"{written} is {peer.peer}'s name, not {kind} here; write {dashes}{peer.key}{note}"
    near = nearest(key)
    advice = f"did you mean {dashes}{near}?" if near else "--dry-run prints every setting"
    return f"{written} is not {kind}; {advice}"


def nearest(key: str) -> str | None:
    """Our key that looks most like this one, by its full path or by its last word."""
    by_leaf = {leaf(each): each for each in reversed(fields())}
    if leaf(key) in by_leaf:
        return _best_home(key)
    close = get_close_matches(key, fields(), n=1, cutoff=0.75)
    if close:
        return close[0]
    close = get_close_matches(leaf(key), by_leaf, n=1, cutoff=0.7)
    return by_leaf[close[0]] if close else None


def _best_home(key: str) -> str:
    """Of the keys with the same last word (`workload.lengths.mean`, `workload.turns.mean`), the most alike."""
    homes = [each for each in fields() if leaf(each) == leaf(key)]
    return get_close_matches(key, homes, n=1, cutoff=0.0)[0]


def _peer(key: str) -> PeerName | None:
    words = key.split(".")
    tails = (".".join(words[start:]) for start in range(len(words)))
    return next((PEERS[tail] for tail in tails if tail in PEERS), None)
