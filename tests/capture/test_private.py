"""What we use of PyTorch's private parts still does what we use it for.

A failure here says which of them a new version of PyTorch changed, before anything else fails in stranger ways.
"""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from poptorch.capture import private

aten = torch.ops.aten


def tensors_without_values():
    with private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode
        assert isinstance(torch.ones(2, 3) @ torch.ones(3, 4), private.FakeTensor)


def raises_for_values(error, function):
    with private.FakeTensorMode(), pytest.raises(error):
        function(torch.ones(1))


def in_place_ops_are_rewritten():
    def function(given):
        with private.FunctionalTensorMode():
            x = private.to_fun(given)
            assert isinstance(x, private.FunctionalTensor)
            assert private.is_functional_tensor(x.elem)
            assert private.is_functionalising()
            x.add_(1)
            return private.from_fun(x)

    traced = make_fx(function)(torch.ones(2))
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"] == [aten.add.Tensor]
    assert not private.is_functionalising()


def seen_by_a_mode():
    seen = []

    class Mode(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode() as mode:
        torch.ones(2) + 1
        assert private.dispatch_modes() == [mode]
        with private.disable_current_modes():
            torch.zeros(2)
    assert seen == [aten.ones.default, aten.add.Tensor]
    assert all(isinstance(op, private.OpOverload) for op in seen)


def seen_as_a_function():
    mode = torch.overrides.TorchFunctionMode()
    with mode:
        assert private.function_modes() == [mode]
        with private.disable_torch_function():
            assert torch.ones(2).sum() == 2


def branches_and_loops():
    operators = {private.cond_op: "cond", private.while_loop_op: "while_loop"}
    assert all(isinstance(op, private.HigherOrderOperator) and op.name() == name for op, name in operators.items())


def recorded_by_a_tracer():
    tracer = private.PythonKeyTracer()
    tracer.graph = fx.Graph()
    mode = private.ProxyTorchDispatchMode(tracer, "real")
    with mode:
        assert private.get_proxy_mode() is mode
    x, node = torch.ones(2), tracer.graph.placeholder("x")
    tracer.tensor_tracker[x] = private.ProxyTensor(fx.Proxy(node, tracer), None)
    assert private.get_proxy_slot(x, tracer).proxy.node is node


def numbers_of_autograd_nodes():
    first = private.sequence_number()
    y = torch.ones(2, requires_grad=True).exp()
    assert y.grad_fn._sequence_nr() == first
    seen = []
    y.register_hook(lambda grad: seen.append(private.current_autograd_node()))
    y.sum().backward()
    assert seen[0] is not None


def annotated():
    with private.fx_traceback.preserve_node_meta(), private.fx_traceback.annotate({"key": 1}):
        assert private.fx_traceback.get_current_meta()["custom"] == {"key": 1}
    assert private.fx_traceback.get_current_replay_node() is None


def wrapped_by_functorch():
    seen = []
    torch.func.vmap(lambda x: seen.append(private.is_functorch_wrapped_tensor(x)) or x)(torch.ones(2))
    assert seen == [True]
    assert not private.is_functorch_wrapped_tensor(torch.ones(2))
    assert not private.is_legacy_batchedtensor(torch.ones(2))


def rewritten_ops_of_users():
    assert isinstance(private.auto_functionalized, private.HigherOrderOperator)
    assert isinstance(private.auto_functionalized_v2, private.HigherOrderOperator)


def negative_views():
    x = torch.ones(2)
    assert private.neg_view(x).is_neg()
    assert private.neg_view(x).data_ptr() == x.data_ptr()


def sequences_are_packed():
    calls = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1), torch.tensor([2]))
    assert set(calls) & set(private.pack_padded_sequence)


def trees():
    assert private.pytree.tree_leaves(({"a": 1}, [2])) == [1, 2]
    assert private.pytree.tree_map_only(int, lambda i: i + 1, [1, "x"]) == [2, "x"]


def described(tensor):
    """All that can be told of a tensor without values."""
    keys = private.dispatch_keys(tensor).raw_repr()
    memory = tensor.untyped_storage().nbytes(), tensor.is_inference(), tensor.requires_grad
    layout = type(tensor), tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device
    return (*layout, keys, *memory)


def made_without_values():
    with private.FakeTensorMode() as mode:
        for tensor in (torch.ones(2, 3).t(), torch.ones(4, dtype=torch.int32), torch.ones(2, dtype=torch.complex64)):
            with private.disable_torch_dispatch():
                plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                assert plain.is_meta
                made = private.fake_like(mode, plain)
            usual = private.FakeTensor(mode, plain, torch.device("cpu"))
            assert described(made) == described(usual) == described(tensor)
            assert made.__dict__ == usual.__dict__ == tensor.__dict__
            with pytest.raises(RuntimeError):
                made.data_ptr()


def wrapped_to_be_functional():
    with private.FakeTensorMode() as fake, private.FunctionalTensorMode() as mode:
        assert private.functional_mode() is mode
        assert private.active_modes() == len(private.dispatch_modes()) == 2
        x = torch.empty(2, 3)
        usual = x.exp()
        with private.disable_torch_dispatch():
            plain = private.fake_like(fake, torch.empty(2, 3, device="meta"))
        made = private.functional_like(mode, plain)
        assert described(made) == described(usual)
        assert private.inner_of(made) is plain
        assert made.__dict__.keys() == usual.__dict__.keys()
        for op, args in ((aten.t.default, ()), (aten.select.int, (0, 1)), (aten._unsafe_view.default, ([6],))):
            view, expected = private.functional_view(mode, op, (x, *args), {}), op(x, *args)
            assert private.functional_mode() is mode
            assert described(view) == described(expected)
            assert _shares_memory(view, x) == _shares_memory(expected, x) == op.is_view
            before = private.times_written(x)
            with torch.no_grad():
                view.mul_(2)
            assert private.times_written(x) > before
            assert private.times_written(made) == 0


def _shares_memory(a, b):
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


CANARIES = {
    made_without_values: "fake_like dispatch_keys disable_torch_dispatch",
    wrapped_to_be_functional: "functional_like functional_view functional_mode inner_of times_written active_modes",
    in_place_ops_are_rewritten: "FunctionalTensor FunctionalTensorMode from_fun to_fun is_functional_tensor "
    "is_functionalising",
    seen_by_a_mode: "TorchDispatchMode OpOverload disable_current_modes dispatch_modes",
    seen_as_a_function: "disable_torch_function function_modes",
    branches_and_loops: "cond_op while_loop_op",
    recorded_by_a_tracer: "ProxyTensor ProxyTorchDispatchMode PythonKeyTracer get_proxy_mode get_proxy_slot",
    numbers_of_autograd_nodes: "sequence_number current_autograd_node",
    annotated: "fx_traceback",
    wrapped_by_functorch: "is_functorch_wrapped_tensor is_legacy_batchedtensor",
    rewritten_ops_of_users: "auto_functionalized auto_functionalized_v2 HigherOrderOperator",
    negative_views: "neg_view",
    sequences_are_packed: "pack_padded_sequence",
    trees: "pytree",
    lambda: list(tensors_without_values()): "FakeTensor FakeTensorMode",
    lambda: raises_for_values(private.DataDependentOutputException, torch.Tensor.item): "DataDependentOutputException",
    lambda: raises_for_values(private.DynamicOutputShapeException, torch.nonzero): "DynamicOutputShapeException",
    lambda: issubclass(private.UnsupportedOperatorException, RuntimeError): "UnsupportedOperatorException",
    lambda: issubclass(private.UnsupportedFakeTensorException, RuntimeError): "UnsupportedFakeTensorException",
}


@pytest.mark.parametrize("canary", CANARIES, ids=lambda canary: CANARIES[canary].split()[0])
def test_private_names_do_what_they_are_used_for(canary):
    assert canary() is not False


def test_every_private_name_has_a_canary():
    assert sorted(" ".join(CANARIES.values()).split()) == sorted(private.__all__)
