"""`--help KEY ...`: what docs/configuration.md says of a few keys, groups or options, in a terminal."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlhf.config.names import ours
from rlhf.config.reference import render
from rlhf.errors import ConfigError

ROW = re.compile(r"\| `(?P<key>[\w.]+)` \| (?P<kind>.+?) \| (?P<default>.+?) \| (?P<meaning>.*) \|")
WIDTH = 100


@dataclass
class Entry:
    """A key as the page describes it."""

    key: str
    kind: str
    default: str
    meaning: str
    options: list[str] = field(default_factory=list)
    """GROUP=OPTION, of those that have it; none of a section's key."""
    choices: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A few lines."""
        default = "required" if self.default == "required" else f"default {self.default}"
        where = f"   ({' or '.join(self.options)})" if self.options else ""
        lines = [f"{self.key}   {self.kind}, {default}{where}", *_wrapped(self.meaning, "    ")]
        for choice in self.choices:
            lines += _wrapped(choice, "      ")
        return "\n".join(lines)


def words_of(arguments: Sequence[str]) -> list[str]:
    """What `--help` is asked about: nothing where there is no `--help`, or only overrides beside it."""
    if not {"--help", "-h"} & set(arguments):
        return []
    return [word for word in arguments if not word.startswith(("-", "+", "~")) and word.partition("=")[0] == word]


def about(words: Sequence[str]) -> str:
    """Of each word the keys that it names: whole (`distill.k`), by their last part (`k`), or all of a group or section.
    Of another trainer's name ours.

    Raises:
        ConfigError: a word names none.
    """
    entries = _entries()
    found = []
    for word in words:
        named = [
            entry
            for entry in entries
            if entry.key == word or entry.key.startswith(f"{word}.") or entry.key.rpartition(".")[2] == word
        ]
        here = ours(word)
        theirs = [entry for entry in entries if here is not None and f"{entry.key}.".startswith(f"{here}.")]
        if not named and not theirs:
            keys = {entry.key for entry in entries}
            names = sorted(keys | {part for key in keys for part in key.split(".")})
            close = difflib.get_close_matches(word, names, n=1)
            meant = f"did you mean {close[0]}?" if close else "docs/configuration.md has them all"
            raise ConfigError(f"--help {word}: no key and no group has this name; {meant}")
        found += [entry.text() for entry in named]
        options = sorted({option for entry in theirs for option in entry.options})
        where = f" with {' or '.join(options)}" if named else ""
        found += [f"{word}{where}: here it is {here}", *(entry.text() for entry in theirs)] if theirs else []
    return "\n\n".join(found)


def _entries() -> list[Entry]:
    """Of the whole page. A key that several options have, described alike, is one entry."""
    entries: dict[tuple[str, str, str, str], Entry] = {}
    option, choices_of = "", ""
    for line in render().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("#").split()[0]
            option = heading if "=" in heading else ""
        elif row := ROW.fullmatch(line):
            kind, default, meaning = (_plain(row[name]) for name in ("kind", "default", "meaning"))
            entry = entries.setdefault((row["key"], kind, default, meaning), Entry(row["key"], kind, default, meaning))
            entry.options += [option] if option else []
        elif choices := re.fullmatch(r"`([\w.]+)`:", line):
            choices_of = choices[1]
        elif line.startswith("- `"):
            for entry in entries.values():
                if entry.key == choices_of:
                    entry.choices.append(_plain(line[2:]))
    return list(entries.values())


def _plain(markdown: str) -> str:
    return markdown.replace("`", "").replace("\\|", "|")


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
