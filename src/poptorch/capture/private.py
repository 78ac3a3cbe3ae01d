"""The door to private parts of PyTorch for this folder: nothing else here imports them.

Each name has a test in tests/capture/test_private.py that says what it is used for, and fails if PyTorch changes it.
They take a second to import, so this module is imported where a model is traced.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import torch._C
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    _ProxyTensor,
    get_proxy_mode,
    get_proxy_slot,
)
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

ProxyTensor = _ProxyTensor  # what PyTorch keeps about a tensor that it traces
disable_current_modes = _disable_current_modes  # inside, ops run as if nothing was traced
disable_torch_function = torch._C.DisableTorchFunction  # inside, functions are not seen by modes or classes
dispatch_modes = _get_current_dispatch_mode_stack  # those that see ops now, the outermost first
function_modes = _get_current_function_mode_stack  # those that see functions now
is_functional_tensor = torch._is_functional_tensor
current_autograd_node = torch._C._current_autograd_node  # whose backward function runs now
sequence_number = torch.autograd._get_sequence_nr  # that the next autograd node gets
neg_view = torch._neg_view
pack_padded_sequence = (torch._VF._pack_padded_sequence, torch._C._VariableFunctions._pack_padded_sequence)


def is_functionalising() -> bool:
    """Whether in-place ops are being rewritten; PyTorch switches that off to look inside tensors of the trace."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is not None


__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "ProxyTensor",
    "ProxyTorchDispatchMode",
    "PythonKeyTracer",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "auto_functionalized",
    "auto_functionalized_v2",
    "cond_op",
    "current_autograd_node",
    "disable_current_modes",
    "disable_torch_function",
    "dispatch_modes",
    "from_fun",
    "function_modes",
    "fx_traceback",
    "get_proxy_mode",
    "get_proxy_slot",
    "is_functional_tensor",
    "is_functionalising",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "neg_view",
    "pack_padded_sequence",
    "pytree",
    "sequence_number",
    "to_fun",
    "while_loop_op",
]
