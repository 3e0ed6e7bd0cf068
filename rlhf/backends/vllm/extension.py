"""Mixed into vLLM's worker: receives new weights bucket by bucket.

vLLM's plain `model.load_weights` leaves a CPU model half updated, because its weights were repacked after loading.
The layerwise reload undoes and redoes that, on CPU and GPU. Covered by tests/integration/test_engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf.backends.channel import WeightChannel
from rlhf.backends.weight_sync import received
from rlhf.types import Bucket


class WeightUpdates:
    """Methods reached through `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    rank: int
    rlhf_channel: WeightChannel | None = None
    """Where weights come from, if the trainer is on another device."""

    def rlhf_join_channel(self, address: tuple[str, int], first: int, size: int) -> None:
        """
        Args:
            first: this replica's first rank in the channel.
        """
        from torch.distributed import TCPStore

        self.rlhf_channel = WeightChannel(TCPStore(*address, size, is_master=False), first + self.rank, size)

    def rlhf_begin_update(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def rlhf_load(self, buckets: Sequence[Bucket]) -> None:
        """
        Args:
            buckets: one for each rank, in GPU memory that only this one can open; or one for all.
        """
        from vllm.config import set_current_vllm_config

        bucket = buckets[self.rank] if len(buckets) > 1 else buckets[0]
        if self.rlhf_channel is not None:
            tensors = self.rlhf_channel.receive(bucket.arrays, bucket.dtypes[0])
        else:
            tensors = [received(array, dtype) for array, dtype in zip(bucket.arrays, bucket.dtypes, strict=True)]
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(zip(bucket.names, tensors, strict=True))

    def rlhf_finish_update(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.model_config)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # from here on the trainer may change what it lent
        elif self.model_config.hf_config.tie_word_embeddings:
            # The reload updates the embedding's weight only. The head shares it, but on CPU it multiplies with a
            # repacked copy, which must be made again or the head keeps the weights of before.
            model.lm_head.tie_weights(model.model.embed_tokens)
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
