"""Rows from a function: of a plugin, or named by its file or module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from rlhf import plugins
from rlhf.config.data import PluginData
from rlhf.data.raw import RawRows, RowSource
from rlhf.errors import ConfigError, DataError, nearest, one_line
from rlhf.user_code import defined_at, imported, line_of, named


def read_plugin(name: str, key: str, spec: PluginData) -> RowSource:
    """The rows that a function returns or yields; it is called anew for each pass over them.

    Args:
        name: a registered one, `package.module.function` or `file.py:function`.
        key: `data.function` or `data.eval_function`.

    Raises:
        ConfigError: there is no such function, or it doesn't take `data.options`.
        DataError: (while reading) it fails.
    """
    function = plugins.find("dataset", name) or imported(name, key, plugins.names("dataset"))
    _check_options(function, f"{key}={name}", spec.options)

    def read() -> RawRows:
        number = 0
        try:
            rows = function(**spec.options)
            for number, row in enumerate(() if rows is None else rows):
                yield f"{name}[{number}]", row
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a user's function may even call sys.exit
            raise DataError(f"{key}={name} failed after row {number}: {named(error)}{line_of(error)}") from error
        if rows is None:
            raise DataError(f"{key}={name} gave None, expected rows; return or yield them{defined_at(function)}")

    return RowSource(f"{key}={name}", read)


def _check_options(function: Callable[..., Any], what: str, options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin written in C
        return
    known = [name for name, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    takes_all = len(known) < len(signature.parameters)
    for option in options:
        if option not in known and not takes_all:
            has = ", ".join(known) or "no options"
            raise ConfigError(f"data.options.{option} is no option of {what}{nearest(option, known)}; it has {has}")
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(f"{what}: {one_line(error)}; write data.options.NAME=VALUE") from error
