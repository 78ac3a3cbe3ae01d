"""for_loop and cond: on the host, and as parts of a compiled program, on both engines."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch


class Model(nn.Module):
    """A function of tensors with some layers at hand."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, *tensors):
        return self.function(self, *tensors)


def compiled(function, engine="eager", options=None):
    options = (options or poptorch.Options()).engine(engine)
    return poptorch.inferenceModel(Model(function).eval(), options)


def same(function, *inputs, engine="eager"):
    """What a function gives as a compiled model, after it was found to be what it gives on the host."""
    expected = Model(function).eval()(*(tensor.clone() for tensor in inputs))
    results = compiled(function, engine)(*inputs)
    assert type(results) is type(expected) is list
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)
    return results


def test_a_loop_doubles_ten_times():
    (result,) = same(lambda model, x: poptorch.for_loop(10, lambda x: x * 2, [x]), torch.ones(1))
    assert result == 1024


def test_a_loop_uses_a_tensor_from_outside():
    (result,) = same(
        lambda model, x, y: poptorch.for_loop(10, lambda x: x * y, [x]), torch.ones(1), torch.tensor([2.0])
    )
    assert result == 1024


@pytest.mark.inductor
def test_a_loop_carries_four_tensors(engine):
    def body(a, b, c, d):
        return a + b, b * 0.5, d, c - a

    same(
        lambda model, *tensors: poptorch.for_loop(10, body, list(tensors)),
        *torch.randn(4, 3).unbind(),
        engine=engine,
    )


@pytest.mark.inductor
def test_layers_run_inside_a_loop(engine):
    def forward(model, x):
        def body(x):
            return torch.tanh(model.linear(model.linear(model.dropout(x))) + model.conv(x))

        return poptorch.for_loop(5, body, [x])

    same(forward, torch.randn(1, 1, 4, 4), engine=engine)


def test_inputs_that_are_no_list_of_tensors():
    with pytest.raises(ValueError, match=r"\(Object is not list\)"):
        poptorch.for_loop(2, lambda x: x, torch.ones(1))
    with pytest.raises(ValueError, match=r"\(Object contained in list at index 1 is not torch\.tensor\)"):
        poptorch.for_loop(2, lambda x, y: (x, y), [torch.ones(1), 5])
    model = compiled(lambda model, x: poptorch.for_loop(2, lambda x, y: (x, y), [x, 5]))
    with pytest.raises(ValueError, match="at index 1"):
        model(torch.ones(1))


@pytest.mark.parametrize("count", [-1, 1.0, True, torch.tensor(3)])
def test_a_count_that_is_no_count(count):
    with pytest.raises(ValueError, match="number of iterations"):
        poptorch.for_loop(count, lambda x: x, [torch.ones(1)])


def test_no_iteration_gives_copies_of_the_inputs():
    def forward(model, x):
        (result,) = poptorch.for_loop(0, lambda x: x * 2, [x])
        result += 1
        return [result, x]

    same(forward, torch.ones(2))


class Trained(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.function = function

    def forward(self, x):
        return poptorch.identity_loss(self.function(self.linear(x)), "mean")


def training(function):
    model = Trained(function)
    return poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_loops_are_for_inference_only():
    model = training(lambda y: poptorch.for_loop(2, lambda x: x * 2, [y])[0])
    with pytest.raises(poptorch.Error, match=r"poptorch\.for_loop\(\) is only supported in inference") as raised:
        model(torch.ones(1, 1))
    assert "test_control.py" in str(raised.value)


def test_branches_are_for_inference_only():
    model = training(lambda y: poptorch.cond(y.sum() > 0, lambda x: x, [y], lambda x: -x, [y])[0])
    with pytest.raises(poptorch.Error, match=r"poptorch\.cond\(\) is only supported in inference"):
        model(torch.ones(1, 1))


@pytest.mark.parametrize("increments", [1, 2])
def test_a_body_that_writes_in_place_leaves_the_input_alone(increments):
    def body(y):
        for _ in range(increments):
            y += 1
        return y

    x = torch.ones(1, 5, dtype=torch.int32)
    (result,) = compiled(lambda model, x: poptorch.for_loop(3, body, [x]))(x)
    assert torch.equal(result, torch.full((1, 5), 1 + 3 * increments, dtype=torch.int32))
    assert torch.equal(x, torch.ones(1, 5, dtype=torch.int32))


@pytest.mark.parametrize(("writes_after", "expected"), [(False, 2), (True, 3)])
def test_the_input_of_the_caller_is_written_outside_the_loop_only(writes_after, expected):
    def body(y):
        y += 1
        return y

    def forward(model, x):
        x += 1
        result = poptorch.for_loop(3, body, [x])
        if writes_after:
            x += 1
        return result

    x = torch.ones(1, 5, dtype=torch.int32)
    (result,) = compiled(forward)(x)
    assert torch.equal(result, torch.full((1, 5), 5, dtype=torch.int32))
    assert torch.equal(x, torch.full((1, 5), expected, dtype=torch.int32))


def test_a_loop_over_constants():
    def forward(model, x):
        numbers, other = torch.tensor([1, 2]), torch.tensor([8])
        (doubled,) = poptorch.for_loop(5, lambda n: n * 2, [numbers])
        return [doubled.int(), other.int(), x]

    doubled, other, _ = same(forward, torch.ones(1))
    assert doubled.tolist() == [32, 64]
    assert other.tolist() == [8]


def both_ways(function, *inputs, engine="eager"):
    """A model with a condition as its first input gives what the host gives, for both conditions, compiled once."""
    model, plain = compiled(function, engine), Model(function).eval()
    for holds in (True, False):
        results, expected = (m(torch.tensor([holds]), *inputs) for m in (model, plain))
        assert type(results) is type(expected) is list
        for result, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(result, wanted)


def shared(x, y):
    return x * 2 + y


@pytest.mark.parametrize(
    "function",
    [
        lambda m, c, x, y: poptorch.cond(c, lambda x, y: x + y, [x, y], lambda x, y: x * y, [x, y]),
        lambda m, c, x, y: poptorch.cond(c, lambda: x + y, [], lambda: m.linear(x), []),
        lambda m, c, x, y: poptorch.cond(c, lambda a: a + y, [x], lambda a, b: a * b, [x, y]),
        lambda m, c, x, y: poptorch.cond(c, lambda: (x, y, x + y), [], lambda: (y, x, x - y), []),
        lambda m, c, x, y: poptorch.cond(c, shared, [x, y], shared, [y, x]),
        lambda m, c, x, y: poptorch.cond(
            c, lambda: poptorch.cond(x.sum() > y.sum(), lambda: x, [], lambda: y, []), [], lambda: x * y, []
        ),
        lambda m, c, x, y: poptorch.cond(
            c, lambda a: torch.topk(a, 2).values, [x], lambda a: a[:, 1:3] + y[:, 0:2], [x]
        ),
        lambda m, c, x, y: [
            *poptorch.cond(c, lambda: x, [], lambda: y, []),
            *poptorch.cond(~c, lambda: x, [], lambda: y, []),
        ],
    ],
    ids=["arguments", "no_arguments", "different_arguments", "three_results", "one_body", "nested", "topk", "two"],
)
def test_the_condition_chooses_when_the_program_runs(function):
    both_ways(function, torch.randn(2, 4), torch.randn(2, 4))


@pytest.mark.inductor
def test_nested_loops_and_branches(engine):
    def forward(model, condition, x):
        def step(x):
            return poptorch.cond(x.sum() > 3, lambda x: x - model.count - 1, [x], lambda x: model.linear(x) + 1, [x])

        def body(x, total):
            (x,) = poptorch.for_loop(2, lambda y: poptorch.cond(condition, step, [y], lambda y: y * 2, [y]), [x])
            return x, total + x

        return poptorch.for_loop(3, body, [x, torch.zeros(2, 4)])

    both_ways(forward, torch.rand(2, 4), engine=engine)


def test_only_the_chosen_branch_computes():
    def forward(model, condition, x):
        def slow(x):
            return poptorch.for_loop(1_000_000_000, lambda x: x + 1, [x])

        return poptorch.cond(condition, lambda x: x + 1, [x], slow, [x])

    (result,) = compiled(forward)(torch.tensor(True), torch.ones(1))
    assert result == 2


def test_results_of_the_first_branch_get_the_shapes_of_the_second():
    model = compiled(lambda m, c, x: poptorch.cond(c, lambda: x, [], lambda: x.flatten() * 2, []))
    assert model(torch.tensor([True]), torch.ones(2, 3))[0].shape == (6,)


@pytest.mark.parametrize(
    "otherwise",
    [lambda x: x.sum(), lambda x: (x, x), lambda x: x.int(), lambda x: x[:1]],
    ids=["scalar", "two", "type", "size"],
)
def test_branches_with_different_results(otherwise):
    model = compiled(lambda m, c, x: poptorch.cond(c, lambda x: x, [x], otherwise, [x]))
    with pytest.raises(poptorch.Error, match="return different tensors") as raised:
        model(torch.tensor([True]), torch.ones(2, 3))
    assert "test_control.py" in str(raised.value)


def test_a_body_that_returns_other_shapes_than_it_takes():
    model = compiled(lambda m, x: poptorch.for_loop(2, lambda x: torch.cat([x, x]), [x]))
    with pytest.raises(poptorch.Error, match=r"returns f32\[4\], but it takes f32\[2\]"):
        model(torch.ones(2))


def test_a_body_that_returns_no_tensor():
    for model in (
        compiled(lambda m, x: poptorch.for_loop(2, lambda x: 3, [x])),
        lambda x: poptorch.for_loop(2, str, [x]),
    ):
        with pytest.raises(ValueError, match="must return tensors"):
            model(torch.ones(2))


@pytest.mark.parametrize("condition", [True, torch.ones(2, dtype=torch.bool)])
def test_a_condition_that_is_not_one_truth_value(condition):
    with pytest.raises(ValueError, match="a tensor with one element"):
        poptorch.cond(condition, lambda: torch.ones(1), [], lambda: torch.ones(1), [])


@pytest.mark.inductor
def test_every_iteration_and_every_call_draws_new_numbers(engine):
    def body(x, row):
        return torch.cat([x[1:], torch.rand(1, 64)]), row + torch.bernoulli(torch.full((64,), 0.5))

    def forward(model, x):
        before = torch.rand(64)
        drawn, row = poptorch.for_loop(4, body, [x, torch.zeros(64)])
        return [before, drawn, row, torch.rand(64)]

    options = poptorch.Options().randomSeed(7)
    model = compiled(forward, engine, options)
    rows = [row for _ in range(2) for r in model(torch.zeros(4, 64)) for row in (r if r.dim() == 2 else [r])]
    assert len({tuple(row.tolist()) for row in rows}) == len(rows) == 14
    again = compiled(forward, "eager", poptorch.Options().randomSeed(7))
    torch.testing.assert_close(again(torch.zeros(4, 64))[1], torch.stack(rows[1:5]), msg="both engines draw the same")


def write_to_buffer(model, x):
    def body(x):
        model.count += 1
        return x + model.count

    return poptorch.for_loop(2, body, [x])


def write_through_view(model, x):
    def body(y):
        x.view(2, 2)[0] += 1
        return y + 1

    return poptorch.for_loop(2, body, [x.clone()])


def write_in_branch(model, x):
    return poptorch.cond(x.sum() > 0, lambda: x.add_(1), [], lambda: x * 2, [])


@pytest.mark.parametrize("forward", [write_to_buffer, write_through_view, write_in_branch])
def test_a_write_to_a_tensor_from_outside_is_refused(forward):
    with pytest.raises(poptorch.Error, match=r"writes to a tensor of shape .* from outside") as raised:
        compiled(forward)(torch.ones(4))
    assert "test_control.py" in str(raised.value)


def test_a_tensor_of_a_body_that_leaves_it_is_refused():
    def forward(model, x):
        kept = []

        def body(x):
            kept.append(x * 2)
            return x + 1

        return [*poptorch.for_loop(2, body, [x]), kept[0] + 1]

    with pytest.raises(poptorch.Error, match="is used outside of it"):
        compiled(forward)(torch.ones(4))


def test_a_buffer_that_is_reassigned_in_a_body_is_refused():
    def forward(model, x):
        def body(x):
            model.count = model.count + x
            return x

        return poptorch.for_loop(2, body, [x])

    with pytest.raises(poptorch.Error, match="is used outside of it"):
        compiled(forward)(torch.ones(4))


@pytest.mark.parametrize(
    "body",
    [lambda x: x if x.sum() > 0 else -x, lambda x: x[x > 0].sum() + x, lambda x: x * x.max().item()],
    ids=["bool", "mask", "item"],
)
def test_values_cannot_be_read_in_a_body(body):
    with pytest.raises(poptorch.Error, match="in the body of a loop or in a branch") as raised:
        compiled(lambda model, x: poptorch.for_loop(2, body, [x]))(torch.ones(4))
    assert "test_control.py" in str(raised.value)


def test_a_value_that_is_read_after_a_loop_is_that_of_the_last_iteration():
    def forward(model, x):
        (doubled,) = poptorch.for_loop(3, lambda x: x * 2, [x])
        return [doubled * 10 if doubled.sum() > 6 else doubled]

    same(forward, torch.ones(1))


@pytest.mark.inductor
def test_an_index_out_of_range_in_a_body_is_an_error(engine):
    def forward(model, position, x):
        def body(position, x):
            return position + 1, x + model.linear.weight[position]

        return poptorch.for_loop(3, body, [position, x])[1:]

    model = compiled(forward, engine)
    torch.testing.assert_close(
        model(torch.tensor([1]), torch.zeros(1, 4))[0][0], model.linear.weight[1:].sum(0).detach()
    )
    with pytest.raises(poptorch.Error, match=r"index 4|range|-4 to 3"):
        model(torch.tensor([2]), torch.zeros(1, 4))


def test_an_index_out_of_range_counts_in_the_chosen_branch_only():
    def forward(model, condition, position):
        return poptorch.cond(
            condition, lambda p: model.linear.weight[p], [position], lambda p: model.linear.weight[p - 4], [position]
        )

    model = compiled(forward)
    assert torch.equal(model(torch.tensor([False]), torch.tensor([5]))[0], model.linear.weight[1:2])
    with pytest.raises(poptorch.Error):
        model(torch.tensor([True]), torch.tensor([5]))


def test_a_loop_runs_in_every_micro_batch():
    options = poptorch.Options().deviceIterations(2)
    model = compiled(lambda m, x, y: poptorch.for_loop(10, lambda x: x + y, [x]), options=options)
    x, y = torch.rand(2, 3), torch.rand(2, 3)
    torch.testing.assert_close(model(x, y)[0], x + 10 * y)
