"""An example of your own preprocessor: rows with a column `hint` tell it to the teacher alone.

    python -m rlhf.launch algo=opsd teacher=self data=file data.path=rows.jsonl \
        plugins=[docs/examples/privileged_hint.py] data.preprocessor=add_hint

Without `plugins` it is `data.preprocessor=docs/examples/privileged_hint.py:add_hint`.

A preprocessor takes a row as it was read and returns the row to use: `prompt` (a string or messages) or `messages`,
`response`, and for the teacher `teacher_prompt`. A row for which it raises is a bad row (`data.on_bad_row`).
"""

from typing import Any

from rlhf.plugins import register_preprocessor


@register_preprocessor("add_hint")
def add_hint(row: dict[str, Any]) -> dict[str, Any]:
    """A row with a hint gets a `teacher_prompt`; the others stay as they are."""
    hint = row.get("hint")
    return {**row, "teacher_prompt": f"{row['prompt']}\n\nHint: {hint}"} if hint else row
