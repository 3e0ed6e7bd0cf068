"""The dense head against the arithmetic written out."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from rlhf.errors import ModelError
from rlhf.losses.heads import VocabHead, shared_shard
from rlhf.losses.shard import Shard


class Group:
    """Stands for a process group."""

    def __init__(self, ranks: int, rank: int = 0) -> None:
        self.ranks, self._rank = ranks, rank

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.ranks


def random_head(rows: int = 3, hidden: int = 4, vocabulary: int = 6, seed: int = 0, **options) -> VocabHead:
    generator = torch.Generator().manual_seed(seed)
    return VocabHead(
        torch.randn(rows, hidden, generator=generator), torch.randn(vocabulary, hidden, generator=generator), **options
    )


def test_logits_apply_bias_then_scale_then_softcap():
    bias = torch.linspace(-1, 1, 6)
    head = random_head(bias=bias, scale=0.5, softcap=2.0)
    expected = 2.0 * torch.tanh(0.5 * (head.hidden @ head.weight.T + bias) / 2.0)
    torch.testing.assert_close(head.logits(), expected)
    assert head.logits().abs().max() < 2.0


def test_plain_logits_are_the_matmul():
    head = random_head()
    torch.testing.assert_close(head.logits(), head.hidden @ head.weight.T)


def test_padding_is_sliced_off_and_gets_no_gradient():
    head = random_head(vocabulary=8, bias=torch.zeros(8), vocab_size=6)
    head.weight.requires_grad_()
    assert head.vocabulary == 6
    assert head.logits().shape == (3, 6)
    torch.testing.assert_close(head.logits(), head.hidden @ head.weight[:6].T)
    head.logits().square().sum().backward()
    assert head.weight.grad[6:].eq(0).all()
    assert head.weight.grad[:6].ne(0).all()


def test_bf16_head_gives_fp32_logits_close_to_fp32():
    head = random_head(hidden=64)
    low = VocabHead(head.hidden.bfloat16(), head.weight.bfloat16(), bias=torch.zeros(6))
    assert low.logits().dtype == torch.float32
    torch.testing.assert_close(low.logits(), head.logits(), rtol=2e-2, atol=0.2)
    # The matmul rounds to bf16 once; scale and softcap after it don't round again.
    scaled = VocabHead(low.hidden, low.weight, scale=1 / 3).logits()
    torch.testing.assert_close(scaled, low.logits() / 3)


def test_fp32_hidden_rows_follow_the_weights_dtype():
    head = random_head()
    mixed = VocabHead(head.hidden, head.weight.bfloat16())
    torch.testing.assert_close(mixed.logits(), VocabHead(head.hidden.bfloat16(), head.weight.bfloat16()).logits())


def test_float64_stays_float64():
    head = random_head()
    assert VocabHead(head.hidden.double(), head.weight.double()).logits().dtype == torch.float64


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([2, 0])])
def test_select_takes_rows(rows):
    head = random_head(scale=3.0, vocab_size=5)
    chosen = head.select(rows)
    assert len(chosen) == 2
    torch.testing.assert_close(chosen.logits(), head.logits()[rows])


def test_zero_rows():
    head = random_head(rows=0)
    assert len(head) == 0
    assert head.logits().shape == (0, 6)


def test_which_tokens_a_rank_has():
    assert random_head(tp_group=Group(1)).logits().shape == (3, 6)
    assert random_head(tp_group=Group(1)).shard == Shard(6)
    group = Group(2, rank=1)
    assert random_head(tp_group=group).shard == Shard(12, 6, group)
    assert random_head(tp_group=group, vocab_size=11).shard == Shard(11, 6, group)


def test_padding_of_a_shard_is_impossible():
    head = random_head(tp_group=Group(2, rank=1), vocab_size=10)
    with torch.no_grad():
        logits = head.shard.restrict(head.hidden @ head.weight.T)
    torch.testing.assert_close(logits[:, :4], head.hidden @ head.weight[:4].T)
    assert (logits[:, 4:] <= -1e30).all()
    assert (Shard(4, 6, Group(2, rank=1)).restrict(logits) <= -1e30).all()  # all of it is padding


def test_vocabulary_larger_than_the_weight_is_refused():
    with pytest.raises(ModelError, match="7 tokens but the LM head only 6 rows"):
        random_head(vocab_size=7)


def test_shared_vocabulary_is_the_smaller_one():
    assert shared_shard(random_head(vocabulary=6), random_head(vocabulary=9, vocab_size=8)) == Shard(6)
    assert shared_shard(random_head(vocabulary=9), random_head(vocabulary=9, vocab_size=7)) == Shard(7)
    group = Group(2, rank=1)
    student, teacher = (random_head(tp_group=group, vocab_size=size) for size in (9, 11))
    assert shared_shard(student, teacher) == Shard(9, 6, group)
    with pytest.raises(AssertionError, match="padded alike"):
        shared_shard(student, replace(teacher, weight=torch.zeros(7, 4), vocab_size=12))


def test_heads_are_frozen():
    with pytest.raises(FrozenInstanceError):
        random_head().scale = 2.0
