"""What we use of PyTorch's private parts still does what we use it for, and the fast way to native code is taken.

A failure here says which of them a new version of PyTorch changed, before anything else fails in stranger ways.
"""

from __future__ import annotations

import os
import shlex

import pytest
import torch

import poptorch
from models import Regression
from poptorch.engines import private
from poptorch.engines.code import to_handles, to_tensors
from poptorch.engines.codegen import generate
from poptorch.engines.private_tools import build_command, cache_folder
from poptorch.engines.wrapper import new_build
from poptorch.ir import Direction, GraphBuilder, InputSpec, Note, OutputRole, OutputSpec, Role

aten = torch.ops.aten


def doubling():
    """A graph that doubles its only input."""
    builder = GraphBuilder()
    x = builder.input(InputSpec.of("x", Role.USER_INPUT, torch.ones(8)))
    builder.output(
        OutputSpec("y", OutputRole.USER_OUTPUT), builder.call(Note(Direction.FORWARD), aten.mul.Tensor, x, 2.0)
    )
    return builder.build("doubling")


def handles_of_tensors():
    """Native code takes and gives addresses of tensors."""
    assert to_tensors(to_handles([torch.arange(3)]))[0].tolist() == [0, 1, 2]


def lengths_as_symbols():
    fake = private.FakeTensorMode(shape_env=private.ShapeEnv())
    context = private.StatelessSymbolicContext(dynamic_sizes=[private.DimDynamic.DUCK])
    found = fake.from_tensor(torch.ones(5), symbolic_context=context, source=private.ConstantSource("v"))
    assert isinstance(found.shape[0], torch.SymInt)


def surroundings_of_a_compilation():
    fake = private.FakeTensorMode()
    with private.V.set_fake_mode(fake), private.tracing(private.TracingContext(fake)):
        assert private.V.fake_mode is fake
    with private.config.patch({"size_asserts": False, "cpp.min_chunk_size": 4096}):
        assert private.config.cpp.min_chunk_size == 4096


def ops_taken_apart():
    table = private.select_decomp_table()
    assert aten.gelu.default in table
    traced = private.make_fx(lambda x: torch.nn.functional.gelu(x), decomposition_table=table)(torch.ones(2))
    assert all(node.target is not aten.gelu.default for node in traced.graph.nodes)
    private.joint_graph_passes(traced)


def ops_that_stay_calls():
    """Inductor's table of what it generates code for takes calls of PyTorch for the rest."""
    op = aten._linalg_eigh.default
    private.make_fallback(op, private.tag_to_layout_constraint(private.get_layout_constraint_tag(op)), warn=False)
    assert op in private.lowerings


def strides_are_forced():
    x = torch.ones(2, 3).t()
    assert private.inductor_prims.force_stride_order(x, (2, 1)).stride() == (2, 1)


def passes_over_loops():
    assert issubclass(private.CustomSchedulerPass, object)
    assert hasattr(private.OuterLoopFusedSchedulerNode, "get_outer_nodes")
    assert private.get_hash_for_files((__file__,))


def notes_and_trees():
    with private.fx_traceback.preserve_node_meta(), private.fx_traceback.annotate({"key": 1}):
        assert private.fx_traceback.get_current_meta()["custom"] == {"key": 1}
    assert private.pytree.tree_leaves([1, (2,)]) == [1, 2]


def vectors_are_chosen():
    assert private.pick_vec_isa() in [*private.valid_vec_isa_list(), private.invalid_vec_isa]
    assert set(map(str, private.valid_vec_isa_list())) <= set(map(str, private.supported_vec_isa_list))


def commands_of_the_compiler():
    option = private.CppTorchDeviceOptions(
        device_type="cpu", include_pytorch=True, shared=True, vec_isa=private.invalid_vec_isa, compile_only=True
    )
    line = shlex.split(private.CppBuilder(name="OUT", sources="IN", BuildOption=option).get_command_line())
    assert line[line.index("-o") + 1] == "OUT.o"
    assert "IN" in line
    assert "-c" in line


def the_class_that_writes_the_wrapper():
    """A backend brings its own; ours has to be asked for kernels one by one, and for ops without a C function."""
    private.init_backend_registration()
    assert issubclass(private.device_codegens["cpu"].cpp_wrapper_codegen or object, private.CppWrapperCpu)
    for name in ("define_kernel", "generate_fallback_kernel_with_runtime_lookup_boxed"):
        assert callable(getattr(private.CppWrapperCpu, name))
    assert callable(private.CppWrapperCodeCache.load_pybinding_async)
    buffer = private.IndentedBuffer()
    with buffer.indent():
        buffer.writeline("x;")
    assert buffer.getvalue() == "    x;\n"
    assert isinstance(private.MutationOutput, type)


def generated(graph):
    build = new_build()
    code = generate(graph, build)
    build.finish()
    return code()


def code_is_generated():
    assert generated(doubling()).function([torch.arange(8.0)])[0].tolist() == [2.0 * i for i in range(8)]


CANARIES = {
    handles_of_tensors: "",
    lengths_as_symbols: "FakeTensorMode ShapeEnv StatelessSymbolicContext DimDynamic ConstantSource",
    surroundings_of_a_compilation: "V TracingContext tracing config",
    ops_taken_apart: "select_decomp_table make_fx joint_graph_passes",
    ops_that_stay_calls: "lowerings make_fallback tag_to_layout_constraint get_layout_constraint_tag",
    strides_are_forced: "inductor_prims",
    passes_over_loops: "CustomSchedulerPass OuterLoopFusedSchedulerNode get_hash_for_files",
    notes_and_trees: "fx_traceback pytree",
    vectors_are_chosen: "pick_vec_isa valid_vec_isa_list invalid_vec_isa supported_vec_isa_list",
    commands_of_the_compiler: "CppBuilder CppTorchDeviceOptions",
    the_class_that_writes_the_wrapper: (
        "device_codegens init_backend_registration CppWrapperCpu CppWrapperCodeCache IndentedBuffer MutationOutput"
    ),
    code_is_generated: "compile_fx_inner",
}


@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: canary.__name__)
def test_private_names_do_what_they_are_used_for(canary):
    canary()


def test_every_private_name_has_a_canary():
    assert sorted(" ".join(CANARIES.values()).split()) == sorted(private.__all__)


def test_native_code_is_called_without_pythons_wrapper():
    code = generated(doubling())
    assert code.native is not None, "Inductor's wrapper has changed: every call goes through Python again"


def test_a_training_step_runs_as_native_code_from_end_to_end():
    model = Regression()
    training = poptorch.trainingModel(
        model, poptorch.Options().engine("inductor"), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    training(torch.ones(2, 3), torch.ones(2, 2))
    (_, bound), *_ = training._current.session._bound.actions
    assert bound[0]._natives[0] is not None


def test_build_tools_are_found(tmp_path):
    assert os.path.isdir(cache_folder())
    command, built = build_command("g++", str(tmp_path / "probe.cpp"), str(tmp_path))
    assert shlex.split(command)[0] == "g++"
    assert built.startswith(str(tmp_path))
