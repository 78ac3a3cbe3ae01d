"""`ipu_print_tensor` and `nop`: what is printed, when, and in which order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Apply


def infer(function, *args, engine="eager", options=None):
    model = poptorch.inferenceModel(Apply(function), (options or poptorch.Options()).engine(engine))
    return model(*args)


def printed(capfd):
    return capfd.readouterr().err


LAYOUTS = {
    "21": (
        {"float_format": "auto", "separator": " ", "open_bracket": "{", "close_bracket": "}"},
        "title: {\n {1.4962566 1.7682219}\n {1.0884774 1.1320305}\n}\n",
    ),
    "22": (
        {
            "float_format": "scientific",
            "max_line_width": 15,
            "separator": ",",
            "open_bracket": "[",
            "close_bracket": "]",
        },
        "title: [\n [1.4962566e+00,\n   1.7682219e+00]\n [1.0884774e+00,\n   1.1320305e+00]\n]\n",
    ),
    "23": (
        {"float_format": "fixed", "separator": ";", "open_bracket": "(", "close_bracket": ")"},
        "title: (\n (1.4962566;1.7682219)\n (1.0884774;1.1320305)\n)\n",
    ),
}


@pytest.mark.parametrize("statement", LAYOUTS)
def test_layout(statement, capfd):
    options, expected = LAYOUTS[statement]
    torch.manual_seed(0)
    x = torch.rand(2, 2)
    infer(lambda x: poptorch.ipu_print_tensor(x + 1, "title", digits=8, **options), x)
    assert printed(capfd) == expected


def test_only_the_first_character_of_separator_and_brackets_counts(capfd):
    infer(
        lambda x: poptorch.ipu_print_tensor(x, "t", separator=", ", open_bracket="<<", close_bracket=">>"),
        torch.tensor([1, 2], dtype=torch.int32),
    )
    assert printed(capfd) == "t: <1,2>\n"


@pytest.mark.parametrize("title", [(), ("named",)])
def test_printing_may_be_all_that_a_model_does(title, capfd):
    x = torch.tensor([1.0], dtype=torch.float16)
    result = infer(lambda x: poptorch.ipu_print_tensor(x, *title), x)
    assert result.dtype == torch.float16
    assert result.item() == 1.0
    assert result.data_ptr() != x.data_ptr()
    assert printed(capfd) == f"{title[0] if title else 'input/*args[0]'}: (1.000)\n"


def test_what_is_no_tensor_is_refused():
    with pytest.raises(poptorch.Error, match="takes a tensor, not 3"):
        poptorch.ipu_print_tensor(3)
    with pytest.raises(poptorch.Error, match="takes a tensor, not 'x'"):
        infer(lambda x: poptorch.nop("x"), torch.ones(1))


def test_an_unknown_format_is_a_key_error_that_lists_the_others():
    with pytest.raises(KeyError, match="'auto', 'fixed', 'scientific', 'none'") as error:
        poptorch.ipu_print_tensor(torch.ones(1), float_format="hex")
    assert isinstance(error.value, poptorch.Error)
    assert "'hex'" in str(error.value)


def test_nothing_is_printed_on_the_host(capfd):
    x = torch.ones(2)
    assert poptorch.ipu_print_tensor(x, "x") is x
    assert poptorch.nop(x) is x
    assert printed(capfd) == ""


def test_a_result_that_nobody_uses_is_not_printed(capfd):
    def forward(x):
        poptorch.ipu_print_tensor(x + 1, "unused")
        return x * 2

    assert infer(forward, torch.ones(1)).item() == 2
    assert printed(capfd) == ""


def test_reading_a_value_while_tracing_prints_nothing_more(capfd):
    """Such a model is traced on real values, which must not be printed."""

    def forward(x):
        x = poptorch.ipu_print_tensor(x, "x")
        return x * 2 if x.sum() > 0 else x

    infer(forward, torch.ones(1))
    assert printed(capfd).endswith("if both cases must work\nx: (1.000)\n")


class Printing(nn.Module):
    def __init__(self, title="", print_gradient=True):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(2, 1, bias=False)
        self.title, self.print_gradient = title, print_gradient

    def forward(self, x):
        weighted = poptorch.ipu_print_tensor(self.fc(x), self.title, self.print_gradient)
        return poptorch.ipu_print_tensor(poptorch.identity_loss(weighted, "sum"), "loss", False)


def titles(text):
    return [line.split(": ")[0] for line in text.splitlines() if ": " in line]


@pytest.mark.inductor
def test_values_and_gradients_are_printed_in_order_for_every_micro_batch_and_replica(engine, capfd):
    module = Printing('say "it"')
    options = poptorch.Options().engine(engine).deviceIterations(2).replicationFactor(2)
    options.Training.gradientAccumulation(2)
    training = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.0))
    training(torch.ones(8, 2))
    assert titles(printed(capfd)) == ['say "it"', "loss", 'say "it"_gradient'] * 8


def say(value, title):
    return poptorch.ipu_print_tensor(value.sum(), title)


@pytest.mark.inductor
def test_loops_and_branches_print_in_their_place(engine, capfd):
    """Nothing here needs the result of anything else, so that only the order of the program decides."""

    def forward(x):
        before = say(x + 1, "before")
        (looped,) = poptorch.for_loop(2, lambda y: y + say(y, 'in a "loop"') + 0 * say(x.sin(), "with another"), [x])
        between = say(x.exp(), "between")
        (chosen,) = poptorch.cond(x[0] > 0, lambda y: say(y, "yes"), [x], lambda y: say(y, "no"), [x])
        return say(x.sin(), "after"), chosen, between, looped, before

    infer(forward, torch.ones(2), engine=engine)
    rounds = ['in a "loop"', "with another"] * 2
    assert titles(printed(capfd)) == ["before", *rounds, "between", "yes", "after"]


@pytest.mark.inductor
def test_a_loop_in_a_loop_prints_the_values_of_every_round(engine, capfd):
    def outer(y):
        return poptorch.for_loop(2, lambda z: poptorch.ipu_print_tensor(z + 1, "inner"), [say(y, "outer").reshape(1)])

    infer(lambda x: poptorch.for_loop(2, outer, [x]), torch.ones(1), engine=engine)
    first, second = ["outer: 1.000", "inner: (2.000)", "inner: (3.000)"], ["outer: 3.000"]
    assert printed(capfd).splitlines() == first + second + ["inner: (4.000)", "inner: (5.000)"]


@pytest.mark.parametrize(
    ("title", "expected"),
    [("", ["fc/MatMul:0", "loss", "Gradient___fc/MatMul:0"]), ("y", ["y", "loss", "y_gradient"])],
)
def test_titles_of_gradients(title, expected, capfd):
    module = Printing(title)
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))
    training(torch.ones(1, 2))
    text = printed(capfd)
    assert titles(text) == expected
    assert text.splitlines()[-2:] == [" (1.000)", ")"]  # the gradient of a sum
    assert expected[0] in training.getTensorNames() or title


def test_gradients_are_not_printed_if_not_asked_for(capfd):
    module = Printing("y", print_gradient=False)
    poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.0))(torch.ones(1, 2))
    assert titles(printed(capfd)) == ["y", "loss"]


def test_printing_does_not_change_training():
    modules = [Printing("y"), Printing("y")]
    modules[1].load_state_dict(modules[0].state_dict())
    x = torch.randn(3, 2)
    loss = poptorch.trainingModel(modules[0], optimizer=torch.optim.SGD(modules[0].parameters(), lr=0.1))(x)
    expected = modules[1].fc(x).sum()
    expected.backward()
    torch.optim.SGD(modules[1].parameters(), lr=0.1).step()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(modules[0].fc.weight, modules[1].fc.weight)


class PrintsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1, 1)

    def forward(self, x):
        return F.linear(x, poptorch.ipu_print_tensor(self.fc.weight, "weight"))


def test_a_weight_is_printed_in_every_call(capfd):
    """Although what depends on weights alone is otherwise computed only once."""
    model = poptorch.inferenceModel(PrintsWeight())
    for _ in range(3):
        model(torch.ones(1, 1))
    assert titles(printed(capfd)) == ["weight"] * 3


def test_an_index_is_printed_once(capfd):
    """Although indices are computed a second time to check them."""
    table = nn.Embedding(3, 1)
    poptorch.inferenceModel(nn.Sequential(Apply(lambda i: poptorch.ipu_print_tensor(i, "i")), table))(
        torch.tensor([1, 2])
    )
    assert titles(printed(capfd)) == ["i"]


def test_nop_stays_in_the_program_and_costs_nothing():
    model = poptorch.inferenceModel(Apply(lambda x: poptorch.nop(x) * 2))
    x = torch.randn(3)
    assert torch.equal(model(x), x * 2)
    targets = [str(node.target) for node in model._executable.step.graph.ops.nodes if node.op == "call_function"]
    assert targets == ["poptorch.nop.default", "aten.mul.Tensor"]


def test_gradients_pass_a_nop():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return poptorch.identity_loss(poptorch.nop(self.w * x), "sum")

    module = Model()
    poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0))(torch.tensor([0.25, 0.5]))
    assert module.w.tolist() == [0.75, 0.5]


def test_under_vmap():
    def forward(x):
        return torch.vmap(lambda row: poptorch.nop(poptorch.ipu_print_tensor(row * 2, "rows")))(x)

    x = torch.randn(2, 3)
    assert torch.equal(infer(forward, x), x * 2)
