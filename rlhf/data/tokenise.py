"""Rows -> token ids through the tokenizer's chat template. Ids are never decoded and encoded again."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

from rlhf.config.data import DataCommon, Truncation
from rlhf.data.rows import BadRow, Row
from rlhf.data.table import PromptTable, pack
from rlhf.errors import DataError, one_line

BATCH = 256
"""Conversations handed to the tokenizer at once; it encodes them in parallel."""
REFUSES = "the chat template refuses it: "


def tokenise_rows(rows: Sequence[Row], tokenizer: Any, spec: DataCommon) -> tuple[PromptTable, list[BadRow]]:
    """Render and encode every conversation, with the header of the answer to come at its end.

    Reference responses are encoded on their own and end with EOS.

    Returns:
        The table of the usable rows in their order, and the rows that the chat template refuses or that are longer
        than `max_length` under `truncation=error`.

    Raises:
        DataError: the tokenizer has no chat template or no EOS token.
    """
    name = tokenizer_name(tokenizer)
    if not tokenizer.chat_template:
        raise DataError(
            f"the tokenizer of {name} has no chat template; use an instruct model, or put a chat_template.jinja "
            "into the model's folder"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer of {name} has no EOS token; set eos_token in its tokenizer_config.json")

    check_template_args(tokenizer.get_chat_template(), spec.chat_template_args)

    used: list[Row] = []
    bad: list[BadRow] = []
    prompts: list[Int32[np.ndarray, " t"]] = []
    teacher_prompts: list[Int32[np.ndarray, " t"] | None] = []
    truncated: list[bool] = []
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        encoded = _encode(tokenizer, [row.messages for row in batch], spec)
        privileged = iter(_encode(tokenizer, [row.teacher_messages for row in batch if row.teacher_messages], spec))
        for row, ids in zip(batch, encoded, strict=True):
            prompt = _cut(ids, "prompt", spec.max_length, "data.max_length", spec)
            teacher_prompt: Int32[np.ndarray, " t"] | str | None = None
            teacher_ids: list[int] | str = []
            if row.teacher_messages:
                teacher_ids = next(privileged)
                teacher_prompt = _cut(
                    teacher_ids, "teacher_prompt", spec.teacher_length, "data.max_teacher_length", spec
                )
            if isinstance(prompt, str):
                bad.append(BadRow(row.where, prompt))
            elif isinstance(teacher_prompt, str):
                bad.append(BadRow(row.where, teacher_prompt))
            else:
                used.append(row)
                prompts.append(prompt)
                teacher_prompts.append(teacher_prompt)
                kept = len(prompt) + (0 if teacher_prompt is None else len(teacher_prompt))
                truncated.append(kept < len(ids) + len(teacher_ids))
    table = pack(
        prompts,
        _responses([row.response for row in used], tokenizer),
        truncated=truncated,
        wheres=[row.where for row in used],
        columns=[row.columns for row in used],
        teacher_prompts=teacher_prompts,
    )
    return table, bad


def _cut(ids: list[int] | str, name: str, longest: int, key: str, spec: DataCommon) -> Int32[np.ndarray, " t"] | str:
    """The tokens that are used, or the reason why the row is a bad one."""
    if isinstance(ids, str):
        return ids
    if len(ids) > longest and spec.truncation is Truncation.error:
        return f"{name} has {len(ids)} tokens, {key} is {longest} (use a larger one, or data.truncation=left)"
    return np.asarray(ids[-longest:], dtype=np.int32)  # left: the end, with the turn to answer, is what counts


def tokenizer_name(tokenizer: Any) -> str:
    """Where it was loaded from."""
    return getattr(tokenizer, "name_or_path", "") or "this model"


def check_refusals(used: int, refused: Sequence[BadRow], tokenizer: Any) -> None:
    """A template that refuses whatever it is given isn't the rows' fault.

    Args:
        used: Rows that were tokenised.
        refused: Those that weren't.

    Raises:
        DataError: every row was refused by the template.
    """
    if used == 0 and refused and all(row.reason.startswith(REFUSES) for row in refused):
        raise DataError(
            f"the chat template of {tokenizer_name(tokenizer)} refuses every row ({len(refused)} of {len(refused)}): "
            f"{refused[0].reason.removeprefix(REFUSES)}; mend the template (chat_template.jinja or "
            "tokenizer_config.json), or change what it asks for (data.system_prompt, data.chat_template_args, roles)"
        )


def with_system_prompt(messages: list[dict[str, Any]], system_prompt: str | None) -> list[dict[str, Any]]:
    """`messages`, with `system_prompt` in front if there is one and the conversation has no system message."""
    if system_prompt is None or any(message["role"] in ("system", "developer") for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def check_template_args(template: str, arguments: dict[str, Any]) -> None:
    """A template passes over variables it doesn't know, so a misspelt one would change nothing.

    Raises:
        DataError: a variable that the template doesn't read.
    """
    known = _template_variables(template)
    for name in arguments:
        if name not in known:
            own = sorted(known - {"messages", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"})
            reads = ", ".join(own) or "no variable"
            raise DataError(f"data.chat_template_args.{name} has no effect: the chat template reads {reads}")


@functools.cache
def _template_variables(template: str) -> frozenset[str]:
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    environment.globals.clear()
    try:
        # `{% generation %}` is an extension of transformers; it reads no variable.
        parsed = environment.parse(re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template))
        return frozenset(meta.find_undeclared_variables(parsed))
    except TemplateSyntaxError as error:
        raise DataError(f"the tokenizer's chat template can't be read: {one_line(error)}") from error


def _encode(tokenizer: Any, messages: list[list[dict[str, Any]]], spec: DataCommon) -> list[list[int] | str]:
    """Token ids of each conversation, or the reason why the chat template refuses it."""
    conversations = [with_system_prompt(one, spec.system_prompt) for one in messages]
    arguments = spec.chat_template_args
    try:
        return _apply(tokenizer, conversations, arguments)
    except Exception:  # one bad conversation fails the batch; templates raise whatever their Jinja code raises
        results: list[list[int] | str] = []
        for conversation in conversations:
            try:
                results += _apply(tokenizer, [conversation], arguments)
            except Exception as error:
                results.append(f"{REFUSES}{one_line(error)[:200]}")
        return results


def _apply(tokenizer: Any, conversations: list[list[dict[str, Any]]], arguments: dict[str, Any]) -> list[Any]:
    if not conversations:
        return []
    return tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
    )


def _responses(texts: list[str | None], tokenizer: Any) -> list[Int32[np.ndarray, " r"] | None]:
    given = [text for text in texts if text is not None]
    # verbose=False: how long a response may be is decided later, not by the tokenizer's model_max_length.
    ids = iter(tokenizer(given, add_special_tokens=False, verbose=False)["input_ids"] if given else [])
    end = tokenizer.eos_token_id
    return [None if text is None else np.asarray([*next(ids), end], dtype=np.int32) for text in texts]
