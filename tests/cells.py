"""The cells of the configuration: what goes with what, for tests that compose, refuse and run them."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig

from rlhf.config.compose import sections_of
from rlhf.config.messages import explain
from rlhf.config.registry import PROJECT_ROOT, register
from rlhf.config.run import Run
from rlhf.errors import RlhfError


class Cell(NamedTuple):
    """One combination of groups."""

    algo: str
    distill: str
    teacher: str
    placement: str
    source: str
    """Whose responses: `live`, `dataset` or `mixed`."""
    reward: str

    @property
    def groups(self) -> list[str]:
        named = {name: option for name, option in self._asdict().items() if name != "source"}
        return [f"{name}={option}" for name, option in named.items()]

    @property
    def keys(self) -> list[str]:
        """What GRPO learns of a teacher."""
        return ["algo.teacher_kl_coef=0.5"] if (self.algo, self.distill) == ("grpo", "sampled") else []

    @property
    def overrides(self) -> list[str]:
        return [*self.groups, *SOURCES[self.source], *self.keys]


SOURCES = {"live": [], "dataset": ["rollout=none"], "mixed": ["algo.lmbda=0.5"]}
OPTIONS = {
    "algo": ["gkd", "opsd", "grpo"],
    "distill": ["topk", "fullvocab", "sampled", "none"],
    "teacher": ["colocated", "standalone", "self", "none"],
    "placement": ["colocate", "separate"],
    "source": list(SOURCES),
    "reward": ["none", "functions"],
}
"""`teacher=reference` goes where `teacher=self` does."""
LEGAL = """
gkd opsd | topk fullvocab | colocated standalone self | colocate          | live dataset mixed | none
gkd opsd | topk fullvocab | colocated standalone self | separate          | live mixed         | none
grpo     | none           | none                      | colocate separate | live               | functions
grpo     | sampled        | colocated standalone self | colocate separate | live               | functions none
"""
"""Each line is a product."""


def every_cell() -> list[Cell]:
    return [Cell(*options) for options in itertools.product(*OPTIONS.values())]


def legal_cells() -> list[Cell]:
    cells = []
    for line in LEGAL.strip().splitlines():
        cells += [Cell(*options) for options in itertools.product(*(part.split() for part in line.split("|")))]
    return cells


def reason_of(cell: Cell) -> str:
    """The beginning of the line that refuses an illegal cell."""
    if cell.algo == "grpo":
        return reason_of_grpo(cell)
    if cell.teacher == "none":
        return f"algo={cell.algo} needs a teacher, got teacher=none; use teacher=colocated or teacher=standalone"
    if cell.distill == "none":
        return f"algo={cell.algo} needs teacher scores, got distill=none; use distill=topk or distill=fullvocab"
    if cell.distill == "sampled":
        return f"algo={cell.algo} compares distributions, and distill=sampled asks about one token of each"
    if cell.reward == "functions":
        return f"algo={cell.algo} learns from a teacher and would ignore reward.*; use reward=none"
    assert (cell.placement, cell.source) == ("separate", "dataset"), cell
    return "placement=separate gives the engine devices of its own, and rollout=none starts none; use placement"


def reason_of_grpo(cell: Cell) -> str:
    if cell.source == "mixed":
        return "unknown key algo.lmbda with algo=grpo; algo=gkd or algo=opsd has it"
    if cell.source == "dataset":
        return "algo=grpo learns from the student's own samples, and rollout=none takes none; use rollout=vllm"
    if cell.keys and cell.teacher == "none":
        return "algo.teacher_kl_coef=0.5 pulls towards a teacher, got teacher=none; use teacher=colocated"
    if not cell.keys and (cell.teacher, cell.distill) != ("none", "none"):
        return "algo=grpo asks a teacher only with algo.kl_coef or algo.teacher_kl_coef; use e.g. algo.kl_coef=0.01"
    assert (cell.teacher, cell.reward) == ("none", "none"), cell
    return "algo=grpo with reward=none has nothing to learn from; use reward=functions, or algo.teacher_kl_coef=1"


def pairwise(cells: list[Cell]) -> list[Cell]:
    """A few cells in which every pair of options that goes together occurs. Deterministic: the most new pairs first."""

    def pairs(cell: Cell) -> set[tuple[int, str, int, str]]:
        return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)}

    missing = set().union(*map(pairs, cells))
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(pairs(cell) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


@cache
def composed(*overrides: str) -> DictConfig:
    register()
    with initialize_config_dir(str(PROJECT_ROOT / "conf"), version_base="1.3"):
        return compose("config", list(overrides))


@cache
def default_sections() -> dict[str, Any]:
    return sections_of([], tuple(field.name for field in dataclasses.fields(Run)), {})


@cache
def section(name: str, *overrides: str) -> Any:
    """One section of the configuration, or what is wrong with it. Composing takes long: once for each option."""
    try:
        return sections_of(list(overrides), (name,), {})[name]
    except Exception as error:
        return error


def refusal(cell: Cell) -> str | None:
    """The line that refuses a cell while it is composed; None for a legal one."""
    sections = dict(default_sections())
    for override in (*cell.groups, *SOURCES[cell.source]):
        name = override.partition("=")[0]
        if name in sections:
            sections[name] = section(name, override)
    given = [override for override in (*SOURCES[cell.source], *cell.keys) if override.startswith("algo.")]
    if given:
        sections["algo"] = section("algo", f"algo={cell.algo}", *given)
    try:
        for found in sections.values():
            if isinstance(found, Exception):
                raise found
        Run(**sections)
    except (HydraException, RlhfError) as error:
        return explain(error)
    return None
