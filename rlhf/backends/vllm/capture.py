"""Mixed into the worker of a teacher's vLLM: takes the final hidden rows of prompts, and makes scores of them.

vLLM hands out log-probabilities of prompts as Python objects, which takes several times as long as computing them
(docs/performance.md). Both of its model runners call a method of theirs with the hidden rows of every step, to make
those; it is replaced here. What vLLM computes stays as it is, and nothing that is captured goes through its scheduler.

    step of the engine ──hidden rows──► Capture.passed: response rows ──keep──► scores ──► pinned host memory
                                                                       Capture.take: what has arrived there ──► Ray

A request's scores are made when its last row has passed; rows of earlier steps are held until then. Covered by
tests/unit/test_capture.py, tests/integration/test_standalone.py and, on GPUs, tests/gpu/test_scoring.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int32, Int64
from safetensors import safe_open
from torch import Tensor

from rlhf.backends.vllm.engine import number_of
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.distill.fullvocab import HiddenScores
from rlhf.losses.fused.projection import ready
from rlhf.losses.heads import VocabHead
from rlhf.losses.policy import sampled_logprobs
from rlhf.shards import read_shards

Keep = Callable[[Tensor, Tensor], Any]
"""(hidden rows, the tokens that they predict) -> scores: a frozen dataclass of tensors, one row for each."""


@dataclass(frozen=True)
class Wanted:
    """Of one request."""

    rows: Int64[np.ndarray, " rows"]
    """Positions in its prompt whose hidden rows are wanted, ascending."""
    targets: Int32[np.ndarray, " rows"]
    """The token that each predicts."""
    length: int
    """Of its prompt, in tokens."""


@dataclass(frozen=True)
class Span:
    """Tokens of one request in a step."""

    request: str
    first: int
    """The position of the first of them in the request."""
    count: int
    offset: int
    """The row of the first of them in the step."""


@dataclass(frozen=True)
class SampledLogprobs:
    """distill=sampled."""

    logprobs: Tensor


class Capture:
    """Of one worker."""

    def __init__(self, setup: ScorerSetup, device: torch.device) -> None:
        self.setup = setup
        self.device = device
        self.head: Tensor | None = None
        if setup.head is not None:
            dtype = getattr(torch, setup.engine.dtype.value)
            self.head = ready(read_tensor(setup.model, setup.head).to(device, dtype))
        self.wanted: dict[str, Wanted] = {}
        self.held: dict[str, list[Tensor]] = {}
        """Wanted rows of requests whose last row hasn't passed."""
        self.keep: Keep = lambda hidden, targets: HiddenScores(hidden)
        self.on_the_way: list[tuple[list[str], Any, torch.cuda.Event | None]] = []

    def expect(self, wanted: dict[str, Wanted], what: str, temperature: float = 1.0) -> None:
        """Requests are about to come.

        Args:
            wanted: by request.
            what: "scores": what `distill` keeps; "hidden": hidden rows; "logprobs": those of the targets.
            temperature: of "logprobs".
        """
        self.wanted = dict(wanted)
        self.held.clear()
        self.keep = {
            "scores": self._scores,
            "hidden": lambda hidden, targets: HiddenScores(hidden),
            "logprobs": lambda hidden, targets: SampledLogprobs(
                sampled_logprobs(self._head_on(hidden), targets.long(), temperature)
            ),
        }[what]

    def _scores(self, hidden: Tensor, targets: Tensor) -> Any:
        if self.head is None:
            return HiddenScores(hidden)
        assert self.setup.distill is not None
        return self.setup.distill.score(self._head_on(hidden), self.setup.engine.logits_mb * 2**20)

    def _head_on(self, hidden: Tensor) -> VocabHead:
        assert self.head is not None
        return VocabHead(hidden, self.head, vocab_size=self.setup.vocab)

    @torch.no_grad()
    def passed(self, hidden: Tensor, spans: Iterable[Span]) -> None:
        """The hidden rows of a step. They are read before the next one, which is behind in the same stream."""
        complete: list[str] = []
        pieces: list[Tensor] = []
        for span in spans:
            wanted = self.wanted.get(span.request)
            if wanted is None:
                continue
            if span.first == 0:
                self.held.pop(span.request, None)  # vLLM had put it off, and starts again
            begin, end = np.searchsorted(wanted.rows, (span.first, span.first + span.count))
            index = torch.from_numpy(wanted.rows[begin:end] + (span.offset - span.first))
            self.held.setdefault(span.request, []).append(hidden[index.to(hidden.device, non_blocking=True)])
            if span.first + span.count >= wanted.length:
                complete.append(span.request)
                pieces += self.held.pop(span.request)
        if complete:
            targets = np.concatenate([self.wanted.pop(request).targets for request in complete])
            rows = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
            scores = self.keep(rows, torch.from_numpy(targets).to(hidden.device, non_blocking=True))
            self.on_the_way.append((complete, *_to_host(scores)))

    def take(self, wait: bool) -> Iterator[tuple[list[str], Any]]:
        """(requests, their scores in host memory) of what has arrived there.

        Args:
            wait: for everything.
        """
        while self.on_the_way:
            requests, scores, arrived = self.on_the_way[0]
            if arrived is not None and not wait and not arrived.query():
                return
            if arrived is not None:
                arrived.synchronize()
            del self.on_the_way[0]
            yield requests, scores


def read_tensor(model: Path, name: str) -> Tensor:
    """One tensor of a checkpoint."""
    with safe_open(read_shards(model)[name].file, "pt") as file:
        return file.get_tensor(name)


def _to_host(scores: Any) -> tuple[Any, torch.cuda.Event | None]:
    """Scores in (pinned) host memory, and the event after which they are there."""
    tensors = {field.name: getattr(scores, field.name) for field in fields(scores)}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if not next(iter(tensors.values())).is_cuda:
        return scores, None
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    arrived = torch.cuda.Event()
    arrived.record()
    return replace(scores, **copies), arrived


class ScoreCapture:
    """Methods reached through `collective_rpc`; `self` is vLLM's worker."""

    model_runner: Any
    device: torch.device
    rank: int
    rlhf_captured: Capture | None

    def rlhf_capture(self, setup: ScorerSetup) -> str | None:
        """Take hold of the hidden rows -> the name of the model runner they come from, or None if it is none we know.
        Under tensor parallelism all ranks have the same rows, and the first keeps them."""
        self.rlhf_captured = Capture(setup, self.device) if self.rank == 0 else None
        runner, capture = self.model_runner, self.rlhf_captured
        if getattr(runner, "prompt_logprobs_worker", None) is not None:

            def of_second(logits_of: Any, hidden: Tensor, batch: Any, *_: Any) -> dict[str, Any]:
                if capture is not None:
                    capture.passed(hidden, _spans_of_second(batch))
                return {}

            runner.prompt_logprobs_worker.compute_prompt_logprobs = of_second
            return "V2"
        if hasattr(runner, "_get_prompt_logprobs_dict"):

            def of_first(hidden: Tensor, scheduled: dict[str, int]) -> dict[str, Any]:
                if capture is not None:
                    capture.passed(hidden, _spans_of_first(runner, scheduled))
                return {}

            runner._get_prompt_logprobs_dict = of_first
            return "V1"
        return None

    def rlhf_expect(self, wanted: dict[str, Wanted], what: str, temperature: float) -> None:
        if self.rlhf_captured is not None:
            self.rlhf_captured.expect(wanted, what, temperature)

    def rlhf_take(self, wait: bool) -> list[tuple[list[str], Any]]:
        return [] if self.rlhf_captured is None else list(self.rlhf_captured.take(wait))


def _spans_of_second(batch: Any) -> Iterator[Span]:
    """Of vLLM's second model runner."""
    for row, request in enumerate(batch.req_ids):
        yield Span(
            number_of(request),
            int(batch.num_computed_prefill_tokens_np[row]),
            int(batch.num_scheduled_tokens[row]),
            int(batch.query_start_loc_np[row]),
        )


def _spans_of_first(runner: Any, scheduled: dict[str, int]) -> Iterator[Span]:
    """Of vLLM's first model runner."""
    for request, count in scheduled.items():
        row = runner.input_batch.req_id_to_index[request]
        first = runner.requests[request].num_computed_tokens
        yield Span(number_of(request), first, count, int(runner.query_start_loc.np[row]))
