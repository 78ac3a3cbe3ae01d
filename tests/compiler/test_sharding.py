"""An update that is cut by rows: which parameters are, what is exchanged before, and what runs when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.errors import CompileError
from poptorch.executable import Commit, Exchange, Executable, Gather, Reduce, Shard


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 5)

    def forward(self, x, target):
        return nn.functional.mse_loss(self.fc(x), target)


def compiled(optimizer, index=0, count=2, fewest=1, clip_norm=None, **more) -> Executable:
    """The executable of one of several processes, without any of them."""
    from poptorch.capture import Call
    from poptorch.capture.record import capture_training
    from poptorch.compiler import Surroundings, compile_graph
    from poptorch.executable import Arguments, GroupBinding, Interface
    from poptorch.optim.plan import plan_optimizers
    from poptorch.options import resolve
    from poptorch.structure import flatten

    options = poptorch.Options().runSideBySide(False)
    options.Distributed.configureProcessId(index, count)
    by_rows = poptorch.TensorLocationSettings().useReplicatedTensorSharding()
    options.TensorLocations.setOptimizerLocation(by_rows.minElementsForReplicatedTensorSharding(fewest))
    if clip_norm is not None:
        options.Training.clipGradNorm(clip_norm)
    for name, anchored in more.items():
        options.anchorTensor(name, anchored)
    settings = resolve(options, training=True)
    model = Model()
    plans = plan_optimizers([optimizer(model.parameters(), lr=0.1)])
    args, tensors = flatten((torch.ones(2, 3), torch.ones(2, 5)))
    kwargs, _ = flatten({})
    captured = capture_training(model, Call(args, kwargs, ("x", "target"), tuple(tensors)), plans, settings)
    call = Arguments(("x", "target"), args, kwargs, ("x", "target"), (), ())
    groups = tuple(GroupBinding(g.index, g.optimizer, g.position, g.names, "") for g in captured.groups)
    return compile_graph(
        captured.graph, Surroundings(Interface(call, captured.result), groups), settings, lambda *_: None
    )


def test_each_process_updates_its_rows(golden):
    executable = compiled(torch.optim.AdamW, clip_norm=1.0)
    programs = [executable.program("exchange0"), executable.program("update")]
    text = "\n\n".join(map(str, [executable.schedule, executable.binding, *(program.graph for program in programs)]))
    golden.check(text)


def test_rows_are_shared_out_as_torch_does():
    bounds = [compiled(torch.optim.SGD, index, 3).binding.shards for index in range(3)]
    assert bounds[2][0] == Shard("fc.weight", (0, 2, 4, 5), 2, (5, 3))
    assert [shards[0].rows for shards in bounds] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert [chunk.shape[0] for chunk in torch.ones(5, 3).chunk(3)] == [shards[0].own_shape[0] for shards in bounds]


def test_small_parameters_and_those_without_rows_for_all_stay_whole():
    assert [shard.name for shard in compiled(torch.optim.SGD, fewest=15).binding.shards] == ["fc.weight"]
    executable = compiled(torch.optim.SGD, count=6)
    assert executable.binding.shards == ()
    assert executable.common == ""


def test_what_needs_all_rows_stays_whole_with_a_warning(caplog):
    executable = compiled(torch.optim.Adafactor)
    assert [shard.name for shard in executable.binding.shards] == ["fc.bias"]
    assert (
        "every process keeps all rows of the optimiser's state for fc.weight: row_var has another shape" in caplog.text
    )


def test_the_schedule_reduces_by_rows_exchanges_commits_and_gathers():
    schedule = compiled(poptorch.optim.LAMB, clip_norm=1.0).schedule
    kinds = [type(step) for step in schedule.instructions[1:]]
    assert kinds == [Reduce, Exchange, Exchange, Commit, Gather]  # the norm of gradients, then those of updates
    assert schedule.reduction is not None
    assert schedule.reduction.scattered == ("fc.weight:accumulator", "fc.bias:accumulator")
    assert schedule.gathering is not None
    assert schedule.gathering.parameters == ("fc.weight", "fc.bias")


def test_all_processes_agree_on_what_they_run_together():
    first, last = (compiled(torch.optim.Adam, index) for index in (0, 1))
    assert first.digest != last.digest  # 3 rows and 2
    assert first.common == last.common != ""


def test_anchors_of_state_that_no_process_has_in_one_piece_are_refused():
    compiled(torch.optim.Adam, weight="fc.weight")
    with pytest.raises(CompileError, match=r"anchor 'moment' asks for fc.weight:exp_avg, of which each process has"):
        compiled(torch.optim.Adam, moment="fc.weight:exp_avg")
