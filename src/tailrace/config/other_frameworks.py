"""What other frameworks call our settings, so that whoever comes from there is told what to write here.

A name is the end of a dotted path: `actor_rollout_ref.rollout.n` is found as `rollout.n`. An entry without
a key says that there is nothing like it here, and what there is instead. `suggestions.py` looks things up.
"""

from __future__ import annotations

from typing import NamedTuple


class FrameworkName(NamedTuple):
    """Whose name it is, our key (empty: there is none), and how to convert where the meaning differs. Where a real run
    and a simulation are told in different ways, `key` is for the run, and `simulated` for the simulation."""

    framework: str
    key: str
    note: str = ""
    simulated: str = ""


_PROMPTS_FROM_SAMPLES = "prompts, not samples: divide by workload.group_size"
_TRL_BATCH = (
    "prompts, for all devices together: per_device_train_batch_size × devices × gradient_accumulation_steps / "
    "num_generations"
)
_TRL_UPDATES = "updates of a step: steps_per_generation / gradient_accumulation_steps, in TRL 1 unless it is set"
_MINI_BATCHES = "the number of mini-batches, not their size: step size / mini-batch size"
_VERL_MINI_BATCHES = "the number of mini-batches, not their size: train_batch_size / ppo_mini_batch_size"
_GPUS = "all GPUs of this machine are used, and others join: tailrace launch, tailrace worker --join"
_CARDS = "all GPUs of this machine are used: trainer.ranks of them train, one each for local.replicas = 'auto' generate"
_TENSOR_PARALLEL = "with rollout.engine = 'vllm': rollout.vllm.tensor_parallel_size"
_TRAINER_PARALLEL = "the trainer shards by FSDP2 over trainer.ranks"
_SHARED_CARDS = "trainer and replicas are processes of their own, which share a GPU where there are too few"
_MODEL = "a directory or a .gguf file that you have; nothing is downloaded. To simulate a known shape: model.preset"
_DATA = "a JSONL or parquet file, or a saved dataset; in Python also the rows"
_REWARD = "'file.py:function'; in Python also the function"
_ONE_REWARD = f"{_REWARD}; one function: let it call the others, each with its weight"
_ONCE = "every sample is trained once. trainer.mini_batches says how many updates a step has"
_EPOCHS = "a run ends with run.steps or task.epochs, whichever comes first, so set both"
_WITH_MODEL = "the tokenizer lies with the model, in model.path"
_KEPT = "so many of a step are told to trackers; every completion is kept and read with tailrace samples RUN"
_EVALUATED_AS_TRAINED = "evaluations take sampling.top_p and sampling.top_k, as training does"
_EVERY_STEP = "the metrics of every step are kept"
_BOTH_CLIPS = "and the same for trainer.clip_high, unless that is another"
_PASSES = "micro-batch token budget; affects memory, not results"
_PASSES_OF_SEQUENCES = "micro-batch token budget, in tokens, not sequences; affects memory, not results"
_PARTIAL = "write schedule.kind = 'partial'"
_PROMPT_LENGTH = (
    "the usual length, not the limit: prompts are never cut, and one that leaves no room for "
    "workload.max_completion_tokens in the model's context is refused"
)
_ALL_WEIGHTS = "all weights are trained; there are no adapters (LoRA)"
_TRUNCATED = "an answer that was cut off is rewarded and trained on like any other"
_ADVANTAGE = "'grpo' divides by the standard deviation of the group, 'dr_grpo' does not; that of a batch is not here"
_GROUPS_LEFT_OUT = "groups in a row, not batches of them"
_LOSS = "'grpo' averages over sequences, 'dapo' over tokens, 'dr_grpo' divides by the longest"
_AGGREGATION = (
    "how tokens are averaged belongs to the loss: 'token-mean' is 'dapo', 'seq-mean-token-mean' 'grpo', "
    "'seq-mean-token-sum-norm' 'dr_grpo'"
)
_NEWEST = "the newest so many stay, 2 or more; trainer.archive_every = N keeps every Nth permanently"
_SAVED = "in training steps; the newest trainer.keep_checkpoints stay, and trainer.archive_every = N keeps every Nth"
_FOLDER = "the parent of all runs; this one is run.folder/run.name"
_WARMUP = "in updates, not as a share: warmup_ratio × run.steps × trainer.mini_batches"
_WARMUP_OF_STEPS = "in updates, not in training steps: lr_warmup_steps × trainer.mini_batches"
_DECAY = "'constant', 'linear' or 'cosine'; TRL decays linearly unless it is told otherwise, here the rate is constant"
_DECAYS = "'constant', 'linear' or 'cosine'"
_OWN_ENGINE = "'native', our own, or 'vllm' with rollout.python, the Python that has it"

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
    "per_device_train_batch_size": FrameworkName("TRL", "workload.prompts_per_step", _TRL_BATCH),
    # mini-batches
    "ppo_mini_batch_size": FrameworkName("verl", "trainer.mini_batches", _VERL_MINI_BATCHES),
    "policy_mini_batch_size": FrameworkName("SkyRL", "trainer.mini_batches", _MINI_BATCHES),
    "global_batch_size": FrameworkName("slime", "trainer.mini_batches", _MINI_BATCHES),
    "train_global_batch_size": FrameworkName("NeMo-RL", "trainer.mini_batches", _MINI_BATCHES),
    "ppo_n_minibatches": FrameworkName("AReaL", "trainer.mini_batches"),
    "num_steps_per_rollout": FrameworkName("slime", "trainer.mini_batches"),
    "steps_per_generation": FrameworkName("TRL", "trainer.mini_batches", _TRL_UPDATES),
    # lengths
    "max_response_length": FrameworkName("verl", "workload.max_completion_tokens"),
    "max_completion_length": FrameworkName("TRL", "workload.max_completion_tokens"),
    "max_new_tokens": FrameworkName("AReaL", "workload.max_completion_tokens"),
    "sampling.max_tokens": FrameworkName("prime-rl", "workload.max_completion_tokens", "of all turns together"),
    "max_tokens": FrameworkName("prime-rl", "workload.max_completion_tokens", "of all turns together"),
    "rollout_max_response_len": FrameworkName("slime", "workload.max_completion_tokens"),
    "generate_max_len": FrameworkName("OpenRLHF", "workload.max_completion_tokens"),
    "max_generate_length": FrameworkName("SkyRL", "workload.max_completion_tokens"),
    "seq_len": FrameworkName("prime-rl", "workload.max_completion_tokens", "without the prompt"),
    "max_total_sequence_length": FrameworkName("NeMo-RL", "workload.max_completion_tokens", "without the prompt"),
    "max_prompt_length": FrameworkName("verl and TRL", "workload.prompt_tokens", _PROMPT_LENGTH),
    "prompt_max_len": FrameworkName("OpenRLHF", "workload.prompt_tokens", _PROMPT_LENGTH),
    "rollout_max_prompt_len": FrameworkName("slime", "workload.prompt_tokens", _PROMPT_LENGTH),
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
    "rollout.mode": FrameworkName(
        "verl", "", "engines always take requests as they come; what overlaps with training is schedule.kind"
    ),
    # what is minimised
    "adv_estimator": FrameworkName("verl", "trainer.advantage"),
    "advantage_estimator": FrameworkName("OpenRLHF, SkyRL and slime", "trainer.advantage"),
    "loss_type": FrameworkName("TRL", "trainer.loss", _LOSS),
    "policy_loss_type": FrameworkName("SkyRL", "trainer.loss"),
    "loss_agg_mode": FrameworkName("verl", "trainer.loss", _AGGREGATION),
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
    "use_kl_in_reward": FrameworkName("verl", "trainer.kl", "in the loss, not in the reward; 0 is without"),
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
    "scale_rewards": FrameworkName("TRL", "trainer.advantage", _ADVANTAGE),
    "norm_adv_by_std_in_grpo": FrameworkName("verl", "trainer.advantage", _ADVANTAGE),
    "delta": FrameworkName("TRL", "trainer.dual_clip"),
    "mask_truncated_completions": FrameworkName("TRL", "", _TRUNCATED),
    "overlong_buffer.enable": FrameworkName("verl", "", "make the reward smaller for long answers"),
    "importance_sampling_level": FrameworkName("TRL", "", "ratios are of tokens, not of sequences (GSPO)"),
    "lam": FrameworkName("verl", "trainer.gae_lambda"),
    "lambd": FrameworkName("OpenRLHF", "trainer.gae_lambda"),
    "filter_groups.enable": FrameworkName("verl", "groups.filter", "'zero_advantage' or 'none'"),
    "filter_groups.metric": FrameworkName("verl", "", "groups.filter compares the rewards that are trained on"),
    "filter_groups.max_num_gen_batches": FrameworkName("verl", "groups.max_filtered", _GROUPS_LEFT_OUT),
    "dynamic_sampling_max_gen_batches": FrameworkName("NeMo-RL", "groups.max_filtered", _GROUPS_LEFT_OUT),
    "dynamic_sampling.max_sample_batches": FrameworkName("SkyRL", "groups.max_filtered", _GROUPS_LEFT_OUT),
    "dynamic_sampling.type": FrameworkName("SkyRL", "groups.filter", "'zero_advantage' is its 'filter'; or 'none'"),
    "dynamic_sampling_filter_path": FrameworkName("slime", "groups.filter", "'zero_advantage' or 'none'"),
    "online_difficulty_filtering": FrameworkName("prime-rl", "groups.filter", "'zero_advantage' or 'none'"),
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
    "lr_warmup_steps": FrameworkName("verl", "trainer.warmup_steps", _WARMUP_OF_STEPS),
    "num_warmup_steps": FrameworkName("SkyRL", "trainer.warmup_steps"),
    "warmup_ratio": FrameworkName("TRL", "trainer.warmup_steps", _WARMUP),
    "lr_scheduler_type": FrameworkName("TRL", "trainer.decay", _DECAY),
    "lr_decay_style": FrameworkName("slime", "trainer.decay", _DECAYS),
    "warmup_style": FrameworkName("verl", "trainer.decay", _DECAYS),
    "lr_warmup_steps_ratio": FrameworkName(
        "verl", "trainer.warmup_steps", _WARMUP.replace("warmup_ratio", "the share")
    ),
    "max_norm": FrameworkName("prime-rl", "trainer.max_grad_norm"),
    "betas1": FrameworkName("prime-rl", "trainer.beta1"),
    "betas2": FrameworkName("prime-rl", "trainer.beta2"),
    "use_peft": FrameworkName("TRL", "", _ALL_WEIGHTS),
    "peft_config": FrameworkName("TRL", "", _ALL_WEIGHTS),
    "lora_r": FrameworkName("TRL", "", _ALL_WEIGHTS),
    "lora_rank": FrameworkName("verl", "", _ALL_WEIGHTS),
    "lora_alpha": FrameworkName("TRL and verl", "", _ALL_WEIGHTS),
    "model.lora.rank": FrameworkName("prime-rl", "", _ALL_WEIGHTS),
    "ppo_epochs": FrameworkName("verl", "", _ONCE),
    "num_iterations": FrameworkName("TRL", "", _ONCE),
    "max_epochs": FrameworkName("OpenRLHF", "", _ONCE),
    "update_epochs_per_batch": FrameworkName("SkyRL", "", _ONCE),
    "ppo_micro_batch_size_per_gpu": FrameworkName("verl", "trainer.tokens_per_batch", _PASSES_OF_SEQUENCES),
    "ppo_max_token_len_per_gpu": FrameworkName("verl", "trainer.tokens_per_batch", _PASSES),
    "max_tokens_per_gpu": FrameworkName("slime", "trainer.tokens_per_batch", _PASSES),
    "max_tokens_per_mb": FrameworkName("AReaL", "trainer.tokens_per_batch", _PASSES),
    "gradient_accumulation_steps": FrameworkName("TRL", "workload.prompts_per_step", _TRL_BATCH),
    "gradient_checkpointing": FrameworkName("TRL and AReaL", "trainer.recompute", "true or false"),
    "enable_gradient_checkpointing": FrameworkName("verl", "trainer.recompute", "true or false"),
    "bf16": FrameworkName("TRL", "trainer.precision", "'bfloat16' or 'float32'"),
    # the engine
    "gpu_memory_utilization": FrameworkName("vLLM", "rollout.memory"),
    "vllm_gpu_memory_utilization": FrameworkName("TRL and OpenRLHF", "rollout.memory"),
    "mem_fraction_static": FrameworkName("SGLang", "rollout.memory"),
    "sglang_mem_fraction_static": FrameworkName("slime", "rollout.memory"),
    "rollout_temperature": FrameworkName("slime", "sampling.temperature"),
    "rollout.name": FrameworkName("verl", "rollout.engine", _OWN_ENGINE),
    "use_vllm": FrameworkName("TRL", "rollout.engine", _OWN_ENGINE),
    # machines
    "nnodes": FrameworkName("verl", "", _GPUS, "cluster.gpus"),
    "n_nodes": FrameworkName("AReaL", "", _GPUS, "cluster.gpus"),
    "num_nodes": FrameworkName("NeMo-RL", "", _GPUS, "cluster.gpus"),
    "n_gpus_per_node": FrameworkName("verl and AReaL", "", _CARDS, "cluster.gpus_per_host"),
    "gpus_per_node": FrameworkName("NeMo-RL", "", _CARDS, "cluster.gpus_per_host"),
    "num_gpus_per_node": FrameworkName("slime", "", _CARDS, "cluster.gpus_per_host"),
    "actor_num_nodes": FrameworkName("slime", "trainer.ranks", "in GPUs, not in hosts", "split.trainer_gpus"),
    "actor_num_gpus_per_node": FrameworkName("slime", "trainer.ranks", "over all hosts together", "split.trainer_gpus"),
    "rollout_num_gpus": FrameworkName(
        "slime", "local.replicas", "one for each GPU that generates; 'auto': all that are left", "split.trainer_gpus"
    ),
    "allocation_mode": FrameworkName("AReaL", "trainer.ranks", "and local.replicas", "split.trainer_gpus"),
    "gen_tp": FrameworkName("verl", "", _TENSOR_PARALLEL, "split.tensor_parallel"),
    "tensor_model_parallel_size": FrameworkName("verl", "", _TENSOR_PARALLEL, "split.tensor_parallel"),
    "tensor_parallel_size": FrameworkName("vLLM", "", _TENSOR_PARALLEL, "split.tensor_parallel"),
    "vllm_tensor_parallel_size": FrameworkName("TRL and OpenRLHF", "", _TENSOR_PARALLEL, "split.tensor_parallel"),
    "inference_engine_tensor_parallel_size": FrameworkName("SkyRL", "", _TENSOR_PARALLEL, "split.tensor_parallel"),
    "rollout_num_gpus_per_engine": FrameworkName("slime", "", _TENSOR_PARALLEL, "split.tensor_parallel"),
    "vllm_num_engines": FrameworkName("OpenRLHF", "local.replicas"),
    "num_inference_engines": FrameworkName("SkyRL", "local.replicas"),
    "train_tp": FrameworkName("verl", "", _TRAINER_PARALLEL, "split.trainer_parallel"),
    "ulysses_sequence_parallel_size": FrameworkName("verl", "", _TRAINER_PARALLEL, "split.trainer_parallel"),
    "context_parallel_size": FrameworkName("slime and NeMo-RL", "", _TRAINER_PARALLEL, "split.trainer_parallel"),
    "ring_attn_size": FrameworkName("OpenRLHF", "", _TRAINER_PARALLEL, "split.trainer_parallel"),
    "num_train_gpus": FrameworkName("prime-rl", "trainer.ranks", "", "split.trainer_gpus"),
    "num_infer_gpus": FrameworkName("prime-rl", "local.replicas", "", "split.trainer_gpus"),
    "colocate": FrameworkName("slime", "", _SHARED_CARDS, "split.colocated"),
    "colocate_all": FrameworkName("SkyRL", "", _SHARED_CARDS, "split.colocated"),
    "colocate_all_models": FrameworkName("OpenRLHF", "", _SHARED_CARDS, "split.colocated"),
    "colocated.enabled": FrameworkName("NeMo-RL", "", _SHARED_CARDS, "split.colocated"),
    "vllm_mode": FrameworkName("TRL", "", _SHARED_CARDS, "split.colocated"),
    "max_num_seqs": FrameworkName("vLLM", "rollout.max_running"),
    "max_running_requests": FrameworkName("SGLang", "rollout.max_running"),
    "sglang_server_concurrency": FrameworkName("slime", "rollout.max_running"),
    # the run
    "total_training_steps": FrameworkName("verl", "run.steps"),
    "total_train_steps": FrameworkName("AReaL", "run.steps"),
    "max_steps": FrameworkName("TRL and prime-rl", "run.steps", "each of trainer.mini_batches updates"),
    "max_num_steps": FrameworkName("NeMo-RL", "run.steps"),
    "num_rollout": FrameworkName("slime", "run.steps"),
    "save_freq": FrameworkName("verl", "trainer.checkpoint_every", _SAVED),
    "save_interval": FrameworkName("slime", "trainer.checkpoint_every", _SAVED),
    "save_steps": FrameworkName("TRL", "trainer.checkpoint_every", _SAVED),
    "save_total_limit": FrameworkName("TRL", "trainer.keep_checkpoints", _NEWEST),
    "max_actor_ckpt_to_keep": FrameworkName("verl", "trainer.keep_checkpoints", _NEWEST),
    "ckpt.interval": FrameworkName("prime-rl", "trainer.checkpoint_every", _SAVED),
    "ckpt.keep_last": FrameworkName("prime-rl", "trainer.keep_checkpoints", _NEWEST),
    "ckpt.keep_interval": FrameworkName("prime-rl", "trainer.archive_every"),
    "experiment_name": FrameworkName("verl and AReaL", "run.name"),
    "trial_name": FrameworkName("AReaL", "run.name"),
    "run_name": FrameworkName("TRL", "run.name"),
    "rollout_seed": FrameworkName("slime", "run.seed"),
    "total_epochs": FrameworkName("verl", "task.epochs", _EPOCHS),
    "num_train_epochs": FrameworkName("TRL", "task.epochs", _EPOCHS),
    "num_episodes": FrameworkName("OpenRLHF", "task.epochs"),
    "trainer.epochs": FrameworkName("SkyRL", "task.epochs"),
    "output_dir": FrameworkName("TRL", "run.folder", _FOLDER),
    "default_local_dir": FrameworkName("verl", "run.folder", _FOLDER),
    "resume_mode": FrameworkName("verl", "", "the option --resume goes on with a run"),
    "resume_from_checkpoint": FrameworkName("TRL", "", "the option --resume goes on with a run"),
    "test_freq": FrameworkName("verl", "eval.every"),
    "eval_steps": FrameworkName("TRL", "eval.every"),
    "eval_interval": FrameworkName("SkyRL and slime", "eval.every"),
    "eval_strategy": FrameworkName("TRL", "eval.every", "in training steps; 0 evaluates before and after only"),
    "val_before_train": FrameworkName("verl", "run.evaluate", "before and after training; while it trains: eval.every"),
    "val_kwargs.n": FrameworkName("verl", "eval.samples"),
    "val_kwargs.temperature": FrameworkName("verl", "eval.temperature"),
    "val_kwargs.do_sample": FrameworkName("verl", "eval.temperature", "0 is greedy"),
    "val_kwargs.top_p": FrameworkName("verl", "", _EVALUATED_AS_TRAINED),
    "val_kwargs.top_k": FrameworkName("verl", "", _EVALUATED_AS_TRAINED),
    "num_generations_eval": FrameworkName("TRL", "eval.samples"),
    "early_stopping_patience": FrameworkName("TRL", "eval.patience", "in evaluations"),
    "load_best_model_at_end": FrameworkName("TRL", "eval.keep_best", "tailrace export RUN --version best has it then"),
    "metric_for_best_model": FrameworkName("TRL", "eval.by", "a set, by its avg@k"),
    "report_to": FrameworkName("TRL", "log.to"),
    "logger": FrameworkName("verl and SkyRL", "log.to"),
    "use_wandb": FrameworkName("OpenRLHF and slime", "log.to"),
    "logging_steps": FrameworkName("TRL", "", _EVERY_STEP),
    "log_completions": FrameworkName("TRL", "log.samples", _KEPT),
    "log_val_generations": FrameworkName("verl", "log.samples", _KEPT),
    "num_completions_to_print": FrameworkName("TRL", "log.samples", _KEPT),
    "project_name": FrameworkName("verl and SkyRL", "log.project", "of wandb and trackio"),
    "wandb_project": FrameworkName("OpenRLHF, slime and NeMo-RL", "log.project", "of wandb and trackio"),
    # prompts and rewards
    "train_files": FrameworkName("verl", "task.data", _DATA),
    "val_files": FrameworkName("verl", "task.eval_data", _DATA),
    "prompt_data": FrameworkName("OpenRLHF and slime", "task.data", _DATA),
    "dataset_name": FrameworkName("TRL", "task.data", _DATA),
    "train_dataset.path": FrameworkName("AReaL", "task.data", _DATA),
    "data.shuffle": FrameworkName("verl", "task.shuffle", "true or false"),
    "shuffle_dataset": FrameworkName("TRL", "task.shuffle", "true or false"),
    "train_data": FrameworkName("SkyRL", "task.data", _DATA),
    "val_data": FrameworkName("SkyRL", "task.eval_data", _DATA),
    "custom_reward_function.path": FrameworkName("verl", "task.reward", _REWARD),
    "custom_reward_function.name": FrameworkName("verl", "task.reward", _REWARD),
    "reward_funcs": FrameworkName("TRL", "task.reward", _ONE_REWARD),
    "reward_weights": FrameworkName("TRL", "task.reward", _ONE_REWARD),
    "train_dataset": FrameworkName("TRL", "task.data", _DATA),
    "eval_dataset": FrameworkName("TRL", "task.eval_data", _DATA),
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
    "trainer.loss": {
        **dict.fromkeys(("gspo", "cispo", "dpo", "sapo", "vapo", "luspo", "vespo", "gpg", "geo_mean"), _LOSSES),
        "rloo": "that is an advantage: write trainer.advantage = 'rloo'",
        "bnpo": "write 'dapo', which averages over the tokens of the mini-batch, not of a device's part of it",
        "vanilla": "write 'ppo'",
    },
    "trainer.advantage": dict.fromkeys(("reinforce", "reinforce_plus_plus", "remax", "opo", "ppo"), _LOSSES),
    "trainer.precision": {"bf16": "write 'bfloat16'", "fp32": "write 'float32'"},
    "rollout.precision": {"bf16": "write 'bfloat16'", "fp32": "write 'float32'", "fp16": "write 'float16'"},
    "rollout.engine": dict.fromkeys(("sglang", "hf", "transformers"), _ENGINE),
    "trainer.engine": dict.fromkeys(("fsdp", "fsdp2", "megatron", "deepspeed"), "'native' shards by FSDP2"),
    "trainer.decay": {
        "none": "write 'constant'",
        "constant_with_warmup": "write 'constant', and trainer.warmup_steps",
    },
    "groups.filter": {"dynamic": "write 'zero_advantage'", "dapo": "write 'zero_advantage'"}
    | dict.fromkeys(("greso", "aero"), "write 'all'"),
}
