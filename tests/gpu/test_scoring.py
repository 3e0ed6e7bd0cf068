"""A standalone teacher on a real card, under both of vLLM's model runners, against transformers in float32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import json, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM
from benchmarks.models import make_model
from pathlib import Path
from rlhf.backends.vllm.scorer import VllmScorer
from rlhf.backends.vllm.setup import ScorerSetup
from rlhf.config.distill import Tail
from rlhf.config.teacher import TeacherEngine
from rlhf.config.train import DType
from rlhf.distill.topk import TopKDistill
from rlhf.types import Sequences, offsets_of

def main(folder):
    model = make_model(Path(folder) / "model", "tiny", seed=0)
    lengths, prompts = [40, 9, 77, 2, 30], [3, 8, 40, 1, 12]
    tokens = np.random.default_rng(0).integers(0, 500, sum(lengths), dtype=np.int32)
    sequences = Sequences(np.arange(100, 105), tokens, offsets_of(lengths), np.array(prompts))
    setup = ScorerSetup(
        model=model, max_model_len=77, distill=TopKDistill(8, Tail.bucket, 0.7), head="model.embed_tokens.weight",
        vocab=512, seed=0,
        engine=TeacherEngine(
            dtype=DType.bfloat16, kv_cache_gb=1.0, max_num_seqs=4, max_num_batched_tokens=32, enforce_eager=EAGER
        ),
    )
    scorer = VllmScorer(setup)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).cuda().eval()
    worst = {"logprobs": 0.0, "normaliser": 0.0, "hidden": 0.0, "sampled": 0.0}
    seen = []
    order = [3, 0, 4, 2, 1]
    scores = {i: s for part in scorer.score(sequences, order) for i, s in part.by_sample(sequences, "cpu")}
    hidden = {i: s for part in scorer.hidden_rows(sequences, order) for i, s in part.by_sample(sequences, "cpu")}
    sampled = np.split(scorer.logprobs(sequences, order, 0.7), np.cumsum([lengths[i] - prompts[i] for i in order])[:-1])
    for place, i in enumerate(order):
        ids = torch.from_numpy(tokens[sequences.offsets[i]:sequences.offsets[i + 1]]).long()
        with torch.no_grad():
            out = reference(ids[None].cuda(), output_hidden_states=True)
        rows = slice(prompts[i] - 1, lengths[i] - 1)
        every, h = out.logits[0].log_softmax(-1).cpu()[rows], out.hidden_states[-1][0].cpu()[rows]
        one = scores[100 + i]
        def differ(name, a, b):
            worst[name] = max(worst[name], float((a.float() - b.float()).abs().max()))
        differ("logprobs", one.logprobs, every.gather(1, one.ids.long()))
        differ("logprobs", one.logprobs, every.topk(8).values)
        differ("normaliser", one.log_normaliser, (every / 0.7).logsumexp(-1))
        differ("hidden", hidden[100 + i].hidden, h)
        at = (out.logits[0].cpu() / 0.7).log_softmax(-1)[rows].gather(1, ids[prompts[i]:, None])[:, 0]
        differ("sampled", torch.from_numpy(sampled[place]), at)
        seen.append(100 + i)
    print(json.dumps({"runner": scorer.runner, "worst": worst, "seen": sorted(scores)}))

if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.mark.parametrize(("runner", "eager"), [("V1", True), ("V2", True), ("V2", False)])
def test_scores_of_transformers(tmp_path: Path, runner: str, eager: bool) -> None:
    """Prompts in several steps of 32 tokens; the last token of one fills max_model_len."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("EAGER", str(eager)))
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1" if runner == "V2" else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["runner"] == runner and found["seen"] == [100, 101, 102, 103, 104]
    assert max(found["worst"].values()) < 0.06, found  # bfloat16 against float32
