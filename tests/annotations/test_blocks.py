"""Blocks: what annotations do to a module, and where the operations of a model are placed because of them."""

from __future__ import annotations

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

import poptorch
from poptorch.ir import Direction, note_of


class Stack(nn.Module):
    """Linear layers, one after the other; `place` is called before each."""

    def __init__(self, depth=3, place=lambda layer: None):
        super().__init__()
        for number in range(depth):
            setattr(self, f"l{number}", nn.Linear(4, 4))
        self.depth, self.place = depth, place

    def forward(self, x):
        for number in range(self.depth):
            self.place(number)
            x = getattr(self, f"l{number}")(x)
        return x


def scoped(*ipus, **how):
    """A model that multiplies by 2 in a scope on each of these IPUs."""

    class Scoped(nn.Module):
        def forward(self, x):
            poptorch.Block.useAutoId()
            for ipu in ipus:
                with poptorch.Block(ipu_id=ipu, **how):
                    x = x * 2
            return x

    return Scoped()


def started(*ipus):
    class Started(nn.Module):
        def forward(self, x):
            for ipu in ipus:
                poptorch.Block.start(ipu_id=ipu)
                x = x * 2
            return x

    return Started()


def compiled(model, x, strategy=None, iterations=1):
    options = poptorch.Options().deviceIterations(iterations)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    inference = poptorch.inferenceModel(model, options)
    inference.compile(x)
    return inference


def placements(inference, op="mul"):
    """The IPU and stage of every forward op of a kind, in order."""
    graph = inference._executable.step.graph
    nodes = [node for node in graph.ops.nodes if node.op == "call_function" and op in str(node.target)]
    notes = [note_of(node) for node in nodes]
    return [(note.placement.ipu, note.placement.stage) for note in notes if note.direction is Direction.FORWARD]


AUTO = poptorch.AutoStage.AutoIncrement


def test_scopes_place_what_is_inside():
    inference = compiled(scoped(0, 1), torch.ones(2, 5), iterations=2)
    assert placements(inference) == [(0, 0), (1, 1)]
    assert torch.equal(inference(torch.ones(2, 5)), torch.full((2, 5), 4.0))


def test_a_started_block_lasts_until_the_next():
    assert placements(compiled(started(0, 1), torch.ones(2, 5), iterations=2)) == [(0, 0), (1, 1)]


def test_an_operation_after_a_scope_belongs_to_no_block():
    class After(nn.Module):
        def forward(self, x):
            with poptorch.Block(ipu_id=0):
                x = x * 4
            return x * 4

    with pytest.raises(poptorch.Error, match=r"No active Block(.|\n)*test_blocks.py.*return x \* 4"):
        compiled(After(), torch.ones(2, 5), poptorch.PipelinedExecution(AUTO))
    assert placements(compiled(scoped(0), torch.ones(2, 5))) == [(0, 0)]


def test_an_operation_after_an_inner_scope_is_told_about_nesting():
    class Nested(nn.Module):
        def forward(self, x):
            with poptorch.Block(ipu_id=0):
                with poptorch.Block(ipu_id=1):
                    x = x * 2
                return x * 2

    with pytest.raises(poptorch.Error, match="a Block inside another one"):
        compiled(Nested(), torch.ones(2, 5))


def test_stages_are_numbered_as_blocks_are_met():
    strategy = poptorch.PipelinedExecution(AUTO)
    assert placements(compiled(scoped(0, 1, 2, 1), torch.ones(4, 5), strategy, 4)) == [(0, 1), (1, 2), (2, 3), (1, 4)]


def test_what_comes_before_the_first_block_is_stage_0():
    model = Stack(4)
    for layer, ipu in ((model.l1, 1), (model.l2, 2), (model.l3, 1)):
        poptorch.BeginBlock(layer, ipu_id=ipu)
    found = placements(compiled(model, torch.ones(4, 4), poptorch.PipelinedExecution(AUTO), 4), "addmm")
    assert found == [(0, 0), (1, 1), (2, 2), (1, 3)]


def test_annotated_layers_begin_blocks_that_include_their_siblings():
    model = Stack(3)
    poptorch.BeginBlock(model.l1, ipu_id=1)
    assert placements(compiled(model, torch.ones(2, 4), iterations=2), "addmm") == [(0, 0), (1, 1), (1, 1)]


def test_decorated_methods_are_blocks(tmp_path):
    inference = poptorch.inferenceModel(Decorated(), poptorch.Options().deviceIterations(2))
    assert torch.equal(inference(torch.ones(2, 5)), torch.full((2, 5), 4.0))
    assert placements(inference) == [(0, 0), (1, 1)]


class Decorated(nn.Module):
    @poptorch.BlockFunction(ipu_id=0)
    def first(self, x):
        return x * 2

    @poptorch.BlockFunction("last", ipu_id=1)
    def second(self, x):
        return x * 2

    def forward(self, x):
        return self.second(self.first(x))


def test_a_module_with_decorated_methods_can_be_pickled():
    loaded = pickle.loads(pickle.dumps(Decorated()))
    assert torch.equal(loaded(torch.ones(2)), torch.full((2,), 4.0))


def test_an_annotated_layer_stays_what_it_is():
    model = Stack()
    before = list(model.state_dict())
    assert poptorch.BeginBlock(model.l1, ipu_id=1) is model.l1
    assert type(model.l1) is nn.Linear
    assert list(model.state_dict()) == before
    model.load_state_dict(Stack().state_dict(), strict=True)
    model.l1.register_buffer("more", torch.zeros(1))
    assert "l1.more" in model.state_dict()


def test_a_list_of_layers_is_annotated_at_its_first():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.rest = poptorch.BeginBlock(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), ipu_id=1)

        def forward(self, x):
            x = self.first(x)
            for layer in self.rest:
                x = layer(x)
            return x

    assert placements(compiled(Listed(), torch.ones(2, 4), iterations=2), "addmm") == [(0, 0), (1, 1), (1, 1)]


def test_annotations_are_shown():
    model = Stack()
    assert "BeginBlock(" not in poptorch.module_repr(model)
    poptorch.BeginBlock(model.l1, ipu_id=1)
    poptorch.BeginBlock(model.l2, "last", ipu_id=2)
    assert "(l1): BeginBlock(user_id=None, ipu_id=1)" in poptorch.module_repr(model)
    assert "(l2): BeginBlock(user_id=last, ipu_id=2)" in repr(poptorch.inferenceModel(model))


def test_placements_are_printed_with_the_graph():
    inference = compiled(scoped(0, 1), torch.ones(2, 5), iterations=2)
    assert "ipu 1 stage 1" in str(inference._executable)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_their_annotations(duplicate):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    poptorch.BeginBlock(model, user_id=1, ipu_id=2)
    poptorch.BeginBlock(model[0][0], ipu_id=3)
    text = poptorch.module_repr(duplicate(model))
    assert "BeginBlock(user_id=1, ipu_id=2)" in text
    assert "BeginBlock(user_id=None, ipu_id=3)" in text


def test_annotated_modules_can_be_saved():
    file = io.BytesIO()
    torch.save(poptorch.BeginBlock(nn.Sequential(nn.Linear(2, 2)), user_id=1, ipu_id=2), file)
    file.seek(0)
    assert "BeginBlock(user_id=1, ipu_id=2)" in poptorch.module_repr(torch.load(file, weights_only=False))


def test_a_function_becomes_a_module():
    begun = poptorch.BeginBlock(torch.relu, 1, 2)
    assert (begun._user_id, begun._ipu_id) == (1, 2)
    assert torch.equal(pickle.loads(pickle.dumps(begun))(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))


def test_a_layer_belongs_to_one_block():
    layer = poptorch.BeginBlock(nn.Linear(2, 2), ipu_id=0)
    with pytest.raises(poptorch.Error, match="module has already been assigned to a block"):
        poptorch.BeginBlock(layer, ipu_id=1)


def test_removed_annotations_are_gone_and_can_be_made_again():
    model = Stack()
    poptorch.BeginBlock(model.l1, ipu_id=1)
    poptorch.removeBlocks(model)
    assert "BeginBlock(" not in poptorch.module_repr(model)
    poptorch.BeginBlock(model.l1, ipu_id=1)
    assert placements(compiled(model, torch.ones(2, 4), iterations=2), "addmm") == [(0, 0), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: poptorch.BeginBlock("text"), poptorch.Error),
        (lambda: poptorch.removeBlocks(5), AssertionError),
        (lambda: compiled(scoped("first"), torch.ones(1)), AssertionError),
        (lambda: compiled(scoped(-1), torch.ones(1)), AssertionError),
    ],
)
def test_nonsense_is_refused(wrong, error):
    with pytest.raises(error):
        wrong()


def test_on_the_host_annotations_do_nothing():
    model = poptorch.BeginBlock(scoped(0, 1), ipu_id=1)
    assert torch.equal(model(torch.ones(2)), torch.full((2,), 4.0))


def test_a_named_block_can_be_entered_again():
    class Again(nn.Module):
        def forward(self, x):
            with poptorch.Block("A"):
                x = x * 2
            with poptorch.Block("B"):
                x = x * 2
            with poptorch.Block("B"):
                return x * 2

    strategy = poptorch.PipelinedExecution("A", "B")
    strategy.stage("A").ipu(0)
    strategy.stage("B").ipu(1)
    assert placements(compiled(Again(), torch.ones(2, 5), strategy, 2)) == [(0, 0), (1, 1), (1, 1)]


def test_blocks_without_an_id_are_numbered_beside_those_that_have_one():
    class Some(nn.Module):
        def forward(self, x):
            poptorch.Block.useAutoId()
            with poptorch.Block():
                x = x * 2
            with poptorch.Block("named"):
                x = x * 2
            with poptorch.Block():
                return x * 2

    strategy = poptorch.PipelinedExecution("0", "named", "1")
    assert placements(compiled(Some(), torch.ones(3, 5), strategy, 3)) == [(0, 0), (1, 1), (2, 2)]


def test_the_ipu_may_be_given_as_text():
    assert placements(compiled(scoped("0", "1"), torch.ones(2, 5), iterations=2)) == [(0, 0), (1, 1)]


def test_the_oldest_annotation_wraps_layers():
    model = Stack(4)
    for number in (1, 2, 3):
        setattr(model, f"l{number}", poptorch.IPU(number, getattr(model, f"l{number}")))
    assert placements(compiled(model, torch.ones(4, 4), iterations=4), "addmm") == [(0, 0), (1, 1), (2, 2), (3, 3)]
    with pytest.raises(poptorch.Error, match="deviceIterations must be greater"):
        compiled(model, torch.ones(3, 4), iterations=3)


def test_the_oldest_annotation_is_a_scope_too():
    class Old(nn.Module):
        def forward(self, x):
            x = x * 2
            for ipu in (1, 2, 3):
                with poptorch.IPU(ipu):
                    x = x * 2
            return x

    assert placements(compiled(Old(), torch.ones(4, 5), iterations=4)) == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_backward_and_update_follow_their_layers():
    class Training(Stack):
        def forward(self, x):
            return poptorch.identity_loss(super().forward(x), reduction="mean")

    model = Training(2)
    poptorch.BeginBlock(model.l1, ipu_id=1)
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(3, 4))
    notes = [note_of(node) for node in training._executable.step.graph.ops.nodes if node.op == "call_function"]
    backward = {
        note.placement.ipu for note in notes if note.direction is Direction.BACKWARD and note.placement is not None
    }
    assert backward == {0, 1}


def test_a_wrapped_model_with_decorated_methods_can_be_saved(tmp_path):
    torch.save(poptorch.inferenceModel(Decorated()), tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size > 0


class Branches(nn.Module):
    """A branch on each of two IPUs."""

    def forward(self, condition, x, y):
        with poptorch.Block("0", ipu_id=0):
            x = poptorch.cond(condition, lambda x: x + 1, [x], lambda x: x - 1, [x])[0]
        with poptorch.Block("1", ipu_id=1):
            return poptorch.cond(condition, lambda x, y: x * y, [x, y], lambda x, y: x + y, [x, y])[0]


@pytest.mark.parametrize("condition", [True, False])
@pytest.mark.parametrize(
    "strategy",
    [
        lambda: poptorch.ShardedExecution(),
        lambda: poptorch.SerialPhasedExecution("0", "1"),
        lambda: poptorch.ParallelPhasedExecution("0", "1"),
    ],
)
def test_branches_may_be_on_several_ipus(condition, strategy):
    options = poptorch.Options().autoRoundNumIPUs(True).setExecutionStrategy(strategy())
    x, y = torch.full((2,), 3.0), torch.full((2,), 5.0)
    found = poptorch.inferenceModel(Branches(), options)(torch.tensor([condition]), x, y)
    assert torch.equal(found, (x + 1) * y if condition else (x - 1) + y)


def test_loops_may_be_on_several_ipus():
    class Loops(nn.Module):
        def forward(self, x, y):
            with poptorch.Block(ipu_id=0):
                (x,) = poptorch.for_loop(5, lambda x: x + y, [x])
            with poptorch.Block(ipu_id=1):
                (x,) = poptorch.for_loop(5, lambda x: x + y, [x])
                return x

    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    x, y = torch.ones(2), torch.full((2,), 2.0)
    assert torch.equal(poptorch.inferenceModel(Loops(), options)(x, y), x + 10 * y)


@pytest.fixture
def is_pipelined(caplog):
    """Whether the log says that the model which was compiled last is a pipeline."""
    poptorch.setLogLevel("DEBUG")
    caplog.set_level(logging.DEBUG)
    prefix = "enablePipelining set to value "
    yield lambda: [text for text in caplog.messages if text.startswith(prefix)][-1] == prefix + "1"
    poptorch.setLogLevel("WARN")


def test_layers_on_one_ipu_are_no_pipeline(is_pipelined):
    model = Stack(2)
    poptorch.BeginBlock(model.l0, ipu_id=0)
    poptorch.BeginBlock(model.l1, ipu_id=0)
    inference = compiled(model, torch.ones(1, 4))
    assert placements(inference, "addmm") == [(0, 0), (0, 0)]
    assert not is_pipelined()


def test_layers_that_are_annotated_with_the_same_ipu_share_a_stage(is_pipelined):
    model = Stack(3)
    poptorch.BeginBlock(model.l1, ipu_id=1)
    poptorch.BeginBlock(model.l2, ipu_id=1)
    inference = compiled(model, torch.ones(2, 4), iterations=2)
    assert placements(inference, "addmm") == [(0, 0), (1, 1), (1, 1)]
    assert is_pipelined()


def test_an_annotated_layer_keeps_its_values_and_takes_parameters():
    model = Stack()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_parameters()]
    poptorch.BeginBlock(model.l1, ipu_id=1)
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.l1.register_parameter("more", nn.Parameter(torch.zeros(1)))
    assert "l1.more" in dict(model.named_parameters())


def test_an_annotated_module_is_loaded_in_another_process(tmp_path, programs):
    file = str(tmp_path / "model.pt")
    torch.save(poptorch.BeginBlock(nn.Sequential(nn.Linear(2, 2)), user_id=1, ipu_id=2), file)
    program = programs.run(f"import torch; print(poptorch.module_repr(torch.load({file!r}, weights_only=False)))")
    assert "BeginBlock(user_id=1, ipu_id=2)" in program.output


def test_nested_layers_are_placed_until_annotations_are_removed(is_pipelined):
    def annotate(model):
        poptorch.BeginBlock(model[0].l1, ipu_id=1)
        poptorch.BeginBlock(model[1], ipu_id=2)
        return compiled(model, torch.ones(3, 4), iterations=3)

    model = nn.Sequential(Stack(), Stack())
    expected = [(0, 0), (1, 1), (1, 1), (2, 2), (2, 2), (2, 2)]
    inference = annotate(model)
    assert placements(inference, "addmm") == expected
    assert is_pipelined()
    poptorch.removeBlocks(model)
    without = compiled(model, torch.ones(3, 4), iterations=3)
    assert placements(without, "addmm") == [(0, 0)] * 6
    assert not is_pipelined()
    assert placements(annotate(model), "addmm") == expected


def test_on_the_host_annotated_layers_compute_what_they_did():
    model, x = Stack(), torch.ones(2, 4)
    expected = model(x)
    poptorch.BeginBlock(model.l1, ipu_id=1)
    assert torch.equal(model(x), expected)


class Lettered(nn.Module):
    """A layer in each of four blocks, and the loss in the last of them again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in "ABCD")

    def forward(self, x, target=None):
        for name, layer in zip("ABCD", self.layers, strict=True):
            with poptorch.Block(name):
                x = layer(x)
        if target is None:
            return x
        with poptorch.Block("D"):
            return x, nn.functional.mse_loss(x, target)


def on_four_ipus():
    strategy = poptorch.PipelinedExecution("A", "B", "C", "D")
    for ipu, name in enumerate("ABCD"):
        strategy.stage(name).ipu(ipu)
    return strategy


def test_stages_place_the_blocks_they_list():
    found = compiled(Lettered(), torch.ones(4, 4), on_four_ipus(), 4)
    assert placements(found, "addmm") == [(0, 0), (1, 1), (2, 2), (3, 3)]
    pairs = poptorch.PipelinedExecution(poptorch.Stage("A", "B"), poptorch.Stage("C", "D"))
    two = compiled(Lettered(), torch.ones(2, 4), pairs, 2)
    assert placements(two, "addmm") == [(0, 0), (0, 0), (1, 1), (1, 1)]


def test_the_loss_may_be_in_the_block_of_the_last_layer():
    model = Lettered()
    options = poptorch.Options().setExecutionStrategy(on_four_ipus())
    options.Training.gradientAccumulation(7)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training(torch.ones(7, 4), torch.ones(7, 4))
    assert placements(training, "addmm")[-1] == (3, 3)
    assert set(placements(training, "mse_loss")) == {(3, 3)}


def test_shards_compute_what_the_host_computes():
    class Factors(nn.Module):
        def forward(self, x):
            for ipu in range(4):
                with poptorch.Block(str(ipu), ipu_id=ipu):
                    x = x * (ipu + 2)
            return x

    strategy = poptorch.ShardedExecution(*[poptorch.Stage(str(k)) for k in range(4)])
    x = torch.randn(3, 7)
    inference = compiled(Factors(), x, strategy)
    assert placements(inference) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert torch.equal(inference(x), Factors()(x))


def test_shards_in_scopes_need_no_full_pipeline():
    x = torch.ones(2, 5)
    with pytest.raises(poptorch.Error, match="deviceIterations must be greater"):
        compiled(scoped(0, 1, 2, 3), x, iterations=2)
    assert torch.equal(compiled(scoped(0, 1, 2, 3), x, poptorch.ShardedExecution(), 2)(x), x * 16)
