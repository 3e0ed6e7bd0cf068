"""Losses of the user's: against the divergences they rebuild, in another process, and what is refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlhf.config.distill import FullVocab, Tail, TopK
from rlhf.config.registry import PROJECT_ROOT
from rlhf.distill.fullvocab import FullVocabDistill
from rlhf.distill.topk import TopKDistill
from rlhf.distill.user_loss import UserLoss
from rlhf.errors import ConfigError
from rlhf.losses.heads import VocabHead

EXAMPLE = str(PROJECT_ROOT / "docs" / "examples" / "jeffreys.py")
ROWS = 5
WEIGHTS = torch.linspace(0.5, 1.5, ROWS)


def heads() -> tuple[VocabHead, VocabHead]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return VocabHead(random(ROWS, 4).requires_grad_(), random(12, 4)), VocabHead(random(ROWS, 6), random(12, 6))


@pytest.mark.parametrize("spec", [FullVocab(), *(TopK(k=4, tail=tail) for tail in Tail)], ids=str)
def test_jeffreys_is_forward_and_reverse_kl(spec):
    kind = FullVocabDistill if isinstance(spec, FullVocab) else TopKDistill
    student, teacher = heads()

    def loss_and_gradient(distill, beta):
        scores = distill.score(teacher)
        head_of = (lambda hidden: replace(teacher, hidden=hidden)) if isinstance(spec, FullVocab) else None
        total, rows = distill.divergence(student, scores, WEIGHTS, beta, teacher_head_of=head_of)
        assert not rows.loss.requires_grad
        return total.detach(), torch.autograd.grad(total, student.hidden)[0], rows.entropy

    forward, reverse = (loss_and_gradient(kind.from_spec(spec), beta) for beta in (0.0, 1.0))
    both = loss_and_gradient(kind.from_spec(replace(spec, loss="jeffreys"), [EXAMPLE]), 0.5)
    torch.testing.assert_close(both[0], forward[0] + reverse[0])
    torch.testing.assert_close(both[1], forward[1] + reverse[1])
    torch.testing.assert_close(both[2], forward[2])


def test_it_travels_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def squares(student, teacher):\n    return (student.exp() - teacher.exp()).square()\n"
    )
    monkeypatch.chdir(tmp_path)
    loss = UserLoss.of("mine.py:squares", [])
    assert loss is not None
    script = (
        "import pickle, sys, torch\n"
        "loss = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(float(loss(torch.tensor([[0.0]]), torch.tensor([[-1e6]])).sum()))\n"
    )
    command = [sys.executable, "-c", script, pickle.dumps(loss).hex()]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
    assert float(done.stdout) == 1.0
    assert UserLoss.of(None, []) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return (student - teacher).sum(-1)", r"one number for each of the \(3, 5\) log-probabilities, got \(3,\)"),
        ("return 1.0", "got float"),
        ("return (teacher * 1).detach()", "no gradient"),
        ("return student.exp() * (student - teacher) / teacher.exp()", "isn't finite where an outcome is impossible"),
        ("return student @ 3", "fails: TypeError"),
        ("raise SystemExit(2)", "fails: SystemExit: 2, line 2 of"),
        ("raise type('Silent', (Exception,), {'__str__': lambda error: 1 / 0})", "fails: Silent, line 2 of"),
        ("return student * 1j", "one number for each of the .* of torch.complex64"),
    ],
)
def test_what_is_no_loss_is_refused(body: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"def f(student, teacher):\n    {body}\n")
    loss = UserLoss.of(f"{tmp_path / 'mine.py'}:f", [])
    assert loss is not None
    with pytest.raises(ConfigError, match=message):
        loss.check()


def test_a_name_that_nothing_has() -> None:
    loss = UserLoss.of("jefreys", [EXAMPLE])
    assert loss is not None
    with pytest.raises(ConfigError, match=r"distill\.loss=jefreys doesn't exist"):
        loss.check()
    UserLoss("jeffreys", (EXAMPLE,), ()).check()
