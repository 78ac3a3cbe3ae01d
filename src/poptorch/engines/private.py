"""The door to private parts of PyTorch for this folder: nothing else here imports them.

Each name has a test in tests/engines/test_private.py that says what it is used for, and fails if PyTorch changes it.
They take more than a second to import, so this module is imported where native code is compiled.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config, inductor_prims
from torch._inductor.codecache import CppWrapperCodeCache
from torch._inductor.codegen.common import device_codegens, init_backend_registration
from torch._inductor.codegen.cpp import OuterLoopFusedSchedulerNode
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.cpu_vec_isa import invalid_vec_isa, pick_vec_isa, supported_vec_isa_list, valid_vec_isa_list
from torch._inductor.custom_graph_pass import CustomSchedulerPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.ir import MutationOutput
from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V
from torch._library.utils import get_layout_constraint_tag
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree

__all__ = [
    "ConstantSource",
    "CppBuilder",
    "CppTorchDeviceOptions",
    "CppWrapperCodeCache",
    "CppWrapperCpu",
    "CustomSchedulerPass",
    "DimDynamic",
    "FakeTensorMode",
    "IndentedBuffer",
    "MutationOutput",
    "OuterLoopFusedSchedulerNode",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "TracingContext",
    "V",
    "compile_fx_inner",
    "config",
    "device_codegens",
    "fx_traceback",
    "get_hash_for_files",
    "get_layout_constraint_tag",
    "inductor_prims",
    "init_backend_registration",
    "invalid_vec_isa",
    "joint_graph_passes",
    "lowerings",
    "make_fallback",
    "make_fx",
    "pick_vec_isa",
    "pytree",
    "select_decomp_table",
    "supported_vec_isa_list",
    "tag_to_layout_constraint",
    "tracing",
    "valid_vec_isa_list",
]
