"""Names that other trainers have for our keys: TRL, ms-swift, verl, NeMo-RL, slime."""

from __future__ import annotations

OURS = {
    "actor_lr": "train.lr",
    "algo.beta": "algo.kl_coef",  # where the option has no beta of its own: GRPO's penalty
    "batch_size": "train.global_batch_samples",
    "dataset": "data.path",
    "dataset_name": "data.name",
    "distill.top_k": "distill.k",
    "eval_steps": "eval.every",
    "gkd_logits_topk": "distill.k",
    "global_batch_size": "train.global_batch_samples",
    "gpu_memory_utilization": "rollout.kv_cache_gb",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "group_size": "algo.num_generations",
    "kl_loss_coef": "algo.kl_coef",
    "lambda": "algo.lmbda",
    "learning_rate": "train.lr",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_r": "model.lora.rank",
    "lora_rank": "model.lora.rank",
    "lr_scheduler_type": "train.lr_schedule",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "train.clip_grad",
    "max_prompt_length": "data.max_length",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "run.steps",
    "max_tokens": "rollout.max_new_tokens",
    "micro_batch_size": "train.micro_batch_tokens",
    "model.name": "model.path",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_epochs": "run.epochs",
    "num_train_epochs": "run.epochs",
    "output_dir": "run.dir",
    "per_device_train_batch_size": "train.micro_batch_tokens",
    "project_name": "logger.wandb_project",
    "report_to": "logger.wandb",
    "reward_funcs": "reward.functions",
    "reward_weights": "reward.weights",
    "rollout.n": "algo.num_generations",
    "save_freq": "run.save_every",
    "save_steps": "run.save_every",
    "save_total_limit": "run.keep_last",
    "target_modules": "model.lora.target",
    "teacher_model": "teacher.model",
    "teacher_model_name_or_path": "teacher.model",
    "total_epochs": "run.epochs",
    "vllm_gpu_memory_utilization": "rollout.kv_cache_gb",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "warmup_ratio": "train.warmup_steps",
}
"""A name, or a full key where the name alone could mean something else -> the key that does it here."""


def ours(key: str) -> str | None:
    """Our key for another trainer's."""
    return OURS.get(key) or OURS.get(key.rpartition(".")[2])
