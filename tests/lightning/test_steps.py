"""What a fit computes: the same as on the CPU, for the rows that a call takes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import poptorch
from lightning_runs import Line, assert_same_weights, fit, fit_both, loader, pl, rows, trainer
from poptorch.lightning import IPUStrategy

OPTIMISERS = {
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.02),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.005, momentum=0.9, nesterov=True),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
}


@pytest.mark.filterwarnings("ignore:.*captured")
@pytest.mark.parametrize("name", OPTIMISERS)
def test_weights_equal_those_of_a_cpu_trainer(name):
    (ours, _), (theirs, _) = fit_both(lambda: Line(OPTIMISERS[name]), max_epochs=2)
    assert_same_weights(ours, theirs)


def test_devices_and_accumulation_make_one_large_batch():
    (ours, ipu), (theirs, host) = fit_both(
        Line, batch_size=2, cpu_batch_size=16, devices=4, accumulate_grad_batches=2, max_epochs=2
    )
    assert_same_weights(ours, theirs)
    assert ipu.global_step == host.global_step == 8


def test_device_iterations_make_several_updates_per_batch():
    (ours, ipu), (theirs, host) = fit_both(Line, strategy=IPUStrategy(device_iterations=4))
    assert_same_weights(ours, theirs)
    assert ipu.global_step * 4 == host.global_step


class Outputs(pl.Callback):
    """What the hooks at the end of a batch see."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.setdefault("train", []).append(outputs)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.setdefault("validation", []).append(outputs)

    def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.setdefault("test", []).append(outputs)

    def on_predict_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.setdefault("predict", []).append(outputs)


@pytest.mark.parametrize("devices", [1, 4])
def test_the_loss_is_one_number_and_that_of_its_rows(devices):
    seen = Outputs()
    module = Line()
    expected = copy.deepcopy(module).loss(next(iter(loader(devices)))).detach()
    fit(module, devices=devices, callbacks=[seen], limit_train_batches=1)
    (outputs,) = seen.seen["train"]
    assert outputs["loss"].shape == ()
    torch.testing.assert_close(outputs["loss"], expected)


class Constant(Line):
    """Steps whose values are known."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return (loss - loss) + 1

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return (loss - loss) + 2

    def test_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return (loss - loss) + 3

    def predict_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return (loss - loss) + 4


@pytest.mark.parametrize("devices", [1, 4])
def test_hooks_see_what_steps_return(devices):
    seen, module = Outputs(), Constant()
    before = copy.deepcopy(module)
    run = trainer(devices=devices, callbacks=[seen], fast_dev_run=True)
    run.fit(module, loader(), loader())
    assert_same_weights(module, before, 0)  # the gradients are zero
    run.validate(module, loader(), verbose=False)
    run.test(module, loader(), verbose=False)
    run.predict(module, loader())
    assert [output["loss"].item() for output in seen.seen["train"]] == [1]
    assert [output.item() for output in seen.seen["validation"]] == [2, 2]
    assert [output.item() for output in seen.seen["test"]] == [3]
    assert [output.flatten().tolist() for output in seen.seen["predict"]] == [[4] * devices]


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_evaluation_works_without_a_fit(function, devices):
    run = trainer(devices=devices, fast_dev_run=True)
    getattr(run, function)(Line(), loader())


class TwoLosses(Line):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        self.log("other", F.smooth_l1_loss(out, 2 * y))
        return F.mse_loss(out, y) + F.l1_loss(out, y) * 3


def test_sums_of_losses_are_differentiated_and_logged_losses_are_not():
    (ours, _), (theirs, _) = fit_both(TwoLosses, batch_size=4)
    assert_same_weights(ours, theirs)


class WithPredictions(Line):
    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        return {"preds": out, "loss": F.mse_loss(out, y), "count": (y > 0).sum(), "name": "x"}


def test_a_dict_keeps_rows_in_order_and_what_is_no_tensor():
    seen = Outputs()
    module = WithPredictions()
    first = copy.deepcopy(module)
    fit(module, loader(2), devices=4, callbacks=[seen], limit_train_batches=1)
    (outputs,) = seen.seen["train"]
    x, y = next(iter(loader(8)))
    torch.testing.assert_close(outputs["preds"], first(x).detach())
    assert outputs["name"] == "x"
    assert outputs["count"].tolist() == [int((part > 0).sum()) for part in y.split(2)]
    assert outputs["count"].dtype == torch.int64
    assert outputs["loss"].shape == ()


class Identity(Line):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return poptorch.identity_loss((self(x) - y) ** 2, "mean")


def test_identity_loss_of_the_user_still_works():
    (ours, _), (theirs, _) = fit_both(Identity, batch_size=4)
    assert_same_weights(ours, theirs)


def returning(value):
    class Returning(Line):
        def training_step(self, batch, batch_idx):
            return value(self, batch)

    return Returning()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda module, batch: None, "Skipping backward by returning `None`"),
        (lambda module, batch: (module(batch[0]) - batch[1]).mean(1), r"shape \[4\]"),
        (lambda module, batch: {"preds": module(batch[0])}, "'loss' key needs to be present"),
        (lambda module, batch: 1.0, "must return a loss tensor"),
    ],
    ids=["nothing", "a vector", "a dict without a loss", "a number"],
)
def test_what_is_no_loss_is_refused(value, text):
    module = returning(value)
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match=text):
        fit(module, loader(4))


class DeviceIdioms(Line):
    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.to(self.device)
        offset = torch.zeros(2, device=self.device) + torch.arange(2).type_as(x)
        return F.mse_loss(self(x) + offset, y.to(self.device))


def test_device_idioms_run():
    (ours, _), (theirs, _) = fit_both(DeviceIdioms, batch_size=4)
    assert_same_weights(ours, theirs)


class Net(Line):
    """With batch normalisation and dropout."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(32), nn.Dropout(dropout)

    def forward(self, x):
        return self.fc(self.dropout(self.norm(x)))


def test_statistics_of_batch_norm_equal_the_cpu():
    (ours, _), (theirs, _) = fit_both(Net, batch_size=8, max_epochs=2)
    assert_same_weights(ours, theirs)
    assert ours.norm.num_batches_tracked == 16


def test_batch_norm_trains_on_several_devices():
    module = Net()
    fit(module, loader(2), loader(2), devices=4)
    assert module.norm.num_batches_tracked == 8


class Masks(Net):
    def training_step(self, batch, batch_idx):
        self.log("kept", (self.dropout(torch.ones_like(batch[0])) > 0).float().mean())
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("kept_in_validation", (self.dropout(torch.ones_like(batch[0])) > 0).float().mean())


def test_dropout_is_active_in_training_only():
    run = fit(Masks(dropout=0.5), loader(8), loader(8))
    assert 0.2 < run.callback_metrics["kept"] < 0.8
    assert run.callback_metrics["kept_in_validation"] == 1


class Weighted(Line):
    """A loss with a weight that a hook changes in epoch 2; where the weight is, tests say."""

    def on_train_epoch_start(self):
        self.put(1.0 if self.trainer.current_epoch < 2 else 0.5)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.get()


class InAttribute(Weighted):
    def put(self, weight):
        self.beta = weight

    def get(self):
        return self.beta


class InList(Weighted):
    def put(self, weight):
        self.betas = [weight]

    def get(self):
        return self.betas[0]


class InTensor(Weighted):
    def put(self, weight):
        self.beta = torch.tensor(weight)

    def get(self):
        return self.beta


class InTensorInPlace(Weighted):
    def __init__(self):
        super().__init__()
        self.beta = torch.tensor(1.0)

    def put(self, weight):
        if weight != self.beta:
            self.beta.fill_(weight)

    def get(self):
        return self.beta


class InHyperparameters(Weighted):
    def __init__(self, beta=1.0):
        super().__init__()
        self.save_hyperparameters()

    def put(self, weight):
        self.hparams.beta = weight

    def get(self):
        return self.hparams.beta


class InSubmodule(Weighted):
    def __init__(self):
        super().__init__()
        self.fc.beta = 1.0

    def put(self, weight):
        self.fc.beta = weight

    def get(self):
        return self.fc.beta


@pytest.mark.parametrize(
    "kind", [InAttribute, InList, InTensor, InTensorInPlace, InHyperparameters, InSubmodule], ids=lambda k: k.__name__
)
@pytest.mark.filterwarnings("default:poptorch compiles a step")
def test_a_value_that_the_host_changes_compiles_again(kind):
    with pytest.warns(UserWarning, match=f"poptorch compiles a step of {kind.__name__} again: .*beta"):
        (ours, _), (theirs, _) = fit_both(kind, batch_size=4, max_epochs=4)
    assert_same_weights(ours, theirs)


class InBuffer(Weighted):
    def __init__(self):
        super().__init__()
        self.register_buffer("beta", torch.tensor(1.0))
        self.unread = [0.0]

    def put(self, weight):
        self.beta.fill_(weight)
        self.unread.append(weight)

    def get(self):
        return self.beta


def test_a_buffer_that_the_host_changes_does_not():
    (ours, _), (theirs, _) = fit_both(InBuffer, batch_size=4, max_epochs=4)
    assert_same_weights(ours, theirs)


class Inplace(Line):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("v", self.loss((x.mul_(2), y)))


def test_a_step_may_write_to_a_batch_of_inference_tensors():
    results = [trainer(kind).validate(Inplace(), loader(8), verbose=False)[0]["v"] for kind in ("ipu", "cpu")]
    assert results[0] == pytest.approx(results[1])


class Annealed(Line):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.combine()

    def combine(self):
        return (self.current_epoch + 1) * 0.1 + self.trainer.global_step * 0.01


def test_epoch_and_global_step_may_be_computed_with():
    (ours, _), (theirs, _) = fit_both(Annealed, batch_size=4, devices=1, max_epochs=3)
    assert_same_weights(ours, theirs)


class Cyclic(Line):
    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (batch_idx % 3)


def test_the_index_of_the_batch_may_be_computed_with():
    (ours, _), (theirs, _) = fit_both(Cyclic, batch_size=4)
    assert_same_weights(ours, theirs)


class Indices(Line):
    def predict_step(self, batch, batch_idx):
        return {"index": batch_idx}


def test_the_index_of_the_batch_may_be_returned():
    found = trainer().predict(Indices(), loader(16))
    assert [batch["index"].item() for batch in found] == [0, 1, 2, 3]


class Warmup(Line):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss * 0.1 if self.current_epoch < 2 else loss


@pytest.mark.filterwarnings("default:poptorch compiles a step")
def test_a_branch_on_the_epoch_compiles_again():
    with pytest.warns(UserWarning, match="poptorch compiles a step of Warmup again: it branches on current_epoch"):
        (ours, _), (theirs, _) = fit_both(Warmup, batch_size=4, max_epochs=4)
    assert_same_weights(ours, theirs)


class EverySecond(Line):
    """Computes and logs something else in every second batch."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx % 2 == 0:
            self.log("x", loss)
            return loss
        return 2 * loss


@pytest.fixture
def compilations():
    """Grows by one for each program that is compiled."""
    found = []
    with poptorch.registerPreCompileHook(lambda *args: found.append(args)):
        yield found


@pytest.mark.filterwarnings("default:poptorch compiles a step")
def test_each_way_through_a_step_is_compiled_once(compilations):
    with pytest.warns(UserWarning, match="it branches on batch_idx") as caught:
        (ours, ipu), (theirs, host) = fit_both(EverySecond, batch_size=4, max_epochs=3)
    assert_same_weights(ours, theirs)
    torch.testing.assert_close(ipu.callback_metrics["x"], host.callback_metrics["x"])
    assert len(compilations) == 2
    assert sum("compiles a step" in str(w.message) for w in caught) == 1


class Numbered(Line):
    """Goes another way in every step."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + float(self.global_step) / 10)


@pytest.mark.filterwarnings("default:poptorch compiles a step")
def test_a_step_may_have_more_ways_than_are_kept():
    with pytest.warns(UserWarning, match="it branches on global_step"):
        (ours, _), (theirs, _) = fit_both(Numbered, batch_size=8)
    assert_same_weights(ours, theirs)


def shapes_that_differ():
    return Batches([[part[:count] for part in rows(8, seed=count)[:]] for count in (8, 4, 8, 4, 8)])


@pytest.mark.filterwarnings("default:poptorch compiles a step")
def test_batches_of_other_shapes_have_programs_of_their_own(compilations):
    ours, theirs = Line(), Line()
    with pytest.warns(UserWarning, match="other shapes or constants than those before"):
        fit(ours, shapes_that_differ(), max_epochs=2)
    fit(theirs, shapes_that_differ(), accelerator="cpu", max_epochs=2)
    assert_same_weights(ours, theirs)
    assert len(compilations) == 2


def test_options_of_the_user_say_whether_shapes_may_differ():
    with pytest.raises(poptorch.Error, match="Shape mismatch"):
        fit(Line(), shapes_that_differ(), strategy=IPUStrategy(training_opts=poptorch.Options()))


class DataBranch(Line):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss if batch[0].sum() > 0 else loss * 2


def test_a_branch_on_data_is_guarded():
    with pytest.raises(poptorch.Error, match="contradicts"):
        fit(DataBranch(), loader(1))


class Sanity(Line):
    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.log("v", self.loss(batch))


def test_a_step_that_asks_for_the_sanity_check_is_compiled_for_both():
    with pytest.warns(UserWarning, match="asks the trainer for its state"):
        run = fit(Sanity(), loader(8), loader(8))
    assert "v" in run.callback_metrics


class Counted(Line):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        self.seen += len(batch[0])


def test_buffers_that_an_evaluation_changes_are_on_the_module():
    module = Counted()
    trainer().validate(module, loader(8), verbose=False)
    assert module.seen == 64


class NumberBatches(Line):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["rows"]) * batch["weight"] + batch["offset"]


class Batches:
    """An iterable that makes its batches itself."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def number_batches():
    names = {"name": "constant"}
    return Batches([{"rows": rows(8, seed=n)[:], "weight": 0.5 * n, "offset": n, **names} for n in range(6)])


def test_numbers_in_a_batch_are_not_frozen():
    ours, theirs = NumberBatches(), NumberBatches()
    fit(ours, number_batches())
    fit(theirs, number_batches(), accelerator="cpu")
    assert_same_weights(ours, theirs)


def test_a_batch_that_does_not_divide_is_the_executors_error():
    with pytest.raises(AssertionError, match=r"argument batch\[0\] has shape \[7, 32\]"):
        fit(Line(), Batches([rows(7)[:]]), devices=2)


def test_raw_results_on_request():
    seen = Outputs()
    fit(
        Line(),
        loader(2),
        strategy=IPUStrategy(reduce_outputs=False),
        devices=4,
        callbacks=[seen],
        limit_train_batches=1,
    )
    assert seen.seen["train"][0]["loss"].shape == (4,)


def test_validation_in_inference_mode_leaves_a_module_that_trains():
    module = Line()
    run = trainer(max_epochs=1)
    run.validate(module, loader(8), verbose=False)
    run.fit(module, loader(8))
    assert not any(parameter.is_inference() for parameter in module.parameters())
    assert module.fc.weight.requires_grad


class NoResult(Line):
    def validation_step(self, batch, batch_idx):
        self(batch[0])


def test_a_step_without_results_runs():
    trainer().validate(NoResult(), loader(8), verbose=False)


def test_a_step_without_batch_idx_runs():
    class Short(Line):
        def training_step(self, batch):
            return self.loss(batch)

        def validation_step(self, batch):
            return self.loss(batch)

    fit(Short(), loader(8), loader(8))


def test_a_module_without_an_optimiser_runs_its_steps():
    module = Line(lambda module: None)
    before = copy.deepcopy(module)
    seen = Outputs()
    with pytest.warns(UserWarning, match="no optimizer"):
        fit(module, loader(2), devices=2, accumulate_grad_batches=2, callbacks=[seen])
    assert_same_weights(module, before, 0)
    assert len(seen.seen["train"]) == 8


def test_loaders_of_dictionaries_and_data_classes():
    class Batches(Line):
        def validation_step(self, batch, batch_idx):
            self.log("v", self.loss((batch.x, batch.extra["y"])))

    from dataclasses import dataclass

    @dataclass
    class Batch:
        x: torch.Tensor
        extra: dict

    def collate(samples):
        xs, ys = zip(*samples, strict=True)
        return Batch(torch.stack(xs), {"y": torch.stack(ys)})

    data = DataLoader(rows(), batch_size=8, collate_fn=collate)
    (ours,) = trainer().validate(Batches(), data, verbose=False)
    (theirs,) = trainer("cpu").validate(Batches(), data, verbose=False)
    assert ours == pytest.approx(theirs)


@pytest.mark.inductor
def test_native_code_logs_measures_and_trains_like_the_cpu(engine, monkeypatch):
    monkeypatch.setenv("POPTORCH_ENGINE", engine)

    class Everything(Net):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch) * (1 + 0.1 * self.current_epoch)
            self.log("t", loss, on_step=True, on_epoch=True)
            return {"loss": loss, "index": batch_idx + batch[0].argmax(1)}

        def validation_step(self, batch, batch_idx):
            self.log("v", self.loss(batch), reduce_fx="max")

    strategy = IPUStrategy(device_iterations=2)
    (ours, ipu), (theirs, host) = fit_both(
        lambda: Everything(),
        batch_size=4,
        strategy=strategy,
        validation=loader(4, 32),
        max_epochs=2,
        gradient_clip_val=0.5,
    )
    assert_same_weights(ours, theirs)
    for name in ("t_epoch", "v"):
        torch.testing.assert_close(ipu.callback_metrics[name], host.callback_metrics[name])
