"""Megatron's data parallelism, AdamW and learning-rate schedule around a model, from the keys of `train`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlhf.config.train import LRSchedule, Train

MEGATRON_STYLE = {
    LRSchedule.constant: "constant",
    LRSchedule.linear: "linear",
    LRSchedule.cosine: "cosine",
    LRSchedule.wsd: "WSD",
}


def wrap(module: Any, train: Train, steps: int) -> tuple[Any, Any, Any]:
    """A GPTModel -> its DDP wrapper, the optimizer of its weights, and the learning-rate schedule.

    Args:
        steps: optimizer steps of the whole run.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.transformer.module import Float16Module

    config = module.config
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=train.distributed_optimizer),
        Float16Module(config, module) if config.bf16 else module,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=train.min_lr,
            weight_decay=train.weight_decay,
            adam_beta1=train.adam_beta1,
            adam_beta2=train.adam_beta2,
            adam_eps=train.adam_eps,
            clip_grad=train.clip_grad or float("inf"),  # so that the norm is known without clipping, too
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=train.distributed_optimizer,
        ),
        [ddp],
    )
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.warmup_steps,
        lr_decay_steps=steps + 1,  # the last step still learns; min_lr comes after it
        lr_decay_style=MEGATRON_STYLE[train.lr_schedule],
        wsd_decay_steps=train.decay_steps + 1,
        lr_wsd_decay_style="linear",
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = sum_gradients
    return ddp, optimizer, schedule


def sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's gradient reduction without its division: the token weights are normalised already."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **kwargs)
