"""Tokenizers of checkpoints: loading, comparing a student's with a teacher's, and where a response ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf.assets import read_json
from rlhf.errors import ConfigError, ModelError, one_line

DIFFERENCES = 3
"""Differences named in an error."""
LISTED = 20
"""Added tokens named in an error."""


def load_tokenizer(folder: Path) -> Any:
    """The Hugging Face tokenizer in `folder`.

    Raises:
        ModelError: there is none, or it can't be read.
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    # Checked here because transformers' own error speaks of missing packages.
    if not any(
        any(folder.glob(pattern)) for pattern in ("tokenizer.json", "*.model", "vocab.*", "tokenizer_config.json")
    ):
        raise ModelError(f"{folder} has no tokenizer; copy the files tokenizer*.json of the original model there")
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except Exception as error:  # whatever the file's parser raises
        raise ModelError(f"the tokenizer in {folder} can't be loaded: {one_line(error)[:300]}") from error


def check_same_tokens(student_folder: Path, teacher_folder: Path) -> None:
    """A teacher can score the student's token ids only if they mean the same to both.

    Raises:
        ModelError: token ids, special tokens or EOS differ; names the first differences.
    """
    if Path(student_folder).resolve() == Path(teacher_folder).resolve():
        return
    student, teacher = load_tokenizer(student_folder), load_tokenizer(teacher_folder)
    differences: list[str] = []
    if len(student) != len(teacher):
        differences.append(f"{len(student)} vs {len(teacher)} tokens")
    if student.eos_token_id != teacher.eos_token_id:
        differences.append(f"EOS {_named(student.eos_token, student)} vs {_named(teacher.eos_token, teacher)}")
    differences += _different_ids(_by_id(student), _by_id(teacher), "id {}: {!r} vs {!r}")
    special = _special(student), _special(teacher)
    differences += _different_ids(*special, "special token {}: {!r} vs {!r}")
    if differences:
        more = f" and {len(differences) - DIFFERENCES} more" if len(differences) > DIFFERENCES else ""
        raise ModelError(
            f"the tokenizers of student and teacher differ: {', '.join(differences[:DIFFERENCES])}{more}; "
            "choose a teacher.model with the student's tokenizer"
        )


def check_vocabulary(tokenizer: Any, vocab: int, name: str) -> None:
    """Every token of the tokenizer has a row in the model's embedding.

    Raises:
        ModelError: one has none; `name` is the checkpoint as the user wrote it.
    """
    tokens = _by_id(tokenizer)
    last = max(tokens)
    if last >= vocab:
        raise ModelError(
            f"{name}: the tokenizer has the token {tokens[last]!r} with id {last}, but config.json has "
            f"vocab_size={vocab}; save the model again after resize_token_embeddings({last + 1}), or remove the token"
        )


def stop_token_ids(folder: Path, tokenizer: Any, vocab: int) -> tuple[int, ...]:
    """Ids that end a response, sorted: the tokenizer's EOS and those of generation_config.json and config.json.

    Raises:
        ModelError: a file isn't a JSON object, or an eos_token_id isn't a token id below `vocab`, or a list of them.
    """
    ids = {tokenizer.eos_token_id} - {None}
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        if not file.exists():
            continue
        given = read_json(file).get("eos_token_id")
        listed = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(value) is int for value in listed):
            raise ModelError(f"{file}: eos_token_id is {given!r}, expected a token id or a list of them")
        if outside := [value for value in listed if not 0 <= value < vocab]:
            raise ModelError(
                f"{file}: eos_token_id {outside[0]} is no token of the model, whose ids are 0 to {vocab - 1}"
            )
        ids |= set(listed)
    return tuple(sorted(ids))


def extra_stop_token_ids(tokenizer: Any, ids: Sequence[int], tokens: Sequence[str]) -> tuple[int, ...]:
    """`rollout.stop_token_ids` and `rollout.stop_tokens` as ids, sorted.

    Raises:
        ConfigError: an id the tokenizer doesn't have, or a text that isn't one of its added tokens (which alone are
            one token wherever they stand).
    """
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    wrong = [number for number in ids if not 0 <= number < len(tokenizer)]
    if wrong:
        raise ConfigError(
            f"rollout.stop_token_ids names {wrong[0]}; the tokenizer has the ids 0 to {len(tokenizer) - 1}"
        )
    for token in tokens:
        if token not in added:
            raise ConfigError(
                f"rollout.stop_tokens names {token!r}, which is no added token of the tokenizer; it has "
                f"{', '.join(sorted(added)[:LISTED])}{', ...' if len(added) > LISTED else ''}"
            )
    return tuple(sorted({*ids, *(added[token] for token in tokens)}))


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def _special(tokenizer: Any) -> dict[int, str]:
    return {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def _different_ids(student: dict[int, str], teacher: dict[int, str], text: str) -> list[str]:
    ids = sorted(student.keys() | teacher.keys())
    return [text.format(i, student.get(i), teacher.get(i)) for i in ids if student.get(i) != teacher.get(i)]


def _named(token: str | None, tokenizer: Any) -> str:
    return "none" if token is None else f"{token!r} (id {tokenizer.eos_token_id})"
