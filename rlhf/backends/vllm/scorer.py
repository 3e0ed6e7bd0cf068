"""One vLLM replica of a standalone teacher: token ids in, scores of their response rows out.

vLLM runs the teacher as a pooling model, which gives the final hidden rows after the last norm. Everything else happens
here, as in the trainer with a colocated teacher: rows are picked by the one alignment, the head is put on response rows
only, and `distill` keeps what it keeps. So both kinds of teacher give the same scores, at any temperature, and no limit
of vLLM on log-probabilities applies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32
from safetensors import safe_open
from torch import Tensor

from rlhf.backends.scores import PackedScores
from rlhf.backends.vllm.engine import replica_options
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.batching import response_rows
from rlhf.distill.fullvocab import HiddenScores
from rlhf.errors import MisalignedScores
from rlhf.losses.heads import VocabHead
from rlhf.losses.policy import sampled_logprobs
from rlhf.shards import read_shards
from rlhf.types import Sequences


class VllmScorer:
    """Wraps a pooling `vllm.LLM` in its own process."""

    def __init__(self, setup: ScorerSetup) -> None:
        from vllm import LLM
        from vllm.config import PoolerConfig

        self.setup = setup
        self.dtype = getattr(torch, setup.engine.dtype.value)
        self.llm = LLM(
            model=str(setup.model),
            runner="pooling",
            convert="embed",
            pooler_config=PoolerConfig(task="token_embed", use_activation=False),
            dtype=setup.engine.dtype.value,
            enforce_eager=setup.engine.enforce_eager,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.engine.max_num_seqs,
            enable_prefix_caching=False,  # rows of a cached prefix would be missing
            seed=setup.seed,
            **replica_options(setup.tensor_parallel, setup.engine.kv_cache_gb),
        )
        self.head: Tensor | None = None
        if setup.head is not None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self.head = read_tensor(setup, setup.head).to(device, self.dtype)

    @torch.no_grad()
    def score(self, sequences: Sequences, samples: Sequence[int]) -> PackedScores:
        """What `distill` keeps of the teacher at every response row.

        Args:
            samples: indices into `sequences`.
        """
        hidden, counts, targets = self._response_rows(sequences, samples)
        scores: object = HiddenScores(hidden)
        if self.head is not None:
            assert self.setup.distill is not None
            scores = self.setup.distill.score(self._head_on(hidden, self.head))
        return PackedScores.pack(scores, sequences.sample_ids[list(samples)].tolist(), counts, targets)

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequences, samples: Sequence[int], temperature: float
    ) -> Float32[np.ndarray, " rows"]:
        """The log-probability of every response token, sample after sample (distill=sampled)."""
        assert self.head is not None
        hidden, _, targets = self._response_rows(sequences, samples)
        head = self._head_on(hidden, self.head)
        ids = torch.from_numpy(targets.astype(np.int64)).to(head.hidden.device)
        return sampled_logprobs(head, ids, temperature).cpu().numpy()

    def _head_on(self, hidden: Tensor, head: Tensor) -> VocabHead:
        return VocabHead(hidden.to(head.device), head, vocab_size=self.setup.vocab)

    def hidden_rows(self, sequences: Sequences, samples: Sequence[int]) -> PackedScores:
        """The final hidden rows, whatever `distill` keeps."""
        hidden, counts, targets = self._response_rows(sequences, samples)
        return PackedScores.pack(HiddenScores(hidden), sequences.sample_ids[list(samples)].tolist(), counts, targets)

    def _response_rows(self, sequences: Sequences, samples: Sequence[int]) -> tuple[Tensor, list[int], np.ndarray]:
        """Hidden rows that predict response tokens, their number a sample, and the tokens they predict.

        Raises:
            MisalignedScores: vLLM answered with another number of rows than there are tokens.
        """
        from vllm import PoolingParams

        tokens = [sequences.tokens[sequences.offsets[row] : sequences.offsets[row + 1]] for row in samples]
        outputs = self.llm.encode(
            [{"prompt_token_ids": one.tolist()} for one in tokens],
            pooling_params=PoolingParams(task="token_embed", use_activation=False),
            pooling_task="token_embed",
            use_tqdm=False,
        )
        hidden, targets, masks = [], [], sequences.masks()
        for sample, ids, output in zip(samples, tokens, outputs, strict=True):
            every_row = output.outputs.data
            if len(every_row) != len(ids) or list(output.prompt_token_ids) != ids.tolist():
                raise MisalignedScores(f"vLLM returned {len(every_row)} hidden rows for {len(ids)} tokens")
            rows = response_rows(len(ids), int(sequences.prompt_lengths[sample]), masks[sample])
            hidden.append(
                every_row[torch.from_numpy(rows).to(every_row.device)].to(self.dtype)
            )  # vLLM hands them out in float32
            targets.append(ids[rows + 1])
        return torch.cat(hidden), [len(part) for part in targets], np.concatenate(targets)


def read_tensor(setup: ScorerSetup, name: str) -> Tensor:
    """One tensor of the checkpoint."""
    with safe_open(read_shards(setup.model)[name].file, "pt") as file:
        return file.get_tensor(name)
