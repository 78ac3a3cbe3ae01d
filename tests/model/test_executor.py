"""The life of an executor: compile, run, detach, destroy; weights, optimiser, and what a failure leaves behind."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from models import Gate, Regression, Scale


def options(**counts: int) -> poptorch.Options:
    made = poptorch.Options().engine("eager").deviceIterations(counts.get("D", 1)).replicationFactor(counts.get("R", 1))
    made.Training.gradientAccumulation(counts.get("G", 1))
    return made


def sgd(module: nn.Module, lr: float = 0.1, **settings: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=lr, **settings)


def batch(rows: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def train(module: nn.Module, optimizer=None, **counts: int) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(module, options(**counts), optimizer or sgd(module))


def infer(module, **counts: int) -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(module, options(**counts))


def snapshot(module: nn.Module, optimizer: torch.optim.Optimizer | None = None):
    """A deep copy of everything that training may change."""
    return copy.deepcopy((module.state_dict(), optimizer.state_dict() if optimizer else None))


def assert_same(before, after) -> None:
    torch.testing.assert_close(after, before, rtol=0, atol=0)


# ---- end to end


def test_end_to_end():
    """D = 4 updates of G = 2 micro-batches in one call equal the same four updates in plain PyTorch."""
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    training = train(model, D=4, G=2)
    x, target = batch(rows=2 * 8)
    out, loss = training(x, target)
    predicted = infer(model)(x, target)[0]

    optimizer = sgd(reference)
    for d in range(4):
        optimizer.zero_grad()
        for g in range(2):
            rows = slice((d * 2 + g) * 2, (d * 2 + g) * 2 + 2)
            expected_out, expected_loss = reference(x[rows], target[rows])
            (expected_loss / 2).backward()
        optimizer.step()
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    torch.testing.assert_close(predicted, reference(x, target)[0])
    assert loss.shape == ()


@pytest.mark.inductor
def test_training_matches_plain_pytorch(engine):
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    made = poptorch.Options().engine(engine).deviceIterations(2)
    training = poptorch.trainingModel(model, made, sgd(model, momentum=0.9))
    optimizer = sgd(reference, momentum=0.9)
    for seed in range(3):
        x, target = batch(rows=8, seed=seed)
        training(x, target)
        for rows in (slice(0, 4), slice(4, 8)):
            optimizer.zero_grad()
            reference(x[rows], target[rows])[1].backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict(), rtol=1e-4, atol=1e-6)


# ---- wrapping


def test_wrapping_twice_is_refused():
    model = Regression()
    training = train(model)
    with pytest.raises(RuntimeError, match="Model has already been wrapped"):
        train(model)
    assert not training.isCompiled()


@pytest.mark.parametrize("compiled", [False, True])
def test_after_destroy_the_model_can_be_wrapped_again(compiled):
    model = Regression()
    training = train(model)
    if compiled:
        training(*batch())
    training.destroy()
    train(model)(*batch())


def test_a_forgotten_executor_does_not_hold_the_model():
    model = Regression()
    train(model)(*batch())
    gc.collect()
    train(model)


def test_wrapping_an_executor_wraps_its_model():
    model = Regression()
    training = train(model)
    training.destroy()
    assert poptorch.trainingModel(training, options(), sgd(model)).model is model


def test_the_model_of_a_training_executor_is_the_users():
    model = Regression()
    assert train(model).model is model


def test_the_model_of_an_inference_executor_is_a_shallow_copy():
    model = Regression()
    inference = infer(model)
    assert inference.model is not model
    assert inference.model.fc is model.fc


def test_wrapping_keeps_the_mode_of_the_model():
    model = Regression().eval()
    assert infer(model).training is False


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_options_must_be_options(wrap):
    with pytest.raises(poptorch.Error, match="Options"):
        wrap(Regression(), {"deviceIterations": 2})


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_model_must_be_a_module(wrap):
    with pytest.raises(poptorch.Error, match="Module"):
        wrap(lambda x: x)


@pytest.mark.parametrize("strategy", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_inference_accumulates_no_gradients(strategy):
    made = options(G=2).setExecutionStrategy(strategy(poptorch.AutoStage.AutoIncrement))
    text = r"You must set poptorch\.Options\(\)\.Training\.gradientAccumulation to 1; deviceIterations"
    with pytest.raises(poptorch.Error, match=rf"(?s)gradientAccumulation is 2.*{text}"):
        poptorch.inferenceModel(Regression(), made)


def test_without_an_optimiser_it_is_plain_gradient_descent():
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    x, target = batch()
    poptorch.trainingModel(model, options())(x, target)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.01)
    reference(x, target)[1].backward()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_training_a_model_without_parameters_fails_like_torch():
    class Nothing(nn.Module):
        def forward(self, x):
            return poptorch.identity_loss(x, "mean")

    with pytest.raises(ValueError, match="empty parameter list"):
        poptorch.trainingModel(Nothing(), options())


# ---- life cycle


def test_states_of_an_executor():
    training = train(Regression())
    assert (training.isCompiled(), training.isAttachedToDevice()) == (False, False)
    training(*batch())
    assert (training.isCompiled(), training.isAttachedToDevice()) == (True, True)
    training.detachFromDevice()
    assert (training.isCompiled(), training.isAttachedToDevice()) == (True, False)
    training.attachToDevice()
    assert (training.isCompiled(), training.isAttachedToDevice()) == (True, True)
    training.destroy()
    assert (training.isCompiled(), training.isAttachedToDevice()) == (False, False)


NEEDS_PROGRAM = ["copyWeightsToHost", "copyWeightsToDevice", "attachToDevice", "detachFromDevice"]


@pytest.mark.parametrize("wrap", [train, infer])
@pytest.mark.parametrize("method", NEEDS_PROGRAM)
def test_methods_that_need_a_program(method, wrap):
    executor = wrap(Regression())
    for _ in range(2):
        with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed"):
            getattr(executor, method)()
        executor(*batch())
        executor.destroy()


def test_detaching_twice():
    training = train(Regression())
    training(*batch())
    training.detachFromDevice()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        training.detachFromDevice()


def test_attaching_twice():
    training = train(Regression())
    training(*batch())
    with pytest.raises(poptorch.Error, match="already attached"):
        training.attachToDevice()


def test_calling_a_detached_model_attaches_it():
    training = train(Regression())
    training(*batch())
    training.detachFromDevice()
    training(*batch())
    assert training.isAttachedToDevice()


def test_destroying_twice_does_no_harm():
    training = train(Regression())
    training(*batch())
    training.destroy()
    training.destroy()


def test_destroyed_training_model_can_be_called_again():
    training = train(Regression())
    training(*batch(4))
    training.destroy()
    training(*batch(6))
    assert training.isCompiled()


def test_compile_does_not_run():
    model = Regression()
    optimizer = sgd(model, momentum=0.9)
    training = train(model, optimizer)
    before = snapshot(model)
    training.compile(*batch())
    assert training.isCompiled()
    assert_same(before, snapshot(model))


def test_compiling_twice_is_ignored_with_a_warning(caplog):
    training = train(Regression())
    training.compile(*batch())
    training.compile(*batch(6))
    assert "ignored" in caplog.text
    training(*batch())


def test_forward_runs_in_python_only_while_compiling():
    calls = []

    class Noisy(Regression):
        def forward(self, x, target):
            calls.append(poptorch.isRunningOnIpu())
            return super().forward(x, target)

    training = train(Noisy())
    training(*batch())
    count = len(calls)
    for _ in range(3):
        training(*batch())
    assert len(calls) == count
    assert all(calls)
    assert not poptorch.isRunningOnIpu()


def test_running_on_ipu_chooses_the_branch():
    class Either(nn.Module):
        def forward(self, x, y):
            return x + y if poptorch.isRunningOnIpu() else x * y

    x, y = torch.tensor([50.0]), torch.tensor([2.0])
    assert infer(Either())(x, y).item() == 52
    assert Either()(x, y).item() == 100


# ---- looking like the model


@pytest.mark.parametrize("wrap", [train, infer])
def test_attributes_reach_the_model(wrap):
    class Named(Regression):
        label = "mine"

        def double(self, x):
            return 2 * x

    executor = wrap(Named())
    assert executor.label == "mine"
    assert executor.double(3) == 6
    assert executor.fc is executor.model.fc
    assert list(executor.state_dict()) == ["fc.weight", "fc.bias"]
    assert [name for name, _ in executor.named_parameters()] == ["fc.weight", "fc.bias"]


def test_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        infer(Regression()).no_such_thing


def test_writing_an_attribute_stays_on_the_executor():
    model = Regression()
    training = train(model)
    training.note = "hello"
    assert training.note == "hello"
    assert not hasattr(model, "note")


def test_repr_shows_the_module_tree_and_the_state():
    training = train(Regression())
    assert "(fc): Linear(in_features=3, out_features=2" in repr(training)
    assert "not compiled" in repr(training)
    training(*batch())
    assert "not compiled" not in repr(training)
    assert "emulated" in repr(training)


def test_options_of_an_executor_are_frozen():
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        train(Regression()).options.deviceIterations(2)


# ---- results


def test_backward_of_a_result_is_refused():
    out, loss = train(Regression())(*batch())
    for result in (out, loss):
        with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
            result.backward()


def test_results_are_fresh_and_without_history():
    training = train(Regression())
    first = training(*batch())
    values = [result.clone() for result in first]
    second = training(*batch(seed=1))
    assert all(not result.requires_grad for result in (*first, *second))
    assert all(torch.equal(result, value) for result, value in zip(first, values, strict=True))


def test_the_first_loss_is_that_of_the_initial_weights():
    model = Regression()
    x, target = batch()
    expected = model(x, target)[1].detach()
    torch.testing.assert_close(train(model)(x, target)[1], expected)


class Structured(nn.Module):
    def forward(self, x):
        y = x + 1
        return {"b": [y, (y * 2, None)], "a": "text", "x": x, "n": 3}


def test_structure_of_the_result_is_that_of_forward():
    model = infer(Structured())
    for value in (1.0, 5.0):
        x = torch.tensor([value])
        result, expected = model(x), Structured()(x)
        assert list(result) == list(expected)
        assert isinstance(result["b"], list)
        assert isinstance(result["b"][1], tuple)
        assert (result["a"], result["n"], result["b"][1][1]) == ("text", 3, None)
        assert torch.equal(result["b"][0], expected["b"][0])
        assert torch.equal(result["b"][1][0], expected["b"][1][0])
        assert torch.equal(result["x"], x)


def test_a_returned_input_does_not_alias_the_callers_tensor():
    x = torch.tensor([1.0])
    returned = infer(Structured())(x)["x"]
    returned.add_(1)
    assert x.item() == 1


def test_64_bit_results_come_back_narrow():
    class Wide(nn.Module):
        def forward(self, x, i):
            return x.double(), i, i + 1

    results = infer(Wide())(torch.ones(2), torch.tensor([1, 2]))
    assert [result.dtype for result in results] == [torch.float32, torch.int32, torch.int32]


class InPlace(nn.Module):
    def forward(self, x):
        x += 1


def test_in_place_change_of_an_input_reaches_the_caller():
    model = infer(InPlace())
    x = torch.tensor([1.0])
    assert model(x) is None
    assert x.item() == 2
    model(x)
    assert x.item() == 3
    other = torch.tensor([10.0])
    model(other)
    assert (x.item(), other.item()) == (3, 11)


def test_in_place_change_of_every_micro_batch_reaches_the_caller():
    x = torch.arange(4.0)
    infer(InPlace(), D=2, R=2)(x)
    assert torch.equal(x, torch.arange(4.0) + 1)


# D, G, R, mode, period → copies, for two rows per micro-batch
MODES = [
    (4, 2, 1, poptorch.OutputMode.All, None),
    (4, 2, 1, poptorch.OutputMode.EveryN, 2),
    (4, 2, 2, poptorch.OutputMode.Final, None),
    (4, 2, 2, poptorch.OutputMode.Sum, None),
    (4, 2, 2, poptorch.OutputMode.EveryN, 2),
    (1, 1, 1, poptorch.OutputMode.All, None),
]


class Echo(nn.Module):
    """Returns its input, and a loss that is the sum of it: results show which rows they come from."""

    def __init__(self):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        y = x + self.zero * 0
        return y, poptorch.identity_loss(y, "sum"), torch.ones(3)


@pytest.mark.parametrize(("d", "g", "r", "mode", "period"), MODES)
def test_output_modes_return_the_right_rows(d, g, r, mode, period):
    made = options(D=d, G=g, R=r).outputMode(mode, period)
    model = Echo()
    rows = torch.arange(2.0 * d * g * r)
    out, loss, constant = poptorch.trainingModel(model, made, sgd(model))(rows)
    parts = rows.reshape(d, g, r, 2)
    expected = {
        poptorch.OutputMode.All: lambda: parts,
        poptorch.OutputMode.EveryN: lambda: parts[period - 1 :: period],
        poptorch.OutputMode.Final: lambda: parts[-1:, -1:],
        poptorch.OutputMode.Sum: lambda: parts.sum((0, 1), keepdim=True),
    }[mode]()
    assert torch.equal(out, expected.reshape(-1))
    losses = expected.sum(-1).reshape(-1)
    assert torch.equal(loss, losses if losses.numel() > 1 else losses[0])
    assert torch.equal(constant, torch.ones(3))


# ---- weights


def test_state_dict_is_plain_and_current():
    model = Regression()
    optimizer = sgd(model, momentum=0.9)
    before = snapshot(model)
    training = train(model, optimizer)
    training(*batch())
    state = model.state_dict()
    assert all(type(value) is torch.Tensor for value in state.values())
    assert not torch.equal(state["fc.weight"], before[0]["fc.weight"])
    assert type(model.fc.weight) is nn.Parameter
    assert torch.equal(
        optimizer.state[model.fc.weight]["momentum_buffer"],
        torch.clone(optimizer.state_dict()["state"][0]["momentum_buffer"]),
    )


def test_training_goes_on_in_plain_pytorch():
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    training = train(model, optimizer)
    for seed in range(6):
        x, target = batch(seed=seed)
        reference_optimizer.zero_grad()
        reference(x, target)[1].backward()
        reference_optimizer.step()
        if seed < 3:
            training(x, target)
        else:
            if seed == 3:
                training.destroy()
            optimizer.zero_grad()
            model(x, target)[1].backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), reference_optimizer.state_dict())


def test_training_starts_from_a_checkpoint_of_plain_pytorch():
    torch.manual_seed(0)
    reference = Regression()
    reference_optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)

    def step(seed):
        reference_optimizer.zero_grad()
        reference(*batch(seed=seed))[1].backward()
        reference_optimizer.step()

    step(0)
    model = Regression()
    model.load_state_dict(copy.deepcopy(reference.state_dict()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.load_state_dict(copy.deepcopy(reference_optimizer.state_dict()))
    train(model, optimizer)(*batch(seed=1))
    step(1)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())
    torch.testing.assert_close(optimizer.state_dict(), reference_optimizer.state_dict())


def test_a_checkpoint_can_be_loaded_between_calls():
    torch.manual_seed(0)
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    training = train(model, optimizer)
    training(*batch())
    kept = snapshot(model, optimizer)
    training(*batch(seed=1))
    expected = snapshot(model, optimizer)
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    training(*batch(seed=1))
    torch.testing.assert_close(snapshot(model, optimizer), expected)


def test_replaced_weights_are_used_by_the_next_training_call():
    model = Regression()
    training = train(model, sgd(model, lr=0.0))
    x, target = batch()
    training(x, target)
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.data = torch.ones(2)
        model.fc.weight.data = torch.full((2, 3), 2.0)
    training.copyWeightsToDevice()
    torch.testing.assert_close(training(x, target)[0], x.sum(1, keepdim=True).expand(-1, 2) * 2 + 1)


def test_parameter_data_replaced_without_a_copy_call_is_noticed():
    model = Regression()
    training = train(model, sgd(model, lr=0.0))
    x, target = batch()
    training(x, target)
    model.fc.weight.data = torch.zeros(2, 3)
    torch.testing.assert_close(training(x, target)[0], model.fc.bias.detach().expand(4, 2))


def test_inference_sees_trained_weights_without_a_copy():
    model = Regression()
    x, target = batch()
    inference = infer(model)
    training = train(model)
    for _ in range(3):
        training(x, target)
        with torch.no_grad():
            torch.testing.assert_close(inference(x, target)[0], model(x, target)[0])


@pytest.mark.parametrize("source", ["model", "executor"])
def test_inference_made_after_training_sees_its_weights(source):
    model = Regression()
    training = train(model)
    x, target = batch()
    training(x, target)
    inference = infer(model if source == "model" else training)
    with torch.no_grad():
        torch.testing.assert_close(inference(x, target)[0], model(x, target)[0])
    training.destroy()
    inference(x, target)


def test_inference_keeps_its_weights_when_the_host_changes_them_and_warns_once(caplog):
    model = Scale(2.0)
    inference = infer(model)
    x = torch.tensor([1.0])
    assert inference(x).item() == 2
    with torch.no_grad():
        model.factor.fill_(5.0)
    assert inference(x).item() == 2
    assert inference(x).item() == 2
    assert sum("copyWeightsToDevice" in record.message for record in caplog.records) == 1
    inference.copyWeightsToDevice()
    assert inference(x).item() == 5


def test_host_change_by_replacing_data_warns_too(caplog):
    model = Scale(2.0)
    inference = infer(model)
    x = torch.tensor([1.0])
    inference(x)
    model.factor.data = torch.tensor([5.0])
    assert inference(x).item() == 2
    assert "copyWeightsToDevice" in caplog.text


def test_reattaching_picks_up_host_changes():
    model = Scale(2.0)
    inference = infer(model)
    x = torch.tensor([1.0])
    inference(x)
    inference.detachFromDevice()
    with torch.no_grad():
        model.factor.fill_(5.0)
    assert inference(x).item() == 5


@pytest.mark.parametrize("wrap", [train, infer])
def test_load_state_dict_is_used_at_once_and_returns_what_torch_returns(wrap):
    model = Regression()
    executor = wrap(model)
    x, target = batch()
    executor(x, target)
    other = Regression()
    result = executor.load_state_dict(other.state_dict())
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    with torch.no_grad():
        torch.testing.assert_close(executor(x, target)[0], other(x, target)[0])
    result = executor.load_state_dict({"fc.weight": torch.zeros(2, 3)}, strict=False)
    assert result.missing_keys == ["fc.bias"]


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor([1.0]))

    def forward(self):
        self.count += 1
        return self.count


def test_buffers_of_an_inference_model_persist_and_reach_the_host_on_request():
    model = Counter()
    inference = infer(model)
    assert [inference().item() for _ in range(4)] == [2, 3, 4, 5]
    assert model.count.item() == 1
    inference.copyWeightsToHost()
    assert model.count.item() == 5


def test_batch_norm_statistics_follow_every_micro_batch():
    torch.manual_seed(0)

    class Normed(Regression):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x, target):
            return super().forward(self.norm(x), target)

    model = Normed()
    reference = copy.deepcopy(model)
    x, target = batch(rows=8)
    train(model, sgd(model, lr=0.0), G=2)(x, target)
    for rows in (slice(0, 4), slice(4, 8)):
        reference(x[rows], target[rows])
    torch.testing.assert_close(model.norm.state_dict(), reference.norm.state_dict())


def test_copying_weights_to_the_host_changes_nothing_after_training():
    model = Regression()
    training = train(model)
    training(*batch())
    before = snapshot(model)
    training.copyWeightsToHost()
    assert training.copyWeightsToHostIfNeeded() is False
    assert_same(before, snapshot(model))


def test_frozen_parameters_stay():
    model = Regression()
    model.fc.bias.requires_grad_(False)
    before = snapshot(model)
    train(model)(*batch())
    assert torch.equal(model.fc.bias, before[0]["fc.bias"])
    assert not torch.equal(model.fc.weight, before[0]["fc.weight"])


def test_parameters_outside_the_optimiser_stay():
    model = Regression()
    before = snapshot(model)
    train(model, torch.optim.SGD([model.fc.weight], lr=0.1))(*batch())
    assert torch.equal(model.fc.bias, before[0]["fc.bias"])


# ---- the optimiser


def test_learning_rate_changes_with_set_optimizer_and_not_before():
    model = Scale(1.0)

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return poptorch.identity_loss(self.inner(x), "sum")

    wrapped = Loss()
    optimizer = sgd(wrapped, lr=1.0)
    training = train(wrapped, optimizer)
    x = torch.tensor([1.0])
    training(x)
    assert model.factor.item() == 0
    optimizer.param_groups[0]["lr"] = 10.0
    training(x)
    assert model.factor.item() == -1
    training.setOptimizer(optimizer)
    training(x)
    assert model.factor.item() == -11


def test_scheduler_and_set_optimizer_do_not_compile_again():
    calls = []

    class Noisy(Regression):
        def forward(self, x, target):
            calls.append(1)
            return super().forward(x, target)

    torch.manual_seed(0)
    model = Noisy()
    reference = Regression()
    reference.load_state_dict(model.state_dict())
    optimizer, reference_optimizer = sgd(model, momentum=0.9), sgd(reference, momentum=0.9)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, reference_optimizer)]
    training = train(model, optimizer)
    training.compile(*batch())
    count = len(calls)
    for seed in range(3):
        x, target = batch(seed=seed)
        training(x, target)
        reference_optimizer.zero_grad()
        reference(x, target)[1].backward()
        reference_optimizer.step()
        optimizer._opt_called = True  # the schedulers expect step() to have been called
        for scheduler in schedulers:
            scheduler.step()
        training.setOptimizer(optimizer)
    assert len(calls) == count
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


def test_inference_has_no_optimiser():
    model = Regression()
    with pytest.raises(AttributeError, match="setOptimizer"):
        infer(model).setOptimizer(sgd(model))


def test_optimiser_that_cannot_be_compiled():
    model = Regression()
    with pytest.raises(AssertionError, match="LBFGS"):
        poptorch.trainingModel(model, options(), torch.optim.LBFGS(model.parameters()))
    train(model)


def test_set_optimizer_to_another_kind_is_refused_after_compiling():
    model = Regression()
    optimizer = sgd(model)
    training = train(model, optimizer)
    training(*batch())
    before = snapshot(model)
    with pytest.raises(poptorch.Error, match="kind of optimiser"):
        training.setOptimizer(torch.optim.Adam(model.parameters()))
    assert_same(before, snapshot(model))
    training(*batch())


def test_optimiser_of_another_model_is_refused():
    training = train(Regression(), sgd(Regression()))
    with pytest.raises(poptorch.Error, match="not part of the model"):
        training(*batch())


# ---- failures leave no trace


def assert_untouched(module, optimizer, call, error, text) -> None:
    """A failed call raises `error` and changes neither module nor optimiser."""
    before = snapshot(module, optimizer)
    types = {name: type(value) for name, value in vars(module).items()}
    with pytest.raises(error, match=text):
        call()
    assert_same(before, snapshot(module, optimizer))
    assert {name: type(value) for name, value in vars(module).items()} == types
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("counts", [{}, {"D": 2, "G": 2}], ids=["D1", "D2G2"])
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda rows: batch(rows * 2), "Shape mismatch"),
        (lambda rows: (batch(rows)[0].half(), batch(rows)[1]), "torch.float16"),
    ],
    ids=["shape", "dtype"],
)
def test_bad_input_after_compiling_leaves_everything_as_it_was(bad, text, counts):
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters())
    training = train(model, optimizer, **counts)
    training(*batch(8))
    assert_untouched(model, optimizer, lambda: training(*bad(8)), poptorch.Error, text)
    training(*batch(8))


def test_bad_shape_in_the_first_call_leaves_everything_as_it_was():
    model = Regression()
    optimizer = torch.optim.Adam(model.parameters())
    training = train(model, optimizer)
    bad = lambda: training(torch.randn(4, 7), torch.randn(4, 2))  # noqa: E731
    assert_untouched(model, optimizer, bad, RuntimeError, "mat1 and mat2|shape|size")
    assert not training.isCompiled()
    training(*batch())


def test_exception_in_forward_is_the_users_own_and_leaves_everything_as_it_was():
    class Broken(Regression):
        broken = True

        def forward(self, x, target):
            self.fc.weight.data.add_(0)
            self.scratch = x * 2
            if self.broken:
                raise KeyError("mine")
            return super().forward(x, target)

    model = Broken()
    optimizer = torch.optim.Adam(model.parameters())
    training = train(model, optimizer)
    assert_untouched(model, optimizer, lambda: training(*batch()), KeyError, "mine")
    assert not hasattr(model, "scratch")
    assert not training.isCompiled()
    assert not poptorch.isRunningOnIpu()
    Regression().forward(*batch())
    Broken.broken = False
    training(*batch())


@pytest.mark.parametrize("counts", [{}, {"D": 2}, {"G": 2}, {"R": 2}, {"D": 2, "G": 2}], ids=str)
def test_guard_failure_leaves_the_state_of_the_last_finished_update(counts):
    class Normed(Gate):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1)
            self.fc.bias.requires_grad_(False)  # its gradient is zero but for rounding, which Adam would blow up

        def forward(self, x, target):
            y = self.norm(self.fc(x))
            if x.sum() > 0:
                y = y * 2
            return y, F.mse_loss(y, target)

    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.Adam(model.parameters())
    training = train(model, optimizer, **counts)
    updates = counts.get("D", 1)
    rows = 2 * updates * counts.get("G", 1) * counts.get("R", 1)
    good = torch.rand(rows, 3), torch.rand(rows, 1)
    training(*good)

    reference, kept = copy.deepcopy(model), snapshot(model, optimizer)
    bad = good[0].clone()
    bad[-1] = -10.0  # only the last micro-batch goes the other way
    with pytest.raises(poptorch.Error, match=r"x.sum\(\) > 0"):
        training(bad, good[1])
    if updates == 1:
        assert_same(kept, snapshot(model, optimizer))
        return
    expected = copy.deepcopy(reference)
    expected_optimizer = torch.optim.Adam(expected.parameters())
    expected_optimizer.load_state_dict(kept[1])
    per_update = rows // updates
    expected_optimizer.zero_grad()
    for part in range(0, per_update, 2):
        (expected(good[0][part : part + 2], good[1][part : part + 2])[1] / (per_update // 2)).backward()
    expected_optimizer.step()
    torch.testing.assert_close(snapshot(model, optimizer), snapshot(expected, expected_optimizer))


def test_after_a_guard_failure_training_goes_on():
    torch.manual_seed(0)
    model, reference = Gate(), Gate()
    reference.load_state_dict(model.state_dict())
    training, clean = train(model, G=2), train(reference, G=2)
    good = torch.rand(4, 3), torch.rand(4, 1)
    training(*good)
    clean(*good)
    bad = good[0].clone()
    bad[2:] = -1
    with pytest.raises(poptorch.Error):
        training(bad, good[1])
    training(*good)
    clean(*good)
    torch.testing.assert_close(model.state_dict(), reference.state_dict())


# ---- random numbers


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_same_seed_same_numbers():
    def run():
        model = poptorch.inferenceModel(Noise(), options(D=2, R=2).randomSeed(42))
        return [model(torch.zeros(8)) for _ in range(2)]

    torch.testing.assert_close(run(), run(), rtol=0, atol=0)


def test_every_micro_batch_replica_and_call_draws_anew():
    model = poptorch.inferenceModel(Noise(), options(D=2, R=2).randomSeed(42))
    drawn = torch.cat([model(torch.zeros(8)) for _ in range(2)])
    assert len(drawn.unique()) == 16


def test_running_a_model_does_not_disturb_the_hosts_generator():
    model = poptorch.inferenceModel(Noise(), options())
    model(torch.zeros(2))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model(torch.zeros(2))
    assert torch.equal(torch.rand(3), expected)


def test_argument_may_have_the_name_of_a_parameter():
    class Product(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, weight):
            return poptorch.identity_loss(self.weight * weight, "sum")

    model = Product()
    options = poptorch.Options().engine("eager")
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    assert training(torch.tensor([1.0, 2.0, 3.0])).item() == 6
    assert model.weight.tolist() == [0.0, -1.0, -2.0]


def test_copy_to_host_if_needed_copies_the_buffers_of_an_inference_model_once():
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self):
            self.count += 1
            return self.count

    model = Counter()
    executor = poptorch.inferenceModel(model, poptorch.Options().engine("eager"))
    executor()
    assert model.count.item() == 0
    assert executor.copyWeightsToHostIfNeeded()
    assert model.count.item() == 1
    assert not executor.copyWeightsToHostIfNeeded()
