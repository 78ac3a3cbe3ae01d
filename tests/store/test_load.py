"""A model comes back from a file, in a process that has never seen its class, and goes on as if it had stayed."""

from __future__ import annotations

import json
import os
from collections import namedtuple

import pytest
import torch
from torch import nn

import poptorch
from models import Gate, Regression, Scale
from poptorch.errors import DeviceError, FileError
from saved_models import GO_ON, Tied, batches, make_optimizer, train, training_model

A_FEW = ["torch.SGD", "torch.AdamW", "torch.NAdam", "poptorch.LAMB"]
TORCHS = [kind.__name__ for kind in vars(torch.optim).values() if isinstance(kind, type)]
NOT_COMPILED = ("Optimizer", "LBFGS", "SparseAdam", "Muon")  # Muon takes matrices only
ALL = [
    *(f"torch.{name}" for name in TORCHS if name not in NOT_COMPILED),
    *(f"poptorch.{name}" for name in ("Adam", "AdamW", "LAMB", "RMSprop", "SGD")),
]


def pytest_generate_tests(metafunc):
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", ALL if metafunc.config.getoption("--long") else A_FEW)


def test_training_goes_on_bit_for_bit_in_a_process_without_the_class(kind, programs, tmp_path):
    file, given, result = (str(tmp_path / name) for name in ("m.poptorch", "batches", "result"))
    training = training_model(kind)
    train(training, batches(6)[:3])
    training.save(file)
    torch.save(batches(6)[3:], given)
    programs.run(GO_ON.format(file=file, batches=given, result=result))
    expected_losses = train(training, batches(6)[3:])
    losses, weights, (state,) = torch.load(result)
    assert all(map(torch.equal, losses, expected_losses))
    expected = training.state_dict()
    assert list(weights) == list(expected)
    for name, value in expected.items():
        assert torch.equal(weights[name], value), name
    expected_state = training._programs.optimizers.optimizers[0].state_dict()["state"]
    assert state.keys() == expected_state.keys()
    for number, entries in expected_state.items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(state[number][k])) for k, v in entries.items())


def test_what_is_shared_stays_shared_and_transient_buffers_stay_out_of_checkpoints(tmp_path):
    training = training_model()
    training.compileAndExport(tmp_path / "m.poptorch", *batches(1)[0])
    model = poptorch.load(tmp_path / "m.poptorch").model
    assert model.first.weight is model.second.weight
    assert "shift" not in model.state_dict()
    assert torch.equal(model.shift, torch.tensor([0.5]))
    plain = Tied()
    plain.load_state_dict(model.state_dict())
    assert repr(type(model.norm)) != repr(nn.BatchNorm1d)
    assert "BatchNorm1d" in repr(model)


def test_keywords_defaults_and_nested_results_come_back(tmp_path):
    training = training_model()
    x, target = batches(1)[0]
    training.compileAndExport(tmp_path / "m.poptorch", x, target, scale=2.0)
    loaded = poptorch.load(tmp_path / "m.poptorch")
    result, loss = loaded(x, target=target, scale=2.0)
    expected, expected_loss = training(x, target, scale=2.0)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(result["y"], expected["y"])
    assert result["pair"][1] is None
    with pytest.raises(poptorch.Error, match="Value mismatch for scale"):
        loaded(x, target)


Pair = namedtuple("Pair", "left right")


class MakesPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return Pair(self.fc(x), x.topk(2))


def test_named_tuples_come_back_as_what_they_are_or_with_the_same_fields(tmp_path, programs):
    file = tmp_path / "m.poptorch"
    poptorch.inferenceModel(MakesPair()).compileAndExport(file, torch.ones(2, 3))
    result = poptorch.load(file)(torch.ones(2, 3))
    assert type(result) is Pair
    assert type(result.right) is torch.return_types.topk
    code = f"import torch; print(sorted(poptorch.load({str(file)!r})(torch.ones(2, 3))._fields))"
    assert programs.run(code).output == "['left', 'right']\n"


def test_inference_comes_back_with_the_weights_of_the_moment(tmp_path):
    model = Scale(2.0)
    inference = poptorch.inferenceModel(model)
    inference(torch.ones(3))
    with torch.no_grad():
        model.factor.fill_(5.0)
    inference.save(tmp_path / "m.poptorch")
    assert poptorch.load(tmp_path / "m.poptorch")(torch.ones(3)).tolist() == [5.0] * 3


def test_guards_still_guard(tmp_path):
    model = Gate()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    training.compileAndExport(tmp_path / "m.poptorch", torch.ones(2, 3), torch.ones(2, 1))
    loaded = poptorch.load(tmp_path / "m.poptorch")
    loaded(torch.ones(2, 3), torch.ones(2, 1))
    with pytest.raises(poptorch.Error, match=r"contradicts[\s\S]*if x.sum\(\) > 0"):
        loaded(-torch.ones(2, 3), torch.ones(2, 1))


def test_indices_are_still_checked(tmp_path):
    poptorch.inferenceModel(nn.Embedding(5, 2)).compileAndExport(tmp_path / "m.poptorch", torch.tensor([1, 2]))
    loaded = poptorch.load(tmp_path / "m.poptorch")
    with pytest.raises(IndexError, match="0 to 4"):
        loaded(torch.tensor([1, 7]))


class Own(torch.optim.Optimizer):
    """An optimiser that a process which loads the file does not know."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.add_(state["sum"] * -group["lr"])


def test_an_optimiser_of_the_user_goes_on_from_its_program(tmp_path):
    model = Regression()
    training = poptorch.trainingModel(model, optimizer=Own(model.parameters(), lr=0.1))
    batch = torch.ones(4, 3), torch.ones(4, 2)
    training(*batch)
    training.save(tmp_path / "m.poptorch")
    loaded = poptorch.load(tmp_path / "m.poptorch")
    assert torch.equal(loaded(*batch)[1], training(*batch)[1])
    (optimizer,) = loaded._programs.optimizers.optimizers
    optimizer.param_groups[0]["lr"] = 0.0
    loaded.setOptimizer(optimizer)
    before = loaded.model.fc.weight.clone()
    loaded(*batch)
    assert torch.equal(loaded.model.fc.weight, before)
    with pytest.raises(poptorch.Error, match="compiled program only"):
        optimizer.step()


def test_a_learning_rate_can_change_after_loading(tmp_path):
    training = training_model("torch.SGD")
    train(training, batches(1))
    training.save(tmp_path / "m.poptorch")
    loaded = poptorch.load(tmp_path / "m.poptorch")
    for executor in (training, loaded):
        (optimizer,) = executor._programs.optimizers.optimizers
        optimizer.param_groups[0]["lr"] = 0.5
        executor.setOptimizer(optimizer)
    assert all(map(torch.equal, train(loaded, batches(3)), train(training, batches(3))))


def test_only_a_program_goes_to_loadexecutable(tmp_path):
    file = tmp_path / "m.poptorch"
    training = training_model()
    training.compileAndExport(file, *batches(1)[0], export_model=False)
    with pytest.raises(AssertionError, match="loadExecutable"):
        poptorch.load(file)
    again = training_model()
    again.loadExecutable(file)
    assert again.isCompiled()
    assert all(map(torch.equal, train(again, batches(3)), train(training, batches(3))))


def test_loadexecutable_takes_weights_and_optimiser_from_the_live_model(tmp_path):
    training = training_model()
    train(training, batches(2))
    training.save(tmp_path / "m.poptorch", save_rng_state=False)
    fresh, other = training_model(), training_model()
    fresh.loadExecutable(tmp_path / "m.poptorch")
    assert all(map(torch.equal, train(fresh, batches(2)), train(other, batches(2))))


def test_loadexecutable_refuses_another_model_or_optimiser(tmp_path):
    file = tmp_path / "m.poptorch"
    training_model().compileAndExport(file, *batches(1)[0])
    with pytest.raises(poptorch.Error, match=r"program trains|was compiled with"):
        poptorch.trainingModel(Regression()).loadExecutable(file)
    with pytest.raises(AssertionError, match="follows"):
        training_model("torch.SGD").loadExecutable(file)
    with pytest.raises(poptorch.Error, match="for training"):
        poptorch.inferenceModel(Tied()).loadExecutable(file)


def test_an_offline_target_is_written_but_not_run_and_loads_online(tmp_path):
    options = poptorch.Options().useOfflineIpuTarget()
    inference = poptorch.inferenceModel(Scale(3.0), options)
    inference.compileAndExport(tmp_path / "m.poptorch", torch.ones(2))
    with pytest.raises(DeviceError):
        inference(torch.ones(2))
    loaded = poptorch.load(tmp_path / "m.poptorch")
    assert loaded(torch.ones(2)).tolist() == [3.0, 3.0]
    assert not loaded.options.exists("ipu_version")
    assert loaded.options.connection_type is poptorch.ConnectionType.Always


def test_options_can_be_edited_but_not_what_the_program_was_compiled_for(tmp_path):
    options = poptorch.Options().deviceIterations(2).setExecutionStrategy(poptorch.ShardedExecution("a", "b"))
    poptorch.inferenceModel(Scale(), options).compileAndExport(tmp_path / "m.poptorch", torch.ones(4))
    loaded = poptorch.load(tmp_path / "m.poptorch", lambda o: o.modelName("edited").deviceIterations(4))
    assert loaded.options.model_name == "edited"
    assert repr(loaded.options._execution_strategy) == "ShardedExecution(Stage('a'), Stage('b'))"
    assert loaded(torch.ones(4)).tolist() == [2.0] * 4


def test_other_shapes_are_refused_as_before_and_python_code_is_not_there(tmp_path):
    poptorch.inferenceModel(Scale()).compileAndExport(tmp_path / "m.poptorch", torch.ones(4))
    loaded = poptorch.load(tmp_path / "m.poptorch")
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        loaded(torch.ones(5))
    with pytest.raises(poptorch.Error, match="no Python code"):
        loaded.model(torch.ones(4))


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("poptorch.store.files.__version__", "0.0.1")
    poptorch.inferenceModel(Scale()).compileAndExport(tmp_path / "m.poptorch", torch.ones(4))
    with pytest.raises(AssertionError, match=r"Invalid file [\s\S]*version mismatch[\s\S]*0\.0\.1"):
        poptorch.load(tmp_path / "m.poptorch")
    with pytest.raises(poptorch.Error, match="version mismatch"):
        poptorch.inferenceModel(Scale()).loadExecutable(tmp_path / "m.poptorch")


def test_a_folder_gets_one_file_and_missing_folders_are_made(tmp_path, caplog):
    inference = poptorch.inferenceModel(Scale())
    with pytest.raises(poptorch.Error, match="not been compiled"):
        inference.save(tmp_path / "m")
    inference.compileAndExport(tmp_path, torch.ones(4), export_model=False)
    assert os.listdir(tmp_path) == ["model.poptorch"]
    inference.save(tmp_path / "a" / "b" / "m.poptorch")
    assert os.listdir(tmp_path / "a" / "b") == ["m.poptorch"]


def test_what_is_no_file_of_ours_is_an_error_that_names_it(tmp_path):
    (tmp_path / "m").write_bytes(b"something else")
    for name in ("m", "absent"):
        with pytest.raises(FileError, match=str(tmp_path / name)):
            poptorch.load(tmp_path / name)
    inference = poptorch.inferenceModel(Scale())
    with pytest.raises(FileError, match="cannot be written"):
        inference.compileAndExport(tmp_path / "m" / "below", torch.ones(4))


class Same(nn.Module):
    def forward(self, x):
        return x


def test_a_model_without_ops_has_nothing_to_save(tmp_path):
    inference = poptorch.inferenceModel(Same())
    inference.compile(torch.ones(2))
    with pytest.raises(poptorch.Error, match="computes nothing"):
        inference.save(tmp_path / "m.poptorch")


def test_a_file_tells_about_itself(tmp_path):
    poptorch.inferenceModel(Scale()).compileAndExport(tmp_path / "m.poptorch", torch.ones(4))
    about = json.loads(poptorch.importPoptorchMetadataFromFile(tmp_path / "m.poptorch"))
    assert about["poptorch"] == poptorch.__version__
    assert about["torch"] == torch.__version__
    assert about["trains"] is False


def test_several_optimisers_and_loss_scaling_come_back(tmp_path):
    torch.manual_seed(0)
    model = Regression()
    several = [make_optimizer("poptorch.SGD", [model.fc.weight]), make_optimizer("poptorch.Adam", [model.fc.bias])]
    for optimizer in several:
        optimizer.loss_scaling = 4.0
        optimizer.variable_attrs.markAsVariable("loss_scaling")
    training = poptorch.trainingModel(model, optimizer=several)
    batch = torch.ones(4, 3), torch.ones(4, 2)
    training(*batch)
    training.save(tmp_path / "m.poptorch")
    loaded = poptorch.load(tmp_path / "m.poptorch")
    for _ in range(2):
        assert torch.equal(loaded(*batch)[1], training(*batch)[1])
    kinds = [type(optimizer) for optimizer in loaded._programs.optimizers.optimizers]
    assert kinds == [poptorch.optim.SGD, poptorch.optim.Adam]
    first, second = loaded._programs.optimizers.optimizers[0].state_dict(), several[0].state_dict()
    assert first["ipu_param"] == second["ipu_param"]


def test_an_inference_model_of_a_loaded_one_follows_its_training(tmp_path):
    model = Regression()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.ones(4, 3), torch.ones(4, 2)
    training.compileAndExport(tmp_path / "train", *batch)
    poptorch.inferenceModel(model).compileAndExport(tmp_path / "valid", *batch)
    loaded = poptorch.load(tmp_path / "train")
    validation, apart = poptorch.inferenceModel(loaded), poptorch.load(tmp_path / "valid")
    validation.loadExecutable(tmp_path / "valid")
    losses = []
    for _ in range(3):
        losses.append(validation(*batch)[1].item())
        loaded(*batch)
    assert losses[0] > losses[1] > losses[2]
    assert apart(*batch)[1].item() == losses[0]
    apart.load_state_dict(loaded.state_dict())
    assert apart(*batch)[1].item() < losses[2]


def test_an_inference_executor_that_is_not_compiled_can_be_pickled(tmp_path):
    torch.save(poptorch.inferenceModel(Scale(3.0)), tmp_path / "executor")
    back = torch.load(tmp_path / "executor", weights_only=False)
    assert back(torch.ones(2)).tolist() == [3.0, 3.0]


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 5)

    def forward(self, x, labels):
        scores = self.fc(x).log_softmax(-1)
        lengths = torch.full((2,), 6), torch.full((2,), 2)
        return nn.functional.ctc_loss(scores, labels, *lengths)


def test_ops_of_ours_are_known_to_a_process_that_only_loads(tmp_path, programs):
    torch.manual_seed(0)
    model = Speech()
    x, labels = torch.ones(6, 2, 4), torch.tensor([[1, 2], [3, 4]])
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    training.compileAndExport(tmp_path / "m", x, labels)
    code = f"""
import torch
training = poptorch.load({str(tmp_path / "m")!r})
print(training(torch.ones(6, 2, 4), torch.tensor([[1, 2], [3, 4]])).item())
"""
    assert float(programs.run(code).output) == pytest.approx(training(x, labels).item())
