"""Registers the specs with Hydra: group, option name, dataclass. The one list of what options exist."""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf, open_dict

from rlhf.config import (
    algo,
    cluster,
    data,
    distill,
    environment,
    logger,
    model,
    placement,
    reward,
    rollout,
    run,
    teacher,
    train,
)

PROJECT_ROOT = Path(__file__).resolve().parents[2]
"""The checkout: `conf/` and `recipes/` lie beside the package, so an editable install is needed."""

GROUPS: dict[str, dict[str, type]] = {
    "algo": {"gkd": algo.GKD, "grpo": algo.GRPO, "opsd": algo.OPSD},
    "distill": {
        "topk": distill.TopK,
        "fullvocab": distill.FullVocab,
        "sampled": distill.Sampled,
        "none": distill.NoDistill,
    },
    "teacher": {
        "colocated": teacher.ColocatedTeacher,
        "standalone": teacher.StandaloneTeacher,
        "self": teacher.SelfTeacher,
        "reference": teacher.ReferenceTeacher,
        "none": teacher.NoTeacher,
    },
    "placement": {"colocate": placement.Colocate, "separate": placement.Separate},
    "model": {"smollm2_24l": model.SmolLM2With24Layers, "hf": model.Model},
    "train": {"megatron": train.Train},
    "rollout": {"vllm": rollout.VllmRollout, "none": rollout.NoRollout},
    "data": {
        "reasoning_gym": data.ReasoningGymData,
        "file": data.FileData,
        "hub": data.HubData,
        "gsm8k": data.HubData,
        "plugin": data.PluginData,
    },
    "reward": {"none": reward.NoReward, "functions": reward.FunctionReward},
    "environment": {"none": environment.NoEnvironment, "multi_turn": environment.MultiTurn},
    "logger": {"default": logger.Logger, "wandb": logger.Logger},
    "cluster": {"local": cluster.Cluster, "attached": cluster.Cluster},
}

SECTIONS: dict[str, type] = {"run": run.RunSection, "eval": run.Eval}


def target_of(spec: type) -> str:
    """What `_target_` says."""
    return f"{spec.__module__}.{spec.__qualname__}"


def _node(spec: type) -> Any:
    """The spec as a typed config node that knows which class it becomes."""
    node = OmegaConf.structured(spec)
    with open_dict(node):
        node._target_ = target_of(spec)
    for field in dataclasses.fields(spec):
        if str(field.type).startswith("dict"):
            OmegaConf.set_struct(node[field.name], False)  # free keys: data.options.min_terms=2 without a +
    return node


def default_teacher(*, _root_: Any) -> str:
    """The default `teacher.model`: the whole built-in model for its cut-down self, none for another student."""
    student = _root_.get("model")
    named = OmegaConf.is_dict(student) and not OmegaConf.is_missing(student, "path")
    return model.BUILT_IN if named and student.path == model.BUILT_IN else teacher.UNNAMED


def _list_groups() -> str:
    """The options of every group, for --help."""
    from rlhf.config.reference import unavailable

    lines = []
    for group, options in GROUPS.items():
        names = [f"{name} (not yet)" if unavailable(spec) else name for name, spec in options.items()]
        lines.append(f"  {group:<10} {', '.join(names)}")
    return "\n".join(lines)


def _list_recipes() -> str:
    """The names of recipes/, for --help."""
    folder = PROJECT_ROOT / "recipes"
    names = sorted(path.stem for path in folder.glob("*.yaml"))
    small = sorted(path.stem for path in (folder / "cpu").glob("*.yaml"))
    lines = textwrap.wrap(", ".join(names), 110, initial_indent="  ", subsequent_indent="  ")
    return "\n".join([*lines, f"  cpu/NAME: the same in small, e.g. cpu/{small[0]}" if small else ""]).rstrip()


def register() -> None:
    """Make `schema/GROUP/OPTION` and `schema/SECTION` known to Hydra. Safe to call again."""
    store = ConfigStore.instance()
    for group, options in GROUPS.items():
        for option, spec in options.items():
            store.store(group=f"schema/{group}", name=option, node=_node(spec))
    for section, spec in SECTIONS.items():
        store.store(group="schema", name=section, node=_node(spec))
    OmegaConf.register_new_resolver("rlhf.default_teacher", default_teacher, replace=True)
    OmegaConf.register_new_resolver("rlhf.groups", _list_groups, replace=True)
    OmegaConf.register_new_resolver("rlhf.recipes", _list_recipes, replace=True)
    OmegaConf.register_new_resolver("rlhf.project_root", lambda: str(PROJECT_ROOT), replace=True)
