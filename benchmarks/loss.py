"""Time, memory and error of the distillation losses: ours, TRL's, Liger's two, and plain torch.

    python -m benchmarks.loss                            # every size, on a GPU; writes benchmarks/results/loss.json
    python -m benchmarks.loss --smoke                    # tiny sizes on any machine: does it run, and is it right?
    python -m benchmarks.loss --only jsd_2048_4096 topk --no-peers

Each measures loss and gradients of hidden rows and of the LM head, from hidden rows and heads. Milliseconds are the
median of calls with a pause before each (`_ms`), and of calls one after another, which bring the card to its power
limit (`_sustained_ms`). GB is what is allocated beside inputs and gradients. The error is the largest of the relative
errors of loss, d hidden and d head against float64 arithmetic on the same bfloat16 inputs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.record import RESULTS, device_name, write_record
from rlhf.config.distill import Tail
from rlhf.losses.fused import losses as fused
from rlhf.losses.heads import VocabHead
from rlhf.losses.rows import TopKScores

PAUSE_S = 0.3
CALLS = 7


@dataclass
class Problem:
    """Random hidden rows and heads of a student and a teacher."""

    rows: int
    student: int
    teacher: int
    vocabulary: int
    device: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.hidden = self._random(self.rows, self.student).requires_grad_()
        self.head = (self._random(self.vocabulary, self.student) * self.student**-0.5).requires_grad_()
        self.teacher_hidden = self._random(self.rows, self.teacher)
        self.teacher_head = self._random(self.vocabulary, self.teacher) * self.teacher**-0.5

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def clear(self) -> None:
        self.hidden.grad = self.head.grad = None
        if hasattr(self.head, "main_grad"):
            self.head.main_grad.zero_()

    @property
    def head_gradient(self) -> Tensor:
        return self.head.main_grad if hasattr(self.head, "main_grad") else self.head.grad


Step = Callable[[], Tensor]
"""Loss, with gradients left in the problem."""


# ---- the losses ------------------------------------------------------------------------------------------------------


def ours(problem: Problem, beta: float) -> Step:
    """As the trainer calls it: a frozen teacher's head in the loss's format, d head added to Megatron's main_grad."""
    problem.head.main_grad = torch.zeros(problem.head.shape, device=problem.device, dtype=torch.float32)
    teacher = fused.converted(VocabHead(problem.teacher_hidden, problem.teacher_head))
    weights = torch.full((problem.rows,), 1 / problem.rows)

    def step() -> Tensor:
        total, _ = fused.full_divergence(VocabHead(problem.hidden, problem.head), teacher, weights, beta, 1.0)
        total.backward()
        return total.detach()

    return step


def trl(problem: Problem, beta: float) -> Step:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    p = problem

    def step() -> Tensor:
        rows, _ = ChunkedDivergenceFunction.apply(p.hidden, p.head, None, p.teacher_hidden, p.teacher_head, None, beta)
        loss = rows.mean()
        loss.backward()
        return loss.detach()

    return step


def liger_chunked(problem: Problem, beta: float) -> Step:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss_of = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=problem.device == "cuda", chunk_size=1024
    )
    p, targets = problem, torch.zeros(problem.rows, dtype=torch.long, device=problem.device)

    def step() -> Tensor:
        loss = loss_of(p.hidden, p.head, p.teacher_hidden, p.teacher_head, targets)
        loss.backward()
        return loss.detach()

    return step


def liger_fused(problem: Problem, beta: float) -> Step:
    from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

    p = problem

    def step() -> Tensor:
        loss = LigerFusedLinearJSDFunction.apply(p.hidden, p.head, p.teacher_hidden, p.teacher_head, None, beta)
        loss.backward()
        return loss.detach()

    return step


def jsd_rows(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The formula on log-probabilities, a row."""
    if beta == 0:
        return (teacher.exp() * (teacher - student)).sum(-1)
    if beta == 1:
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return (beta * teacher.exp() * (teacher - mixture) + (1 - beta) * student.exp() * (student - mixture)).sum(-1)


def plain(problem: Problem, beta: float) -> Step:
    p = problem

    def step() -> Tensor:
        student = (p.hidden @ p.head.t()).float().log_softmax(-1)
        teacher = (p.teacher_hidden @ p.teacher_head.t()).float().log_softmax(-1)
        loss = jsd_rows(student, teacher, beta).mean()
        loss.backward()
        return loss.detach()

    return step


def topk_scores(problem: Problem, k: int) -> TopKScores:
    ids = torch.stack([torch.randperm(problem.vocabulary)[:k] for _ in range(64)]).to(problem.device)
    ids = ids.repeat(-(-problem.rows // 64), 1)[: problem.rows]
    logprobs = torch.randn(problem.rows, k, device=problem.device).log_softmax(-1) - 0.1
    return TopKScores(ids.int(), logprobs)


def ours_topk(problem: Problem, k: int) -> Step:
    problem.head.main_grad = torch.zeros(problem.head.shape, device=problem.device, dtype=torch.float32)
    scores, weights = topk_scores(problem, k), torch.full((problem.rows,), 1 / problem.rows)

    def step() -> Tensor:
        head = VocabHead(problem.hidden, problem.head)
        total, _ = fused.topk_divergence(head, scores, weights, 0.5, 1.0, Tail.bucket)
        total.backward()
        return total.detach()

    return step


def plain_topk(problem: Problem, k: int) -> Step:
    """Forward KL over the k tokens, fully normalised: less than ours, which has the rest as one more outcome."""
    scores = topk_scores(problem, k)

    def step() -> Tensor:
        logits = (problem.hidden @ problem.head.t()).float()
        student = logits.gather(1, scores.ids.long()) - logits.logsumexp(-1, keepdim=True)
        loss = (scores.logprobs.exp() * (scores.logprobs - student)).sum(-1).mean()
        loss.backward()
        return loss.detach()

    return step


PEERS = {"trl": trl, "liger_chunked": liger_chunked, "liger_fused": liger_fused, "plain": plain}

# ---- measuring -------------------------------------------------------------------------------------------------------


def reference(problem: Problem, beta: float, chunk: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, d hidden and d head in float64 by autograd, a few rows at a time."""
    head, teacher_head = problem.head.detach().double().requires_grad_(), problem.teacher_head.double()
    hidden = problem.hidden.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64, device=problem.device)
    for start in range(0, problem.rows, chunk):
        rows = slice(start, start + chunk)
        student = (hidden[rows] @ head.t()).log_softmax(-1)
        teacher = (problem.teacher_hidden[rows].double() @ teacher_head.t()).log_softmax(-1)
        loss = jsd_rows(student, teacher, beta).sum() / problem.rows
        loss.backward()
        total += loss.detach()
    assert hidden.grad is not None and head.grad is not None
    return total, hidden.grad, head.grad


def error(problem: Problem, step: Step, expected: tuple[Tensor, Tensor, Tensor]) -> float:
    """The largest of three relative errors."""
    problem.clear()
    loss = step()
    assert problem.hidden.grad is not None
    got = loss, problem.hidden.grad, problem.head_gradient
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))


def timings(problem: Problem, step: Step) -> dict[str, float]:
    """Median milliseconds after a pause and one after another; GB beside inputs and gradients."""
    on_gpu = problem.device == "cuda"
    for _ in range(2):
        problem.clear()
        step()
    gigabytes = 0.0
    if on_gpu:
        problem.clear()
        gradients = problem.hidden.nbytes + (0 if hasattr(problem.head, "main_grad") else problem.head.nbytes)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        gigabytes = (torch.cuda.max_memory_allocated() - before - gradients) / 1e9

    def milliseconds(pause: float) -> float:
        problem.clear()
        if not on_gpu:
            started = time.perf_counter()
            step()
            return (time.perf_counter() - started) * 1e3
        torch.cuda.synchronize()
        time.sleep(pause)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)

    paused = [milliseconds(PAUSE_S) for _ in range(CALLS)]
    sustained = [milliseconds(0) for _ in range(3 * CALLS)][-CALLS:]
    return {"ms": median(paused), "sustained_ms": median(sustained), "gb": gigabytes}


def cases(smoke: bool) -> Iterator[tuple[str, int, int, int, int, float, bool]]:
    """(name, rows, student, teacher, vocabulary, beta, whether the error is measured)."""
    if smoke:
        for beta, name in ((0.5, "jsd"), (0.0, "fkl"), (1.0, "rkl")):
            yield f"{name}_16_24", 40, 16, 24, 512, beta, True
        return
    for student, teacher in ((2048, 4096), (1024, 2560)):
        for beta, name in ((0.5, "jsd"), (0.0, "fkl"), (1.0, "rkl")):
            yield f"{name}_{student}_{teacher}", 8192, student, teacher, 151_936, beta, True
    yield "jsd_4096_5120", 8192, 4096, 5120, 151_936, 0.5, False
    for rows in (2048, 32_768):
        yield f"jsd_2048_4096_n{rows}", rows, 2048, 4096, 151_936, 0.5, False


def measure(smoke: bool, only: list[str], peers: bool) -> dict[str, float]:
    device = "cpu" if smoke else "cuda"
    dtype = torch.float32 if smoke else torch.bfloat16
    found: dict[str, float] = {}
    for name, rows, student, teacher, vocabulary, beta, with_error in cases(smoke):
        if only and name not in only:
            continue
        problem = Problem(rows, student, teacher, vocabulary, device, dtype)
        expected = reference(problem, beta) if with_error else None
        best: dict[str, float] = {}
        for who, make in {"": ours, **(PEERS if peers else {})}.items():
            if (who == "plain" and rows > 8192) or (who == "liger_fused" and name != "jsd_2048_4096"):
                continue  # too much memory; too slow to be the best
            label = f"{who}_{name}" if who else name
            try:
                step = make(problem, beta)
                measured = timings(problem, step)
                if expected is not None:
                    measured["error"] = error(problem, step, expected)
            except (ImportError, torch.OutOfMemoryError) as reason:
                print(f"{label}: {type(reason).__name__}: {str(reason)[:100]}", flush=True)
                continue
            finally:
                problem.clear()
                if not who:
                    del problem.head.main_grad
            found |= {f"{label}_{key}": value for key, value in measured.items()}
            print(f"{label:36s}" + "".join(f"{key} {value:10.4g}  " for key, value in measured.items()), flush=True)
            if who:
                best = {key: min(value, best.get(key, value)) for key, value in measured.items()}
        if best:
            found |= {f"{name}_vs_best_peer": found[f"{name}_ms"] / best["ms"]}
            found |= {f"{name}_sustained_vs_best_peer": found[f"{name}_sustained_ms"] / best["sustained_ms"]}
            if expected is not None:
                found |= {f"{name}_error_vs_best_peer": found[f"{name}_error"] / best["error"]}
        del problem, expected
    if not only or "topk" in only:
        found |= measure_topk(smoke, device, dtype)
    return found


def measure_topk(smoke: bool, device: str, dtype: torch.dtype) -> dict[str, float]:
    k, student = (8, 16) if smoke else (64, 2048)
    found = {}
    problem = Problem(40 if smoke else 8192, student, 8, 512 if smoke else 151_936, device, dtype)
    for who, make in (("", ours_topk), ("plain_", plain_topk)):
        measured = timings(problem, make(problem, k))
        problem.clear()
        if not who:
            del problem.head.main_grad
        label = f"{who}topk{k}_{student}"
        print(f"{label:36s}" + "".join(f"{key} {value:10.4g}  " for key, value in measured.items()), flush=True)
        found |= {f"{label}_{key}": value for key, value in measured.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--only", nargs="*", default=[], help="names of cases; topk")
    parser.add_argument("--no-peers", action="store_true", help="ours only")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for loss.json")
    arguments = parser.parse_args()
    metrics = measure(arguments.smoke, arguments.only, not arguments.no_peers)
    command = " ".join(["python -m benchmarks.loss", *sys.argv[1:]]).replace(str(arguments.out), "OUT")
    device = "cpu" if arguments.smoke else device_name()
    write_record("loss", command, metrics, ("torch", "triton", "trl", "liger-kernel"), arguments.out, device)


if __name__ == "__main__":
    main()
