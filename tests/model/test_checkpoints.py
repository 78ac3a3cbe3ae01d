"""Training goes on from a checkpoint as if nothing had happened, and plain PyTorch reads it."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import poptorch

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::UserWarning:torch")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 2))

    def forward(self, x, target):
        y = self.layers(x)
        return y, nn.functional.mse_loss(y, target)


def batches(count=6, rows=8):
    numbers = torch.Generator().manual_seed(5)
    return [(torch.randn(rows, 4, generator=numbers), torch.randn(rows, 2, generator=numbers)) for _ in range(count)]


def make(replicas=1, optimizer=poptorch.optim.AdamW, **arguments):
    torch.manual_seed(0)
    module = Net()
    options = poptorch.Options().randomSeed(3).replicationFactor(replicas).broadcastBuffers(False)
    optimizer = optimizer(module.parameters(), lr=0.05, **arguments)
    return module, optimizer, poptorch.trainingModel(module, options, optimizer)


def train(training, given):
    for batch in given:
        training(*batch)
    return training


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("optimizer", [poptorch.optim.AdamW, poptorch.optim.LAMB, torch.optim.RMSprop, torch.optim.SGD])
def test_training_goes_on_bit_for_bit(tmp_path, replicas, optimizer):
    given = batches()
    module, own, training = make(replicas, optimizer)
    train(training, given[:3])
    for group in own.param_groups:
        group["lr"] = 0.01
    training.setOptimizer(own)
    assert training.saveCheckpoint(tmp_path, {"step": 3}) == tmp_path / "000001"
    train(training, given[3:])

    again, other, resumed = make(replicas, optimizer)
    resumed.compile(*given[0])
    assert resumed.loadCheckpoint(tmp_path) == {"step": 3}
    assert other.param_groups[0]["lr"] == 0.01
    train(resumed, given[3:])
    for name, value in module.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for before, after in zip(training._session.replica_buffers, resumed._session.replica_buffers, strict=True):
        assert before.keys() == {f"layers.1.{key}" for key in ("running_mean", "running_var", "num_batches_tracked")}
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_last_ones_are_kept_and_a_link_leads_to_the_newest(tmp_path):
    _, _, training = make()
    for step, batch in enumerate(batches(4)):
        training(*batch)
        training.saveCheckpoint(tmp_path, step)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["000003", "000004", "latest"]
    assert os.readlink(tmp_path / "latest") == "000004"
    assert training.loadCheckpoint(tmp_path) == 3


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path):
    _, _, training = make()
    training.compile(*batches(1)[0])
    assert training.loadCheckpoint(tmp_path / "none") is None


def test_plain_pytorch_reads_it(tmp_path):
    module, own, training = make(optimizer=torch.optim.AdamW)
    train(training, batches(3)).saveCheckpoint(tmp_path / "all")
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    model_state, optimizer_state = get_state_dict(plain, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    load(state, storage_reader=FileSystemReader(tmp_path / "all" / "latest"), no_dist=True)
    set_state_dict(plain, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    for name, value in module.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    for mine, theirs in zip(own.state.values(), optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)

    dcp_to_torch_save(tmp_path / "all" / "latest", tmp_path / "one.pt")
    assert torch.equal(torch.load(tmp_path / "one.pt")["model"]["layers.0.weight"], module.layers[0].weight)


def damage(folder):
    """Cut off the end of what holds the tensors."""
    for path in (folder / "latest").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def forget(folder):
    (folder / "latest" / ".metadata").unlink()


@pytest.mark.parametrize("harm", [damage, forget])
def test_what_cannot_be_read_changes_nothing(tmp_path, harm):
    given = batches()
    _, _, training = make()
    train(training, given[:2]).saveCheckpoint(tmp_path)
    harm(tmp_path)
    train(training, given[2:4])
    module, _, twin = make()
    train(twin, given[:4])
    with pytest.raises(poptorch.Error, match=r"loading a checkpoint in .* failed"):
        training.loadCheckpoint(tmp_path)
    train(training, given[4:])
    train(twin, given[4:])
    for name, value in module.state_dict().items():
        assert torch.equal(value, training.model.state_dict()[name]), name


def test_a_checkpoint_of_another_model_is_refused_with_the_reason(tmp_path):
    _, _, training = make(optimizer=torch.optim.SGD)
    train(training, batches(1)).saveCheckpoint(tmp_path)
    _, _, other = make(optimizer=torch.optim.AdamW)
    other.compile(*batches(1)[0])
    with pytest.raises(poptorch.Error, match=r"(?s)failed\..*reason: .*fix: .*optimiser of the same kind"):
        other.loadCheckpoint(tmp_path)


def test_an_unfinished_one_is_ignored_and_removed(tmp_path):
    _, _, training = make()
    train(training, batches(1)).saveCheckpoint(tmp_path, "first")
    shutil.copytree(tmp_path / "000001", tmp_path / ".unfinished-000002")
    (tmp_path / ".unfinished-000002" / "poptorch.json").write_text(json.dumps({"progress": "second"}))
    assert training.loadCheckpoint(tmp_path) == "first"
    training.saveCheckpoint(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["000001", "000002", "latest"]


def test_only_models_in_training_have_checkpoints(tmp_path):
    inference = poptorch.inferenceModel(nn.Linear(2, 2))
    with pytest.raises(poptorch.Error, match="not been compiled"):
        inference.saveCheckpoint(tmp_path)
    inference(torch.ones(1, 2))
    with pytest.raises(poptorch.Error, match="models in training"):
        inference.saveCheckpoint(tmp_path)


def test_progress_must_be_plain_data(tmp_path):
    _, _, training = make()
    train(training, batches(1))
    with pytest.raises(TypeError, match="JSON"):
        training.saveCheckpoint(tmp_path, torch.ones(1))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    _, _, training = make()
    train(training, batches(1))
    with pytest.raises(poptorch.Error, match=r"saving a checkpoint in .*file.* failed"):
        training.saveCheckpoint(tmp_path / "file" / "below")
