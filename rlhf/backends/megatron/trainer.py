"""One trainer process: the student under Megatron's DDP and optimizer, and a teacher that lives with it.

A plain class: Ray wraps it in an actor, tests call it in their own process. The model code knows nothing of algorithms
or teachers: an `Objective` turns head rows and teacher scores into a loss.
"""

from __future__ import annotations

import collections
import functools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float32
from torch import Tensor

from rlhf.algos.objective import RowBatch, Totals
from rlhf.backends.channel import Pushed, WeightChannel
from rlhf.backends.megatron import optimizer, training_state, weights
from rlhf.backends.megatron.device import megatron_device
from rlhf.backends.megatron.logprobs import over_data_parallel, own_logprobs
from rlhf.backends.megatron.model import architecture_of, forward, load_head, load_model, select_rows
from rlhf.backends.megatron.partition import Partition
from rlhf.backends.megatron.setup import TrainerSetup
from rlhf.backends.megatron.teachers import teacher_of
from rlhf.backends.scores import PackedScores
from rlhf.backends.weight_sync import to_send
from rlhf.batching import MicroBatch, pack
from rlhf.config.lora import LoraSave
from rlhf.distill.fullvocab import HiddenScores
from rlhf.errors import MisalignedScores, TrainingDiverged
from rlhf.losses.fused.losses import forward_and_reverse_kl
from rlhf.losses.heads import VocabHead
from rlhf.types import BatchPlan, Bucket, Experience, Metrics, MiniBatch, Sequences

SEEDS_OF_A_COPY = 10_000
"""Apart, so that no rank of one copy of the model draws what a rank of another does."""


def on_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method where Megatron finds its device."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with megatron_device():
            return method(*args, **kwargs)

    return wrapped


def gives_memory_back(method: Callable[..., Any]) -> Callable[..., Any]:
    """On a GPU that roles share: what torch keeps for later is given to the engine, which wakes next."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return result

    return wrapped


def by_sample(rows: Any, micro: MicroBatch) -> dict[int, Any]:
    """Sample id -> its part of a micro-batch's response rows."""
    ends = np.cumsum(micro.row_counts)
    return {
        sample_id: rows[end - count : end]
        for sample_id, count, end in zip(micro.sample_ids, micro.row_counts, ends, strict=True)
    }


class MegatronTrainer:
    """Trains, scores with the colocated teacher, evaluates, exports. All ranks call each method in the same order."""

    @on_device
    def __init__(self, setup: TrainerSetup, rank: int = 0, store: dist.Store | None = None) -> None:
        """
        Args:
            rank: of `setup.train.gpus` processes.
            store: where they find each other; not needed by one process.
        """
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.setup = setup
        self.rank = rank
        self.version = 0
        self._scores: dict[int, Any] = {}
        self._heads: dict[int, Callable[[Tensor], VocabHead]] = {}
        """Sample id -> the head that its scores' hidden rows belong to, where they are hidden rows."""
        self._lent: list[Tensor] = []
        """What an engine on the same GPU is reading; see `buckets`."""
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store or dist.HashStore(), rank=rank, world_size=setup.train.gpus)
        parallel_state.initialize_model_parallel(setup.train.tensor_parallel)
        random.seed(setup.seed)
        np.random.seed(setup.seed)
        torch.manual_seed(setup.seed)
        # Copies of the model read different samples and draw different dropout masks, the ranks of a copy the same.
        model_parallel_cuda_manual_seed(setup.seed + SEEDS_OF_A_COPY * self.data_parallel_rank)

        dtype = getattr(torch, setup.train.dtype.value)
        partition = self._partition()
        self.student = load_model(setup.student, dtype, partition, setup.adapter, setup.seed)
        self.teacher = teacher_of(setup, self.student, dtype)
        lone = None if setup.teacher_head is None else load_head(setup.teacher_head, dtype, partition)
        self.head_of_teacher = self.teacher or lone
        """Puts the teacher's LM head on hidden rows; None where none are kept."""
        self._lone_head = None if lone is None else lone.head
        self.ddp, self.optimizer, self.schedule = optimizer.wrap(self.student.module, setup.train, setup.steps)

    def _partition(self) -> Partition:
        """This process's part of student and teacher."""
        from megatron.core import parallel_state

        train, setup = self.setup.train, self.setup
        folders = (setup.student, setup.teacher, setup.teacher_head)
        if train.tensor_parallel == 1:
            return weights.WHOLE
        return Partition(
            rank=parallel_state.get_tensor_model_parallel_rank(),
            size=train.tensor_parallel,
            group=parallel_state.get_tensor_model_parallel_group(),
            sequence_parallel=train.uses_sequence_parallel,
            least_vocab=max(architecture_of(folder).vocab for folder in folders if folder is not None),
        )

    # ---- teacher ----------------------------------------------------------------------------------------------------

    @on_device
    @torch.no_grad()
    def score(self, sequences: Sequences, minibatches: tuple[MiniBatch, ...]) -> None:
        """Ask the teacher about every response token; the answers stay here until `train` uses them."""
        assert self.teacher is not None
        distill = self.setup.objective.distill
        assert distill is not None, "a teacher is asked for what the loss uses"
        with self.teacher.at_work() as teacher:
            for minibatch in minibatches:
                for micro in self._micro_batches(sequences, minibatch.plan):
                    scores = distill.score(teacher.head(teacher.hidden_rows(micro)))
                    self._scores |= by_sample(scores, micro)
        if distill.needs_teacher_head:
            self._heads |= dict.fromkeys(sequences.sample_ids.tolist(), self.teacher.lasting_head())

    @on_device
    @torch.no_grad()
    def logprobs(
        self, sequences: Sequences, minibatches: tuple[MiniBatch, ...], temperature: float
    ) -> Float32[np.ndarray, " R"]:
        """The teacher's log-probability of every response token (distill=sampled), on every rank."""
        assert self.teacher is not None
        micros = [micro for one in minibatches for micro in self._micro_batches(sequences, one.plan)]
        with self.teacher.at_work() as teacher:
            own = own_logprobs(
                micros,
                int(sequences.response_lengths.sum()),
                lambda micro: teacher.head(teacher.hidden_rows(micro)),
                temperature,
            )
        return over_data_parallel(own)

    def _joined_scores(self, micro: MicroBatch, held: Mapping[int, Any]) -> Any:
        """The scores of a micro-batch's rows, in its order."""
        parts = []
        for sample_id, count in zip(micro.sample_ids, micro.row_counts, strict=True):
            scores = held.get(sample_id)
            if scores is None or len(scores) != count:
                there = "none" if scores is None else f"{len(scores)} rows"
                raise MisalignedScores(f"sample {sample_id} needs {count} rows of teacher scores, there are {there}")
            parts.append(scores)
        return type(parts[0]).concat(parts)

    def _unpacked(self, packed: Sequence[PackedScores], sequences: Sequences) -> dict[int, Any]:
        """Sample id -> scores that came from a standalone teacher; see `PackedScores.by_sample`."""
        device = torch.cuda.current_device()
        return dict(sample for part in packed for sample in part.by_sample(sequences, device))

    @property
    def data_parallel_rank(self) -> int:
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_rank()

    # ---- student ----------------------------------------------------------------------------------------------------

    @gives_memory_back
    @on_device
    def train(self, experience: Experience, scores: Sequence[PackedScores] = ()) -> Metrics:
        """One optimizer step a minibatch. Returns metrics averaged over the response tokens of all of them.

        Args:
            scores: a standalone teacher's, of this rank's samples and perhaps of others.
        """
        totals, grad_norms, lr = Totals(), [], 0.0
        started = time.perf_counter()
        own = {
            int(experience.sequences.sample_ids[row])
            for minibatch in experience.minibatches
            for micro in minibatch.plan.ranks[self.data_parallel_rank]
            for row in micro.rows
        }
        self._scores |= self._unpacked([part.only(own) for part in scores], experience.sequences)
        self._take_back()
        minibatches = self._with_old_logprobs(experience)
        self.ddp.train()
        for minibatch in minibatches:
            totals += self._over_data_parallel(self.accumulate_gradients(experience.sequences, minibatch))
            grad_norm, lr = self._step()
            grad_norms.append(grad_norm)
            if self.teacher is not None:
                self.teacher.after_step()
        for sample_id in experience.sequences.sample_ids.tolist():  # others may be there already, of the next step
            self._scores.pop(sample_id, None)
            self._heads.pop(sample_id, None)
        return {
            **totals.means(optimizer_steps=len(experience.minibatches)),
            "train/grad_norm": float(np.mean(grad_norms)),
            "train/lr": lr,
            "train/weight_version": float(self.version),
            "time/train": time.perf_counter() - started,
        }

    @torch.no_grad()
    def _with_old_logprobs(self, experience: Experience) -> tuple[MiniBatch, ...]:
        """The optimizer steps, with the student's log-probabilities before the first of them where the loss needs them.
        A rank needs those of its own rows only."""
        temperature, minibatches = self.setup.objective.old_logprobs_at, experience.minibatches
        if temperature is None or len(minibatches) == 1:
            return minibatches
        sequences = experience.sequences
        self.ddp.eval()
        old = own_logprobs(
            [micro for one in minibatches for micro in self._micro_batches(sequences, one.plan)],
            int(sequences.response_lengths.sum()),
            lambda micro: self.student.head(select_rows(forward(self.ddp, micro), micro)),
            temperature,
        )
        return tuple(replace(one, old_logprobs=old) for one in minibatches)

    @on_device
    def accumulate_gradients(self, sequences: Sequences, minibatch: MiniBatch) -> Totals:
        """Forward and backward of one optimizer step -> this rank's totals; gradients are left in the DDP buffers.

        Data-parallel ranks may have different numbers of micro-batches: they meet when all of theirs are done.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        micro_batches = self._micro_batches(sequences, minibatch.plan)
        outputs = get_forward_backward_func()(
            forward_step_func=functools.partial(self._forward_step, sequences, minibatch),
            data_iterator=iter(micro_batches),
            model=self.ddp,
            num_microbatches=len(micro_batches),
            seq_length=max(micro.tokens.shape[1] for micro in micro_batches),
            micro_batch_size=1,
            forward_only=False,
        )
        return functools.reduce(Totals.__add__, outputs, Totals())

    def _forward_step(
        self, sequences: Sequences, minibatch: MiniBatch, micro_batches: Iterator[MicroBatch], model: Any
    ) -> tuple[Tensor, Callable[[Tensor], Any]]:
        """Megatron's contract: the model's output, and the function that makes a loss of it on the last stage."""
        micro = next(micro_batches)

        def loss_of(hidden: Tensor) -> tuple[Tensor, Tensor, Totals]:
            rows = select_rows(hidden, micro)

            def of_rows(values: np.ndarray | None, device: torch.device) -> Tensor | None:
                return None if values is None else torch.from_numpy(values[micro.response_index]).to(device)

            host = torch.device("cpu")
            batch = RowBatch(
                weights=torch.from_numpy(minibatch.weights[micro.response_index]),
                targets=torch.from_numpy(micro.targets).to(rows.device),
                behaviour_logprobs=of_rows(sequences.logprobs, rows.device),
                target_weights=of_rows(minibatch.target_weights, host),
                advantages=of_rows(minibatch.advantages, rows.device),
                teacher_logprobs=of_rows(minibatch.teacher_logprobs, rows.device),
                old_logprobs=of_rows(minibatch.old_logprobs, rows.device),
                row_counts=micro.row_counts,
            )
            asked = self.setup.objective.distill is not None
            loss, totals = self.setup.objective.loss(
                self.student.head(rows),
                self._joined_scores(micro, self._scores) if asked else None,
                batch,
                self._heads.get(micro.sample_ids[0], self._lone_head),
            )
            return loss, torch.tensor(len(micro.rows), dtype=torch.int), totals

        return forward(model, micro), loss_of

    def _over_data_parallel(self, totals: Totals) -> Totals:
        """Of all data-parallel ranks together. (Ranks that share a model have the same totals: they count once.)"""
        from megatron.core import parallel_state

        parts: list[Any] = [None] * parallel_state.get_data_parallel_world_size()
        dist.all_gather_object(parts, totals, group=parallel_state.get_data_parallel_group_gloo())
        return functools.reduce(Totals.__add__, parts)

    def _step(self) -> tuple[float, float]:
        """Apply the gradients -> (gradient norm before clipping, learning rate used)."""
        self.schedule.step(increment=1)
        lr = self.optimizer.param_groups[0]["lr"]
        _, grad_norm, _ = self.optimizer.step()
        if not math.isfinite(grad_norm):  # the weights are lost now, so they must not be saved or used
            raise TrainingDiverged(
                f"the gradient of step {self.version + 1} was not finite; lower train.lr or raise train.warmup_steps"
            )
        self.version += 1
        return float(grad_norm), float(lr)

    def _micro_batches(self, sequences: Sequences, plan: BatchPlan) -> list[MicroBatch]:
        """This rank's share of the plan, laid out."""
        return [
            pack(sequences, micro, padding_free=plan.padding_free, pad_multiple=plan.pad_multiple)
            for micro in plan.ranks[self.data_parallel_rank]
        ]

    # ---- evaluation -------------------------------------------------------------------------------------------------

    @gives_memory_back
    @on_device
    @torch.no_grad()
    def evaluate(
        self,
        sequences: Sequences,
        plan: BatchPlan,
        teacher: tuple[Sequences, BatchPlan] | None = None,
        hidden: Sequence[PackedScores] = (),
    ) -> Metrics:
        """Full-vocabulary forward KL(T||S) and reverse KL(S||T) at temperature 1, in nats a response token.

        Args:
            teacher: the same responses as the teacher reads them, on the same ranks; None: it reads `sequences`.
            hidden: a standalone teacher's hidden rows, of this rank's samples.
        """
        assert self.head_of_teacher is not None
        held = self._unpacked(hidden, sequences)
        if self.teacher is not None:
            with self.teacher.at_work() as model:
                for micro in self._micro_batches(*(teacher or (sequences, plan))):
                    held |= by_sample(HiddenScores(model.hidden_rows(micro)), micro)
        self.ddp.eval()
        totals = Totals()
        for micro in self._micro_batches(sequences, plan):
            student = self.student.head(select_rows(forward(self.ddp, micro), micro))
            rows = self._joined_scores(micro, held).hidden
            forward_kl, reverse_kl = forward_and_reverse_kl(student, self.head_of_teacher.head(rows))
            sums = {
                "eval/forward_kl": float(forward_kl.double().sum()),
                "eval/reverse_kl": float(reverse_kl.double().sum()),
            }
            totals += Totals(rows=len(micro.rows), sums=sums)
        self.ddp.train()
        return self._over_data_parallel(totals).means()

    # ---- weights ----------------------------------------------------------------------------------------------------

    def buckets(self, dtype: str, max_bytes: int, channel: WeightChannel | None = None) -> Iterator[Bucket]:
        """The student's weights in Hugging Face names, in buckets of about `max_bytes`, one in memory at a time.

        Rank 0 yields them; meanwhile the other ranks that share its model call `take_part_in_export`.

        Args:
            channel: the way to engines on devices of their own. A bucket then says what comes, and is sent once it has
                been taken.
        """
        for named in weights.in_parts(self.student.tensors(), getattr(torch, dtype), max_bytes):
            names, tensors = zip(*named, strict=True)
            dtypes = (dtype,) * len(names)
            if channel is None:
                self._lent += [tensor for tensor in tensors if tensor.is_cuda]
                yield Bucket(self.version, names, tuple(map(to_send, tensors)), dtypes)
            else:
                yield Bucket(self.version, names, tuple(Pushed(tuple(tensor.shape)) for tensor in tensors), dtypes)
                channel.send(tensors)

    def _take_back(self) -> None:
        """The engine has loaded what was lent to it: copies are freed, and weights may change again."""
        if self._lent:
            self._lent.clear()
            torch.cuda.ipc_collect()

    def take_part_in_export(self) -> None:
        """Give rank 0 this rank's part of each weight."""
        collections.deque(self.student.tensors(), maxlen=0)

    @on_device
    def save(self, folder: Path) -> None:
        """Write a Hugging Face folder that `transformers` loads, peft's `adapter/`, or both. Complete or absent: it is
        renamed into place.

        Rank 0 writes, with the help of those that share its model; copies of the model do nothing.
        """
        from rlhf.backends.megatron.adapters import peft_config
        from rlhf.export import save_hf, writing

        adapter = self.setup.adapter
        whole = adapter is None or adapter.save is not LoraSave.adapter
        factors = adapter is not None and adapter.save is not LoraSave.merged
        if self.rank == 0:
            with writing(folder):
                save_hf(
                    folder,
                    self.student.tensors() if whole else None,
                    self.setup.student,
                    dtype=self.setup.train.dtype.value,
                    adapter=(peft_config(adapter), self.student.adapter_tensors()) if adapter and factors else None,
                )
        elif self.rank < self.setup.train.tensor_parallel:
            if whole:
                self.take_part_in_export()
            if factors:
                collections.deque(self.student.adapter_tensors(), maxlen=0)

    # ---- training state ---------------------------------------------------------------------------------------------

    @on_device
    def save_state(self, folder: Path) -> None:
        """Write what this process needs to go on from here. Every rank writes a file of its own.

        Raises:
            CheckpointError: a full disk, or a folder that isn't there for this process.
        """
        from rlhf.export import writing

        with writing(folder):
            training_state.save(folder, self._rank_state())

    @on_device
    def load_state(self, folder: Path) -> int:
        """Go on where `save_state` was called -> the version of the weights.

        Raises:
            CheckpointError: a file that can't be read, or is of another model or layout.
        """
        self.version = training_state.load(folder, self._rank_state())
        if self.teacher is not None:
            self.teacher.state_filled()
        return self.version

    def _rank_state(self) -> training_state.RankState:
        first_copy = self.rank % self.setup.train.tensor_parallel  # tensor-parallel ranks are neighbours
        return training_state.RankState(
            rank=self.rank,
            first_copy=first_copy,
            module=self.student.module,
            optimizer=self.optimizer,
            schedule=self.schedule,
            sharded=self.setup.train.distributed_optimizer,
            teacher=[] if self.teacher is None else self.teacher.state(),
        )
