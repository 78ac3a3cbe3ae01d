"""`poptorch.CPU`: a Python function runs on the host, in the middle of every micro-batch."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import poptorch
from poptorch.errors import EngineError
from poptorch.ir.serial import FormatError, graph_data, graph_from, origin_data


class Calls(nn.Module):
    """A model whose forward is a function of itself and its inputs."""

    def __init__(self, forward, **functions):
        super().__init__()
        self._forward = forward
        self.inner = nn.Linear(3, 3)
        for name, function in functions.items():
            setattr(self, name, poptorch.CPU(function, name))

    def forward(self, *inputs):
        return self._forward(self, *inputs)


def infer(model: nn.Module, engine: str = "eager", iterations: int = 1) -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine(engine).deviceIterations(iterations)
    options.outputMode(poptorch.OutputMode.All)
    return poptorch.inferenceModel(model, options)


@pytest.mark.inductor
def test_a_product_on_the_host_goes_on_in_the_model(engine):
    run = infer(Calls(lambda self, x, y: self.product(x, y) * 3, product=lambda x, y: x * y), engine)
    x = torch.randn(4)
    for y in (torch.randn(4), torch.randn(4)):
        torch.testing.assert_close(run(x, y), x * y * 3)


def test_a_function_with_two_results_gives_a_list():
    model = Calls(lambda self, x: self.both(x), both=lambda x: (x + 1, x.sum()))
    x = torch.randn(2, 3)
    assert type(model(x)) is list  # also on the CPU
    outputs = infer(model)(x)
    assert type(outputs) is list
    torch.testing.assert_close(outputs, [x + 1, x.sum().reshape(())])


def test_results_may_have_another_shape():
    x = torch.randn(4, 3)
    mean = infer(Calls(lambda self, x: self.mean(x) + 1, mean=torch.mean))(x)
    torch.testing.assert_close(mean, x.mean() + 1)


@pytest.mark.inductor
def test_a_module_of_the_model_runs_on_the_host_with_its_own_weights(engine):
    model = Calls(lambda self, x: self.host(x) * 2)
    model.host = poptorch.CPU(model.inner, "linear of the model")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    x = torch.randn(2, 3)
    torch.testing.assert_close(infer(model, engine)(x), model.inner(x) * 2)
    with torch.no_grad():
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


@pytest.mark.inductor
def test_three_calls_in_a_row_see_tensors_of_the_cpu(engine):
    devices = []

    def double(x):
        devices.append((x.device.type, type(x), poptorch.isRunningOnIpu()))
        return x * 2

    x = torch.randn(3)
    run = infer(Calls(lambda self, x: self.double(self.double(self.double(x))), double=double), engine)
    torch.testing.assert_close(run(x), x * 8)
    assert len(devices) == 6  # each call once to compile, once to run
    assert set(devices) == {("cpu", torch.Tensor, False)}


@pytest.mark.inductor
def test_calls_are_made_in_order_in_every_micro_batch(engine):
    log = []

    def first(x):
        log.append(("first", float(x.flatten()[0])))
        return x + 1

    def second(x):
        log.append(("second", float(x.flatten()[0])))
        return x * 10

    def forward(self, x):
        # without data from one to the next, so that only the order of the program says which comes first
        return sum(function(x + i) for i in range(3) for function in (self.first, self.second))

    run = infer(Calls(forward, first=first, second=second), engine, iterations=2)
    run.compile(torch.zeros(2, 1))
    log.clear()
    x = torch.tensor([[1.0], [5.0]])
    expected = sum((x + i + 1) + (x + i) * 10 for i in range(3))
    torch.testing.assert_close(run(x), expected)
    assert log == [(name, row + i) for row in (1.0, 5.0) for i in range(3) for name in ("first", "second")]


def test_a_loss_inside_the_function_is_only_computed():
    def loss(x):
        return poptorch.identity_loss(x, reduction="mean")

    x = torch.randn(4, 2)
    outputs = infer(Calls(lambda self, x: self.loss(x) + 1, loss=loss), iterations=2)(x)
    torch.testing.assert_close(outputs, x.reshape(2, -1).mean(1) + 1)


def test_training_models_refuse_it():
    model = Calls(lambda self, x: poptorch.identity_loss(self.host(self.inner(x)), "mean"), host=torch.abs)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match=r"'host' is called in a training model.*only supported in inference"):
        training(torch.randn(2, 3))


@pytest.mark.inductor
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_what_the_function_raises_surfaces_as_it_is(engine, kind):
    raised = kind("mine")

    def fail(x):
        if x.sum() > 0:
            raise raised
        return x

    run = infer(Calls(lambda self, x: self.fail(x) * 2, fail=fail), engine)
    run(-torch.ones(2))
    with pytest.raises(kind) as caught:
        run(torch.ones(2))
    assert caught.value is raised
    torch.testing.assert_close(run(-torch.ones(2)), torch.full((2,), -2.0))  # and the model still runs


def test_what_the_function_raises_at_compilation_surfaces_as_it_is():
    def fail(x):
        raise LookupError("no zeros, please")

    with pytest.raises(LookupError, match="no zeros, please"):
        infer(Calls(lambda self, x: self.fail(x), fail=fail))(torch.ones(2))


@pytest.mark.inductor
def test_the_function_may_change_its_inputs_and_keep_its_result(engine):
    kept = torch.zeros(2)

    def careless(x):
        x.mul_(0)
        return kept.add_(1)

    x = torch.ones(4)
    run = infer(Calls(lambda self, x: self.careless(x + 0) + x, careless=careless), engine, iterations=2)
    run.compile(x)
    kept.zero_()
    torch.testing.assert_close(run(x), torch.tensor([2.0, 2.0, 3.0, 3.0]))


def test_a_result_of_another_shape_than_compiled_is_an_error():
    model = Calls(lambda self, x: self.positive(x) * 1, positive=lambda x: x[x >= 0])
    run = infer(model)
    run(torch.ones(3))
    with pytest.raises(EngineError, match=r"'positive' returned float32\[1\].*compiled for float32\[3\]"):
        run(torch.tensor([-1.0, 1.0, -1.0]))


@pytest.mark.parametrize("result", [None, 3.0, (), [torch.ones(1), "text"]])
def test_results_are_tensors(result):
    with pytest.raises(poptorch.Error, match="instead of tensors"):
        infer(Calls(lambda self, x: self.wrong(x), wrong=lambda x: result))(torch.ones(2))


def test_other_arguments_than_tensors_are_refused():
    with pytest.raises(poptorch.Error, match="is called with int, and takes only tensors"):
        infer(Calls(lambda self, x: self.scale(x, 3), scale=lambda x, by: x * by))(torch.ones(2))


def test_instances_of_one_id_are_told_apart():
    a = infer(Calls(lambda self, x: self.same(x), same=lambda x: x + 1))
    b = infer(Calls(lambda self, x: self.same(x), same=lambda x: x + 2))
    x = torch.zeros(1)
    assert [a(x).item(), b(x).item(), a(x).item()] == [1, 2, 1]


def test_a_copy_of_a_model_calls_the_copies_of_its_modules():
    model = Calls(lambda self, x: self.host(x))
    model.host = poptorch.CPU(model.inner, "copied")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.inner.weight.zero_()
        twin.inner.bias.fill_(7)
    torch.testing.assert_close(infer(twin)(torch.randn(2, 3)), torch.full((2, 3), 7.0))


def test_a_function_that_takes_only_weights_runs_in_every_call():
    values = iter(range(100))

    def count(weight):
        return weight * 0 + next(values)

    run = infer(Calls(lambda self, x: x + self.count(self.inner.weight.sum()), count=count))
    run.compile(torch.zeros(1))
    first = run(torch.zeros(1))
    assert run(torch.zeros(1)).item() == first.item() + 1


@pytest.mark.inductor
def test_python_may_read_what_the_function_returned(engine):
    def forward(self, x):
        y = self.double(x)
        return y + 1 if y.sum() > 0 else y - 1

    run = infer(Calls(forward, double=lambda x: x * 2), engine)
    assert run(torch.ones(2)).tolist() == [3, 3]
    with pytest.raises(poptorch.Error, match="contradicts"):
        run(-torch.ones(2))


def test_a_program_that_calls_functions_is_not_read_from_data():
    model = Calls(lambda self, x: self.quoted(x) + 1, **{"quoted": lambda x: x * 2})
    model.quoted = poptorch.CPU(model.quoted.layer_to_call, 'it\'s a "name" \\ %27')
    run = infer(model)
    assert run(torch.ones(2)).tolist() == [3, 3]
    graph = run._executable.step.graph
    with pytest.raises(FormatError, match="no text that an op takes"):  # a file must not choose what is called
        graph_from(json.loads(json.dumps(graph_data(graph))), origin_data(graph), {})


def test_indices_that_the_host_computes_are_checked_without_calling_it_again():
    calls = []

    def choose(x):
        calls.append(x)
        return x.long()

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.choose, self.table = poptorch.CPU(choose, "rows"), nn.Parameter(torch.arange(4.0))

        def forward(self, x):
            return self.table[self.choose(x)]

    run = infer(Rows())
    assert run(torch.tensor([3.0, 1.0])).tolist() == [3, 1]
    assert len(calls) == 2
    with pytest.raises(IndexError, match="4"):
        run(torch.tensor([4.0, 1.0]))
