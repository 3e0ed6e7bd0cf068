"""Off-policy and mixed runs of the real command, and the loss of reference responses against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhf.algos.gkd import make_minibatches
from rlhf.backends.megatron.trainer import MegatronTrainer
from rlhf.config.train import Train
from rlhf.errors import RlhfError
from rlhf.loggers import rollouts
from rlhf.preflight import check_inputs
from rlhf.report.summary import read
from tests.integration.megatron import end_groups, experience_of, random_sequences, trainer_setup
from tests.integration.runs import composed, launch, metrics_of, role_processes, start, tiny_world, wait_for_step
from tests.unit.tiny import save_tiny_llama

LENGTHS = [(4, 12), (7, 5), (3, 21), (6, 6)]


@pytest.mark.parametrize("micro_batch_tokens", [4096, 40])
def test_sft_alpha_adds_the_cross_entropy_of_transformers(tmp_path: Path, micro_batch_tokens: int) -> None:
    student, teacher = (save_tiny_llama(tmp_path / str(seed), layers=2, seed=seed) for seed in (1, 2))
    norms, losses = [], []
    for alpha in (0.0, 0.5):
        end_groups()
        trainer = MegatronTrainer(trainer_setup(student, teacher, k=8))
        sequences = random_sequences(trainer.student.architecture.vocab, LENGTHS)
        train = Train(micro_batch_tokens=micro_batch_tokens)
        experience = experience_of(sequences)
        minibatches = make_minibatches(sequences, train, 1, alpha)
        trainer.score(sequences, minibatches)
        totals = trainer.accumulate_gradients(experience.sequences, minibatches[0])
        losses.append(totals.weighted["train/loss"])
        norms.append([p.main_grad.clone() for p in trainer.student.module.parameters()])

    model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
    total, count = torch.zeros(()), int(sequences.response_lengths.sum())
    for tokens, prompt_length in zip(sequences.rows(), sequences.prompt_lengths, strict=True):
        ids = torch.from_numpy(tokens).long()[None]
        labels = ids.clone()
        labels[0, :prompt_length] = -100
        total = total + model(ids, labels=labels).loss * (len(tokens) - prompt_length)
    expected = total / count
    expected.backward()
    assert losses[1] - losses[0] == pytest.approx(0.5 * expected.item(), rel=1e-5)
    difference = torch.stack([(b - a).norm() for a, b in zip(*norms, strict=True)]).norm()
    theirs = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert float(difference) == pytest.approx(0.5 * float(theirs), rel=1e-4)


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Tiny models, and rows that all have a response."""
    folder = tmp_path_factory.mktemp("world")
    overrides = tiny_world(folder)
    rows = [{"prompt": f"how many boxes make {i} boxes", "response": f"the answer is {i}"} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*overrides, "data.max_response_length=16", "run.steps=3"]


def test_an_off_policy_run_has_no_engine(world: list[str], tmp_path: Path) -> None:
    """rollout=none and algo.lmbda=0 are the same run, to the last digit."""
    none = [o for o in world if not o.startswith("rollout.")]
    process = start([*none, "rollout=none", "algo.sft_alpha=0.5", "run.name=none"], tmp_path)
    wait_for_step(process, tmp_path / "outputs" / "none", 1)
    roles = role_processes(process.pid)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert set(roles) == {"TrainerActor"}, "no EngineActor"
    assert (
        "engine: none, responses are the data's; so there is no sample to show" in out and "before and after" not in out
    )
    steps = metrics_of(tmp_path / "outputs" / "none")
    for step in (1, 2, 3):
        assert not {"time/sync", "time/rollout", "rollout/logprob_gap_mean"} & set(steps[step])
        cross_entropy = steps[step]["train/cross_entropy"]
        assert steps[step]["train/loss"] == pytest.approx(steps[step]["train/divergence"] + 0.5 * cross_entropy)
    assert steps[3]["train/cross_entropy"] < steps[1]["train/cross_entropy"]
    assert read(tmp_path / "outputs" / "none").sample is None

    done = launch([*world, "algo.lmbda=0", "algo.sft_alpha=0.5", "run.name=zero"], tmp_path)
    assert done.returncode == 0, done.stderr
    zero = metrics_of(tmp_path / "outputs" / "zero")
    assert [zero[step]["train/loss"] for step in (1, 2, 3)] == [steps[step]["train/loss"] for step in (1, 2, 3)]


@pytest.mark.slow
def test_opsd_from_the_live_policy_in_a_mixed_run(world: list[str], tmp_path: Path) -> None:
    """Both kinds of step; teacher prompts made by the built-in preprocessor; the teacher is the student."""
    arguments = [
        *(o for o in world if not o.startswith("teacher.")),
        *("algo=opsd", "teacher=self", "distill=fullvocab", "algo.lmbda=0.5", "run.steps=4", "run.name=opsd"),
        *("data.preprocessor=opsd_reference_solution", "data.max_teacher_length=300"),
    ]
    done = launch([o for o in arguments if not o.startswith("distill.")], tmp_path)
    assert done.returncode == 0, done.stderr
    steps = metrics_of(tmp_path / "outputs" / "opsd")
    kinds = {steps[step]["rollout/on_policy"] for step in range(1, 5)}
    assert kinds == {0.0, 1.0}
    for step in range(1, 5):
        assert steps[step]["batch/privileged_share"] == 1 and steps[step]["train/divergence"] > 1e-6
        assert ("rollout/logprob_gap_mean" in steps[step]) == (steps[step]["rollout/on_policy"] == 1)
    assert steps[0]["eval/forward_kl"] > 1e-4
    assert "teacher: the student itself" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_teacher_writes_the_responses_of_off_policy_steps(tmp_path: Path) -> None:
    """Rows without responses. At temperature 0 what is trained on is what transformers generates from the teacher."""
    world = tiny_world(tmp_path)
    rows = [{"prompt": f"how many boxes make {i} boxes"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    writes = ["teacher=standalone", "algo.seq_kd=true", "algo.sft_alpha=1", "teacher.engine.kv_cache_gb=0.1"]
    writes += [f"teacher.generation.{key}" for key in ("temperature=0", "max_new_tokens=12", "kv_cache_gb=0.1")]
    common = [*writes, "eval.samples=0", "logger.rollouts=true", "run.seed=1"]
    none = [one for one in world if not one.startswith("rollout.")]
    runs = {"none": [*none, *common, "rollout=none", "run.steps=2"]}
    runs["mixed"] = [*world, *common, "algo.lmbda=0.5", "run.steps=4"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.float32).eval()
    eos = model.config.eos_token_id
    for name, arguments in runs.items():
        done = launch([*arguments, f"run.name={name}"], tmp_path, timeout=600)
        assert done.returncode == 0, done.stderr
        run_dir = tmp_path / "outputs" / name
        steps, recorded = metrics_of(run_dir), rollouts.read(run_dir)
        kinds = {step: steps[step].get("rollout/on_policy", 0.0) for step in recorded}
        assert set(kinds.values()) == ({0.0} if name == "none" else {0.0, 1.0})
        for step, sequences in recorded.items():
            assert ("rollout/logprob_gap_mean" in steps[step]) == (kinds[step] == 1)
            assert ("train/cross_entropy" in steps[step]) == (kinds[step] == 0)
            for tokens, length in zip(sequences.rows(), sequences.prompt_lengths, strict=True):
                ids = torch.from_numpy(tokens[:length]).long()[None]
                out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=0)
                assert (out[0].tolist() == tokens.tolist()) == (kinds[step] == 0), (name, step)
        teacher = read(run_dir).roles[1]
        assert teacher.endswith("1 x cpu of its own, vLLM, float32, writes responses")


REFUSED = [
    (["algo=opsd"], "no teacher_prompt, which algo=opsd needs"),
    (["teacher=self", "distill.k=600"], "distill.k=600 exceeds the vocabulary of 512 tokens"),
    (["teacher=self"], "teacher=self has nothing to teach, since no row has a teacher_prompt"),
    (["data.max_teacher_length=500"], r"data.max_teacher_length=500 \+ rollout.max_new_tokens=16 is more than the 512"),
    (["algo.lmbda=0.5", "data.max_response_length=500"], r"data.max_length=64 \+ data.max_response_length=500 is more"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED)
def test_what_is_found_before_anything_starts(overrides: list[str], message: str, world: list[str]) -> None:
    kept = [o for o in world if not (o.startswith("teacher.") and "teacher=self" in overrides)]
    kept = [o for o in kept if not (o.startswith("data.max_response") and "algo.lmbda=0.5" not in overrides)]
    with pytest.raises(RlhfError, match=message):
        check_inputs(composed([*kept, *overrides]))
