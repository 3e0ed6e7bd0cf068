"""What goes with environment=multi_turn, how long its samples may be, and the line that refuses what doesn't fit."""

from __future__ import annotations

import copy

import pytest
import yaml
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

from rlhf.algos.build import minibatches_of
from rlhf.config.compose import to_run
from rlhf.config.environment import MultiTurn
from rlhf.config.messages import explain
from rlhf.config.run import Run
from rlhf.errors import RlhfError
from rlhf.memory import longest_sample
from tests.cells import composed

GROUPS = {
    "grpo": ("algo=grpo", "environment=multi_turn"),
    "unrewarded": ("algo=grpo", "environment=multi_turn", "reward=none"),
    "gkd": ("environment=multi_turn",),
    "off-policy": ("environment=multi_turn", "rollout=none"),
    "none": ("algo=grpo",),
}


def run_of(groups: str, keys: str = "") -> Run:
    config = copy.deepcopy(composed(*GROUPS[groups]))
    named = "" if groups == "none" else "environment.name=mine.py:Mine "
    for override in (named + keys).split():
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
    ("off-policy", ""): "environment=multi_turn talks with the student's engine, and rollout=none starts none; use "
    "environment=none",
    ("gkd", "algo.lmbda=0"): "environment=multi_turn talks with the student's engine, and algo.lmbda=0 starts none; "
    "use environment=none",
    (
        "gkd",
        "environment.reward_weight=2",
    ): "environment.reward_weight=2.0 has no effect with a teacher's divergence to "
    "learn from, where rewards are only logged; use algo=grpo, or leave environment.reward_weight=1.0",
    (
        "grpo",
        "algo.overlong_buffer=4",
    ): "algo.overlong_buffer=4 has no effect with environment=multi_turn, where no one "
    "response has a length to punish; use algo.mask_truncated=true, or leave algo.overlong_buffer=0",
    ("grpo", "reward.functions=[a.b.environment]"): "a function of reward.functions is called environment, as the part "
    "of environment=multi_turn is; rename it",
    ("unrewarded", "environment.reward_weight=0"): "algo=grpo with reward=none environment.reward_weight=0 has nothing "
    "to learn from; use reward=functions, or algo.teacher_kl_coef=1 with teacher=colocated distill=sampled",
    ("unrewarded", "algo.num_generations=1"): "algo.num_generations=1 leaves nothing to compare a reward with; use "
    "algo.num_generations=8",
    ("grpo", "environment.max_turns=1 environment.max_observation_tokens=64"): "environment.max_observation_tokens=64 "
    "has no effect with environment.max_turns=1, where no answer is followed by another turn; use "
    "environment.max_turns=2, or leave environment.max_observation_tokens=128",
    ("grpo", "environment.name=''"): "environment.name is empty; write e.g. environment.name=docs/examples/"
    "second_try.py:SecondTry",
    (
        "grpo",
        "environment.max_turns=3 environment.max_observation_tokens=100 data.max_length=300 rollout.max_new_tokens=50 "
        "train.micro_batch_tokens=649",
    ): "train.micro_batch_tokens=649 can't hold one sample of data.max_length=300 + a conversation "
    "(environment.max_turns=3 x rollout.max_new_tokens=50 + 2 x environment.max_observation_tokens=100)=350 tokens; "
    "use at least 650",
}


@pytest.mark.parametrize(("groups", "keys"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(groups: str, keys: str) -> None:
    assert refusal(groups, keys) == REFUSED[groups, keys]


@pytest.mark.parametrize("key", ["max_turns", "max_observation_tokens", "timeout_s", "processes"])
def test_values_out_of_range_name_their_key(key: str) -> None:
    assert f"environment.{key} must be" in refusal("grpo", f"environment.{key}=0")
    assert "environment.reward_weight must be finite, got nan" in refusal("grpo", "environment.reward_weight=.nan")


def test_a_name_is_asked_for() -> None:
    with pytest.raises(RlhfError, match=r"missing value: write environment.name=FILE.py:CLASS \(with reset and step"):
        to_run(composed(*GROUPS["grpo"]))


def test_the_longest_sample_counts_all_turns() -> None:
    keys = "data.max_length=300 rollout.max_new_tokens=50 train.micro_batch_tokens=4096"
    talk = f"{keys} environment.max_turns=3 environment.max_observation_tokens=100"
    assert longest_sample(run_of("unrewarded", f"{talk} eval.samples=0")) == 650
    assert run_of("unrewarded", talk).longest_continuation == 350
    assert run_of("unrewarded", f"{keys} environment.max_turns=1").longest_continuation == 50
    assert run_of("none", keys).longest_continuation == 50
    assert run_of("unrewarded", talk).most_response_tokens == 150 == 3 * run_of("none", keys).most_response_tokens
    made = minibatches_of(run_of("unrewarded", talk), 1)
    assert made.keywords["max_new_tokens"] == 150  # type: ignore[attr-defined]


def test_what_is_learned_from_rewards() -> None:
    assert run_of("unrewarded").rewarded and run_of("grpo", "environment.reward_weight=0").rewarded
    assert not run_of("gkd").rewarded and run_of("none").rewarded
    assert isinstance(run_of("gkd").environment, MultiTurn)
