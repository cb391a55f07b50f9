"""What other systems call our settings, so that whoever comes from there is told what to write here.

A name is the tail of the peer's dotted path: `actor_rollout_ref.rollout.n` is found as `rollout.n`. An entry without a
key says that there is nothing like it here, and what there is instead. `names.py` looks things up.
"""

from __future__ import annotations

from typing import NamedTuple


class PeerName(NamedTuple):
    """Whose name it is, our key (empty: there is none), and how to convert where the meaning differs."""

    peer: str
    key: str
    note: str = ""


_PROMPTS_FROM_SAMPLES = "prompts, not samples: divide by workload.group_size"
_MINI_BATCHES = "the number of mini-batches, not their size: step size / mini-batch size"
_GPUS = "all GPUs of the run together: hosts × GPUs per host"
_NUMBER_OF_REPLICAS = "the number of replicas follows: rollout GPUs / split.tensor_parallel"
_MODEL = "a directory or a .gguf file that you have; nothing is downloaded. To simulate a known shape: model.preset"
_DATA = "a JSONL or parquet file, or a saved dataset"
_REWARD = "'file.py:function'"
_ONCE = "every sample is trained once. trainer.mini_batches says how many updates a step has"
_WITH_MODEL = "the tokenizer lies with the model, in model.path"
_SHOWN = "figures are in run.db; tailrace page RUN shows them"
_MEASURED = "accuracy is measured before and after, and by tailrace eval RUN"
_BOTH_CLIPS = "and trainer.clip_high for the other side"
_PASSES = "most tokens in one forward and backward pass; gradients add up over them"
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
    "async_training": PeerName("verl", "schedule.kind", "write 'one_step', 'partial' or 'trajectory'"),
    "rollout.mode": PeerName("verl", "schedule.kind", "write 'one_step', 'partial' or 'trajectory'"),
    # what is minimised
    "adv_estimator": PeerName("verl", "trainer.advantage"),
    "advantage_estimator": PeerName("OpenRLHF, SkyRL and slime", "trainer.advantage"),
    "loss_type": PeerName("TRL", "trainer.loss"),
    "policy_loss_type": PeerName("SkyRL", "trainer.loss"),
    "loss_agg_mode": PeerName("verl", "trainer.loss", "how tokens are weighted belongs to the loss"),
    "beta": PeerName("TRL", "trainer.kl"),
    "kl_coef": PeerName("verl and slime", "trainer.kl", "in the loss, not in the reward"),
    "kl_loss_coef": PeerName("verl, SkyRL and slime", "trainer.kl"),
    "init_kl_coef": PeerName("OpenRLHF", "trainer.kl", "in the loss, not in the reward"),
    "kl_ctl": PeerName("AReaL", "trainer.kl"),
    "reference_policy_kl_penalty": PeerName("NeMo-RL", "trainer.kl"),
    "use_kl_loss": PeerName("verl, SkyRL and slime", "trainer.kl", "its weight; 0 is without"),
    "entropy_coeff": PeerName("verl", "trainer.entropy"),
    "entropy_coef": PeerName("slime", "trainer.entropy"),
    "entropy_loss_coef": PeerName("OpenRLHF and SkyRL", "trainer.entropy"),
    "clip_ratio": PeerName("verl", "trainer.clip_low", _BOTH_CLIPS),
    "clip_ratio_low": PeerName("verl", "trainer.clip_low"),
    "clip_ratio_high": PeerName("verl", "trainer.clip_high"),
    "clip_ratio_c": PeerName("verl", "trainer.dual_clip"),
    "c_clip": PeerName("AReaL", "trainer.dual_clip"),
    "epsilon": PeerName("TRL", "trainer.clip_low", _BOTH_CLIPS),
    "epsilon_high": PeerName("TRL", "trainer.clip_high"),
    "eps_clip": PeerName("AReaL, OpenRLHF and slime", "trainer.clip_low", _BOTH_CLIPS),
    "eps_clip_low": PeerName("SkyRL", "trainer.clip_low"),
    "eps_clip_high": PeerName("SkyRL and slime", "trainer.clip_high"),
    "eps_clip_higher": PeerName("AReaL", "trainer.clip_high"),
    "ratio_clip_min": PeerName("NeMo-RL", "trainer.clip_low"),
    "ratio_clip_max": PeerName("NeMo-RL", "trainer.clip_high"),
    "tis_imp_ratio_cap": PeerName("verl and SkyRL", "trainer.importance_cap", "with trainer.loss = 'tis'"),
    "behav_imp_weight_cap": PeerName("AReaL", "trainer.importance_cap"),
    "lam": PeerName("verl", "trainer.gae_lambda"),
    "lambd": PeerName("OpenRLHF", "trainer.gae_lambda"),
    "filter_groups.enable": PeerName("verl", "groups.filter", "'zero_advantage' or 'none'"),
    "dynamic_filtering": PeerName("OpenRLHF", "groups.filter", "'zero_advantage' or 'none'"),
    "use_dynamic_sampling": PeerName("NeMo-RL", "groups.filter", "'zero_advantage' or 'none'"),
    # the optimiser
    "lr": PeerName("verl, AReaL, SkyRL and slime", "trainer.learning_rate"),
    "critic.optim.lr": PeerName("verl", "trainer.critic_learning_rate"),
    "actor_learning_rate": PeerName("OpenRLHF", "trainer.learning_rate"),
    "adam_beta1": PeerName("TRL and slime", "trainer.beta1"),
    "adam_beta2": PeerName("TRL and slime", "trainer.beta2"),
    "grad_clip": PeerName("verl", "trainer.max_grad_norm"),
    "clip_grad": PeerName("slime", "trainer.max_grad_norm"),
    "gradient_clipping": PeerName("AReaL", "trainer.max_grad_norm"),
    "lr_warmup_steps": PeerName("verl", "trainer.warmup_steps"),
    "num_warmup_steps": PeerName("SkyRL", "trainer.warmup_steps"),
    "warmup_ratio": PeerName("TRL", "trainer.warmup_steps", "in optimiser steps, not as a share"),
    "lr_scheduler_type": PeerName("TRL", "trainer.decay", "'constant', 'linear' or 'cosine'"),
    "lr_decay_style": PeerName("slime", "trainer.decay", "'constant', 'linear' or 'cosine'"),
    "warmup_style": PeerName("verl", "trainer.decay", "'constant', 'linear' or 'cosine'"),
    "ppo_epochs": PeerName("verl", "", _ONCE),
    "num_iterations": PeerName("TRL", "", _ONCE),
    "max_epochs": PeerName("OpenRLHF", "", _ONCE),
    "update_epochs_per_batch": PeerName("SkyRL", "", _ONCE),
    "ppo_micro_batch_size_per_gpu": PeerName("verl", "trainer.tokens_per_batch", _PASSES),
    "ppo_max_token_len_per_gpu": PeerName("verl", "trainer.tokens_per_batch", _PASSES),
    "max_tokens_per_gpu": PeerName("slime", "trainer.tokens_per_batch", _PASSES),
    "max_tokens_per_mb": PeerName("AReaL", "trainer.tokens_per_batch", _PASSES),
    "gradient_accumulation_steps": PeerName("TRL", "trainer.tokens_per_batch", _PASSES),
    "gradient_checkpointing": PeerName("TRL and AReaL", "trainer.recompute", "true or false"),
    "enable_gradient_checkpointing": PeerName("verl", "trainer.recompute", "true or false"),
    "bf16": PeerName("TRL", "trainer.precision", "'bfloat16' or 'float32'"),
    # the engine
    "gpu_memory_utilization": PeerName("vLLM", "rollout.memory"),
    "vllm_gpu_memory_utilization": PeerName("TRL and OpenRLHF", "rollout.memory"),
    "mem_fraction_static": PeerName("SGLang", "rollout.memory"),
    "sglang_mem_fraction_static": PeerName("slime", "rollout.memory"),
    "rollout_temperature": PeerName("slime", "sampling.temperature"),
    "rollout.name": PeerName("verl", "", "the engine is our own"),
    "use_vllm": PeerName("TRL", "", "the engine is our own"),
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
    "total_epochs": PeerName("verl", "task.epochs"),
    "num_train_epochs": PeerName("TRL", "task.epochs"),
    "num_episodes": PeerName("OpenRLHF", "task.epochs"),
    "trainer.epochs": PeerName("SkyRL", "task.epochs"),
    "output_dir": PeerName("TRL", "run.folder"),
    "default_local_dir": PeerName("verl", "run.folder"),
    "resume_mode": PeerName("verl", "", "the option --resume goes on with a run"),
    "resume_from_checkpoint": PeerName("TRL", "", "the option --resume goes on with a run"),
    "test_freq": PeerName("verl", "", _MEASURED),
    "eval_steps": PeerName("TRL", "", _MEASURED),
    "eval_interval": PeerName("SkyRL and slime", "", _MEASURED),
    "report_to": PeerName("TRL", "", _SHOWN),
    "logger": PeerName("verl and SkyRL", "", _SHOWN),
    "use_wandb": PeerName("OpenRLHF and slime", "", _SHOWN),
    "project_name": PeerName("verl and SkyRL", "", "a run has a folder (run.folder) and a name (run.name)"),
    # prompts and rewards
    "train_files": PeerName("verl", "task.data", _DATA),
    "val_files": PeerName("verl", "task.eval_data", _DATA),
    "prompt_data": PeerName("OpenRLHF and slime", "task.data", _DATA),
    "dataset_name": PeerName("TRL", "task.data", _DATA),
    "train_dataset.path": PeerName("AReaL", "task.data", _DATA),
    "train_data": PeerName("SkyRL", "task.data", _DATA),
    "val_data": PeerName("SkyRL", "task.eval_data", _DATA),
    "custom_reward_function.path": PeerName("verl", "task.reward", _REWARD),
    "custom_reward_function.name": PeerName("verl", "task.reward", _REWARD),
    "reward_funcs": PeerName("TRL", "task.reward", _REWARD),
    "custom_rm_path": PeerName("slime", "task.reward", _REWARD),
    # the model
    "model.name": PeerName("prime-rl", "model.path", _MODEL),
    "model_name": PeerName("NeMo-RL", "model.path", _MODEL),
    "model_name_or_path": PeerName("TRL", "model.path", _MODEL),
    "actor.path": PeerName("AReaL", "model.path", _MODEL),
    "hf_checkpoint": PeerName("slime", "model.path", _MODEL),
    "pretrain": PeerName("OpenRLHF", "model.path", _MODEL),
    "tokenizer_name": PeerName("NeMo-RL", "", _WITH_MODEL),
    "tokenizer_path": PeerName("AReaL", "", _WITH_MODEL),
}

_ASYNCHRONOUS = "asynchronous are 'one_step', 'stream', 'partial' and 'trajectory', the default"
_ENGINE = "the engine is our own: 'native', or 'emulated' without a model"
_LOSSES = "that algorithm is not here"

# Words that other systems use for a value of ours: what to write, or what there is.
VALUES: dict[str, dict[str, str]] = {
    "schedule.kind": {
        "async": _ASYNCHRONOUS,
        "asynchronous": _ASYNCHRONOUS,
        "off_policy": _ASYNCHRONOUS,
        "synchronous": "write 'sync'",
        "on_policy": "write 'sync', or schedule.max_staleness = 0 with any other",
        "colocate": "write 'sync'; it shares the GPUs, and split.colocated = true makes the others share them",
        "colocated": "write 'sync'; it shares the GPUs, and split.colocated = true makes the others share them",
        "one_step_off": "write 'one_step'",
        "one_step_off_policy": "write 'one_step'",
        "one_step_async": "write 'one_step'",
        "fully_async": "write 'partial', or 'stream' for rollouts that are never interrupted",
        "fully_async_policy": "write 'partial', or 'stream' for rollouts that are never interrupted",
        "partial_rollout": "write 'partial'",
        "in_flight": "write 'partial'",
        "streaming": "write 'stream'",
        "streamrl": "write 'stream'",
        "areal": "write 'partial'",
        "pipelinerl": "write 'partial' with schedule.in_flight_kv = 'keep'",
        "laminar": "write 'trajectory'",
        "dora": "write 'trajectory'",
    },
    "trainer.loss": dict.fromkeys(("gspo", "cispo", "dpo", "sapo", "vapo", "rloo"), _LOSSES),
    "trainer.advantage": dict.fromkeys(("reinforce", "reinforce_plus_plus", "remax", "opo", "ppo"), _LOSSES),
    "trainer.precision": {"bf16": "write 'bfloat16'", "fp32": "write 'float32'"},
    "rollout.precision": {"bf16": "write 'bfloat16'", "fp32": "write 'float32'", "fp16": "write 'float16'"},
    "rollout.engine": dict.fromkeys(("vllm", "sglang", "hf", "transformers"), _ENGINE),
    "trainer.engine": dict.fromkeys(("fsdp", "fsdp2", "megatron", "deepspeed"), "'native' shards by FSDP2"),
    "trainer.decay": {"none": "write 'constant'"},
    "groups.filter": {"dynamic": "write 'zero_advantage'", "dapo": "write 'zero_advantage'"},
}
