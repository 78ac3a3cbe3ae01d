"""What is frozen while a model is traced, how it is guarded, and what cannot be captured."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import poptorch
from models import Apply, Gate, Regression


def infer(function) -> poptorch.PoplarExecutor:
    module = function if isinstance(function, nn.Module) else Apply(function)
    return poptorch.inferenceModel(module, poptorch.Options().engine("eager"))


def train(module: nn.Module) -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine("eager")
    return poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))


# ---- values that Python reads


def branch(x):
    if x.sum() > 0:
        return x * 2
    return x * 3


def item(x):
    return x * x[0].item()


def integer(x):
    return x[: int(x[0])]


def listed(x):
    return x * sum(x.tolist())


def mask(x):
    return x[x > 0]


def nonzero(x):
    return x.nonzero()


def masked_select(x):
    return torch.masked_select(x, x > 0) * 2


def equal(x):
    return x + 1 if torch.equal(x, x.abs()) else x - 1


class Rows(nn.Module):
    """Rows that a weight selects, so their number cannot be checked before the call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        return x.index_select(0, (x * self.weight > 0).nonzero().squeeze(1))


def repeat(x):
    return x.repeat_interleave(x.int())


def unique(x):
    return [torch.arange(len(values)) * values for values in torch.unique(x, return_inverse=True, return_counts=True)]


def unique_slices(x):
    slices = torch.unique(x, dim=0)
    return torch.arange(len(slices)) * slices


def unique_consecutive_slices(x):
    return torch.unique_consecutive(x, dim=0, return_counts=True)


def unique_consecutive(x):
    return torch.unique_consecutive(x, return_inverse=True, return_counts=True)


def bins(x):
    return torch.bincount(x.int(), minlength=2), torch.bincount(x.int(), weights=x * 2)


# a model, a first batch, one that leads to the same value, one that does not, and the line that reads it
READS = {
    "branch": (branch, [1.0, 2.0], [0.0, 5.0], [-3.0, 1.0], "if x.sum() > 0:"),
    "item": (item, [2.0, 1.0], [2.0, 7.0], [3.0, 1.0], "return x * x[0].item()"),
    "int": (integer, [1.0, 2.0], [1.0, 7.0], [2.0, 1.0], "return x[: int(x[0])]"),
    "tolist": (listed, [1.0, 2.0], [1.0, 2.0], [2.0, 1.0], "return x * sum(x.tolist())"),
    "mask": (mask, [1.0, -2.0], [-1.0, 3.0], [1.0, 2.0], "return x[x > 0]"),
    "nonzero": (nonzero, [1.0, 0.0], [0.0, 3.0], [1.0, 2.0], "return x.nonzero()"),
    "masked_select": (masked_select, [1.0, -2.0], [-1.0, 3.0], [-1.0, -2.0], "torch.masked_select(x, x > 0)"),
    "rows": (Rows(), [1.0, -2.0], [-1.0, 3.0], [-1.0, -2.0], "(x * self.weight > 0).nonzero()"),
    "repeat": (repeat, [0.0, 2.0], [1.0, 1.0], [3.0, 0.0], "x.repeat_interleave(x.int())"),
    "unique": (unique, [4.0, 1.0, 4.0], [2.0, 2.0, 3.0], [1.0, 1.0, 1.0], "torch.unique(x, "),
    "unique slices": (unique_slices, [4.0, 1.0, 4.0], [2.0, 2.0, 3.0], [1.0, 1.0, 1.0], "torch.unique(x, dim"),
    "unique_consecutive slices": (
        unique_consecutive_slices,
        [4.0, 1.0, 1.0],
        [1.0, 1.0, 4.0],
        [1.0, 2.0, 1.0],
        "consecutive(x, dim",
    ),
    "unique_consecutive": (unique_consecutive, [4.0, 1.0, 1.0], [1.0, 1.0, 4.0], [1.0, 2.0, 1.0], "consecutive(x, "),
    "bins": (bins, [0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [2.0, 1.0, 0.0], "torch.bincount(x.int(), "),
    "equal": (equal, [1.0, 2.0], [3.0, 4.0], [-3.0, 4.0], "torch.equal(x, x.abs())"),
}


@pytest.mark.parametrize("case", READS)
def test_a_value_that_is_read_is_frozen_and_guarded(case, caplog):
    function, first, same, other, line = READS[case]
    model = infer(function)
    for values in (first, same):
        x = torch.tensor(values)
        result, expected = model(x), function(x)
        torch.testing.assert_close(result, expected, check_dtype=False)
    assert line in caplog.text
    with pytest.raises(poptorch.Error) as caught:
        model(torch.tensor(other))
    assert line in str(caught.value)
    assert "test_trace.py" in str(caught.value)
    torch.testing.assert_close(model(torch.tensor(first)), function(torch.tensor(first)), check_dtype=False)


def test_each_freeze_is_warned_about_once(caplog):
    model = infer(branch)
    for _ in range(3):
        model(torch.ones(2))
    assert sum("part of the compiled program" in record.message for record in caplog.records) == 1


def test_not_a_number_is_guarded_too():
    model = infer(item)
    model(torch.tensor([float("nan"), 1.0]))
    model(torch.tensor([float("nan"), 2.0]))
    with pytest.raises(poptorch.Error):
        model(torch.tensor([1.0, 2.0]))


def test_value_of_a_constant_needs_no_guard(caplog):
    model = infer(lambda x: x * torch.arange(3).sum().item())
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 3.0))
    assert torch.equal(model(-torch.ones(2)), torch.full((2,), -3.0))
    assert "part of the compiled program" not in caplog.text


def test_size_that_a_constant_decides_needs_no_guard(caplog):
    model = infer(lambda x: x[~torch.eye(2, dtype=torch.bool)])
    assert model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist() == [2, 3]
    assert "part of the compiled program" not in caplog.text


def test_branch_on_a_parameter_is_guarded_in_training():
    class Switch(Gate):
        def forward(self, x, target):
            y = self.fc(x)
            if self.fc.bias.sum() > 0:
                y = y + 1
            return F.mse_loss(y, target)

    module = Switch()
    with torch.no_grad():
        module.fc.bias.fill_(0.5)
    training = train(module)
    training(torch.zeros(2, 3), torch.zeros(2, 1))
    with torch.no_grad():
        module.fc.bias.fill_(-0.5)
    with pytest.raises(poptorch.Error, match=r"if self\.fc\.bias\.sum\(\) > 0:"):
        training(torch.zeros(2, 3), torch.zeros(2, 1))


def test_reading_a_shape_or_a_python_number_is_not_reading_a_value(caplog):
    def function(x, scale=2):
        return x.reshape(x.shape[0], -1) * (scale if x.dim() == 2 else 1)

    model = infer(function)
    assert torch.equal(model(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    assert caplog.text == ""


def test_tracing_does_not_draw_from_the_hosts_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    infer(lambda x: x + torch.rand_like(x) if x.sum() > 0 else x).compile(torch.ones(2))
    assert torch.equal(torch.rand(2), expected)


def test_seeding_in_forward_is_warned_about_and_leaves_the_host_alone(caplog):
    def seeding(x):
        torch.manual_seed(123)
        return x + torch.rand_like(x)

    before = torch.get_rng_state()
    poptorch.inferenceModel(Apply(seeding))(torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert [record for record in caplog.records if "Options.randomSeed" in record.message]


def test_forward_can_ask_torch_whether_it_is_compiled(caplog):
    def function(x):
        if not torch.compiler.is_compiling() and x.all():
            return x * 2
        return x * 2 + 0

    model = infer(function)
    assert model(torch.tensor([0.0, 1.0])).tolist() == [0, 2]
    assert model(torch.tensor([1.0, 1.0])).tolist() == [2, 2]
    assert caplog.text == ""
    assert not torch.compiler.is_compiling()


class Fallback(nn.Module):
    """Catches the exception of a submodule, and goes on with another."""

    def __init__(self):
        super().__init__()
        self.broken = nn.Sequential(nn.Linear(5, 5))
        self.twice = Apply(lambda x: x * 2)

    def forward(self, x):
        try:
            return self.broken(x)
        except RuntimeError:
            return self.twice(x)


def test_forward_may_catch_what_a_submodule_raises():
    assert infer(nn.Sequential(Fallback(), Fallback()))(torch.ones(3)).tolist() == [4, 4, 4]


@pytest.mark.parametrize("reads_a_value", [False, True])
def test_each_attention_without_dropout_computes_its_own_result(reads_a_value):
    def function(x, mask):
        if reads_a_value and mask.all():
            return x
        for _ in range(2):
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        return x

    x, mask = torch.rand(1, 2, 4, 8), torch.rand(1, 1, 4, 4) > 0.3
    mask[..., 0] = True
    torch.testing.assert_close(infer(function)(x, mask), function(x, mask))


class CheckpointedDropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, reads_a_value):
        if reads_a_value and x.min() < 0:
            return x
        y = checkpoint(lambda x: F.dropout(F.dropout(x) * self.scale), x, use_reentrant=False)
        return poptorch.identity_loss(y.sum(), reduction="none")


@pytest.mark.parametrize("reads_a_value", [False, True])
def test_checkpointing_repeats_each_of_several_dropouts(reads_a_value):
    module = CheckpointedDropouts()
    loss = train(module)(torch.rand(3, 50), reads_a_value)
    gradient = (1.5 - module.scale.detach()) / 0.1
    torch.testing.assert_close(gradient * 1.5, loss)  # which is proportional to the scale


# ---- what cannot be captured


def to_numpy(x):
    return torch.from_numpy(x.numpy() * 2)


def to_array(x):
    import numpy

    return torch.from_numpy(numpy.asarray(x) * 2)


@pytest.mark.parametrize(
    ("function", "line"), [(to_numpy, "torch.from_numpy(x.numpy() * 2)"), (to_array, "numpy.asarray(x) * 2")]
)
def test_numpy_is_refused_with_the_line_and_a_way_out(function, line):
    model = infer(function)
    with pytest.raises(poptorch.Error) as caught:
        model(torch.ones(2))
    assert line in str(caught.value)
    assert "fix:" in str(caught.value)
    assert not model.isCompiled()


def test_removing_a_buffer_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("y", torch.ones(1))

        def forward(self, x):
            del self.y
            return x + 1

    module = Model()
    with pytest.raises(poptorch.Error, match="Buffer y is removed from the model"):
        infer(module)(torch.ones(1))
    assert torch.equal(module.y, torch.ones(1))


def test_reassigning_a_parameter_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(1))

        def forward(self, x):
            self.p = nn.Parameter(x * 2)
            return x + self.p

    module = Model()
    with pytest.raises(poptorch.Error, match="Parameter p is reassigned within the model"):
        infer(module)(torch.ones(1))
    assert torch.equal(module.p, torch.ones(1))


# ---- what forward leaves behind


def test_a_reassigned_buffer_persists():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 1)
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x):
            self.seen = self.seen + x.sum(0)
            return F.mse_loss(self.fc(x), x)

    module = Model()
    training = train(module)
    for total in (2.0, 4.0, 6.0):
        training(torch.ones(2, 1))
        assert module.seen.item() == total


def test_tensors_stored_on_the_module_do_not_leak():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.last = None

        def forward(self, x):
            self.last = self.fc(x)
            self.fc.seen = self.last
            return self.last

    module = Model()
    before = {name: set(vars(m)) for name, m in module.named_modules()}
    infer(module)(torch.ones(1, 2))
    assert module.last is None
    assert {name: set(vars(m)) for name, m in module.named_modules()} == before


COMPLEX = torch.randn(3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))


@pytest.mark.inductor
def test_a_view_from_outside_that_reads_memory_in_another_way(engine):
    """Conjugated, negated, a part of complex numbers, another type: what counts is what the view shows."""
    outside = [
        COMPLEX.conj(),
        COMPLEX.conj()[1:],
        COMPLEX.imag,
        COMPLEX.conj().imag,
        torch.arange(3.0).view(torch.int32),
    ]
    model = poptorch.inferenceModel(
        Apply(lambda x: [x[-len(t) :] * t for t in outside]), poptorch.Options().engine(engine)
    )
    x = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(model(x), [x[-len(t) :] * t for t in outside])


def test_tensor_from_outside_is_a_constant_and_stays_as_it_was():
    outside = torch.tensor([1.0])

    def count(x):
        outside.add_(1)
        return x + outside

    model = infer(count)
    assert model(torch.zeros(1)).item() == 2
    assert model(torch.zeros(1)).item() == 2
    assert outside.item() == 1


def test_tensor_that_forward_did_not_compute_is_returned_with_a_warning():
    outside = torch.tensor([4.0])
    model = infer(lambda x: (x + 1, outside))
    with pytest.warns(UserWarning, match="Output expected to be on the IPU but is on cpu"):
        results = model(torch.zeros(1))
    assert [result.item() for result in results] == [1, 4]


class Box:
    def __init__(self, content):
        self.content = content


@pytest.mark.parametrize("hide", [lambda x: [Box(Box([x]))], lambda x: {x}], ids=["object", "set"])
def test_result_of_an_unknown_type_with_tensors_is_refused(hide):
    with pytest.raises(poptorch.Error, match=r"holds tensors(.|\n)*poptorch.registerCustomArgParser\((Box|set), ...\)"):
        infer(lambda x: (x + 1, hide(x + 2)))(torch.zeros(1))


ITERATORS = {
    "iter": lambda x: iter([x]),
    "generator": lambda x: (y for y in [x]),
    "map": lambda x: map(abs, [x]),
    "zip": lambda x: zip([x], [x], strict=True),
    "reversed": lambda x: reversed([x]),
    "values": lambda x: iter({"a": x}.values()),
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
def test_iterators_are_refused_as_results(make):
    with pytest.raises(poptorch.Error, match=r"gone through only once(.|\n)*return a list"):
        infer(lambda x: (x + 1, make(x + 2)))(torch.zeros(1))


def test_result_of_an_unknown_type_without_tensors_of_the_trace_is_itself():
    box = Box(torch.ones(1))
    assert infer(lambda x: (x + 1, box))(torch.zeros(1))[1] is box


@dataclass
class Scores:
    values: torch.Tensor
    names: list[str]


def test_result_may_be_a_dataclass():
    found = infer(lambda x: Scores(x + 1, ["a", "b"]))(torch.zeros(2))
    assert (type(found), found.values.tolist(), found.names) == (Scores, [1, 1], ["a", "b"])


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_surroundings_of_the_call_do_not_matter(surroundings):
    torch.manual_seed(0)
    inside, outside = Gate(), Gate()
    outside.load_state_dict(copy.deepcopy(inside.state_dict()))
    x, target = torch.rand(2, 3), torch.rand(2, 1)
    with surroundings():
        train(inside)(x, target)
    assert torch.is_grad_enabled()
    train(outside)(x, target)
    torch.testing.assert_close(inside.state_dict(), outside.state_dict())


def test_gradients_of_the_host_are_untouched():
    module = Gate()
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    train(module)(torch.rand(2, 3), torch.rand(2, 1))
    assert all(torch.equal(p.grad, torch.full_like(p, 7.0)) for p in module.parameters())


@pytest.mark.parametrize("training", [False, True])
def test_a_shape_error_says_nothing_but_the_error(training, capfd, caplog):
    model = Regression()
    executor = (
        poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        if training
        else poptorch.inferenceModel(model)
    )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        executor(torch.ones(2, 4), torch.ones(2, 2))
    assert capfd.readouterr().err == ""
    assert not caplog.records
