"""What goes with algo=grpo, what its keys mean, and the line that refuses what doesn't fit."""

from __future__ import annotations

import copy

import pytest
import yaml
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from rlhf.config.algo import GRPO, ScaleRewards
from rlhf.config.checks_grpo import recomputes
from rlhf.config.compose import to_run
from rlhf.config.messages import explain
from rlhf.config.run import Run
from rlhf.config.teacher import ReferenceTeacher
from rlhf.errors import ConfigError, RlhfError
from rlhf.preflight import check_lesson
from tests.cells import composed

GROUPS = {
    "plain": ("algo=grpo",),
    "reference": ("algo=grpo", "teacher=reference", "distill=sampled"),
    "colocated": ("algo=grpo", "teacher=colocated", "distill=sampled"),
    "self": ("algo=grpo", "teacher=self", "distill=sampled"),
    "standalone": ("algo=grpo", "teacher=standalone", "distill=sampled"),
    "own lesson": ("algo=grpo", "teacher=reference", "distill=sampled", "reward=none"),
    "distillation": ("algo=grpo", "teacher=colocated", "distill=sampled", "reward=none"),
    "unasked": ("algo=grpo", "teacher=colocated"),
    "other": ("algo=grpo", "teacher=reference", "distill=topk"),
    "nothing": ("algo=grpo", "reward=none"),
    "no engine": ("algo=grpo", "rollout=none"),
    "ahead": ("algo=grpo", "placement=separate", "teacher=self", "distill=sampled"),
    "reference ahead": ("algo=grpo", "placement=separate", "teacher=reference", "distill=sampled"),
}
"""Composing takes long: each set of groups once, keys are set afterwards."""


def run_of(groups: str, keys: str = "") -> Run:
    config = copy.deepcopy(composed(*GROUPS[groups]))
    for override in keys.split():
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value))
    return to_run(config)


def refusal(groups: str, keys: str = "") -> str:
    with pytest.raises((InstantiationException, RlhfError)) as caught:
        run_of(groups, keys)
    line = explain(caught.value)
    assert line is not None and "\n" not in line
    return line


REFUSED = {
    ("no engine", ""): "algo=grpo learns from the student's own samples, and rollout=none takes none; use rollout=vllm",
    ("plain", "rollout.temperature=0"): "algo=grpo compares different samples of a prompt, and rollout.temperature=0 "
    "(greedy) gives one; use rollout.temperature=1",
    ("unasked", ""): "algo=grpo asks a teacher only with algo.kl_coef or algo.teacher_kl_coef; use e.g. "
    "algo.kl_coef=0.01 with teacher=reference distill=sampled, or teacher=none distill=none",
    ("plain", "algo.kl_coef=0.1"): "algo.kl_coef=0.1 pulls towards a teacher, got teacher=none; use teacher=reference "
    "distill=sampled, or algo.kl_coef=0",
    ("plain", "algo.teacher_kl_coef=1"): "algo.teacher_kl_coef=1 pulls towards a teacher, got teacher=none; use "
    "teacher=colocated distill=sampled, or algo.teacher_kl_coef=0",
    ("other", "algo.kl_coef=0.1"): "algo.kl_coef=0.1 needs the teacher's log-probabilities of the sampled tokens; use "
    "distill=sampled",
    ("self", "algo.kl_coef=0.1"): "algo.kl_coef=0.1 with teacher=self measures the student's distance from itself; use "
    "teacher=reference",
    ("reference", "algo.kl_coef=0.1 algo.teacher_kl_coef=1"): "algo.kl_coef=0.1 and algo.teacher_kl_coef=1 both pull "
    "towards the same teacher; keep one",
    ("standalone", "algo.teacher_kl_coef=1 teacher.generation.top_k=5"): "teacher.generation.top_k=5 has no effect "
    "with algo=grpo (the teacher writes nothing); use algo=gkd algo.seq_kd=true, or leave teacher.generation.top_k=0",
    ("nothing", ""): "algo=grpo with reward=none has nothing to learn from; use reward=functions, or "
    "algo.teacher_kl_coef=1 with teacher=colocated distill=sampled",
    ("plain", "algo.num_generations=1"): "algo.num_generations=1 leaves nothing to compare a reward with; use "
    "algo.num_generations=8",
    ("distillation", "algo.teacher_kl_coef=1 algo.dynamic_sampling=true"): "algo.dynamic_sampling=true has no effect "
    "with reward=none; use reward=functions, or leave algo.dynamic_sampling=false",
    ("plain", "algo.old_logprobs=sampler rollout.top_p=0.9 rollout.top_k=20"): "algo.old_logprobs=sampler with "
    "rollout.top_p=0.9 rollout.top_k=20: the sampler's log-probabilities are those of a cut distribution, which the "
    "trainer doesn't compute; use algo.old_logprobs=trainer (or null)",
    ("plain", "algo.old_logprobs=sampler rollout.min_p=0.1"): "algo.old_logprobs=sampler with "
    "rollout.min_p=0.1: the sampler's log-probabilities are those of a cut distribution, which the trainer doesn't "
    "compute; use algo.old_logprobs=trainer (or null)",
    ("reference", "algo.kl_coef=0.1 algo.kl_in=reward rollout.top_p=0.9"): "algo.kl_in=reward with rollout.top_p=0.9: "
    "the penalty takes the sampler's log-probabilities, which are those of a cut distribution; use algo.kl_in=loss",
    ("plain", "rollout.top_k=1"): "algo=grpo compares different samples of a prompt, and rollout.top_k=1 leaves only "
    "the likeliest token; use rollout.top_k=2, or 0",
    ("plain", "rollout.min_p=1"): "algo=grpo compares different samples of a prompt, and rollout.min_p=1 leaves only "
    "the likeliest token; use rollout.min_p=0.1, or 0",
    ("plain", "algo.importance_cap=2"): "algo.importance_cap=2.0 has no effect with algo.old_logprobs=sampler (null "
    "means that here), whose ratio corrects for the sampler already; use algo.old_logprobs=trainer, or leave "
    "algo.importance_cap=null",
    ("plain", "rollout.top_p=0.95 algo.clip_high=0.28"): "algo.clip_high=0.28 has no effect with rollout.top_p=0.95 "
    "(which means algo.old_logprobs=trainer) algo.steps_per_generation=1, where every ratio is 1; use "
    "algo.steps_per_generation=2, or leave algo.clip_high=null",
    ("plain", "algo.old_logprobs=trainer algo.clip_low=0.1"): "algo.clip_low=0.1 has no effect with "
    "algo.old_logprobs=trainer algo.steps_per_generation=1, where every ratio is 1; use algo.steps_per_generation=2 or "
    "algo.old_logprobs=sampler, or leave algo.clip_low=0.2",
    ("plain", "algo.old_logprobs=trainer algo.clip_dual=3 algo.importance_cap=2"): "algo.clip_dual=3.0 has no effect "
    "with algo.old_logprobs=trainer algo.steps_per_generation=1, where every ratio is 1; use "
    "algo.steps_per_generation=2 or algo.old_logprobs=sampler, or leave algo.clip_dual=null",
    ("plain", "algo.old_logprobs=trainer algo.ratio=sequence"): "algo.ratio=sequence has no effect with "
    "algo.old_logprobs=trainer algo.steps_per_generation=1, where every ratio is 1; use algo.steps_per_generation=2 or "
    "algo.old_logprobs=sampler, or leave algo.ratio=token",
    ("reference", "algo.kl_coef=0.1 algo.kl_estimator=k1"): "algo.kl_estimator=k1 has a gradient that is zero on "
    "average with algo.kl_in=loss, so nothing would pull towards the teacher; use algo.kl_in=reward or "
    "algo.kl_estimator=k3",
    ("plain", "train.global_batch_samples=12"): "train.global_batch_samples=12 must be divisible by "
    "algo.num_generations=8: a generation makes whole groups",
    ("plain", "train.global_batch_samples=10 algo.steps_per_generation=2"): "train.global_batch_samples=10 x "
    "algo.steps_per_generation=2 must be divisible by algo.num_generations=8: a generation makes whole groups",
    ("plain", "algo.dynamic_sampling=true run.steps=null run.epochs=1"): "run.epochs=1 needs to know how many rows a "
    "step takes, and algo.dynamic_sampling=true takes more where it must; use run.steps",
    ("plain", "algo.max_resamples=5"): "algo.max_resamples=5 has no effect with algo.dynamic_sampling=false; use "
    "algo.dynamic_sampling=true, or leave algo.max_resamples=3",
    ("plain", "algo.overlong_buffer=200"): "algo.overlong_buffer=200 is more than rollout.max_new_tokens=128; lower it",
    (
        "plain",
        "reward.functions=[length] reward.options.length.target=128",
    ): "reward.options.length.target=128 punishes "
    "no response, since none is longer than rollout.max_new_tokens=128; use a smaller target",
    ("plain", "data.max_response_length=100"): "data.max_response_length=100 has no effect with algo=grpo, where every "
    "response is the student's own; use rollout.max_new_tokens, or leave data.max_response_length=512",
    ("plain", "eval.responses=student"): "eval.responses=student has no effect with teacher=none, from which no "
    "divergence is measured; name a teacher, or leave eval.responses=dataset",
    ("plain", "data.max_teacher_length=100"): "data.max_teacher_length=100 has no effect with teacher=none; name a "
    "teacher, or leave data.max_teacher_length=null",
    ("plain", "algo.kl_in=reward"): "algo.kl_in=reward has no effect with algo.kl_coef=0; use e.g. algo.kl_coef=0.01, "
    "or leave algo.kl_in=loss",
    ("plain", "algo.clip_dual=1.1"): "algo.clip_dual=1.1 must be above 1 + algo.clip_high = 1.2",
    ("plain", "train.warmup_steps=33 algo.steps_per_generation=2"): "train.warmup_steps=33 and train.decay_steps=0 "
    "don't fit run.steps=16 x algo.steps_per_generation=2; lower them",
    ("ahead", "algo.teacher_kl_coef=1 placement.max_staleness=1"): "placement.max_staleness=1 with teacher=self, whose "
    "weights are trained while it is asked is not available yet; what works today: placement.max_staleness=0, or "
    "another teacher",
}


@pytest.mark.parametrize(("groups", "keys"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(groups: str, keys: str) -> None:
    assert refusal(groups, keys) == REFUSED[groups, keys]


@pytest.mark.parametrize(
    "override",
    [
        "num_generations=0",
        "steps_per_generation=0",
        "clip_low=0",
        "clip_low=1",
        "clip_high=0",
        "importance_cap=0",
        "kl_coef=-1",
        "teacher_kl_coef=-1",
        "max_resamples=0",
        "overlong_buffer=-1",
    ],
)
def test_values_out_of_range_name_their_key(override: str) -> None:
    assert f"algo.{override.partition('=')[0]} must be" in refusal("plain", f"algo.{override}")


@pytest.mark.parametrize(
    ("groups", "keys"),
    [
        ("plain", ""),
        ("plain", "algo.steps_per_generation=2 train.warmup_steps=32 train.global_batch_samples=12"),
        ("plain", "algo.importance_cap=2 rollout.top_p=0.9"),
        ("plain", "algo.importance_cap=2 rollout.min_p=0.1"),
        ("plain", "algo.importance_cap=2 algo.old_logprobs=trainer"),
        ("plain", "algo.importance_cap=2 algo.old_logprobs=trainer algo.ratio=sequence"),
        ("plain", "algo.steps_per_generation=2 rollout.top_p=0.9 algo.clip_high=0.28 algo.clip_dual=3"),
        ("plain", "algo.steps_per_generation=2 algo.old_logprobs=trainer algo.ratio=sequence algo.clip_low=0.001"),
        ("plain", "algo.clip_high=0.28 algo.clip_dual=3 algo.ratio=sequence"),
        ("reference", "algo.kl_coef=0.1 algo.kl_estimator=k2"),
        ("plain", "algo.dynamic_sampling=true algo.max_resamples=9 algo.overlong_buffer=128"),
        ("plain", "reward.functions=[length] reward.options.length.target=127"),
        ("plain", "reward.functions=[mine.py:length] reward.options.length.target=500"),
        ("reference", "algo.kl_coef=0.1 algo.kl_in=reward algo.kl_estimator=k1"),
        ("colocated", "algo.kl_coef=0.1 rollout.top_k=5"),
        ("self", "algo.teacher_kl_coef=1"),
        ("self", "algo.kl_coef=0.1 teacher.ema_decay=0.9"),
        ("distillation", "algo.teacher_kl_coef=1 algo.num_generations=1"),
        ("reference ahead", "algo.kl_coef=0.1 placement.max_staleness=1"),
    ],
)
def test_what_fits(groups: str, keys: str) -> None:
    assert isinstance(run_of(groups, keys).algo, GRPO)


def test_its_own_teacher_teaches_by_what_it_reads_alone() -> None:
    """Without a privileged prompt, and no reward that moves the student, its reference agrees with it for ever."""
    run = run_of("own lesson", "algo.teacher_kl_coef=1")
    with pytest.raises(ConfigError) as caught:
        check_lesson(run, {"data/teacher_prompt_rows": 0.0})
    assert str(caught.value) == (
        "teacher=reference with reward=none has nothing to teach, since no row has a teacher_prompt: teacher and "
        "student read the same; use data.preprocessor=opsd_reference_solution (or your own), or teacher=colocated"
    )
    check_lesson(run, {"data/teacher_prompt_rows": 1.0})
    check_lesson(run_of("reference", "algo.kl_coef=0.1"), {"data/teacher_prompt_rows": 0.0})


def test_sizes_of_a_step() -> None:
    run = run_of("plain", "algo.steps_per_generation=3 train.global_batch_samples=16 algo.num_generations=4")
    assert (run.updates_per_step, run.prompts_per_step) == (3, 12)
    assert (run.lmbda, run.response_limits) == (1, {"rollout.max_new_tokens": 128})
    assert not run.measures_divergence and not run.reads_reference_responses
    assert run_of("reference", "algo.kl_coef=0.1").reads_reference_responses


def test_what_null_means() -> None:
    assert (GRPO().scale, GRPO().upper_clip) == (ScaleRewards.group, 0.2)
    assert run_of("plain", "algo.advantage=rloo").algo.scale is ScaleRewards.none
    assert run_of("plain", "algo.advantage=rloo algo.scale_rewards=batch").algo.scale is ScaleRewards.batch
    for keys, recomputed in [
        ("", False),
        ("rollout.temperature=0.7", False),
        ("rollout.top_p=0.9", True),
        ("rollout.top_k=5", True),
        ("algo.old_logprobs=trainer", True),
    ]:
        run = run_of("plain", keys)
        assert run.engine is not None and recomputes(run.algo, run.engine) is recomputed, keys


def test_a_reference_is_the_student_as_it_was() -> None:
    teacher = run_of("reference", "algo.kl_coef=0.1").teacher
    assert isinstance(teacher, ReferenceTeacher) and not teacher.changes
