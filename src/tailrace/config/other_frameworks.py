"""What other frameworks call our settings, so that whoever comes from there is told what to write here.

A name is the end of a dotted path: `actor_rollout_ref.rollout.n` is found as `rollout.n`. An entry without
a key says that there is nothing like it here, and what there is instead. `suggestions.py` looks things up.
"""

from __future__ import annotations

from typing import NamedTuple


class FrameworkName(NamedTuple):
    """Whose name it is, our key (empty: there is none), and how to convert where the meaning differs."""

    framework: str
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
_BOTH_CLIPS = "and trainer.clip_high for the other side"
_PASSES = "micro-batch token budget; affects memory, not results"
_PARTIAL = "write schedule.kind = 'partial'"
_COLOCATED = "true or false"

FRAMEWORK_NAMES: dict[str, FrameworkName] = {
    # samples per prompt
    "rollout.n": FrameworkName("verl", "workload.group_size"),
    "num_generations": FrameworkName("TRL", "workload.group_size"),
    "n_samples_per_prompt": FrameworkName("slime, OpenRLHF and SkyRL", "workload.group_size"),
    "num_generations_per_prompt": FrameworkName("NeMo-RL", "workload.group_size"),
    "rollouts_per_example": FrameworkName("prime-rl", "workload.group_size"),
    "gconfig.n_samples": FrameworkName("AReaL", "workload.group_size"),
    "n_samples": FrameworkName("AReaL", "workload.group_size"),
    # prompts per step
    "train_batch_size": FrameworkName("verl and SkyRL", "workload.prompts_per_step", "OpenRLHF counts samples: divide"),
    "rollout_batch_size": FrameworkName("slime and OpenRLHF", "workload.prompts_per_step"),
    "num_prompts_per_step": FrameworkName("NeMo-RL", "workload.prompts_per_step"),
    "batch_size": FrameworkName("prime-rl", "workload.prompts_per_step", _PROMPTS_FROM_SAMPLES),
    "train_dataset.batch_size": FrameworkName("AReaL", "workload.prompts_per_step"),
    "consumer_batch_size": FrameworkName("AReaL", "workload.prompts_per_step", _PROMPTS_FROM_SAMPLES),
    "generation_batch_size": FrameworkName("TRL", "workload.prompts_per_step", _PROMPTS_FROM_SAMPLES),
    "per_device_train_batch_size": FrameworkName("TRL", "workload.prompts_per_step", "for all devices together"),
    # mini-batches
    "ppo_mini_batch_size": FrameworkName("verl", "trainer.mini_batches", _MINI_BATCHES),
    "policy_mini_batch_size": FrameworkName("SkyRL", "trainer.mini_batches", _MINI_BATCHES),
    "global_batch_size": FrameworkName("slime", "trainer.mini_batches", _MINI_BATCHES),
    "train_global_batch_size": FrameworkName("NeMo-RL", "trainer.mini_batches", _MINI_BATCHES),
    "ppo_n_minibatches": FrameworkName("AReaL", "trainer.mini_batches"),
    "num_steps_per_rollout": FrameworkName("slime", "trainer.mini_batches"),
    "steps_per_generation": FrameworkName("TRL", "trainer.mini_batches"),
    "require_batches": FrameworkName("verl", "trainer.mini_batches", "it fetches mini-batches; here groups stream in"),
    # lengths
    "max_response_length": FrameworkName("verl", "workload.max_completion_tokens"),
    "max_completion_length": FrameworkName("TRL", "workload.max_completion_tokens"),
    "max_new_tokens": FrameworkName("AReaL", "workload.max_completion_tokens"),
    "sampling.max_tokens": FrameworkName("prime-rl", "workload.max_completion_tokens"),
    "max_tokens": FrameworkName("prime-rl", "workload.max_completion_tokens"),
    "rollout_max_response_len": FrameworkName("slime", "workload.max_completion_tokens"),
    "generate_max_len": FrameworkName("OpenRLHF", "workload.max_completion_tokens"),
    "max_generate_length": FrameworkName("SkyRL", "workload.max_completion_tokens"),
    "seq_len": FrameworkName("prime-rl", "workload.max_completion_tokens", "without the prompt"),
    "max_total_sequence_length": FrameworkName("NeMo-RL", "workload.max_completion_tokens", "without the prompt"),
    "max_prompt_length": FrameworkName("verl and TRL", "workload.prompt_tokens", "the usual length, not the limit"),
    "prompt_max_len": FrameworkName("OpenRLHF", "workload.prompt_tokens", "the usual length, not the limit"),
    "rollout_max_prompt_len": FrameworkName("slime", "workload.prompt_tokens", "the usual length, not the limit"),
    # staleness
    "max_off_policy_steps": FrameworkName("prime-rl", "schedule.max_staleness"),
    "max_head_offpolicyness": FrameworkName("AReaL", "schedule.max_staleness", "and the same for schedule.steps_ahead"),
    "staleness_threshold": FrameworkName("verl", "schedule.steps_ahead", "max_staleness is the bound in versions"),
    "max_trajectory_age_steps": FrameworkName("NeMo-RL", "schedule.max_staleness"),
    "max_staleness_steps": FrameworkName("SkyRL", "schedule.max_staleness"),
    "max_lag": FrameworkName("PipelineRL", "schedule.max_staleness", "in versions, not in samples"),
    "max_async_level": FrameworkName("prime-rl", "schedule.steps_ahead"),
    "async_queue_size": FrameworkName("OpenRLHF", "schedule.steps_ahead"),
    # schedule
    "trigger_parameter_sync_step": FrameworkName("verl", "schedule.publish_every"),
    "update_weights_interval": FrameworkName("slime", "schedule.publish_every"),
    "weight_sync_steps": FrameworkName("TRL", "schedule.publish_every"),
    "partial_rollout": FrameworkName("verl, slime and OpenRLHF", "schedule.kind", _PARTIAL),
    "in_flight_weight_updates": FrameworkName("NeMo-RL", "schedule.kind", _PARTIAL),
    "async_train": FrameworkName("OpenRLHF", "schedule.kind", "write 'one_step', 'partial' or 'trajectory'"),
    "async_grpo.enabled": FrameworkName("NeMo-RL", "schedule.kind", "write 'one_step', 'partial' or 'trajectory'"),
    "recompute_kv_cache_after_weight_updates": FrameworkName(
        "NeMo-RL", "schedule.in_flight_kv", "'recompute' or 'keep'"
    ),
    "max_concurrent_rollouts": FrameworkName("AReaL", "schedule.max_inflight"),
    "max_inflight_rollouts": FrameworkName("prime-rl", "schedule.max_inflight"),
    "max_inflight_tasks": FrameworkName("TRL", "schedule.max_inflight"),
    "num_parallel_generation_workers": FrameworkName("SkyRL", "schedule.max_inflight", "in trajectories, not groups"),
    "over_sampling_batch_size": FrameworkName("slime", "schedule.max_inflight", "in trajectories, not prompts"),
    "request_timeout": FrameworkName("AReaL", "groups.deadline_s"),
    "async_training": FrameworkName("verl", "schedule.kind", "write 'one_step', 'partial' or 'trajectory'"),
    "rollout.mode": FrameworkName("verl", "schedule.kind", "write 'one_step', 'partial' or 'trajectory'"),
    # what is minimised
    "adv_estimator": FrameworkName("verl", "trainer.advantage"),
    "advantage_estimator": FrameworkName("OpenRLHF, SkyRL and slime", "trainer.advantage"),
    "loss_type": FrameworkName("TRL", "trainer.loss"),
    "policy_loss_type": FrameworkName("SkyRL", "trainer.loss"),
    "loss_agg_mode": FrameworkName("verl", "trainer.loss", "how tokens are weighted belongs to the loss"),
    "beta": FrameworkName("TRL", "trainer.kl"),
    "kl_coef": FrameworkName("verl and slime", "trainer.kl", "in the loss, not in the reward"),
    "kl_loss_coef": FrameworkName("verl, SkyRL and slime", "trainer.kl"),
    "init_kl_coef": FrameworkName("OpenRLHF", "trainer.kl", "in the loss, not in the reward"),
    "kl_ctl": FrameworkName("AReaL", "trainer.kl"),
    "reference_policy_kl_penalty": FrameworkName("NeMo-RL", "trainer.kl"),
    "use_kl_loss": FrameworkName("verl, SkyRL and slime", "trainer.kl", "its weight; 0 is without"),
    "entropy_coeff": FrameworkName("verl", "trainer.entropy"),
    "entropy_coef": FrameworkName("slime", "trainer.entropy"),
    "entropy_loss_coef": FrameworkName("OpenRLHF and SkyRL", "trainer.entropy"),
    "clip_ratio": FrameworkName("verl", "trainer.clip_low", _BOTH_CLIPS),
    "clip_ratio_low": FrameworkName("verl", "trainer.clip_low"),
    "clip_ratio_high": FrameworkName("verl", "trainer.clip_high"),
    "clip_ratio_c": FrameworkName("verl", "trainer.dual_clip"),
    "c_clip": FrameworkName("AReaL", "trainer.dual_clip"),
    "epsilon": FrameworkName("TRL", "trainer.clip_low", _BOTH_CLIPS),
    "epsilon_high": FrameworkName("TRL", "trainer.clip_high"),
    "eps_clip": FrameworkName("AReaL, OpenRLHF and slime", "trainer.clip_low", _BOTH_CLIPS),
    "eps_clip_low": FrameworkName("SkyRL", "trainer.clip_low"),
    "eps_clip_high": FrameworkName("SkyRL and slime", "trainer.clip_high"),
    "eps_clip_higher": FrameworkName("AReaL", "trainer.clip_high"),
    "ratio_clip_min": FrameworkName("NeMo-RL", "trainer.clip_low"),
    "ratio_clip_max": FrameworkName("NeMo-RL", "trainer.clip_high"),
    "tis_imp_ratio_cap": FrameworkName("verl and SkyRL", "trainer.importance_cap", "with trainer.loss = 'tis'"),
    "behav_imp_weight_cap": FrameworkName("AReaL", "trainer.importance_cap"),
    "lam": FrameworkName("verl", "trainer.gae_lambda"),
    "lambd": FrameworkName("OpenRLHF", "trainer.gae_lambda"),
    "filter_groups.enable": FrameworkName("verl", "groups.filter", "'zero_advantage' or 'none'"),
    "dynamic_filtering": FrameworkName("OpenRLHF", "groups.filter", "'zero_advantage' or 'none'"),
    "use_dynamic_sampling": FrameworkName("NeMo-RL", "groups.filter", "'zero_advantage' or 'none'"),
    # the optimiser
    "lr": FrameworkName("verl, AReaL, SkyRL and slime", "trainer.learning_rate"),
    "critic.optim.lr": FrameworkName("verl", "trainer.critic_learning_rate"),
    "actor_learning_rate": FrameworkName("OpenRLHF", "trainer.learning_rate"),
    "adam_beta1": FrameworkName("TRL and slime", "trainer.beta1"),
    "adam_beta2": FrameworkName("TRL and slime", "trainer.beta2"),
    "grad_clip": FrameworkName("verl", "trainer.max_grad_norm"),
    "clip_grad": FrameworkName("slime", "trainer.max_grad_norm"),
    "gradient_clipping": FrameworkName("AReaL", "trainer.max_grad_norm"),
    "lr_warmup_steps": FrameworkName("verl", "trainer.warmup_steps"),
    "num_warmup_steps": FrameworkName("SkyRL", "trainer.warmup_steps"),
    "warmup_ratio": FrameworkName("TRL", "trainer.warmup_steps", "in optimiser steps, not as a share"),
    "lr_scheduler_type": FrameworkName("TRL", "trainer.decay", "'constant', 'linear' or 'cosine'"),
    "lr_decay_style": FrameworkName("slime", "trainer.decay", "'constant', 'linear' or 'cosine'"),
    "warmup_style": FrameworkName("verl", "trainer.decay", "'constant', 'linear' or 'cosine'"),
    "ppo_epochs": FrameworkName("verl", "", _ONCE),
    "num_iterations": FrameworkName("TRL", "", _ONCE),
    "max_epochs": FrameworkName("OpenRLHF", "", _ONCE),
    "update_epochs_per_batch": FrameworkName("SkyRL", "", _ONCE),
    "ppo_micro_batch_size_per_gpu": FrameworkName("verl", "trainer.tokens_per_batch", _PASSES),
    "ppo_max_token_len_per_gpu": FrameworkName("verl", "trainer.tokens_per_batch", _PASSES),
    "max_tokens_per_gpu": FrameworkName("slime", "trainer.tokens_per_batch", _PASSES),
    "max_tokens_per_mb": FrameworkName("AReaL", "trainer.tokens_per_batch", _PASSES),
    "gradient_accumulation_steps": FrameworkName("TRL", "trainer.tokens_per_batch", _PASSES),
    "gradient_checkpointing": FrameworkName("TRL and AReaL", "trainer.recompute", "true or false"),
    "enable_gradient_checkpointing": FrameworkName("verl", "trainer.recompute", "true or false"),
    "bf16": FrameworkName("TRL", "trainer.precision", "'bfloat16' or 'float32'"),
    # the engine
    "gpu_memory_utilization": FrameworkName("vLLM", "rollout.memory"),
    "vllm_gpu_memory_utilization": FrameworkName("TRL and OpenRLHF", "rollout.memory"),
    "mem_fraction_static": FrameworkName("SGLang", "rollout.memory"),
    "sglang_mem_fraction_static": FrameworkName("slime", "rollout.memory"),
    "rollout_temperature": FrameworkName("slime", "sampling.temperature"),
    "rollout.name": FrameworkName("verl", "", "the engine is our own"),
    "use_vllm": FrameworkName("TRL", "", "the engine is our own"),
    # machines
    "nnodes": FrameworkName("verl", "cluster.gpus", _GPUS),
    "n_nodes": FrameworkName("AReaL", "cluster.gpus", _GPUS),
    "num_nodes": FrameworkName("NeMo-RL", "cluster.gpus", _GPUS),
    "n_gpus_per_node": FrameworkName("verl and AReaL", "cluster.gpus_per_host"),
    "gpus_per_node": FrameworkName("NeMo-RL", "cluster.gpus_per_host"),
    "num_gpus_per_node": FrameworkName("slime", "cluster.gpus_per_host"),
    "actor_num_nodes": FrameworkName("slime", "split.trainer_gpus", "in GPUs, not in hosts"),
    "actor_num_gpus_per_node": FrameworkName("slime", "split.trainer_gpus", "over all hosts together"),
    "rollout_num_gpus": FrameworkName("slime", "split.trainer_gpus", "the GPUs that are left generate"),
    "allocation_mode": FrameworkName("AReaL", "split.trainer_gpus", "and split.tensor_parallel for a replica"),
    "gen_tp": FrameworkName("verl", "split.tensor_parallel"),
    "tensor_model_parallel_size": FrameworkName(
        "verl", "split.tensor_parallel", "the trainer's is split.trainer_parallel"
    ),
    "tensor_parallel_size": FrameworkName("vLLM", "split.tensor_parallel"),
    "vllm_tensor_parallel_size": FrameworkName("TRL and OpenRLHF", "split.tensor_parallel"),
    "inference_engine_tensor_parallel_size": FrameworkName("SkyRL", "split.tensor_parallel"),
    "rollout_num_gpus_per_engine": FrameworkName("slime", "split.tensor_parallel"),
    "vllm_num_engines": FrameworkName("OpenRLHF", "split.tensor_parallel", _NUMBER_OF_REPLICAS),
    "num_inference_engines": FrameworkName("SkyRL", "split.tensor_parallel", _NUMBER_OF_REPLICAS),
    "train_tp": FrameworkName("verl", "split.trainer_parallel"),
    "ulysses_sequence_parallel_size": FrameworkName("verl", "split.trainer_parallel"),
    "context_parallel_size": FrameworkName("slime and NeMo-RL", "split.trainer_parallel"),
    "ring_attn_size": FrameworkName("OpenRLHF", "split.trainer_parallel"),
    "colocate": FrameworkName("slime", "split.colocated", _COLOCATED),
    "colocate_all": FrameworkName("SkyRL", "split.colocated", _COLOCATED),
    "colocate_all_models": FrameworkName("OpenRLHF", "split.colocated", _COLOCATED),
    "colocated.enabled": FrameworkName("NeMo-RL", "split.colocated", _COLOCATED),
    "vllm_mode": FrameworkName("TRL", "split.colocated", _COLOCATED),
    "max_num_seqs": FrameworkName("vLLM", "rollout.max_running"),
    "max_running_requests": FrameworkName("SGLang", "rollout.max_running"),
    "sglang_server_concurrency": FrameworkName("slime", "rollout.max_running"),
    # the run
    "total_training_steps": FrameworkName("verl", "run.steps"),
    "total_train_steps": FrameworkName("AReaL", "run.steps"),
    "max_steps": FrameworkName("TRL and prime-rl", "run.steps"),
    "max_num_steps": FrameworkName("NeMo-RL", "run.steps"),
    "num_rollout": FrameworkName("slime", "run.steps"),
    "save_freq": FrameworkName("verl", "trainer.checkpoint_every"),
    "save_interval": FrameworkName("slime", "trainer.checkpoint_every"),
    "save_steps": FrameworkName("TRL", "trainer.checkpoint_every"),
    "experiment_name": FrameworkName("verl and AReaL", "run.name"),
    "trial_name": FrameworkName("AReaL", "run.name"),
    "run_name": FrameworkName("TRL", "run.name"),
    "rollout_seed": FrameworkName("slime", "run.seed"),
    "total_epochs": FrameworkName("verl", "task.epochs"),
    "num_train_epochs": FrameworkName("TRL", "task.epochs"),
    "num_episodes": FrameworkName("OpenRLHF", "task.epochs"),
    "trainer.epochs": FrameworkName("SkyRL", "task.epochs"),
    "output_dir": FrameworkName("TRL", "run.folder"),
    "default_local_dir": FrameworkName("verl", "run.folder"),
    "resume_mode": FrameworkName("verl", "", "the option --resume goes on with a run"),
    "resume_from_checkpoint": FrameworkName("TRL", "", "the option --resume goes on with a run"),
    "test_freq": FrameworkName("verl", "eval.every"),
    "eval_steps": FrameworkName("TRL", "eval.every"),
    "eval_interval": FrameworkName("SkyRL and slime", "eval.every"),
    "report_to": FrameworkName("TRL", "log.to"),
    "logger": FrameworkName("verl and SkyRL", "log.to"),
    "use_wandb": FrameworkName("OpenRLHF and slime", "log.to"),
    "project_name": FrameworkName("verl and SkyRL", "", "a run has a folder (run.folder) and a name (run.name)"),
    # prompts and rewards
    "train_files": FrameworkName("verl", "task.data", _DATA),
    "val_files": FrameworkName("verl", "task.eval_data", _DATA),
    "prompt_data": FrameworkName("OpenRLHF and slime", "task.data", _DATA),
    "dataset_name": FrameworkName("TRL", "task.data", _DATA),
    "train_dataset.path": FrameworkName("AReaL", "task.data", _DATA),
    "train_data": FrameworkName("SkyRL", "task.data", _DATA),
    "val_data": FrameworkName("SkyRL", "task.eval_data", _DATA),
    "custom_reward_function.path": FrameworkName("verl", "task.reward", _REWARD),
    "custom_reward_function.name": FrameworkName("verl", "task.reward", _REWARD),
    "reward_funcs": FrameworkName("TRL", "task.reward", _REWARD),
    "custom_rm_path": FrameworkName("slime", "task.reward", _REWARD),
    # the model
    "model.name": FrameworkName("prime-rl", "model.path", _MODEL),
    "model_name": FrameworkName("NeMo-RL", "model.path", _MODEL),
    "model_name_or_path": FrameworkName("TRL", "model.path", _MODEL),
    "actor.path": FrameworkName("AReaL", "model.path", _MODEL),
    "hf_checkpoint": FrameworkName("slime", "model.path", _MODEL),
    "pretrain": FrameworkName("OpenRLHF", "model.path", _MODEL),
    "tokenizer_name": FrameworkName("NeMo-RL", "", _WITH_MODEL),
    "tokenizer_path": FrameworkName("AReaL", "", _WITH_MODEL),
}

_ASYNCHRONOUS = "asynchronous are 'one_step', 'stream', 'partial' and 'trajectory', the default"
_ENGINE = "there is our own, 'native', and 'vllm'; or 'emulated' without a model"
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
    "rollout.engine": dict.fromkeys(("sglang", "hf", "transformers"), _ENGINE),
    "trainer.engine": dict.fromkeys(("fsdp", "fsdp2", "megatron", "deepspeed"), "'native' shards by FSDP2"),
    "trainer.decay": {"none": "write 'constant'"},
    "groups.filter": {"dynamic": "write 'zero_advantage'", "dapo": "write 'zero_advantage'"},
}
