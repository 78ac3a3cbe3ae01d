"""The inductor engine: compiles a program to native code with TorchInductor.

The functional graph is decomposed with Inductor's table, ends in one in-place write per new value, and goes straight
to Inductor's code generator; nothing is traced a second time by dynamo or autograd.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._C import _aoti  # pyright: ignore[reportAttributeAccessIssue]
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from poptorch._logging import logger
from poptorch.errors import EngineError, explain
from poptorch.executable import Program, in_place
from poptorch.executable.roll import Rolled, roll
from poptorch.runtime.attention import join_attentions
from poptorch.runtime.bias import add_biases_last
from poptorch.runtime.cross_entropy import join_cross_entropies
from poptorch.runtime.decompositions import decompositions, runs_in_pytorch
from poptorch.runtime.engine import Call
from poptorch.runtime.layout import channels_last_strides
from poptorch.runtime.memory import keep_freed_memory
from poptorch.runtime.packed_weights import Packing, expect_packed

_CONFIG: dict[str, Any] = {
    "size_asserts": False,
    "nan_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "aot_inductor.enable_line_tables": False,  # nobody debugs this code, and without them it compiles faster
    "aot_inductor.enable_frame_pointer": False,
    "cpp.min_chunk_size": 4096,  # waking a second thread for less costs more than it gains
}


@dataclass(frozen=True)
class InductorEngine:
    name: str = "inductor"

    def compile(self, program: Program, fixed: Collection[str] = ()) -> InductorKernel | RolledKernel:
        keep_freed_memory()
        strides = channels_last_strides(program, fixed)
        rolled = roll(program, strides)
        if rolled is None:
            return InductorKernel(_compile(program, strides), strides)
        patterns = [_compile(pattern.program, {}, length=pattern.length) for pattern in rolled.patterns]
        logger.debug("%s: %d pieces of %d patterns", program.name, len(rolled.pieces), len(patterns))
        shared = None if rolled.shared is None else _compile(rolled.shared, strides)
        return RolledKernel(rolled, shared, patterns, strides)


@dataclass(frozen=True)
class InductorKernel:
    """Native code that takes one list of tensors: the state, then the user's."""

    code: NativeCode
    strides: Mapping[str, tuple[int, ...]]

    def bind(self, state: list[torch.Tensor]) -> Call:
        bound = [tensor.detach() for tensor in state]
        for packing in self.code.packings:
            packing.apply(bound)
        entry = self.code.entry

        def call(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return entry(bound + tensors)

        return call


@dataclass(frozen=True)
class RolledKernel:
    """The update of many parameters: code for what they share, and code for each pattern, called once per piece."""

    rolled: Rolled
    shared: NativeCode | None
    patterns: list[NativeCode]
    strides: Mapping[str, tuple[int, ...]]

    def bind(self, state: list[torch.Tensor]) -> Call:
        codes = [] if self.shared is None else [self.shared]
        codes += [self.patterns[piece.pattern] for piece in self.rolled.pieces]
        arguments = self.rolled.arguments([tensor.detach() for tensor in state])
        natives, entries = [code.native for code in codes], [code.entry for code in codes]
        first, others = arguments[0], arguments[1:]  # the shared part, which takes and returns the user's tensors

        def call(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            # No line of Python runs between the pieces, so an interrupt finds all of them done or none.
            results = list(map(_CALL, natives, map(_to_handles, [first + tensors, *others])))
            return _to_tensors(results[0])

        def call_through_wrappers(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            results = [entry(own) for entry, own in zip(entries, [first + tensors, *others], strict=True)]
            return results[0]

        return call_through_wrappers if None in natives else call


_CALL = type(len).__call__
_to_handles = _aoti.unsafe_alloc_void_ptrs_from_tensors
_to_tensors = _aoti.alloc_tensors_by_stealing_from_void_ptrs


@dataclass(frozen=True)
class NativeCode:
    """A compiled function, and what Inductor's Python wrapper around it calls in the end, if that is known."""

    function: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
    native: Callable[[Any], Any] | None
    packings: Sequence[Packing] = ()  # how some of its inputs are to be packed

    @classmethod
    def of(cls, function: Any, packings: Sequence[Packing] = ()) -> NativeCode:
        native = inspect.getclosurevars(function).nonlocals.get("f") if inspect.isfunction(function) else None
        if not inspect.isbuiltin(native) or "constants_tensor" in function.__code__.co_varnames:
            native = None  # not the wrapper we know, or one that adds tensors of its own
        return cls(function, native, packings)

    @property
    def entry(self) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
        """The function without the wrapper, which looks at every argument in Python."""
        native = self.native
        return self.function if native is None else lambda tensors: _to_tensors(native(_to_handles(tensors)))


def _compile(program: Program, strides: Mapping[str, tuple[int, ...]], *, length: int | None = None) -> NativeCode:
    """Generate and build code; if `length` is given, for vectors of any length, and for that one in particular."""
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake:
        inputs = [
            torch.empty_strided(spec.shape, strides.get(spec.name, spec.stride), dtype=spec.dtype)
            for spec in program.signature.inputs
        ]
    if length is not None:
        inputs = [_of_any_length(tensor, fake) if tensor.dim() else tensor for tensor in inputs]
    try:
        with _compiling(fake, program, force_channels_last=bool(strides)):
            decomposed = joint_graph_passes(_decompose(program.functional_ops(), inputs, fake))
            packings = expect_packed(decomposed, program.fixed_positions)
            ops = in_place(decomposed, program.written_positions)
            compiled = compile_fx_inner(ops, inputs, static_input_idxs=range(len(program.state)), cpp_wrapper=True)
    except Exception as error:
        raise EngineError.from_backend(
            explain(
                f"the inductor engine could not compile the {program.name} program: {_first_line(error)}",
                fix="run on the eager engine: Options.engine('eager') or POPTORCH_ENGINE=eager",
            )
        ) from error
    function = getattr(compiled, "current_callable", compiled)  # a graph without ops is handed back as it is
    return NativeCode.of(function, packings)


def _of_any_length(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    """A stand-in whose length is a symbol, the same one for all vectors of a program."""
    real = torch.empty(tensor.shape, dtype=tensor.dtype)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
    return fake.from_tensor(real, symbolic_context=context, source=ConstantSource("vector"))


def _decompose(ops: fx.GraphModule, inputs: list[torch.Tensor], fake: FakeTensorMode) -> fx.GraphModule:
    """The same ops in terms of those that Inductor generates code for, with the inputs' memory layouts."""
    join_attentions(ops.graph)
    join_cross_entropies(ops.graph)
    add_biases_last(ops.graph)
    ops.recompile()
    with fake, fx_traceback.preserve_node_meta():
        trace = make_fx(fx.Interpreter(ops).run, decomposition_table=decompositions(), _allow_non_fake_inputs=True)
        decomposed = trace(*inputs)
    for node in decomposed.graph.nodes:
        if runs_in_pytorch(node):
            node.meta["should_fallback"] = True
    return decomposed


@contextmanager
def _compiling(fake: FakeTensorMode, program: Program, *, force_channels_last: bool) -> Iterator[None]:
    # Inductor takes the workspace of oneDNN's recurrent layer for a buffer of one float, and would reuse it as such.
    recurrent = any(node.target is torch.ops.aten.mkldnn_rnn_layer.default for node in program.graph.ops.nodes)
    patches = {**_CONFIG, "force_layout_optimization": force_channels_last, "allow_buffer_reuse": not recurrent}
    with (
        V.set_fake_mode(fake),
        tracing(TracingContext(fake)),
        config.patch(patches),
        torch.no_grad(),
        warnings.catch_warnings(),
        _without_hints("torch._inductor.ir"),
    ):
        warnings.simplefilter("ignore")  # about torch's own code, which users can do nothing about
        yield


@contextmanager
def _without_hints(name: str) -> Iterator[None]:
    """Keep remarks of torch's own logger that are meant for its developers from the user."""
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
