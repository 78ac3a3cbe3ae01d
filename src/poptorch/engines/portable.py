"""Kernels of native code as plain data and the bytes of their code, and back, without the code generator.

Only for whoever made them: data and code fit together, and nothing here checks that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poptorch.engines.calls import Cut, Part, Source, View
from poptorch.engines.code import NativeCode, load_codes
from poptorch.engines.engine import Kernel
from poptorch.engines.host import Host, run_host_passes, unobserved
from poptorch.engines.host_state import HostState
from poptorch.engines.memory import keep_freed_memory
from poptorch.engines.native import NativeKernel
from poptorch.engines.passes.draw_ahead import calls_python, draw_ahead
from poptorch.engines.passes.nops import remove_nops
from poptorch.engines.passes.serialized import write_out_products
from poptorch.executable import Program
from poptorch.ir import StepGraph
from poptorch.ir.serial import (
    FormatError,
    argument_data,
    argument_from,
    graph_data,
    graph_from,
    input_data,
    input_from,
    op_named,
    origin_data,
    target_name,
)

Data = Any  # what JSON can hold


@dataclass(frozen=True)
class Portable:
    """Kernels by the names of their programs: what is known about each, and the code that they name by number."""

    kernels: Mapping[str, Data]
    codes: tuple[bytes, ...]


def stays_here(program: Program) -> bool:
    """Whether native code for a program could not be kept, because it would call Python on its way."""
    graph = run_host_passes(program.graph, Host(program.fixed), _DECIDING, unobserved)
    return calls_python(graph)


_DECIDING = (remove_nops, write_out_products, draw_ahead)  # the host passes that replace what would call Python


def make_portable(kernels: Mapping[str, Kernel]) -> Portable | None:
    """Kernels in a form that can be kept; None if one of them is not native, or calls Python on its way."""
    codes: list[bytes] = []
    found: dict[str, Data] = {}
    try:
        for name, kernel in kernels.items():
            if not isinstance(kernel, NativeKernel):
                return None
            found[name] = _kernel_data(kernel, codes)
    except FormatError:
        return None
    return Portable(found, tuple(codes))


def _kernel_data(kernel: NativeKernel, codes: list[bytes]) -> Data:
    def place(code: NativeCode) -> tuple[int, str]:
        """Where code is: in which library, and under which name."""
        content = code.content
        if content is None:
            raise FormatError("there is more to this code than its bytes")
        if not any(content is known for known in codes):
            codes.append(content)
        return next(number for number, known in enumerate(codes) if content is known), code.entry

    return {
        "given": kernel.state.given,
        "taken": kernel.state.taken,
        "prepare": _graph_data(kernel.state.prepare),
        "strides": {name: list(stride) for name, stride in kernel.strides.items()},
        "drawing": _graph_data(kernel.drawing),
        "parts": [[part.graph, part.operands, part.first, part.results, part.dropped] for part in kernel.cut.parts],
        "places": kernel.cut.returned,
        "views": [_source_data(source) for source in kernel.cut.views],
        "kept": list(map(input_data, kernel.cut.kept)),
        "codes": {name: place(code) for name, code in kernel.codes.items()},
        "returned": kernel.returned,
        "written": kernel.written,
    }


def _graph_data(graph: StepGraph | None) -> Data:
    if graph is None:
        return None
    if graph.constants:
        raise FormatError("a graph with constants")
    return [graph_data(graph), origin_data(graph)]


def _source_data(source: Source) -> Data:
    views = [[target_name(view.op), argument_data(view.args, {})] for view in source.views]
    return [source.position, views]


def kernels_from(kept: Portable) -> dict[str, Kernel]:
    """The kernels again. This loads their code, and so runs it."""
    keep_freed_memory()
    entries: list[dict[str, None]] = [{} for _ in kept.codes]
    for data in kept.kernels.values():
        for number, entry in data["codes"].values():
            entries[number][entry] = None
    codes = [load_codes(content, names) for content, names in zip(kept.codes, entries, strict=True)]
    return {name: _kernel(data, codes) for name, data in kept.kernels.items()}


def _kernel(data: Data, codes: Sequence[Mapping[str, NativeCode]]) -> NativeKernel:
    parts = [
        Part(name, tuple(operands), first, results, tuple(dropped))
        for name, operands, first, results, dropped in data["parts"]
    ]
    return NativeKernel(
        HostState(tuple(data["given"]), tuple(data["taken"]), _graph(data["prepare"])),
        {name: tuple(stride) for name, stride in data["strides"].items()},
        _graph(data["drawing"]),
        Cut(
            tuple(parts),
            tuple(data["places"]),
            tuple(map(_source, data["views"])),
            tuple(map(input_from, data["kept"])),
        ),
        {name: codes[number][entry] for name, (number, entry) in data["codes"].items()},
        data["returned"],
        tuple(data["written"]),
    )


def _graph(data: Data) -> StepGraph | None:
    return None if data is None else graph_from(data[0], data[1], {})


def _source(data: Data) -> Source:
    position, views = data
    return Source(position, tuple(View(op_named(name), tuple(argument_from(args, ()))) for name, args in views))
