"""Options as text: files of setter calls, and JSON.

Nothing here runs code: a line is parsed, and only calls of the setters with plain values, enumeration members, torch
types and the configuration classes of poptorch are carried out.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import EnumMeta
from pathlib import Path
from typing import Any, cast

import torch

from poptorch import enums
from poptorch.errors import ConfigFileError, OptionError, nearest
from poptorch.options import locations, strategies

_CONSTRUCTORS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        locations.TensorLocationSettings,
        strategies.Stage,
        strategies.Phase,
        strategies.PipelinedExecution,
        strategies.ShardedExecution,
        strategies.SerialPhasedExecution,
        strategies.ParallelPhasedExecution,
    )
}
_ENUMS: dict[str, Any] = {
    name: kind for name, kind in vars(enums).items() if isinstance(kind, EnumMeta) and kind.__module__ == enums.__name__
}
_CARRIED_OUT: ContextVar[tuple[Path, ...]] = ContextVar("poptorch_option_files", default=())  # outermost first
_PRIVATE_BUT_COMMON = ("_Popart", "_popart")


def apply_file(options: Any, path: str | os.PathLike[str]) -> None:
    """Carry out the lines of a file; nothing is changed if one of them is not well formed."""
    file = _existing(path)
    stripped = (line.strip() for line in _read(file).splitlines())
    kept = [line for line in stripped if line and not line.startswith("#")]
    parsed = [_parse(line, number, file.name) for number, line in enumerate(kept, start=1)]
    with _being_carried_out(file):
        for expression in parsed:
            _Evaluator(options).value(expression)


def _existing(path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise OptionError(f"loadFromFile takes the name of a file, not {path!r}")
    return Path(cast("str | os.PathLike[str]", path))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{file.name} is not text in UTF-8: {error}") from error


@contextmanager
def _being_carried_out(file: Path) -> Generator[None, None, None]:
    """A file may load others, but not itself, on whatever way."""
    outer, now = _CARRIED_OUT.get(), file.resolve()
    if now in outer:
        loop = " → ".join(path.name for path in (*outer[outer.index(now) :], now))
        raise ConfigFileError(f"{file.name} loads itself, which would never end: {loop}")
    token = _CARRIED_OUT.set((*outer, now))
    try:
        yield
    finally:
        _CARRIED_OUT.reset(token)


def _parse(line: str, number: int, file: str) -> ast.expr:
    """One line as an expression that `_Evaluator` knows in full."""
    source = f"options.{line}"
    try:
        expression = ast.parse(source, mode="eval").body
        _Evaluator.check(expression)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise ConfigFileError(f"SyntaxError at line {number} of {file}: {error.args[0]}\n> {source}") from error
    return expression


class _Evaluator:
    """Gives the value of the few kinds of expression that a file of options may contain."""

    def __init__(self, options: Any) -> None:
        self._options = options

    @staticmethod
    def check(expression: ast.expr) -> None:
        """Raise `SyntaxError` if there is anything that a file of options cannot contain."""
        if not isinstance(expression, ast.Call):
            raise SyntaxError("a line calls a method of the options")
        allowed = (ast.Constant, ast.Name, ast.Attribute, ast.Call, ast.List, ast.Tuple, ast.Set, ast.Dict)
        ignored = (ast.expr_context, ast.keyword, ast.UnaryOp, ast.USub)
        for node in ast.walk(expression):
            if not isinstance(node, (*allowed, *ignored)):
                raise SyntaxError(f"{type(node).__name__} is not allowed in a file of options")
            if isinstance(node, ast.Attribute) and not _is_open(node.attr):
                raise SyntaxError(f"{node.attr} is private")
            if (isinstance(node, ast.keyword) and node.arg is None) or (
                isinstance(node, ast.Dict) and None in node.keys
            ):
                raise SyntaxError("** is not allowed in a file of options")
            if isinstance(node, ast.UnaryOp) and not _is_number(node.operand):
                raise SyntaxError("only a number can follow a minus sign in a file of options")
            if isinstance(node, ast.Name) and node.id not in ("options", "poptorch", "torch"):
                raise SyntaxError(f"unknown name {node.id}: only options, poptorch and torch are known")

    def value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp):
            return -self.value(node.operand)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
            return kind(self.value(item) for item in node.elts)
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            return {self.value(key): self.value(value) for key, value in pairs if key is not None}
        if isinstance(node, ast.Call):
            named = {keyword.arg: self.value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
            return self.value(node.func)(*(self.value(argument) for argument in node.args), **named)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        assert isinstance(node, ast.Name)
        if node.id != "options":
            raise AttributeError(f"a file of options can use names inside {node.id}, not the module itself")
        return self._options

    def _attribute(self, node: ast.Attribute) -> Any:
        if isinstance(node.value, ast.Name) and node.value.id == "poptorch":
            known = {**_ENUMS, **_CONSTRUCTORS}
            if node.attr not in known:
                raise AttributeError(f"a file of options cannot use poptorch.{node.attr}{nearest(node.attr, known)}")
            return known[node.attr]
        if isinstance(node.value, ast.Name) and node.value.id == "torch":
            dtype = getattr(torch, node.attr, None)
            if not isinstance(dtype, torch.dtype):
                raise AttributeError(f"torch.{node.attr} is not a type of tensor elements")
            return dtype
        return getattr(self.value(node.value), node.attr)


def apply_json(options: Any, text: str, origin: str = "") -> None:
    """Call the setters that a JSON object names; a list holds several arguments. `origin` says where it came from."""
    if not isinstance(text, (str, bytes, bytearray)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise OptionError(f"from_json takes a text, not {text!r} ({type(text).__name__})")
    try:
        calls: object = json.loads(text)
    except json.JSONDecodeError as error:
        if not origin:
            raise
        raise json.JSONDecodeError(f"{origin} is not JSON: {error.msg}", error.doc, error.pos) from error
    if not isinstance(calls, dict):
        raise json.JSONDecodeError(f"{origin or 'the text'} is not a JSON object", text, 0)
    for path, argument in cast("dict[str, object]", calls).items():
        setter = options
        for name in path.split("."):
            if not _is_open(name):
                raise AttributeError(f"{path}: {name!r} is private")
            setter = getattr(setter, name)
        if not inspect.ismethod(setter):
            raise AttributeError(f"{path} is not a method that sets an option")
        arguments = cast("list[object]", argument) if isinstance(argument, list) else [argument]
        setter(*(_from_json(item) for item in arguments))


def _is_open(name: str) -> bool:
    """Whether text may reach an attribute: it is not private, or one of those that programs use all the same."""
    return not name.startswith("_") or name in _PRIVATE_BUT_COMMON


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _from_json(value: Any) -> Any:
    """The member of an enumeration if a string names one, else the value as it is."""
    if isinstance(value, str):
        kind, _, member = value.partition(".")
        if kind in _ENUMS and member in _ENUMS[kind].__members__:
            return _ENUMS[kind][member]
    return value
