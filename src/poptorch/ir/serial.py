"""Graphs as plain data: dictionaries, lists, texts and numbers, which JSON can hold, and back.

What a graph computes and where each op comes from are kept apart, so that a digest can be taken of the first alone.
Values of constants are not part of the data; they are tensors, which have files of their own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, replace
from typing import Any, cast

import torch
from torch import fx

from poptorch.ir.control import call_graph, choose_graph, repeat_graph, repeat_while
from poptorch.ir.graph import Direction, Guard, HintValue, Note, StepGraph, annotation, note_of
from poptorch.ir.ops import Op, as_op
from poptorch.ir.placement import Placement
from poptorch.ir.ranges import Range
from poptorch.ir.signature import InputSpec, OutputRole, OutputSpec, Role, Signature
from poptorch.ir.source import SourceLine
from poptorch.ir.values import fake_mode, value_of

Data = Any  # what JSON can hold


class FormatError(ValueError):
    """Data that is no graph; the text says what is wrong with it."""


# ---- to data


def graph_data(graph: StepGraph) -> dict[str, Data]:
    """What a graph computes."""
    numbers = {node: index for index, node in enumerate(graph.ops.nodes)}
    return {
        "name": graph.name,
        "inputs": [input_data(spec) for spec in graph.signature.inputs],
        "ops": [_op_data(node, numbers) for node in graph.ops.nodes if node.op == "call_function"],
        "outputs": [[*_output_data(spec), numbers[node]] for spec, node in graph.outputs],
        "guards": [[guard.expected, range_data(guard.allowed)] for guard in graph.guards],
        "graphs": {name: graph_data(inner) for name, inner in graph.graphs.items()},
        "takes_any_length": graph.takes_any_length,
    }


def origin_data(graph: StepGraph) -> dict[str, Data]:
    """Where the ops and guards of a graph come from in the user's program."""
    notes = [note_of(node) for node in graph.ops.nodes if node.op == "call_function"]
    return {
        "ops": [None if note is None else _note_data(note) for note in notes],
        "guards": [line_data(guard.line) for guard in graph.guards],
        "graphs": {name: origin_data(inner) for name, inner in graph.graphs.items()},
    }


def _note_data(note: Note) -> list[Data]:
    return [line_data(note.line), note.path, note.name, [[kind, _plain(value)] for kind, value in note.hints]]


def _plain(value: HintValue) -> Data:
    """The value of a hint with lists in place of tuples."""
    return [_plain(item) for item in cast("tuple[HintValue, ...]", value)] if isinstance(value, tuple) else value


def range_data(allowed: Range | None) -> Data:
    """A range of integers."""
    return None if allowed is None else [allowed.low, allowed.high, allowed.op, allowed.what, allowed.ignored]


def input_data(spec: InputSpec) -> list[Data]:
    """What an input is."""
    return [
        spec.name,
        spec.role.value,
        *_tensor_data(spec.dtype, spec.shape, spec.stride),
        spec.owner,
        spec.key,
        spec.group,
    ]


def _output_data(spec: OutputSpec) -> list[Data]:
    accumulated = None if spec.accumulated_as is None else _plain_name(spec.accumulated_as)
    return [spec.name, spec.role.value, spec.batched, accumulated, spec.is_number]


def _op_data(node: fx.Node, numbers: Mapping[fx.Node, int]) -> list[Data]:
    note = note_of(node)
    return [
        target_name(node.target),
        argument_data(node.args, numbers),
        {key: argument_data(value, numbers) for key, value in node.kwargs.items()},
        _value_data(value_of(node)),
        None if note is None else note.direction.value,
        None if note is None or note.placement is None else list(astuple(note.placement)),
        0 if note is None else note.replica,
    ]


def target_name(target: object) -> str:
    """What an op is called in data: `aten.add.Tensor`."""
    if as_op(target) is not None:
        return str(target)
    for name, function in _NOT_OPS.items():
        if target is function:
            return name
    raise FormatError(f"{target} is no op that data can name")


def argument_data(value: object, numbers: Mapping[fx.Node, int]) -> Data:
    """An argument of an op; nodes by their numbers."""
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [argument_data(item, numbers) for item in cast("Sequence[object]", value)]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [argument_data(value.real, numbers), argument_data(value.imag, numbers)]}
    for kind, name in _NAMED.items():
        if isinstance(value, kind):
            return {name: _plain_name(value)}
    if as_op(value) is not None:
        return {"op": target_name(value)}
    raise FormatError(f"{value!r} of type {type(value).__name__} is an argument that data cannot hold")


_NAMED: dict[type, str] = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}


def _plain_name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _value_data(value: object) -> Data:
    """The types of what a node computes; None for what is no tensor."""
    if isinstance(value, torch.Tensor):
        return _tensor_data(value.dtype, tuple(value.shape), tuple(value.stride()))
    if isinstance(value, (list, tuple)):
        return {"items": [_value_data(item) for item in cast("Sequence[object]", value)]}
    return None


def _tensor_data(dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> list[Data]:
    return [_plain_name(dtype), list(shape), list(stride)]


def line_data(line: SourceLine | None) -> dict[str, Data] | None:
    """A place in the user's program."""
    return None if line is None else asdict(line)


# ---- from data


def graph_from(
    data: Mapping[str, Data], origin: Mapping[str, Data], constants: Mapping[str, torch.Tensor]
) -> StepGraph:
    """The graph that data describe; `FormatError` if they describe none. Ops must be known to torch by their names."""
    try:
        return _graph(data, origin, constants)
    except FormatError:
        raise
    except Exception as error:  # whatever nonsense leads to, down to the fake tensors of torch
        raise FormatError(f"these data describe no graph: {type(error).__name__}: {error}") from error


def _graph(data: Mapping[str, Data], origin: Mapping[str, Data], constants: Mapping[str, torch.Tensor]) -> StepGraph:
    graph, nodes = fx.Graph(), list[fx.Node]()
    inputs = tuple(input_from(item) for item in data["inputs"])
    for index, spec in enumerate(inputs):
        nodes.append(graph.placeholder(f"in{index}"))
        nodes[-1].meta = {"val": _value(_tensor_data(spec.dtype, spec.shape, spec.stride))}
    for (name, args, kwargs, value, direction, placed, replica), place in zip(data["ops"], origin["ops"], strict=True):
        named = {_keyword(key): argument_from(item, nodes) for key, item in kwargs.items()}
        node = graph.call_function(op_named(name), tuple(argument_from(args, nodes)), named)
        node.meta = {"val": _value(value)}
        if direction is not None:
            placement = None if placed is None else _placement(*placed)
            note = replace(_note(Direction(direction), *place), placement=placement, replica=int(replica))
            node.meta["custom"] = annotation(note)
        nodes.append(node)
    outputs = tuple(_output(item[:-1]) for item in data["outputs"])
    results: list[int] = [item[-1] for item in data["outputs"]]
    graph.output(tuple(nodes[index] for index in results))
    guards = tuple(
        Guard(line_from(line), str(expected), range_from(allowed))
        for (expected, allowed), line in zip(data["guards"], origin["guards"], strict=True)
    )
    used = {spec.name for spec in inputs if spec.role is Role.CONSTANT}
    own = {name: constants[name] for name in used}
    inner = {str(name): _graph(each, origin["graphs"][name], constants) for name, each in data["graphs"].items()}
    any_length = bool(data["takes_any_length"])
    return StepGraph(str(data["name"]), graph, Signature(inputs, outputs), guards, own, inner, any_length)


def _placement(block: str, stage: int, phase: int, ipu: int, section: int) -> Placement:
    return Placement(str(block), int(stage), int(phase), int(ipu), int(section))


def _note(direction: Direction, line: Data, path: str, name: str, hints: Sequence[tuple[str, Data]]) -> Note:
    known = tuple((_line(kind), _frozen(value)) for kind, value in hints)
    return Note(direction, line_from(line), _line(path), _line(name), known)


def _frozen(data: Data) -> HintValue:
    return tuple(_frozen(item) for item in cast("list[Data]", data)) if isinstance(data, list) else data


def range_from(data: Data) -> Range | None:
    """The range of integers that data describe, or None."""
    if data is None:
        return None
    low, high, op, what, ignored = data
    return Range(int(low), int(high), str(op), str(what), None if ignored is None else int(ignored))


def input_from(data: list[Data]) -> InputSpec:
    """The input that data describe."""
    name, role, dtype, shape, stride, owner, key, group = data
    return InputSpec(name, Role(role), tuple(shape), _dtype(dtype), tuple(stride), owner, key, group)


def _output(data: list[Data]) -> OutputSpec:
    name, role, batched, accumulated, is_number = data
    added_as = None if accumulated is None else _dtype(accumulated)
    return OutputSpec(name, OutputRole(role), bool(batched), added_as, bool(is_number))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FormatError(f"{name!r} is no type of tensors")
    return found


def op_named(name: str) -> Callable[..., Any]:
    """What a node calls by this name; `FormatError` if that is no op."""
    if name in _NOT_OPS:
        return _NOT_OPS[name]
    parts = name.split(".")
    found: Any = torch.ops
    if len(parts) != 3 or any(part.startswith("__") for part in parts):
        raise FormatError(f"{name!r} is no name of an op")
    for part in parts:
        found = getattr(found, part)
    op = as_op(found)
    if op is None:
        raise FormatError(f"{name!r} is no op")
    if not _is_computation(op):
        raise FormatError(f"{name!r} is no op that data may call")
    return cast("Callable[..., Any]", found)


_OF_PYTORCH = frozenset({"aten", "prims", "prim", "mkldnn", "mkl", "inductor", "quantized", "poptorch"})
_REFUSED = frozenset({"aten::from_file", "poptorch::draw", "poptorch::draw_two"})  # files, or ops named by text


def _is_computation(op: Op[..., Any]) -> bool:
    """Whether an op computes with tensors, and does nothing else to the machine: data may come from anywhere.

    Of libraries those ops count that the program itself has defined in Python; others may write files.
    """
    name: str = op._schema.name  # pyright: ignore[reportPrivateUsage]
    if op.namespace in _OF_PYTORCH:
        return name not in _REFUSED
    return name in torch._library.custom_ops.OPDEFS  # pyright: ignore


_NOT_OPS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "call": call_graph,
    "repeat": repeat_graph,
    "if": choose_graph,
    "while": repeat_while,
}


def _keyword(data: Data) -> str:
    """The name of an argument: it becomes a part of Python code."""
    if not isinstance(data, str) or not data.isidentifier():
        raise FormatError(f"{data!r} is no name of an argument")
    return data


_DANGEROUS = frozenset("\"'\\")


def _text(data: Data) -> str:
    """An argument that is text: it may become a part of C++ code, between quotes."""
    if not isinstance(data, str) or not data.isprintable() or _DANGEROUS.intersection(data):
        raise FormatError(f"{data!r} is no text that an op takes")
    return data


def argument_from(data: Data, nodes: Sequence[fx.Node]) -> Any:
    """The argument that data describe."""
    if isinstance(data, list):
        return [argument_from(item, nodes) for item in cast("list[Data]", data)]
    if isinstance(data, str):
        return _text(data)
    if not isinstance(data, dict):
        return data
    ((kind, value),) = cast("dict[str, Data]", data).items()
    if kind == "node":
        return nodes[int(value)]
    if kind == "complex":
        return complex(*(argument_from(part, nodes) for part in value))
    readers: dict[str, Callable[[str], Any]] = {
        "float": float,
        "dtype": _dtype,
        "device": torch.device,
        "layout": lambda name: _member(name, torch.layout),
        "memory_format": lambda name: _member(name, torch.memory_format),
        "op": op_named,
    }
    return readers[kind](value)


def _member(name: str, kind: type) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise FormatError(f"{name!r} is no {kind.__name__}")
    return found


def _value(data: Data) -> Any:
    if data is None:
        return None
    if isinstance(data, dict):
        return tuple(map(_value, cast("dict[str, Data]", data)["items"]))
    dtype, shape, stride = data
    with fake_mode():
        return torch.empty_strided(tuple(shape), tuple(stride), dtype=_dtype(dtype))


def line_from(data: Mapping[str, Data] | None) -> SourceLine | None:
    """The place in the user's program that data describe, or None."""
    if data is None:
        return None
    return SourceLine(_line(data["file"]), int(data["line"]), _line(data["function"]), _line(data["text"]))


def _line(data: Data) -> str:
    """Text on one line: it may become a part of a comment."""
    return " ".join(str(data).splitlines())
