"""The door to private parts of PyTorch for this folder: nothing else here imports them.

Each name has a test in tests/capture/test_private.py that says what it is used for, and fails if PyTorch changes it.
They take a second to import, so this module is imported where a model is traced.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import functools
from typing import Any

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
disable_torch_dispatch = torch._C._DisableTorchDispatch  # inside, ops are not seen by modes or classes
dispatch_keys = torch._C._dispatch_keys  # what PyTorch chooses the code of an op by
active_modes = torch._C._len_torch_dispatch_stack  # how many
dispatch_modes = _get_current_dispatch_mode_stack  # those that see ops now, the outermost first
function_modes = _get_current_function_mode_stack  # those that see functions now
is_functional_tensor = torch._is_functional_tensor
current_autograd_node = torch._C._current_autograd_node  # whose backward function runs now
sequence_number = torch.autograd._get_sequence_nr  # that the next autograd node gets
neg_view = torch._neg_view
pack_padded_sequence = (torch._VF._pack_padded_sequence, torch._C._VariableFunctions._pack_padded_sequence)


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> FakeTensor:
    """`FakeTensor(mode, tensor, "cpu")` for a tensor of the meta device, in a quarter of the time."""
    made = torch.Tensor._make_subclass(
        FakeTensor, tensor, False, dispatch_device=True, device_for_backend_keys=_PROCESSOR
    )
    torch._C._set_throw_on_mutable_data_ptr(made)
    made.__dict__.update(_fake_attributes(mode))
    return made


@functools.lru_cache(maxsize=8)
def _fake_attributes(mode: FakeTensorMode) -> dict[str, Any]:
    """What PyTorch notes on each fake tensor that nothing special is known about."""
    with disable_torch_dispatch():
        return dict(FakeTensor(mode, torch.empty(0, device="meta"), _PROCESSOR).__dict__)


_PROCESSOR = torch.device("cpu")


def functional_mode() -> FunctionalTensorMode | None:
    """What rewrites in-place ops, unless PyTorch has switched that off to look inside tensors of the trace."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)


def times_written(tensor: FunctionalTensor) -> int:
    """How often anything was written to the memory that a tensor shows."""
    return torch._functionalize_mutation_counter(tensor.elem)


def inner_of(tensor: FunctionalTensor) -> torch.Tensor:
    """What is wrapped, which is the value of the tensor if that is up to date."""
    return torch._from_functional_tensor(tensor.elem)


def functional_like(mode: FunctionalTensorMode, tensor: torch.Tensor) -> FunctionalTensor:
    """A new tensor without history as ops give it while in-place ops are rewritten."""
    with disable_torch_dispatch():
        return FunctionalTensor(torch._to_functional_tensor(tensor), mode)


def functional_view(
    mode: FunctionalTensorMode, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> FunctionalTensor:
    """The view of its first argument that an op gives, as the mode for functional tensors lets PyTorch compute it."""
    key, functionalize = torch._C._TorchDispatchModeKey.FUNCTIONAL, torch._C.DispatchKey.Functionalize
    include = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(functionalize)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(functionalize) - FunctionalTensor._extra_dispatch_keys
    torch._C._unset_dispatch_mode(key)
    try:
        with torch._C._ForceDispatchKeyGuard(include, exclude):
            before = torch._functionalize_enable_reapply_views(True)
            try:
                result = func._op_dk(functionalize, args[0].elem, *args[1:], **kwargs)
                view = FunctionalTensor(result, mode)
            finally:
                torch._disable_functionalization()
                torch._functionalize_enable_reapply_views(before)
    finally:
        torch._C._set_dispatch_mode(mode)
    if func.is_view:
        torch._functionalize_unsafe_set(view, args[0])
    return view


def is_functionalising() -> bool:
    """Whether in-place ops are being rewritten; PyTorch switches that off to look inside tensors of the trace."""
    return functional_mode() is not None


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
    "active_modes",
    "auto_functionalized",
    "auto_functionalized_v2",
    "cond_op",
    "current_autograd_node",
    "disable_current_modes",
    "disable_torch_dispatch",
    "disable_torch_function",
    "dispatch_keys",
    "dispatch_modes",
    "fake_like",
    "from_fun",
    "function_modes",
    "functional_like",
    "functional_mode",
    "functional_view",
    "fx_traceback",
    "get_proxy_mode",
    "get_proxy_slot",
    "inner_of",
    "is_functional_tensor",
    "is_functionalising",
    "is_functorch_wrapped_tensor",
    "is_legacy_batchedtensor",
    "neg_view",
    "pack_padded_sequence",
    "pytree",
    "sequence_number",
    "times_written",
    "to_fun",
    "while_loop_op",
]
