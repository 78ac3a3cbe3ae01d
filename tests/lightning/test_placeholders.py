"""Numbers that a step asks for before they are known, and those that the host changes from call to call."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import lr_scheduler

import poptorch
from lightning_runs import Line, adam, assert_same_weights, fit, fit_both, loader, pl, trainer
from poptorch.lightning.placeholders import HostNumber, ReadLater, host_numbers

MisErr = pl.utilities.exceptions.MisconfigurationException


class Items(Line):
    """Logs, appends and returns Python numbers, as steps do that were written for a CPU."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("t", loss.item(), on_step=True, on_epoch=True)
        self.losses.append(loss.item())
        return {"loss": loss, "half": (loss / 2).item(), "rows": len(batch[0])}

    def predict_step(self, batch, batch_idx):
        return self.loss(batch).item()


class Halves(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.append(outputs["half"])


@pytest.mark.parametrize("devices", [1, 2])
def test_items_are_logged_appended_and_returned_as_on_the_cpu(devices):
    found = []
    for accelerator, count in (("ipu", devices), ("cpu", 1)):
        halves, module = Halves(), Items()
        data = loader(8 // count if accelerator == "ipu" else 8)
        run = fit(module, data, accelerator=accelerator, devices=count, callbacks=[halves], max_epochs=2)
        assert all(isinstance(number, float) for number in module.losses + halves.seen)
        found.append(
            (module.losses, halves.seen, [run.callback_metrics[name].item() for name in ("t_step", "t_epoch")])
        )
    for ours, theirs in zip(*found, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    assert len(found[0][0]) == 16


def test_items_that_are_predicted():
    ours, theirs = (trainer(accelerator).predict(Items(), loader(8)) for accelerator in ("ipu", "cpu"))
    assert ours == pytest.approx(theirs)


class Computes(Line):
    """Needs the numbers while it runs; the first ones are the same for every batch."""

    def training_step(self, batch, batch_idx):
        width = int((0 * batch[0]).sum().item()) + (0 * batch[0] + 2).mean().round().int().item()
        x = batch[0][:, :width].sum() + torch.full((width,), 2.0).sum() + batch[0][0][width]
        return self.loss(batch) + 1e-3 * x * torch.tensor([width]).sum()


class Scales(Line):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * loss.item()


def test_items_that_are_computed_with_are_read_and_guarded():
    (ours, _), (theirs, _) = fit_both(Computes, batch_size=8)
    assert_same_weights(ours, theirs)
    with pytest.raises(poptorch.Error, match=r"(?s)contradicts the value.*\.item\(\), which need no guard"):
        fit(Scales(), loader(8))


def test_an_item_that_something_else_keeps_is_refused_when_it_is_used():
    kept = []

    class Keeps(Line):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            kept.append(loss.item())
            return loss

    fit(Keeps(), loader(8))
    with pytest.raises(MisErr, match="known only after the call"):
        print(kept[0])


USES = {
    "sum": lambda n: (n + 1, 1 + n, n - 1, 1 - n),
    "product": lambda n: (n * 2, 2 * n, n / 2, 2 / n, n // 2, 7 // n, n % 2, 7 % n, n**2, 2**n),
    "comparison": lambda n: (n == 3, n != 3, n < 4, n >= 3, n > n, bool(n)),
    "text": lambda n: (f"{n:5}", str(n), repr(n), "{}".format(n)),  # noqa: UP032
    "functions": lambda n: (abs(-n), round(n), int(n), float(n), hash(n), max(n, 1), math.sqrt(n)),
    "quotients": lambda n: (divmod(n, 2), divmod(7, n)),
    "methods": lambda n: n.as_integer_ratio(),
    "kind": lambda n: (isinstance(n, int), isinstance(n, float)),
    "torch": lambda n: ((torch.ones(2) * n).tolist(), torch.full((2,), n).tolist()),
}


@pytest.mark.parametrize("value", [3.0, 3])
@pytest.mark.parametrize("use", USES)
def test_an_item_is_used_like_the_number(use, value):
    tensor = torch.tensor(value)
    assert USES[use](ReadLater(tensor, torch.Tensor.item)) == USES[use](value)


def test_an_integer_item_is_an_index():
    two = ReadLater(torch.tensor(2), torch.Tensor.item)
    assert ["a", "b", "c"][two] == "c"
    assert list(range(two)) == [0, 1]
    assert (1 << two, two >> 1, two & 3, 4 | two, ~two) == (4, 1, 2, 6, -3)


class Rates(Line):
    """Logs its learning rate in the ways that Lightning offers."""

    def training_step(self, batch, batch_idx):
        self.log("optimizers()", self.optimizers().param_groups[0]["lr"])
        self.log("trainer.optimizers", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("lr_schedulers()", self.lr_schedulers().get_last_lr()[0])
        return self.loss(batch)

    def configure_optimizers(self):
        optimizer = adam(self)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Known(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, *args):
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_a_logged_rate_is_that_of_the_step():
    found = []
    for accelerator in ("ipu", "cpu"):
        known = Known()
        fit(Rates(), loader(8), accelerator=accelerator, callbacks=[known])
        found.append(known.seen)
    assert found[0] == found[1]
    assert len({seen["optimizers()"] for seen in found[0][1:]}) == 7


class Setup:
    """What of a trainer is asked for."""

    def __init__(self, optimizer, scheduler):
        self.optimizers, self.lr_scheduler_configs = [optimizer], [type("Config", (), {"scheduler": scheduler})]


def test_numbers_of_the_host_are_put_back():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    group = optimizer.param_groups[0]
    with host_numbers(Setup(optimizer, scheduler)):
        assert isinstance(group["lr"], HostNumber)
        assert isinstance(scheduler.get_last_lr()[0], HostNumber)
        assert group["lr"] == 0.5
        group["initial_lr"] = 0.25
    assert type(group["lr"]) is type(scheduler.get_last_lr()[0]) is float
    assert group["initial_lr"] == 0.25
