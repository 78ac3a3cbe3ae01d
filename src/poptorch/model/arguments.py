"""Bind the arguments of a call to `forward`, check them against the compiled call, and take out the tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, cast

import torch

from poptorch._logging import logger
from poptorch.errors import ArgumentBindingError, ArgumentError, Error, explain
from poptorch.executable import Arguments
from poptorch.ir import tensor_type
from poptorch.structure import (
    Constant,
    Custom,
    Leaf,
    Node,
    Structure,
    child_name,
    constants,
    flatten,
    flatten_like,
    hidden_tensors,
    leaf_names,
)

_DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
_MANY, _ANY_KEY = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


class ArgumentBinder:
    """Knows the signature of a `forward` and brings arguments into its order."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.signature = inspect.signature(forward)
        self._parameters = list(self.signature.parameters.values())
        self._positional = [p for p in self._parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._takes_many = any(p.kind is _MANY for p in self._parameters)
        self._plain = len(self._positional) == len(self._parameters)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments first, with defaults filled in, then the named ones."""
        if self._plain and not kwargs and len(args) == len(self._positional):
            return args, kwargs
        self._check(args, kwargs)
        named = dict(kwargs)
        bound = list(args)
        for parameter in self._positional[len(args) :]:
            if parameter.name in named:
                bound.append(named.pop(parameter.name))
            elif parameter.default is parameter.empty:
                raise Error(f"Mandatory parameter {parameter.name} missing: forward{self} takes it without a default.")
            else:
                bound.append(parameter.default)
        for parameter in self._parameters:
            if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in named:
                if parameter.default is parameter.empty:
                    raise Error(f"Mandatory parameter {parameter.name} missing: forward{self} takes it by keyword.")
                named[parameter.name] = parameter.default
        return tuple(bound), named

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > len(self._positional) and not self._takes_many:
            raise ArgumentBindingError(
                f"{len(args)} positional arguments given, but forward{self} takes {len(self._positional)}."
            )
        twice = [p.name for p in self._positional[: len(args)] if p.name in kwargs and p.kind is not p.POSITIONAL_ONLY]
        if twice:
            raise ArgumentBindingError(
                f"argument {', '.join(twice)} is given by position and by keyword to forward{self}."
            )
        known = {p.name for p in self._parameters}
        unknown = [name for name in kwargs if name not in known]
        if unknown and not any(p.kind is _ANY_KEY for p in self._parameters):
            raise ArgumentBindingError(f"forward{self} has no argument {', '.join(unknown)}.")

    def names(self, count: int) -> list[str]:
        """A name for each of `count` positional arguments."""
        own = [parameter.name for parameter in self._positional]
        many = next((p.name for p in self._parameters if p.kind is _MANY), "args")
        return [own[i] if i < len(own) else f"*{many}[{i - len(own)}]" for i in range(count)]

    def __str__(self) -> str:
        return f"({', '.join(str(parameter) for parameter in self._parameters)})"


class CallSpec(Arguments):
    """The call that a model was compiled for; later calls must look the same."""

    @classmethod
    def of(cls, binder: ArgumentBinder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallSpec:
        structure, tensors = flatten((args, kwargs))
        structure = cast("Node", structure)
        names = binder.names(len(args))
        args_structure, kwargs_structure = cast("Node", structure.children[0]), cast("Node", structure.children[1])
        tensor_names = [
            n for name, child in zip(names, args_structure.children, strict=True) for n in leaf_names(child, name)
        ]
        tensor_names += [
            n
            for key, child in zip(kwargs_structure.keys, kwargs_structure.children, strict=True)
            for n in leaf_names(child, key)
        ]
        for name, tensor in zip(tensor_names, tensors, strict=True):
            _check_supported(name, tensor)
        for value in constants(structure):
            _check_no_tensors(value)
        return cls(
            tuple(names),
            args_structure,
            kwargs_structure,
            tuple(tensor_names),
            tuple(tensor.shape for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
        )

    @classmethod
    def like(cls, arguments: Arguments) -> CallSpec:
        """The call that an executable describes."""
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(arguments)})

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a later call, in compiled order; raises `ArgumentError` if the call differs."""
        if not kwargs and len(args) == len(self.shapes) == len(self.names) and self._is_flat_match(args):
            return list(args)
        try:
            self._compare(args, kwargs)
        except _Mismatch as mismatch:
            raise self._error(str(mismatch), args, kwargs) from None
        return flatten_like(self.args, args) + flatten_like(self.kwargs, kwargs)

    def _error(self, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentError:
        return ArgumentError(
            explain(
                what,
                compiled=str(self),
                this_call=_signature([*args, *kwargs.values()], [*self.names[: len(args)], *kwargs]),
                reason="the model is compiled for the arguments of its first call",
                fix="create a new wrapper, or call destroy() and call again to compile for these arguments; "
                "with Options.allowShapeChanges(True) a model compiles for each new kind of call",
            )
        )

    def _is_flat_match(self, args: tuple[Any, ...]) -> bool:
        for value, shape, dtype in zip(args, self.shapes, self.dtypes, strict=True):
            if type(value) is not torch.Tensor or value.is_nested or value.shape != shape or value.dtype != dtype:
                return False
            if not value.is_cpu or value.layout is not torch.strided:  # native code reads memory, and asks nobody
                return False
        return True

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        expected = cast("Node", self.args)
        if len(args) != len(expected.children):
            _mismatch(
                f"Number of positional arguments mismatch: "
                f"expected {len(expected.children)} arguments but got {len(args)}"
            )
        for name, structure, value in zip(self.names, expected.children, args, strict=True):
            self._compare_one(name, structure, value)
        self._compare_keys("", cast("Node", self.kwargs), kwargs)

    def _compare_one(self, name: str, structure: Structure, value: Any) -> None:
        if isinstance(structure, Leaf):
            self._compare_tensor(name, structure, value)
        elif isinstance(structure, Constant):
            _compare_constant(name, structure.value, value)
        elif isinstance(structure, Custom):
            if type(value) is not type(structure.example):
                _type_mismatch(name, type(structure.example), value)
            tensors = flatten_like(structure, value)
            if len(tensors) != len(structure.leaves):
                _mismatch(
                    f"Length mismatch for {name}: expected {len(structure.leaves)} tensors but got {len(tensors)}"
                )
            for index, (leaf, tensor) in enumerate(zip(structure.leaves, tensors, strict=True)):
                self._compare_one(f"{name}.{index}", leaf, tensor)
        elif type(value) is not structure.kind:
            _type_mismatch(name, structure.kind, value)
        elif structure.is_mapping:
            self._compare_keys(name, structure, value)
        else:
            items = structure.items(value)
            if tuple(items) != structure.keys:
                _mismatch(f"Length mismatch for {name}: expected {len(structure.children)} but got {len(items)}")
            for key, child in zip(structure.keys, structure.children, strict=True):
                self._compare_one(child_name(structure, name, key), child, items[key])

    def _compare_keys(self, name: str, structure: Node, value: dict[Any, Any]) -> None:
        missing = sorted(str(key) for key in structure.keys if key not in value)
        unexpected = sorted(str(key) for key in value if key not in structure.keys)
        if missing:
            _mismatch(f"Missing arguments: {', '.join(missing)}.")
        if unexpected:
            _mismatch(f"Unexpected arguments: {', '.join(unexpected)}.")
        for key, child in zip(structure.keys, structure.children, strict=True):
            self._compare_one(f"{name}[{key}]" if name else str(key), child, value[key])

    def _compare_tensor(self, name: str, leaf: Leaf, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            _type_mismatch(name, torch.Tensor, value)
        _check_memory(name, value)
        shape, dtype = self.shapes[leaf.index], self.dtypes[leaf.index]
        if value.dtype != dtype:
            _mismatch(f"Type mismatch for {name}: expected {dtype} but got {value.dtype}")
        if value.shape != shape:
            _mismatch(f"Shape mismatch for {name}: expected {shape} but got {value.shape}")


def prepare(tensors: Sequence[torch.Tensor], warned: set[str]) -> list[torch.Tensor]:
    """The tensors as the program takes them: contiguous, without history."""
    prepared: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.requires_grad:
            _warn_once(
                warned, "an input requires a gradient: it is detached, because a compiled step trains parameters only."
            )
            tensor = tensor.detach()
        if not tensor.is_contiguous():
            _warn_once(warned, "an input is not contiguous: a contiguous copy of it is used in every call.")
            tensor = tensor.contiguous()
        elif tensor.is_neg():  # memory of the other sign, as the imaginary part of a conjugate has
            tensor = tensor.resolve_neg()
        prepared.append(tensor)
    return prepared


def _warn_once(warned: set[str], text: str) -> None:
    if text not in warned:
        warned.add(text)
        logger.warning("%s", text)


def _check_supported(name: str, tensor: torch.Tensor) -> None:
    _check_memory(name, tensor)
    if tensor.numel() == 0:
        raise Error(f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)}) for argument {name}.")
    if tensor.dtype not in _DTYPES:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
        raise Error(
            explain(
                f"argument {name} is a tensor of {tensor.dtype}, which a device does not have.",
                fix=f"convert it to one of {names}",
            )
        )


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    """A program takes numbers that lie side by side in the memory of the host."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise Error(
            explain(
                f"argument {name} is a {'nested' if tensor.is_nested else tensor.layout} tensor, "
                "but a compiled program works on dense ones.",
                fix=f"pass {name}.to_padded_tensor(value)" if tensor.is_nested else f"pass {name}.to_dense()",
            )
        )
    if not tensor.is_cpu:
        raise Error(
            explain(
                f"argument {name} is on the device {tensor.device}, but a compiled program takes tensors of the host.",
                fix="pass a tensor with numbers" if tensor.is_meta else f"pass {name}.cpu()",
            )
        )


def _check_no_tensors(value: Any) -> None:
    if any(True for _ in hidden_tensors(value)):
        kind = type(value).__name__
        raise Error(
            explain(
                f"an argument is a {kind} that holds tensors, and this type is not known: they would be constants.",
                fix=f"pass its tensors themselves, or teach poptorch the type: "
                f"poptorch.registerCustomArgParser({kind}, ...)",
            )
        )


def _compare_constant(name: str, expected: Any, value: Any) -> None:
    if type(value) is not type(expected):
        _type_mismatch(name, type(expected), value)
    if value is not expected and not _is_equal(value, expected):
        _mismatch(f"Value mismatch for {name}: expected {expected!r} but got {value!r}")


def _is_equal(value: Any, expected: Any) -> bool:
    if getattr(value, "shape", None) != getattr(expected, "shape", None):
        return False
    try:
        same = value == expected
        return bool(same.all()) if hasattr(same, "all") else bool(same)  # NumPy arrays compare element by element
    except Exception:  # of the user's own comparison: what cannot be compared is not the same
        return False


def _type_mismatch(name: str, expected: type, value: Any) -> None:
    _mismatch(f"Type mismatch for {name}: expected {expected.__name__} but got {type(value).__name__}")


def _signature(values: list[Any], names: list[str]) -> str:
    """The arguments of a call as `CallSpec` prints those that were compiled."""
    found: list[str] = []
    for index, value in enumerate(values):
        structure, tensors = flatten(value)
        inner = leaf_names(structure, names[index] if index < len(names) else f"*args[{index}]")
        found += [f"{name}: {tensor_type(t.dtype, tuple(t.shape))}" for name, t in zip(inner, tensors, strict=True)]
    return f"({', '.join(found)})"


class _Mismatch(Exception):
    """A call is not like the compiled one; the text says where they differ."""


def _mismatch(what: str) -> None:
    raise _Mismatch(what)
