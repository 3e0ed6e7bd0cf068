"""Plugins: what they register can be chosen by name; what is wrong with one is a line."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from rlhf import plugins
from rlhf.config.compose import to_run
from rlhf.config.data import FileData, PluginData
from rlhf.config.registry import PROJECT_ROOT, register
from rlhf.config.reward import FunctionReward
from rlhf.data.__main__ import main
from rlhf.data.dataset import load
from rlhf.data.preprocess import BUILT_IN, load_preprocessor
from rlhf.data.rows import Needs
from rlhf.errors import ConfigError, DataError
from rlhf.plugins import load_plugins
from rlhf.rewards.build import FunctionRewarder, check
from rlhf.rewards.built_in import FACTORIES
from tests.unit.test_rewards import batch
from tests.unit.tiny import save_tiny_llama, tiny_tokenizer

EXAMPLES = PROJECT_ROOT / "docs" / "examples"


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    load_plugins([])


def plugin(folder: Path, body: str, name: str = "mine") -> str:
    path = folder / f"{name}.py"
    path.write_text(
        "from rlhf.plugins import *\nfrom rlhf.plugins import register_preprocessor, register_reward\n" + body
    )
    return str(path)


def test_the_names_that_are_taken_are_those_that_exist() -> None:
    assert {
        "preprocessor": tuple(BUILT_IN),
        "reward": tuple(FACTORIES),
        "dataset": (),
        "loss": (),
        "environment": (),
    } == plugins.BUILT_IN


# ---- the examples of docs/plugins.md ---------------------------------------------------------------------------------


def test_every_example_is_in_the_documentation_and_says_how_to_run_it() -> None:
    page = (PROJECT_ROOT / "docs" / "plugins.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"examples/{path.name}" in page
        doc = ast.get_docstring(ast.parse(path.read_text()))
        assert doc is not None and f"plugins=[docs/examples/{path.name}]" in doc


def test_the_example_of_a_data_set_and_the_one_of_a_reward() -> None:
    entries = [str(EXAMPLES / "sums.py"), str(EXAMPLES / "near.py")]
    load_plugins(entries)
    spec = PluginData(function="sums", options={"count": 12, "largest": 5}, shuffle=False)
    needs = Needs(for_rewards=True)
    dataset = load(spec, tiny_tokenizer(), 0, eval_samples=2, eval_needs_response=True, needs=needs)
    assert (len(dataset.train), len(dataset.held_out)) == (10, 2)
    rows = dataset.train.columns
    assert rows[3]["data row"] == "sums[3]" and rows[3]["response"] == str(rows[3]["answer"])
    again = load(spec, tiny_tokenizer(), 1, eval_samples=2, eval_needs_response=True)
    assert again.train.tokens.tolist() == dataset.train.tokens.tolist()
    options = {"near": {"width": 4}}
    reward = FunctionReward(functions=["near"], options=options, processes=1)
    check(reward, dataset.train_column_names()[0], entries)
    rewarder = FunctionRewarder(reward, tiny_tokenizer(), entries)
    texts = [f"it is {rows[0]['answer']}", f"it is {rows[1]['answer'] + 1}", "no idea"]
    rewards = rewarder.score(batch(texts), [*rows[:2], {"answer": 1}]).result()
    rewarder.close()
    assert rewards.parts["near"].tolist() == rewards.total.tolist() == [1, 0.75, 0]


def test_the_example_of_a_preprocessor() -> None:
    load_plugins([str(EXAMPLES / "privileged_hint.py")])
    made = load_preprocessor("add_hint")({"prompt": "2 + 3?", "hint": "count"})
    assert made["teacher_prompt"] == "2 + 3?\n\nHint: count"


# ---- names -----------------------------------------------------------------------------------------------------------

FUNCTION = "def f(row):\n    return row\n"


def test_a_plugin_of_one_run_is_not_one_of_the_next(tmp_path: Path) -> None:
    entry = plugin(tmp_path, f"@register_preprocessor('mine')\n{FUNCTION}")
    load_plugins([entry])
    assert load_preprocessor("mine")({"a": 1}) == {"a": 1}
    load_plugins([])
    with pytest.raises(ConfigError, match=r"data\.preprocessor=mine doesn't exist; write opsd_reference_solution"):
        load_preprocessor("mine")
    load_plugins([entry])  # imported once, and known again
    assert load_preprocessor("mine")({"a": 1}) == {"a": 1}


def test_names_of_plugins_are_suggested(tmp_path: Path) -> None:
    entry = plugin(tmp_path, f"@register_preprocessor('tidy_up')\n{FUNCTION}@register_reward('brevity')\n{FUNCTION}")
    load_plugins([entry])
    with pytest.raises(ConfigError, match=r"did you mean tidy_up\?; write opsd_reference_solution, tidy_up, package"):
        load_preprocessor("tidyup")
    with pytest.raises(ConfigError, match=r"did you mean brevity\?; write math_verify, .*, code, brevity, package"):
        check(FunctionReward(functions=["brevty"]), [], [entry])
    with pytest.raises(ConfigError, match=r"brevity takes no completions"):
        check(FunctionReward(functions=["brevity"]), [], [entry])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"@register_reward('length')\n{FUNCTION}", r"@register_reward\('length'\): a built-in reward is called so"),
        (f"@register_preprocessor('a b')\n{FUNCTION}", r"a name has letters, digits and _ only, line 3 of .*mine\.py"),
        (f"for _ in range(2):\n    @register_reward('a')\n    {FUNCTION!s}".replace("\n    return", "\n        return"),
         "two rewards are called a, in .*; rename one"),
        (f"@register_reward\n{FUNCTION}", r"needs a name; write @register_reward\('f'\), line 3 of \S*$"),
        ("@register_environment\nclass Maze: ...\n", r"write @register_environment\('Maze'\), line 3 of \S*$"),
        ("register_reward('a')(3)\n", r"reward\('a'\) decorates int 3, expected a function, line 3 of"),
        ("register_environment('a')('b')\n", r"decorates str 'b', expected a class, line 3 of .*mine\.py"),
        ("x = 1\n", "registers nothing; decorate a function with one of @register_preprocessor, @register_reward, "),
        ("x = 1\nx.y = 2\n", r"can't be imported: AttributeError: .*, line 4 of .*mine\.py"),
        ("x = (\n", r"can't be imported: SyntaxError: .*, line 3 of .*mine\.py"),
        ("raise SystemExit(0)\n", r"can't be imported: SystemExit: 0, line 3"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_plugin_is_one_line(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_plugins([plugin(tmp_path, body)])
    assert "\n" not in str(caught.value) and "plugins" in str(caught.value)


def test_two_plugins_with_one_name(tmp_path: Path) -> None:
    entries = [plugin(tmp_path, f"@register_reward('a')\n{FUNCTION}", name) for name in ("one", "two")]
    with pytest.raises(ConfigError, match=r"two rewards are called a, in .*one\.py and .*two\.py; rename one"):
        load_plugins(entries)
    with pytest.raises(ConfigError, match=r"names .*one\.py twice; keep one"):
        load_plugins([entries[0], entries[0].replace("/one.py", "/../" + tmp_path.name + "/one.py")])
    for name in ("gone.py", "no_such_module"):
        with pytest.raises(ConfigError, match=rf"plugins=\[{name}\] can't be imported: .*NotFoundError"):
            load_plugins([name])


def test_a_module_that_was_imported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin(tmp_path, f"@register_preprocessor('early')\n{FUNCTION}", "early_bird")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("early_bird")
    load_plugins(["early_bird"])
    assert plugins.find("preprocessor", "early") is sys.modules["early_bird"].f


# ---- in a run --------------------------------------------------------------------------------------------------------


def test_plugins_are_loaded_before_the_rest_is_checked(tmp_path: Path) -> None:
    entry = plugin(tmp_path, f"@register_preprocessor('mine')\n{FUNCTION}")
    register()
    with initialize_config_dir(str(PROJECT_ROOT / "conf"), version_base="1.3"):
        run = to_run(compose("config", [f"plugins=[{entry}]", "data.preprocessor=mine"]))
        assert run.plugins == [entry] and plugins.find("preprocessor", "mine") is not None
        assert to_run(compose("config", [])).plugins == [] and plugins.find("preprocessor", "mine") is None
        for value, message in [
            ("3", r"plugins=3 must be a list of files and modules; write plugins=\[mine\.py\]"),
            ("[3]", r"must be a list of files and modules"),
            ("[a.py,a.py]", "names a.py twice"),
        ]:
            with pytest.raises(ConfigError, match=message):
                to_run(compose("config", [f"plugins={value}"]))


def test_the_data_checker_knows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save_tiny_llama(tmp_path / "model", layers=1))
    keys = ["data=plugin", f"plugins=[{EXAMPLES / 'sums.py'}]", "data.function=sums", "data.options.count=40"]
    assert main([*keys, "--model", model]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["data.function=sums", "40 rows can be used, 0 can't"]


# ---- rows from functions ---------------------------------------------------------------------------------------------

ROWS = """
def rows(count=3, level=1):
    for number in range(count):
        if level >= 8 and number == 2:
            raise OSError("disk on fire") if level == 9 else Silent
        yield {"prompt": f"row {number}", "response": "y"} if number != level else 7

def held_out(count=3, level=1):
    return [{"prompt": f"held out {number}", "response": "y"} for number in range(5)]

def needs(x):
    return []

def forgets():
    [{"prompt": "x"}]

class Silent(Exception):
    def __str__(self):
        raise KeyError
"""


def rows_of(folder: Path, **options: object) -> PluginData:
    (folder / "rows.py").write_text(ROWS)
    given = {"function": f"{folder}/rows.py:rows", **options}
    return PluginData(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_function(streaming: bool, tmp_path: Path) -> None:
    options = {"count": 6, "level": -1}
    spec = rows_of(
        tmp_path, options=options, streaming=streaming, shuffle=False, eval_function=f"{tmp_path}/rows.py:held_out"
    )
    dataset = load(spec, tiny_tokenizer(), 0, eval_samples=2, eval_needs_response=True)
    texts = [dict(row) for row in dataset.held_out.columns]
    assert texts == [{}, {}] and dataset.held_out.wheres[1] == f"{tmp_path}/rows.py:held_out[1]"
    cursor = dataset.cursor(0, False, lambda row: None)
    draw = cursor.take(8)  # over the end of an epoch
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "row {n % 6}"}}\n' for n in range(8)))
    same = load(FileData(path=str(tmp_path / "rows.jsonl"), shuffle=False), tiny_tokenizer(), 0, 0, False)
    assert draw.table.tokens.tolist() == same.train.tokens.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"rows\.py:rows\[1\]: row is an int, expected an object"),
        ({"options": {"level": 9}}, r"failed after row 1: OSError: disk on fire, line 5 of .*rows\.py"),
        ({"options": {"level": 8}}, r"failed after row 1: Silent, line 5 of .*rows\.py"),
        ({"options": {"levl": 9}}, r"options\.levl is no option of .*; did you mean level\?; it has count, level"),
        ({"function": "{}/rows.py:needs"}, r"needs: missing a required argument: 'x'; write data\.options\.NAME=VALUE"),
        ({"function": "{}/rows.py:forgets"}, r"forgets gave None, expected rows; return or yield them, line 14"),
        ({"function": "{}/rows.py:row"}, r"there is no function row in .*; did you mean rows\?"),
        ({"function": "sums"}, r"function=sums doesn't exist; write package\.module\.function or file\.py:function"),
    ],
)  # fmt: skip
def test_rows_that_can_not_be_made(options: dict[str, object], message: str, tmp_path: Path) -> None:
    given = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises((ConfigError, DataError), match=message):
        load(rows_of(tmp_path, **given), tiny_tokenizer(), 0, 0, False)
