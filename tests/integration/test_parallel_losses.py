"""The losses with the vocabulary split over two gloo processes against the dense ones, in value and gradient."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.config.distill import Tail
from rlhf.distill.topk import TopKDistill
from rlhf.losses import divergence
from rlhf.losses.fused import losses as fused
from rlhf.losses.heads import VocabHead
from rlhf.losses.policy import sampled_logprobs
from tests.integration.ranks import run_ranks

RANKS, ROWS, HIDDEN = 2, 7, 5
BETAS = (0.0, 0.5, 1.0)
PADDED = 26
"""Rows of each head, 13 a rank. A vocabulary of 25 is one that two ranks don't divide; of 12, one of which the second
rank has padding only."""
CASES = [
    ("topk", vocabulary, 25, beta, tail, temperature, chunk_rows)
    for vocabulary, beta, tail in itertools.product((26, 25, 12), BETAS, Tail)
    for temperature, chunk_rows in ((1.0, 512), (2.0, 3))
] + [
    ("full", vocabulary, teacher_vocabulary, beta, Tail.bucket, temperature, chunk_rows)
    for vocabulary, teacher_vocabulary, beta in itertools.product((26, 25, 12), (26, 23), BETAS)
    for temperature, chunk_rows in ((1.0, 512), (0.5, 3))
]
# More tokens than the second rank has of 25; all there are; and of a teacher's 12, all of them on the first rank.
CASES += [
    ("topk", 26, teacher_vocabulary, 0.5, Tail.bucket, 1.0, 512, k)
    for teacher_vocabulary, k in ((25, 13), (25, 25), (23, 12), (12, 12))
]
CASES += [
    ("policy", vocabulary, 25, 0.0, Tail.bucket, temperature, chunk_rows)
    for vocabulary, (temperature, chunk_rows) in itertools.product((26, 25, 12), ((1.0, 512), (0.7, 3)))
]


def heads(vocabulary: int, teacher_vocabulary: int, dtype: torch.dtype) -> tuple[VocabHead, VocabHead]:
    """A student with a bias, a scale and a soft cap, and a teacher. What the padding holds must not matter."""
    generator = torch.Generator().manual_seed(vocabulary)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    student = VocabHead(random(ROWS, HIDDEN), random(PADDED, HIDDEN), random(PADDED), 1.5, 9.0, vocab_size=vocabulary)
    return student, VocabHead(random(ROWS, HIDDEN), random(PADDED, HIDDEN), vocab_size=teacher_vocabulary)


def part_of(head: VocabHead, rank: int) -> VocabHead:
    """One rank's part of a dense head."""
    bias = None if head.bias is None else head.bias.chunk(RANKS)[rank]
    return replace(head, weight=head.weight.chunk(RANKS)[rank], bias=bias, tp_group=dist.group.WORLD)


def everything(
    student: VocabHead,
    teacher: VocabHead,
    path: str,
    kind: str,
    beta: float,
    tail: Tail,
    temperature: float,
    chunk_rows: int,
    k: int = 6,
) -> dict[str, Tensor]:
    """What a run takes from two heads: losses, statistics, scores, and the gradients of a weighted sum of losses.

    Args:
        path: dense | fused.
    """
    weights = torch.linspace(0.5, 1.5, ROWS, dtype=student.weight.dtype)
    student = replace(
        student,
        hidden=student.hidden.detach().requires_grad_(),
        weight=student.weight.detach().requires_grad_(),
        bias=student.bias.detach().requires_grad_(),
    )
    targets = torch.arange(ROWS) % student.vocabulary
    found: dict[str, Tensor] = {}
    rows: Any
    if kind == "policy":
        found["sampled"] = sampled_logprobs(student, targets, temperature)
        if path == "fused":
            total, rows = fused.token_loss(student, targets, weights, lambda rows, logprobs: -logprobs, temperature)
            rows = SimpleNamespace(loss=rows.loss, entropy=rows.entropy)
        else:
            every = divergence.log_probs(student.logits(), temperature, student.shard)
            plain = divergence.log_probs(student.logits().detach(), shard=student.shard)
            entropy = -student.shard.add((plain.exp() * plain).sum(-1))
            rows = SimpleNamespace(loss=-student.shard.at(every, targets[:, None])[:, 0], entropy=entropy)
    elif kind == "full":
        if path == "fused":
            total, rows = fused.full_divergence(student, teacher, weights, beta, temperature, targets, 0.7)
            found["kl"] = torch.stack(fused.forward_and_reverse_kl(student, teacher))
        else:
            rows = divergence.full_divergence(student, teacher, beta, temperature, targets, 0.7, chunk_rows)
            found["kl"] = torch.stack(divergence.forward_and_reverse_kl(student, teacher, chunk_rows))
    else:
        scores = TopKDistill(k, tail, temperature).score(teacher)
        if path == "fused":
            total, rows = fused.topk_divergence(student, scores, weights, beta, temperature, tail, targets, 0.7)
        else:
            rows = divergence.topk_divergence(student, scores, beta, temperature, tail, targets, 0.7, chunk_rows)
        found |= {f"scores.{name}": value for name, value in vars(scores).items() if value is not None}
    if path == "dense":
        total = (weights * rows.loss).sum()
    found |= {f"rows.{name}": value.detach() for name, value in vars(rows).items()}
    total.backward()
    return found | {f"d {name}": getattr(student, name).grad for name in ("hidden", "weight", "bias")}


def largest_differences(rank: int, world_size: int, store: Any) -> dict[tuple[Any, ...], float]:
    """(dtype, case, what) -> the largest difference between this rank's share and the dense one, relative above 1."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    differences = {}
    for dtype, (kind, vocabulary, teacher_vocabulary, *options) in itertools.product(
        (torch.float32, torch.float64), CASES
    ):
        chunk_rows = options[3]
        if dtype is torch.float32 and chunk_rows < ROWS:
            continue  # in chunks: float64 shows it better
        student, teacher = heads(vocabulary, teacher_vocabulary, dtype)
        dense = everything(student, teacher, "dense", kind, *options)
        for path in ("dense", "fused") if dtype is torch.float64 else ("fused",):
            split = everything(part_of(student, rank), part_of(teacher, rank), path, kind, *options)
            assert dense.keys() == split.keys()
            for what, expected in dense.items():
                if what in ("d weight", "d bias"):
                    expected = expected.chunk(RANKS)[rank]
                difference = (split[what].double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1)
                differences[dtype, path, kind, vocabulary, teacher_vocabulary, *options, what] = difference.item()
    return differences


def test_two_ranks_equal_one() -> None:
    for differences in run_ranks(largest_differences, RANKS):
        assert {case[-1] for case in differences} >= {"rows.loss", "rows.entropy", "rows.logprob", "d hidden", "kl"}
        for case, difference in differences.items():
            # The teacher's scores are kept in fp32, in whatever the heads are.
            kept = case[-1] in ("scores.logprobs", "sampled")
            limit = 1e-5 if case[0] is torch.float32 else 1e-6 if kept else 1e-12
            assert difference <= limit, f"{case}: {difference:.1e}"
