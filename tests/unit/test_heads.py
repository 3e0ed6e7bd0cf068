"""The dense head against the arithmetic written out."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch

from rlhf.errors import ConfigError, ModelError
from rlhf.losses.heads import VocabHead, shared_vocabulary


class Group:
    """Stands for a process group."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

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


def test_one_rank_is_dense_and_several_are_refused():
    assert random_head(tp_group=Group(1)).logits().shape == (3, 6)
    split = random_head(tp_group=Group(2))
    assert split.vocabulary == 12
    with pytest.raises(ConfigError, match=r"train\.tensor_parallel=2: the vocabulary-parallel form"):
        split.logits()


def test_vocabulary_larger_than_the_weight_is_refused():
    with pytest.raises(ModelError, match="7 tokens but the LM head only 6 rows"):
        random_head(vocab_size=7).logits()


def test_shared_vocabulary_is_the_smaller_one_on_both_sides():
    student, teacher = shared_vocabulary(random_head(vocabulary=6), random_head(vocabulary=9, vocab_size=8))
    assert (student.vocabulary, teacher.vocabulary) == (6, 6)
    assert student.logits().shape == teacher.logits().shape
    student, teacher = shared_vocabulary(random_head(vocabulary=9), random_head(vocabulary=9, vocab_size=7))
    assert (student.vocabulary, teacher.vocabulary) == (7, 7)


def test_heads_are_frozen():
    with pytest.raises(FrozenInstanceError):
        random_head().scale = 2.0
