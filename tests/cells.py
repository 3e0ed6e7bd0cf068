"""The cells of the configuration: what goes with what, for tests that compose, refuse and run them."""

from __future__ import annotations

import copy
import itertools
from functools import cache
from typing import NamedTuple

from hydra import compose, initialize_config_dir
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf

from rlhf.config.compose import to_run
from rlhf.config.messages import explain
from rlhf.config.registry import PROJECT_ROOT, register
from rlhf.errors import RlhfError


class Cell(NamedTuple):
    """One combination of groups."""

    algo: str
    distill: str
    teacher: str
    placement: str
    source: str
    """Whose responses: `live`, `dataset` or `mixed`."""

    @property
    def overrides(self) -> list[str]:
        groups = [f"{name}={option}" for name, option in zip(self._fields[:4], self[:4], strict=True)]
        return [*groups, *SOURCES[self.source]]


SOURCES = {"live": [], "dataset": ["rollout=none"], "mixed": ["algo.lmbda=0.5"]}
OPTIONS = {
    "algo": ["gkd", "opsd"],
    "distill": ["topk", "fullvocab", "none"],
    "teacher": ["colocated", "standalone", "self", "none"],
    "placement": ["colocate", "separate"],
    "source": list(SOURCES),
}
"""Options that are not available yet are refused whatever they come with (tests/unit/test_config.py)."""
LEGAL = """
gkd opsd | topk fullvocab | colocated standalone self | colocate | live dataset mixed
gkd opsd | topk fullvocab | colocated standalone self | separate | live mixed
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
    if cell.teacher == "none":
        return f"algo={cell.algo} needs a teacher, got teacher=none; use teacher=colocated or teacher=standalone"
    if cell.distill == "none":
        return f"algo={cell.algo} needs teacher scores, got distill=none; use distill=topk or distill=fullvocab"
    assert (cell.placement, cell.source) == ("separate", "dataset"), cell
    return "placement=separate gives the engine devices of its own, and rollout=none starts none; use placement"


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


def refusal(cell: Cell) -> str | None:
    """The line that refuses a cell while it is composed; None for a legal one."""
    groups, source = cell.overrides[:4], cell.overrides[4:]
    config = copy.deepcopy(composed(*groups))  # composing takes long: once for all sources
    if source == ["rollout=none"]:
        config.rollout = composed(*source).rollout
    elif source:
        OmegaConf.update(config, *source[0].split("="))
    try:
        to_run(config)
    except (InstantiationException, RlhfError) as error:
        return explain(error)
    return None
