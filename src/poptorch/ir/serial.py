"""Graphs as plain data: dictionaries, lists, texts and numbers, which JSON can hold, and back.

What a graph computes and where each op comes from are kept apart, so that a digest can be taken of the first alone.
Values of constants are not part of the data; they are tensors, which have files of their own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import fx

from poptorch.ir.graph import Guard, Note, Phase, StepGraph, annotation, call_graph, note_of
from poptorch.ir.ops import as_op
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
        "inputs": [_input_data(spec) for spec in graph.signature.inputs],
        "ops": [_op_data(node, numbers) for node in graph.ops.nodes if node.op == "call_function"],
        "outputs": [[*_output_data(spec), numbers[node]] for spec, node in graph.outputs],
        "guards": [guard.expected for guard in graph.guards],
        "graphs": {name: graph_data(inner) for name, inner in graph.graphs.items()},
        "takes_any_length": graph.takes_any_length,
    }


def origin_data(graph: StepGraph) -> dict[str, Data]:
    """Where the ops and guards of a graph come from in the user's program."""
    notes = [note_of(node) for node in graph.ops.nodes if node.op == "call_function"]
    return {
        "ops": [[_line_data(note.line), note.path, note.name] if note is not None else None for note in notes],
        "guards": [_line_data(guard.line) for guard in graph.guards],
        "graphs": {name: origin_data(inner) for name, inner in graph.graphs.items()},
    }


def _input_data(spec: InputSpec) -> list[Data]:
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
        _argument_data(node.args, numbers),
        {key: _argument_data(value, numbers) for key, value in node.kwargs.items()},
        _value_data(value_of(node)),
        None if note is None else note.phase.value,
        0 if note is None else note.replica,
    ]


def target_name(target: object) -> str:
    """What an op is called in data: `aten.add.Tensor`."""
    if target is operator.getitem:
        return "getitem"
    if target is call_graph:
        return "call"
    if as_op(target) is not None:
        return str(target)
    raise FormatError(f"{target} is no op that data can name")


def _argument_data(value: object, numbers: Mapping[fx.Node, int]) -> Data:
    if isinstance(value, fx.Node):
        return {"node": numbers[value]}
    if isinstance(value, (list, tuple)):
        return [_argument_data(item, numbers) for item in cast("Sequence[object]", value)]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [_argument_data(value.real, numbers), _argument_data(value.imag, numbers)]}
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


def _line_data(line: SourceLine | None) -> dict[str, Data] | None:
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
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise FormatError(f"these data describe no graph: {type(error).__name__}: {error}") from error


def _graph(data: Mapping[str, Data], origin: Mapping[str, Data], constants: Mapping[str, torch.Tensor]) -> StepGraph:
    graph, nodes = fx.Graph(), list[fx.Node]()
    inputs = tuple(_input(item) for item in data["inputs"])
    for index, spec in enumerate(inputs):
        nodes.append(graph.placeholder(f"in{index}"))
        nodes[-1].meta = {"val": _value(_tensor_data(spec.dtype, spec.shape, spec.stride))}
    for (name, args, kwargs, value, phase, replica), place in zip(data["ops"], origin["ops"], strict=True):
        named = {str(key): _argument(item, nodes) for key, item in kwargs.items()}
        node = graph.call_function(_target(name), tuple(_argument(args, nodes)), named)
        node.meta = {"val": _value(value)}
        if phase is not None:
            line, path, own_name = place
            note = Note(Phase(phase), _line(line), str(path), str(own_name), int(replica))
            node.meta["custom"] = annotation(note)
        nodes.append(node)
    outputs = tuple(_output(item[:-1]) for item in data["outputs"])
    results: list[int] = [item[-1] for item in data["outputs"]]
    graph.output(tuple(nodes[index] for index in results))
    guards = tuple(
        Guard(_line(line), str(expected)) for expected, line in zip(data["guards"], origin["guards"], strict=True)
    )
    used = {spec.name for spec in inputs if spec.role is Role.CONSTANT}
    own = {name: constants[name] for name in used}
    inner = {str(name): _graph(each, origin["graphs"][name], constants) for name, each in data["graphs"].items()}
    any_length = bool(data["takes_any_length"])
    return StepGraph(str(data["name"]), graph, Signature(inputs, outputs), guards, own, inner, any_length)


def _input(data: list[Data]) -> InputSpec:
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


def _target(name: str) -> Callable[..., Any]:
    if name in _NOT_OPS:
        return _NOT_OPS[name]
    parts = name.split(".")
    found: Any = torch.ops
    if len(parts) != 3 or any(part.startswith("__") for part in parts):
        raise FormatError(f"{name!r} is no name of an op")
    for part in parts:
        found = getattr(found, part)
    if as_op(found) is None:
        raise FormatError(f"{name!r} is no op")
    return cast("Callable[..., Any]", found)


_NOT_OPS: dict[str, Callable[..., Any]] = {"getitem": operator.getitem, "call": call_graph}


def _argument(data: Data, nodes: Sequence[fx.Node]) -> Any:
    if isinstance(data, list):
        return [_argument(item, nodes) for item in cast("list[Data]", data)]
    if not isinstance(data, dict):
        return data
    ((kind, value),) = cast("dict[str, Data]", data).items()
    if kind == "node":
        return nodes[int(value)]
    if kind == "complex":
        return complex(*(_argument(part, nodes) for part in value))
    readers: dict[str, Callable[[str], Any]] = {
        "float": float,
        "dtype": _dtype,
        "device": torch.device,
        "layout": lambda name: _member(name, torch.layout),
        "memory_format": lambda name: _member(name, torch.memory_format),
        "op": _target,
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


def _line(data: Mapping[str, Data] | None) -> SourceLine | None:
    return None if data is None else SourceLine(**data)
