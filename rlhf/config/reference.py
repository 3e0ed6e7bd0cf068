"""Writes the configuration reference: `python -m rlhf.config.reference > docs/configuration.md`.

Everything comes from the specs (types, defaults, the strings under fields) and from `conf/` (which option is chosen,
which default it changes), so the page can't say anything else than the program does.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import sys
import typing
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf

from rlhf.config.base import written
from rlhf.config.registry import GROUPS, PROJECT_ROOT, SECTIONS
from rlhf.config.run import Run
from rlhf.errors import ConfigError

HEAD = """\
# Configuration

Every run is composed from one option per group and single keys:

    python -m rlhf.launch [GROUP=OPTION ...] [KEY=VALUE ...]
    python -m rlhf.launch distill=fullvocab algo.beta=0 run.steps=100

`+recipes=NAME` takes a set of choices from `recipes/`; `-m KEY=A,B,C` runs one job for each value;
`--cfg job --resolve` prints the configuration and stops. An unknown key, a value out of range, a combination that
isn't possible and a key that would have no effect are refused in one line before anything starts; where a recipe or
another job of a sweep may need such a key, a warning names it.

This page is generated: `python -m rlhf.config.reference > docs/configuration.md`.
"""


def render() -> str:
    """The whole page."""
    config = _yaml("config")
    chosen = {name: option for entry in config["defaults"] if isinstance(entry, dict) for name, option in entry.items()}
    parts = [HEAD, _groups(chosen)]
    for section, spec in SECTIONS.items():
        parts += [f"## {section}\n", _prose(spec), _table(section, spec, config.get(section, {}))]
        parts.append(_choices(section, spec, enums_of(spec).values()))
    parts += ["## resume\n", _table("", Run, {"resume": config["resume"]}, only=("resume",))]
    parts += ["## plugins\n", _table("", Run, {"plugins": config["plugins"]}, only=("plugins",))]
    for group in _order():
        parts += [f"## {group}\n", f"{_meaning(group)}\n"]
        shown: dict[Any, str] = {}
        for option, spec in GROUPS[group].items():
            default = " (default)" if chosen[group] == option else ""
            parts.append(f"### {group}={option}{default}\n")
            if works := unavailable(spec):
                parts += [_prose(spec), f"**Not available yet.** What works today: {works}.\n"]
            elif spec in shown:
                parts.append(_like(group, shown[spec], _yaml(f"{group}/{option}")))
            else:
                new = {kind: option for kind in enums_of(spec).values() if kind not in shown}
                parts += [_prose(spec), _table(group, spec, _yaml(f"{group}/{option}")), _choices(group, spec, new)]
                shown |= {spec: option, **new}
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def field_docs(spec: type) -> dict[str, str]:
    """The string under each field, or under each member of an enum; those of base classes included."""
    docs: dict[str, str] = {}
    for cls in reversed(spec.__mro__):
        if cls.__module__.startswith("rlhf."):
            docs |= _docs_in_source(cls)
    return docs


def enums_of(spec: type) -> dict[str, type[enum.Enum]]:
    """Field -> its choices."""
    found = {}
    for name, kind in typing.get_type_hints(spec).items():
        for one in typing.get_args(kind) or (kind,):  # `Tail`, or `Tail | None`
            if isinstance(one, type) and issubclass(one, enum.Enum):
                found[name] = one
    return found


def unavailable(spec: type) -> str | None:
    """What works instead of an option that isn't available yet; None where it is."""
    try:
        spec()
    except ConfigError as error:
        _, refused, works = str(error).partition("is not available yet; what works today: ")
        return works if refused else None
    return None


@functools.cache
def _docs_in_source(cls: type) -> dict[str, str]:
    (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for statement, below in zip(body.body, body.body[1:], strict=False):
        target: ast.expr | None = None
        if isinstance(statement, ast.AnnAssign):
            target = statement.target
        elif isinstance(statement, ast.Assign):
            target = statement.targets[0]
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        if isinstance(target, ast.Name) and isinstance(text, str):
            docs[target.id] = " ".join(text.split())
    return docs


def _order() -> list[str]:
    """Groups in the order of the fields of `Run`."""
    return [field.name for field in dataclasses.fields(Run) if field.name in GROUPS]


def _meaning(group: str) -> str:
    """What the group's module says it is."""
    module = next(iter(GROUPS[group].values())).__module__
    text = str(sys.modules[module].__doc__).partition(": ")[2]
    return text[0].upper() + text[1:]


def _yaml(name: str) -> dict[str, Any]:
    """A file of conf/ as it is written."""
    content = OmegaConf.to_container(OmegaConf.load(PROJECT_ROOT / "conf" / f"{name}.yaml"), resolve=False)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def _groups(chosen: dict[str, str]) -> str:
    lines = ["| group | options | meaning |", "|---|---|---|"]
    for group in _order():
        names = []
        for option, spec in GROUPS[group].items():
            name = f"**{option}**" if chosen[group] == option else option
            names.append(f"~~{name}~~" if unavailable(spec) else name)
        lines.append(f"| [{group}](#{group}) | {', '.join(names)} | {_meaning(group)} |")
    struck = " Struck out: not available yet." if any("~~" in line for line in lines) else ""
    return "\n".join([*lines, "", f"Bold: chosen by default.{struck}\n"])


def _like(group: str, other: str, stated: dict[str, Any]) -> str:
    """An option that differs from another one in the defaults of its YAML only."""
    keys = [f"`{group}.{key}={written(value)}`" for key, value in stated.items() if key != "defaults"]
    return f"As {group}={other}, with {', '.join(keys)}.\n"


def _prose(spec: type) -> str:
    text = inspect.cleandoc(spec.__doc__ or "").replace(" Not available yet.", "")
    if text.startswith("Section "):
        text = text.partition(": ")[2]
        text = text[0].upper() + text[1:]
    return f"{text}\n"


def _table(prefix: str, spec: type, stated: dict[str, Any], only: tuple[str, ...] = ()) -> str:
    """A row a field."""
    docs, enums = field_docs(spec), enums_of(spec)
    fields = [field for field in dataclasses.fields(spec) if not only or field.name in only]
    if not fields:
        return "No keys.\n"
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        key = f"{prefix}.{field.name}" if prefix else field.name
        if dataclasses.is_dataclass(_default(field)):
            lines += _table(key, type(_default(field)), {}).splitlines()[2:]
            continue
        default = written(stated.get(field.name, _default(field)))
        cells = [f"`{key}`", _type(field, enums), "required" if default == "???" else f"`{default}`", docs[field.name]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def _choices(prefix: str, spec: type, wanted: Iterable[type[enum.Enum]]) -> str:
    """What each choice of an enum means."""
    lines: list[str] = []
    for name, kind in enums_of(spec).items():
        if kind in wanted:
            docs = field_docs(kind)
            lines += [f"`{prefix}.{name}`:\n", *(f"- `{member.name}`: {docs[member.name]}" for member in kind), ""]
    return "\n".join(lines)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _type(field: dataclasses.Field[Any], enums: dict[str, type[enum.Enum]]) -> str:
    if field.name in enums:
        return "choice or null" if str(field.type).endswith("| None") else "choice"
    names = {
        "list[int]": "list of int",
        "list[str]": "list of str",
        "list[float]": "list of float",
        "dict[str, Any]": "mapping",
        "Targets": "str or list of str",
    }
    return " or ".join(names.get(part, part).replace("None", "null") for part in str(field.type).split(" | "))


if __name__ == "__main__":
    sys.stdout.write(render())
