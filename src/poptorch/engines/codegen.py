"""Native code for one graph: TorchInductor generates it, the C++ compiler builds it.

The graph is decomposed with Inductor's table, ends in one in-place write per new value, and goes straight to Inductor's
code generator; nothing is traced a second time by dynamo or autograd.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from poptorch._logging import without_remarks
from poptorch.engines.building import Build, building
from poptorch.engines.code import NativeCode
from poptorch.engines.control_flow import WithControlFlow, all_nodes
from poptorch.engines.decompositions import allow_call, decompositions, runs_in_pytorch
from poptorch.engines.ops import write_in_place, written_positions
from poptorch.engines.outer_loops import SplitOuterLoops
from poptorch.engines.passes.draw_ahead import calls_python
from poptorch.engines.private import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    StatelessSymbolicContext,
    TracingContext,
    V,
    compile_fx_inner,
    config,
    fx_traceback,
    inductor_prims,
    joint_graph_passes,
    make_fx,
    tracing,
)
from poptorch.engines.toolchain import find_compiler
from poptorch.engines.vectors import SEARCH
from poptorch.engines.wrapper import CONFIG, our_wrapper
from poptorch.ir import OutputRole, StepGraph, insert, value_of

_CONFIG: dict[str, Any] = {
    "size_asserts": False,
    "nan_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "aot_inductor.enable_line_tables": False,  # nobody debugs this code, and without them it compiles faster
    "aot_inductor.enable_frame_pointer": False,
    "cpp.min_chunk_size": 4096,  # waking a second thread for less costs more than it gains
}


def generate(
    graph: StepGraph, build: Build, *, has_images: bool = False, is_careful: bool = False
) -> Callable[[], NativeCode]:
    """Code for a graph; if that takes vectors of any length, for all of them, and for its own length in particular.

    It is a part of what is built. The function that this gives waits until that is finished.
    If it `has_images`, intermediate results have their channels innermost as well. A careful attempt leaves out a part
    of Inductor that was seen to fail.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with fake:
        inputs = [torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype) for spec in graph.signature.inputs]
    if graph.takes_any_length:
        inputs = [_of_any_length(tensor, fake) if tensor.dim() else tensor for tensor in inputs]
    with _compiling(fake, graph, has_images=has_images, is_careful=is_careful):
        decomposed = joint_graph_passes(_decompose(graph, inputs, fake))
        writes_in_place = not calls_python(graph)
        final = write_in_place(decomposed, written_positions(graph)) if writes_in_place else decomposed
        _keep_layouts(final.graph, graph)
        state = range(len(graph.signature.state))
        with our_wrapper(), building(build):
            compiled = compile_fx_inner(final, inputs, static_input_idxs=state, cpp_wrapper=True)
    function = getattr(compiled, "current_callable", compiled)  # a graph without ops is handed back as it is
    return partial(NativeCode.of, function, writes_in_place=writes_in_place)


def _of_any_length(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    """A stand-in whose length is a symbol, the same one for all vectors of a program."""
    real = torch.empty(tensor.shape, dtype=tensor.dtype)
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DUCK])
    return fake.from_tensor(real, symbolic_context=context, source=ConstantSource("vector"))


def _decompose(graph: StepGraph, inputs: list[torch.Tensor], fake: FakeTensorMode) -> fx.GraphModule:
    """The same ops in terms of those that Inductor generates code for, with the inputs' memory layouts."""
    run = WithControlFlow(graph).run
    with fake, fx_traceback.preserve_node_meta():
        trace = make_fx(run, decomposition_table=decompositions(), _allow_non_fake_inputs=True)
        decomposed = trace(*inputs)
    for module in decomposed.modules():  # those that are inside are bodies of loops and branches
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            allow_call(node.target)
            if runs_in_pytorch(node):
                node.meta["should_fallback"] = True
    return decomposed


def _keep_layouts(ops: fx.Graph, graph: StepGraph) -> None:
    """Let what other parts of a program take have the memory layout that was foretold, which their code counts on."""
    output = ops.output_node()
    results: list[fx.Node] = list(output.args[0])  # pyright: ignore
    returned = [(spec, node) for spec, node in graph.outputs if spec.role is not OutputRole.NEW_VALUE]
    kept = [index for index, (spec, _) in enumerate(returned) if spec.role is OutputRole.BOUNDARY]
    for index in kept:
        stride = list(value_of(returned[index][1]).stride())
        if list(value_of(results[index]).stride()) != stride:
            with ops.inserting_before(output):
                results[index] = insert(ops, results[index], inductor_prims.force_stride_order, results[index], stride)
    if kept:
        output.args = (tuple(results),)
        output.meta["user_visible_output_idxs"] = kept


@contextmanager
def _compiling(fake: FakeTensorMode, graph: StepGraph, *, has_images: bool, is_careful: bool) -> Iterator[None]:
    # Inductor takes the workspace of oneDNN's recurrent layer for a buffer of one float, and would reuse it as such.
    recurrent = any(node.target is torch.ops.aten.mkldnn_rnn_layer.default for node in all_nodes(graph))
    patches = {
        **_CONFIG,
        **CONFIG,
        **SEARCH.config,
        "force_layout_optimization": has_images,
        "allow_buffer_reuse": not recurrent,
    }
    patches["cpp.cxx"] = (None, find_compiler())
    SEARCH.begin(patches)
    if is_careful:
        patches["_post_fusion_custom_pass"] = SplitOuterLoops()
    with (
        V.set_fake_mode(fake),
        tracing(TracingContext(fake)),
        config.patch(patches),
        torch.no_grad(),
        warnings.catch_warnings(),
        without_remarks("torch._inductor.ir", logging.WARNING),
        without_remarks("torch._subclasses.fake_tensor"),
    ):
        warnings.simplefilter("ignore")  # about torch's own code, which users can do nothing about
        yield


def first_line(error: BaseException) -> str:
    """What an exception of PyTorch is about, without what it says to its own developers."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
