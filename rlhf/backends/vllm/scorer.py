"""One vLLM replica of a standalone teacher: token ids in, scores of their response rows out.

vLLM runs the teacher, and `capture` takes its final hidden rows. Everything else is as in the trainer with a colocated
teacher: rows are picked by the one alignment, the head is put on response rows only, and `distill` keeps what it keeps.
So both kinds of teacher give the same scores, at any temperature, and no limit of vLLM on log-probabilities applies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from rlhf.backends.scores import PackedScores
from rlhf.backends.vllm.capture import Wanted
from rlhf.backends.vllm.engine import number_of, replica_options
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.batching import response_rows
from rlhf.distill.topk import TopKDistill
from rlhf.errors import ConfigError, MisalignedScores
from rlhf.losses.rows import TopKScores
from rlhf.types import Sequences

log = logging.getLogger(__name__)


class VllmScorer:
    """Wraps a `vllm.LLM` in its own process."""

    def __init__(self, setup: ScorerSetup) -> None:
        """
        Raises:
            ConfigError: this vLLM has none of the model runners that we know, and what is asked for can't be had
                without.
        """
        from vllm import LLM

        self.setup = setup
        k = setup.distill.k if isinstance(setup.distill, TopKDistill) else 1
        self.llm = LLM(
            model=str(setup.model),
            skip_tokenizer_init=True,
            dtype=setup.engine.dtype.value,
            enforce_eager=setup.engine.enforce_eager,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.engine.max_num_seqs,
            max_num_batched_tokens=setup.engine.max_num_batched_tokens,
            enable_prefix_caching=False,  # rows of a cached prefix would be missing
            worker_extension_cls="rlhf.backends.vllm.capture.ScoreCapture",
            logprobs_mode="raw_logprobs",
            max_logprobs=k,
            seed=setup.seed,
            **replica_options(setup.tensor_parallel, setup.engine.kv_cache_gb),
        )
        self.runner = self.llm.collective_rpc("rlhf_capture", args=(setup,))[0]
        if self.runner is None:
            self._require_flat()

    def score(self, sequences: Sequences, samples: Sequence[int]) -> Iterator[PackedScores]:
        """What `distill` keeps of the teacher at every response row, in parts, as they are made.

        Args:
            samples: indices into `sequences`.

        Raises:
            MisalignedScores: vLLM didn't show every row.
        """
        if self.runner is None:
            return self._flat(sequences, samples)
        return self._packed(sequences, samples, "scores")

    def hidden_rows(self, sequences: Sequences, samples: Sequence[int]) -> Iterator[PackedScores]:
        """The final hidden rows, whatever `distill` keeps.

        Raises:
            MisalignedScores: vLLM didn't show every row.
        """
        return self._packed(sequences, samples, "hidden")

    def logprobs(
        self, sequences: Sequences, samples: Sequence[int], temperature: float
    ) -> Float32[np.ndarray, " rows"]:
        """The log-probability of every response token, sample after sample (distill=sampled).

        Raises:
            MisalignedScores: vLLM didn't show every row.
        """
        found: dict[int, np.ndarray] = {}
        for rows, counts, _, scores in self._captured(sequences, samples, "logprobs", temperature):
            parts = np.split(scores.logprobs.numpy(), np.cumsum(counts)[:-1])
            found |= dict(zip(rows, parts, strict=True))
        return np.concatenate([found[row] for row in samples])

    def _packed(self, sequences: Sequences, samples: Sequence[int], what: str) -> Iterator[PackedScores]:
        for rows, counts, targets, scores in self._captured(sequences, samples, what):
            yield PackedScores.pack(scores, sequences.sample_ids[rows].tolist(), counts, targets)

    def _captured(
        self, sequences: Sequences, samples: Sequence[int], what: str, temperature: float = 1.0
    ) -> Iterator[tuple[list[int], list[int], np.ndarray, Any]]:
        """(samples, rows of each, the tokens they are about, scores) as they come."""
        from vllm import SamplingParams

        wanted = self._wanted(sequences, samples)
        # A sample's last token predicts nothing of it, so vLLM isn't given it; the token it samples is of no interest.
        names = self.llm.enqueue(
            [{"prompt_token_ids": prompt.tolist()} for prompt in self._prompts(sequences, samples)],
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            use_tqdm=False,
        )
        by_name = {number_of(name): row for row, name in enumerate(names)}
        self.llm.collective_rpc("rlhf_expect", args=(dict(zip(by_name, wanted, strict=True)), what, temperature))
        missing = set(by_name)
        engine = self.llm.llm_engine
        while missing:
            running = engine.has_unfinished_requests()
            if running:
                engine.step()
            taken = self.llm.collective_rpc("rlhf_take", args=(not running,))[0]
            if not running and not taken:
                raise MisalignedScores(f"vLLM didn't show the rows of {len(missing)} samples of {len(samples)}")
            for requests, scores in taken:
                missing -= set(requests)
                places = [by_name[request] for request in requests]
                targets = [wanted[place].targets for place in places]
                yield [samples[place] for place in places], [*map(len, targets)], np.concatenate(targets), scores

    def _prompts(self, sequences: Sequences, samples: Sequence[int]) -> list[np.ndarray]:
        """All tokens but the last."""
        return [sequences.tokens[sequences.offsets[row] : sequences.offsets[row + 1] - 1] for row in samples]

    def _wanted(self, sequences: Sequences, samples: Sequence[int]) -> list[Wanted]:
        """Of each sample: its response rows."""
        wanted, masks = [], sequences.masks()
        for sample in samples:
            tokens = sequences.tokens[sequences.offsets[sample] : sequences.offsets[sample + 1]]
            rows = response_rows(len(tokens), int(sequences.prompt_lengths[sample]), masks[sample])
            wanted.append(Wanted(rows, tokens[rows + 1], len(tokens) - 1))
        return wanted

    # ---- without a model runner that we know ------------------------------------------------------------------------

    def _require_flat(self) -> None:
        """
        Raises:
            ConfigError: vLLM's own log-probabilities won't do.
        """
        from vllm import __version__

        distill = self.setup.distill
        plain = isinstance(distill, TopKDistill) and distill.temperature == 1 and self.setup.head is not None
        if not plain or self.setup.evaluates:
            raise ConfigError(
                f"vLLM {__version__} has no model runner whose hidden rows can be taken, which a standalone teacher "
                "needs but for distill=topk at distill.temperature=1 with eval.samples=0; install the versions of "
                "requirements/, or use teacher=colocated"
            )
        log.warning(
            "vLLM %s has no model runner whose hidden rows can be taken: the teacher's log-probabilities come as "
            "Python objects, which is slower",
            __version__,
        )

    def _flat(self, sequences: Sequences, samples: Sequence[int]) -> Iterator[PackedScores]:
        """From the log-probabilities that vLLM gives of a prompt and of the token it samples."""
        from vllm import SamplingParams

        assert isinstance(self.setup.distill, TopKDistill)
        k = self.setup.distill.k
        options = SamplingParams(
            max_tokens=1, temperature=0.0, prompt_logprobs=k, logprobs=k, flat_logprobs=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in self._prompts(sequences, samples)]
        outputs = self.llm.generate(prompts, options, use_tqdm=False)
        for sample, wanted, output in zip(samples, self._wanted(sequences, samples), outputs, strict=True):
            of_prompt, of_next = output.prompt_logprobs, output.outputs[0].logprobs
            starts = of_prompt.start_indices[1:]  # of the first token nothing is said
            # Every position lists its own token first, then the k most likely.
            ids = [of_prompt.token_ids[start + 1 : start + 1 + k] for start in starts]
            logprobs = [of_prompt.logprobs[start + 1 : start + 1 + k] for start in starts]
            ids.append(of_next.token_ids[1 : 1 + k])
            logprobs.append(of_next.logprobs[1 : 1 + k])
            scores = TopKScores(torch.tensor(ids, dtype=torch.int32), torch.tensor(logprobs), None)
            rows = scores[torch.from_numpy(wanted.rows)]
            yield PackedScores.pack(rows, [int(sequences.sample_ids[sample])], [len(wanted.rows)], wanted.targets)
