"""Checkpoints: Lightning's own, current at any moment, and good to go on elsewhere."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.optim import lr_scheduler

import poptorch
from lightning_runs import Line, Logs, adam, assert_same_weights, fit, fit_both, loader, pl, trainer


def checkpoint(run, path):
    run.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def test_a_checkpoint_has_the_keys_of_a_cpu_run(tmp_path):
    (_, ipu), (_, host) = fit_both(lambda: Logs(adam), batch_size=8)
    ours, theirs = checkpoint(ipu, tmp_path / "ipu.ckpt"), checkpoint(host, tmp_path / "cpu.ckpt")
    assert list(ours) == list(theirs)
    assert list(ours["state_dict"]) == ["fc.weight", "fc.bias"]
    torch.testing.assert_close(ours["state_dict"], theirs["state_dict"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours["optimizer_states"], theirs["optimizer_states"], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_checkpoint_loads_without_this_library(tmp_path):
    run = fit(Line(lambda m: poptorch.optim.Adam(m.parameters(), lr=0.01)), loader(8))
    run.save_checkpoint(tmp_path / "x.ckpt")
    code = (
        "import sys; sys.modules['poptorch'] = None; import torch; "
        f"c = torch.load({str(tmp_path / 'x.ckpt')!r}, weights_only=True); print(sorted(c['state_dict']))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "['fc.bias', 'fc.weight']\n"


@pytest.mark.parametrize("order", [("ipu", "cpu"), ("cpu", "ipu"), ("ipu", "cpu", "ipu")], ids="-".join)
@pytest.mark.parametrize("own", [False, True], ids=["torch", "poptorch"])
def test_a_run_goes_on_elsewhere(order, own, tmp_path):
    def configure(module, accelerator):
        kind = poptorch.optim.Adam if own and accelerator == "ipu" else torch.optim.Adam
        optimizer = kind(module.parameters(), lr=0.01)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, 0.5)]

    reference = Line(lambda m: configure(m, "cpu"))
    fit(reference, loader(8), accelerator="cpu", max_epochs=len(order))

    path = None
    for epoch, accelerator in enumerate(order):
        module = Line(partial(configure, accelerator=accelerator))
        run = trainer(accelerator, max_epochs=epoch + 1)
        run.fit(module, loader(8), ckpt_path=path)
        path = tmp_path / f"{epoch}.ckpt"
        run.save_checkpoint(path)
    assert_same_weights(module, reference)
    assert run.global_step == 8 * len(order)


class Saved(Logs):
    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def test_a_loaded_checkpoint_tests_as_the_module_did(tmp_path):
    module = Saved()
    run = fit(module, loader(8))
    run.save_checkpoint(tmp_path / "end.ckpt")
    expected = run.test(module, loader(8), verbose=False)
    loaded = Saved.load_from_checkpoint(tmp_path / "end.ckpt", weights_only=True)
    assert trainer().test(loaded, loader(8), verbose=False) == expected
    moments = torch.load(tmp_path / "end.ckpt", weights_only=True)["optimizer_states"][0]["state"][0]
    assert moments["step"] == 8
    assert moments["exp_avg"].abs().sum() > 0


def test_checkpoints_in_the_middle_of_an_epoch_are_current(tmp_path):
    weights = []

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer, module, *args):
            weights.append(module.fc.weight.detach().clone())

    files = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    fit(Line(), loader(8), callbacks=[Note(), files], enable_checkpointing=True)
    for step in (3, 6):
        saved = torch.load(tmp_path / f"step={step}.ckpt", weights_only=True)
        assert torch.equal(saved["state_dict"]["fc.weight"], weights[step - 1])


def test_early_stopping_and_the_best_checkpoint(tmp_path):
    class Worse(Line):
        def validation_step(self, batch, batch_idx):
            self.log("v", self.current_epoch + 0 * self.loss(batch))

    best = pl.callbacks.ModelCheckpoint(tmp_path, monitor="v", filename="best")
    module = Worse()
    run = fit(
        module,
        loader(8),
        loader(8),
        callbacks=[pl.callbacks.EarlyStopping("v", patience=1), best],
        enable_checkpointing=True,
        max_epochs=10,
        num_sanity_val_steps=0,
    )
    assert run.current_epoch == 2
    assert torch.load(best.best_model_path, weights_only=True)["epoch"] == 0
    run.test(module, loader(8), ckpt_path="best", verbose=False, weights_only=True)
