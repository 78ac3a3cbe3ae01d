"""A training step is cut where gradients are added up: what each half takes, computes and leaves behind."""

from __future__ import annotations

import pytest
import torch

import poptorch
from compiler.step_graphs import step_graph
from poptorch.compiler.accumulate import drop_intermediates, has_update, split_update, trained_gradients
from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.ir import OutputRole, Role, verify
from poptorch.ir.python import as_function
from poptorch.options import resolve


def settings(reduction: ReductionType = ReductionType.Mean, strategy=MeanReductionStrategy.Post):
    options = poptorch.Options()
    options.Training.accumulationAndReplicationReductionType(reduction)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    return resolve(options, training=True)


def run(graph, state, *given):
    """The outputs of a graph by name, from the values of its inputs; new state is written back."""
    values = [state[spec.name] if spec.role.is_state else given[0] for spec in graph.signature.inputs]
    results = as_function(graph.ops, graph.name, graph.graphs)(*values)
    found = {spec.name: value for spec, value in zip(graph.signature.outputs, results, strict=True)}
    state.update({spec.name: found[spec.name] for spec in graph.signature.outputs if spec.role is OutputRole.NEW_VALUE})
    return found


def after_two_micro_batches(graph, chosen):
    """All state after micro-batches [1, 2] and [3, 6] and an update."""
    step, update = split_update(graph, chosen, runs=2)
    for each in (step, update):
        verify(each)
    specs = [spec for each in (step, update) for spec in each.signature.state]
    state = {spec.name: torch.zeros(spec.shape, dtype=spec.dtype) for spec in specs}
    for x in ([1.0, 2.0], [3.0, 6.0]):
        run(step, state, torch.tensor(x, dtype=graph.signature.inputs[-1].dtype))
    run(update, state)
    return state


@pytest.mark.parametrize(
    ("reduction", "strategy", "expected"),
    [
        (ReductionType.Sum, MeanReductionStrategy.Post, [20 - 4.0, 20 - 8.0]),
        (ReductionType.Mean, MeanReductionStrategy.Post, [20 - 2.0, 20 - 4.0]),
        (ReductionType.Mean, MeanReductionStrategy.Running, [20 - 2.0, 20 - 4.0]),
    ],
)
def test_the_update_sees_the_sum_or_the_mean_and_leaves_the_accumulators_at_zero(reduction, strategy, expected):
    state = after_two_micro_batches(step_graph(), settings(reduction, strategy))
    assert state["w"].tolist() == expected
    left = {name: value for name, value in state.items() if name not in ("w", "count")}
    assert left
    assert not any(value.any() for value in left.values())


def test_what_forward_changes_is_written_by_every_micro_batch_before_the_update_sees_it():
    state = after_two_micro_batches(step_graph(), settings(ReductionType.Sum))
    assert state["count"].item() == 2
    assert state["w"].tolist() == [2 * 10 - (1 + 3), 2 * 10 - (2 + 6)]


def test_a_single_run_writes_its_gradient_over_what_is_there_and_nobody_clears_it():
    step, update = split_update(step_graph(), settings(ReductionType.Sum), runs=1)
    state = {spec.name: torch.full(spec.shape, 7.0) for each in (step, update) for spec in each.signature.state}
    run(step, state, torch.tensor([1.0, 2.0]))
    assert state["w:accumulator"].tolist() == [1, 2]
    run(update, state)
    assert state["w:accumulator"].tolist() == [1, 2]
    assert "w:accumulator" not in update.signature.written


def test_a_running_mean_counts_its_gradients_and_a_sum_does_not():
    def names(strategy):
        step, _ = split_update(step_graph(), settings(strategy=strategy), runs=2)
        return [spec.name for spec in step.signature.inputs if spec.role is Role.ACCUMULATOR]

    assert names(MeanReductionStrategy.Post) == ["w:accumulator"]
    assert names(MeanReductionStrategy.Running) == ["w:accumulator", "accumulated:count"]


@pytest.mark.parametrize(
    ("dtype", "chosen", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float16, None, torch.float32),
        (torch.float16, torch.float16, torch.float16),
        (torch.float64, None, torch.float64),
    ],
)
def test_gradients_are_added_up_in_the_chosen_type_or_in_one_that_holds_the_sum(dtype, chosen, expected):
    step, _ = split_update(step_graph(dtype, accumulated_as=chosen), settings(), runs=2)
    (accumulator,) = [spec for spec in step.signature.inputs if spec.role is Role.ACCUMULATOR]
    assert accumulator.dtype is expected
    assert after_two_micro_batches(step_graph(dtype, accumulated_as=chosen), settings())["w"].tolist() == [
        20 - 2.0,
        20 - 4.0,
    ]


def test_the_micro_step_has_no_op_of_the_update_and_the_update_no_input_of_the_user():
    step, update = split_update(step_graph(), settings(), runs=2)
    assert "update" not in str(step).replace("update(", "")
    assert not [spec for spec in update.signature.inputs if spec.role is Role.USER_INPUT]
    assert has_update(step_graph())
    assert not has_update(step)


def test_only_gradients_of_what_the_update_changes_are_accumulated():
    assert list(trained_gradients(step_graph())) == ["w"]
    step, _ = split_update(step_graph(), settings(), runs=2)
    assert not trained_gradients(step)


def test_a_step_that_is_not_cut_returns_no_gradients():
    graph = drop_intermediates(step_graph())
    verify(graph)
    roles = {spec.role for spec in graph.signature.outputs}
    assert roles == {OutputRole.USER_OUTPUT, OutputRole.NEW_VALUE}
