"""One vLLM replica: token ids in, token ids and log-probabilities out, under a checked weight version."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from rlhf.assets import read_config, weight_files
from rlhf.backends.vllm.setup import EngineSetup
from rlhf.errors import StaleWeights
from rlhf.types import Bucket, Prompts, Rollouts, Sequences

PARTS = 8
"""In which `stream` hands a batch out: few enough that a teacher has something to do with each."""
NEVER = -100.0
"""The lowest logit bias that vLLM takes."""


class VllmEngine:
    """Wraps `vllm.LLM` in its own process (vLLM patches torch, so it never shares one with Megatron)."""

    def __init__(self, setup: EngineSetup) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        rollout = setup.rollout
        self.sleeps = setup.shares_device and current_platform.is_cuda()
        """Give the GPU's memory to the others between generations; vLLM has no sleep on CPU."""
        self._asleep = False
        self.setup = setup
        self.version: int | None = 0 if setup.fixed else None
        """Version of the weights held; None before the first update and while one is under way."""
        self._arriving: int | None = None
        self._expected = tensor_names(setup.model)
        self._missing = set(self._expected)
        self._forbidden: dict[int, float] = {}
        """Logit biases of rows of the head that stand for no token of the student."""
        if setup.vocab is not None:
            rows = read_config(setup.model)["vocab_size"]
            self._forbidden = dict.fromkeys(range(setup.vocab, rows), NEVER)
        self.llm = LLM(
            model=str(setup.model),
            load_format="auto" if setup.fixed else "dummy",
            skip_tokenizer_init=True,
            dtype=rollout.dtype.value,
            enforce_eager=rollout.enforce_eager,
            max_model_len=setup.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            worker_extension_cls="rlhf.backends.vllm.extension.WeightUpdates",
            logprobs_mode="processed_logprobs",  # of the distribution the tokens were drawn from
            seed=setup.seed,
            enable_sleep_mode=self.sleeps,
            **replica_options(rollout.tensor_parallel, rollout.kv_cache_gb),
        )

    # ---- weights ----------------------------------------------------------------------------------------------------

    def begin_update(self) -> None:
        """From here until `finish_update` the engine holds no usable weights."""
        assert not self.setup.fixed
        self._wake("weights")
        self.version = self._arriving = None
        self._missing = set(self._expected)
        self.llm.collective_rpc("rlhf_begin_update")

    def join_channel(self, address: tuple[str, int], rank: int, size: int) -> None:
        """Take weights from the trainer's channel from here on.

        Args:
            address: of its store.
            rank: in the channel, of the first of our devices.
            size: of the channel.
        """
        self.llm.collective_rpc("rlhf_join_channel", args=(address, rank, size))

    def load(self, buckets: Sequence[Bucket]) -> None:
        """Take a few weights over.

        Args:
            buckets: the same weights for each of our devices, or once for all.

        Raises:
            StaleWeights: buckets of different versions in one update.
        """
        bucket = buckets[0]
        if self._arriving not in (None, bucket.version):
            raise StaleWeights(f"one update mixes weights of versions {self._arriving} and {bucket.version}")
        self._arriving = bucket.version
        self.llm.collective_rpc("rlhf_load", args=(buckets,))
        self._missing -= set(bucket.names)

    def finish_update(self) -> int:
        """Make the new weights the ones generated with. Returns their version.

        Raises:
            StaleWeights: not every weight has arrived. vLLM would keep the old ones without a word.
        """
        if self._missing or self._arriving is None:
            raise StaleWeights(
                f"the update to weights of version {self._arriving} lacks {len(self._missing)} of "
                f"{len(self._expected)} tensors, the first is {min(self._missing, default='')}"
            )
        self.llm.collective_rpc("rlhf_finish_update")
        self._wake("kv_cache")
        self._asleep = False
        if not self.llm.reset_prefix_cache():  # cached keys and values belong to the old weights
            raise StaleWeights("vLLM kept its prefix cache, whose contents belong to the old weights")
        self.version = self._arriving
        return self.version

    def _wake(self, what: str) -> None:
        if self._asleep:
            self.llm.wake_up(tags=[what])

    def sleep(self) -> None:
        """Drop weights and cache until the next update, which brings weights anyway; on CPU, do nothing."""
        if self.sleeps and not self._asleep:
            self.llm.sleep(level=2)
            self._asleep = True
            self.version = None

    # ---- generation -------------------------------------------------------------------------------------------------

    def generate(self, prompts: Prompts, version: int, greedy: bool = False) -> Rollouts:
        """Continue every prompt.

        Args:
            prompts: n requests.
            version: the weight version the caller wants; another one is an error, never a silent stale rollout.
            greedy: take the most likely token instead of sampling.

        Raises:
            StaleWeights: the engine holds another version.
        """
        requests, sampling = self._requests(prompts, version, greedy)
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        return self._rollouts(prompts, list(range(len(prompts))), outputs)

    def stream(self, prompts: Prompts, version: int) -> Iterator[Rollouts]:
        """The rollouts of `generate` in up to `PARTS` parts, as they are finished. vLLM is asked for the whole batch at
        once here, too.

        Raises:
            StaleWeights: the engine holds another version.
        """
        requests, sampling = self._requests(prompts, version, greedy=False)
        ids = self.llm.enqueue(requests, sampling, use_tqdm=False)
        number = {number_of(name): row for row, name in enumerate(ids)}
        enough = -(-len(prompts) // PARTS)
        rows: list[int] = []
        outputs: list[Any] = []
        while self.llm.llm_engine.has_unfinished_requests():
            for output in self.llm.llm_engine.step():
                if output.finished:
                    rows.append(number[output.request_id])
                    outputs.append(output)
            if len(rows) >= enough:
                yield self._rollouts(prompts, rows, outputs)
                rows, outputs = [], []
        if rows:
            yield self._rollouts(prompts, rows, outputs)

    def _requests(self, prompts: Prompts, version: int, greedy: bool) -> tuple[list[Any], list[Any]]:
        """vLLM's prompts and sampling options."""
        from vllm import SamplingParams

        if version != self.version:
            raise StaleWeights(f"asked to generate with weights of version {version}, the engine holds {self.version}")
        rollout = self.setup.rollout
        requests: list[Any] = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts.rows()]
        sampling = [
            SamplingParams(
                temperature=0.0 if greedy else rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                min_p=rollout.min_p,
                max_tokens=rollout.max_new_tokens,
                seed=int(seed),
                ignore_eos=True,  # the stop tokens below are the whole list
                stop_token_ids=list(self.setup.stop_token_ids),
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                logit_bias=self._forbidden or None,
            )
            for seed in prompts.seeds
        ]
        return requests, sampling

    def _rollouts(self, prompts: Prompts, rows: list[int], requests: list[Any]) -> Rollouts:
        """What vLLM answered to some of the prompts."""
        assert self.version is not None
        outputs = [request.outputs[0] for request in requests]
        responses = [np.asarray(output.token_ids, dtype=np.int32) for output in outputs]
        # Each position lists the sampled token first.
        logprobs = [
            np.asarray(output.logprobs.logprobs, dtype=np.float32)[output.logprobs.start_indices] for output in outputs
        ]
        every = list(prompts.rows())
        sequences = Sequences.join(prompts.sample_ids[rows], [every[row] for row in rows], responses, logprobs)
        finished = np.array([output.finish_reason == "stop" for output in outputs])
        return Rollouts(self.version, sequences, finished)


def number_of(request: str) -> str:
    """vLLM itself knows a request by its id and a suffix."""
    return request.partition("-")[0]


def replica_options(tensor_parallel: int, kv_cache_gb: float) -> dict[str, Any]:
    """Options of `vllm.LLM` for its cache and the processes that share it: this one, or as many children of it.

    Args:
        kv_cache_gb: of all of them together, in GiB.
    """
    from vllm.platforms import current_platform

    options: dict[str, Any] = {
        "tensor_parallel_size": tensor_parallel,
        "kv_cache_memory_bytes": int(kv_cache_gb * 2**30 / tensor_parallel),
    }
    if tensor_parallel > 1:
        options["distributed_executor_backend"] = "mp"  # in a Ray actor vLLM would start actors of its own
    if current_platform.is_cuda():
        # vLLM wants this share of the memory to be free when it starts. The cache has a size, so nothing depends on it.
        options["gpu_memory_utilization"] = 0.01
    return options


def tensor_names(folder: Path) -> frozenset[str]:
    """Names of the weights of a Hugging Face folder, without a head that is tied to the embedding."""
    names: set[str] = set()
    for file in weight_files(folder):
        with safe_open(file, "pt") as tensors:
            names |= set(tensors.keys())
    return frozenset(names - {"lm_head.weight"} if read_config(folder).get("tie_word_embeddings") else names)
