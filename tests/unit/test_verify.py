"""Final answers, and the verifiers of reasoning-gym."""

from __future__ import annotations

import pytest

from rlhf.rewards.verify import final_answer, has_verifier, solves


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("I think <answer>5</answer>, no: <answer> 7 </answer>, so 9", "7"),
        (r"hence \boxed{4}; or rather \boxed{\frac{1}{2}} of them", r"\frac{1}{2}"),
        (r"cut off in \boxed{4", r"cut off in \boxed{4"),
        ("160 + 128 = 288\n#### 1,288\nmore", "1288"),
        ("So the answer is 2.5. It was 3 before.", "2.5"),
        ("The Answer is: Alice", "Alice"),
        ("first 1 + 1 = 2\nthen 2 * 3 = 6.", "6"),
        ("12 apples\n\n", "12 apples"),
        ("", ""),
    ],
)
def test_final_answer(response: str, answer: str) -> None:
    assert final_answer(response) == answer


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # reasoning-gym's own, on import
@pytest.mark.parametrize("task", ["gsm_symbolic", "chain_sum"])
def test_a_right_answer_solves_and_a_wrong_one_does_not(task: str) -> None:
    import reasoning_gym

    for entry in reasoning_gym.create_dataset(task, size=3, seed=1):
        columns = {"task": task, "entry": entry}
        assert has_verifier(columns)
        assert solves(f"3 + 4 = 7\n#### {entry['answer']}", columns)
        assert not solves(f"3 + 4 = 7\n#### {float(entry['answer']) + 1:g}", columns)
        assert not solves("", columns)


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
def test_an_answer_of_several_lines_is_the_whole_response() -> None:
    import reasoning_gym

    (entry,) = reasoning_gym.create_dataset("mini_sudoku", size=1, seed=1)
    columns = {"task": "mini_sudoku", "entry": entry}
    assert "\n" in entry["answer"] and solves(f"{entry['answer']}\n", columns)
    assert not solves(entry["answer"].replace("1", "2"), columns)


def test_what_a_scorer_can_not_read_is_not_solved() -> None:
    assert not solves("7", {"task": "gsm_symbolic", "entry": {"answer": "seven"}})
    assert not solves("7", {"task": "chain_sum", "entry": {"answer": None}})  # its scorer raises


def test_other_rows_have_no_verifier() -> None:
    assert not has_verifier({"task": "math"}) and not has_verifier({})
