"""An example of your own data set: rows that are made on the spot.

    python -m rlhf.launch data=plugin plugins=[docs/examples/sums.py] data.function=sums data.options.largest=99

A data set is a function that returns or yields rows: dicts with `prompt` or `messages`, `response`, and columns of your
own. Each epoch of a stream calls it again, so it must give the same rows each time: seed what is random.
"""

import random
from collections.abc import Iterator
from typing import Any

from rlhf.plugins import register_dataset


@register_dataset("sums")
def sums(count: int = 1000, largest: int = 20, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Sums of two numbers, with the answer as the reference response and as a number."""
    rng = random.Random(seed)
    for _ in range(count):
        a, b = rng.randint(0, largest), rng.randint(0, largest)
        yield {"prompt": f"What is {a} + {b}?", "response": str(a + b), "answer": a + b}
