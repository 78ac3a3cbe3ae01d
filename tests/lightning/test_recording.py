"""What a step does beside computing: it logs, feeds metrics and appends to lists, in every call."""

from __future__ import annotations

import csv

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch.utils.checkpoint import checkpoint
from torchmetrics.functional.classification import multiclass_accuracy

import poptorch
from lightning_runs import Line, fit, fit_both, loader, pl, rows, trainer
from poptorch.lightning import IPUStrategy

MisErr = pl.utilities.exceptions.MisconfigurationException


def logging(**arguments):
    """A module that logs its loss with these arguments."""

    class Logging(Line):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("a", loss, **arguments)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("v", self.loss(batch), **arguments)

        def test_step(self, batch, batch_idx):
            self.log("t", self.loss(batch), **arguments)

    return Logging()


class Metrics(pl.Callback):
    """What the Trainer knows after each batch."""

    def __init__(self):
        self.callback, self.losses, self.bar = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"])

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.callback.append(dict(trainer.callback_metrics))
        self.bar.append(dict(trainer.progress_bar_metrics))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_logged_loss_is_that_of_the_batch(devices):
    seen = Metrics()
    run = fit(logging(), loader(2), devices=devices, callbacks=[seen])
    known = [metrics["a"] for metrics in seen.callback[1:]] + [run.callback_metrics["a"]]
    torch.testing.assert_close(known, seen.losses)
    assert len({float(value) for value in known}) > 1


@pytest.mark.parametrize("function", ["validate", "test"])
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("count", [64, 70])
def test_an_evaluation_equals_the_cpu(count, devices, function):
    data = loader(4, count)
    (ours,) = getattr(trainer(devices=devices), function)(logging(), data, verbose=False)
    (theirs,) = getattr(trainer("cpu"), function)(logging(), data, verbose=False)
    assert ours == pytest.approx(theirs, abs=1e-5)


def test_step_and_epoch_and_progress_bar():
    (_, ipu), (_, host) = fit_both(
        lambda: logging(on_step=True, on_epoch=True, prog_bar=True), batch_size=8, validation=loader(8), max_epochs=2
    )
    assert set(ipu.callback_metrics) == set(host.callback_metrics) == {"a", "a_step", "a_epoch", "v", "v_epoch"}
    assert set(ipu.progress_bar_metrics) == set(host.progress_bar_metrics)
    for name, value in host.callback_metrics.items():
        torch.testing.assert_close(ipu.callback_metrics[name], value)


class Constants(Line):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log_dict({"a": loss, "b": 2.0}, on_step=False, on_epoch=True)
        return loss


def test_a_number_is_logged_at_every_step_with_one_warning():
    with pytest.warns(UserWarning, match="the same number is logged") as caught:
        run = fit(Constants(), loader(8), devices=2)
    assert run.callback_metrics["b"] == 2
    assert sum("the same number is logged at every step" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("sum", torch.sum),
        ("min", torch.min),
        ("max", torch.max),
        (torch.max, torch.max),
        (sum, torch.sum),
        ("avg", torch.mean),
    ],
    ids=["sum", "min", "max", "torch.max", "the built-in sum", "avg"],
)
def test_reductions_over_replicas(reduction, expected):
    class Reduced(Line):
        def validation_step(self, batch, batch_idx):
            self.log("v", batch[0].sum(), reduce_fx=reduction)
            self.log("c", torch.ones(()), reduce_fx=reduction)

    (found,) = trainer(devices=4).validate(Reduced(), loader(2, 8), verbose=False)
    values = rows(8)[:][0].reshape(4, -1).sum(1)
    assert found["v"] == pytest.approx(expected(values).item(), abs=1e-4)
    assert found["c"] == (4 if expected is torch.sum else 1)


def test_an_unknown_reduction_is_lightnings_error():
    with pytest.raises(MisErr, match=r"Only `self\.log"):
        fit(logging(reduce_fx="median"), loader(8))


@pytest.mark.parametrize(("chosen", "count"), [(None, 4), (poptorch.OutputMode.Final, 1)])
@pytest.mark.filterwarnings("default:.*OutputMode.Final")
def test_which_micro_batches_a_training_log_covers(chosen, count, recwarn):
    class Sums(Line):
        def training_step(self, batch, batch_idx):
            self.log("x", batch[0].sum())
            return self.loss(batch)

    options = poptorch.Options().deviceIterations(4)
    if chosen is not None:
        options.outputMode(chosen)
    run = fit(Sums(), loader(1, 4), strategy=IPUStrategy(training_opts=options))
    sums = rows(4)[:][0].sum(1)
    torch.testing.assert_close(run.callback_metrics["x"], sums[-count:].mean())
    assert any("covers only the micro-batches" in str(w.message) for w in recwarn) == (chosen is not None)


def test_sums_of_micro_batches_become_means():
    options = poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.Sum)
    run = fit(logging(), loader(1, 4), strategy=IPUStrategy(training_opts=options))
    expected = fit(logging(), loader(1, 4), strategy=IPUStrategy(device_iterations=4))
    torch.testing.assert_close(run.callback_metrics["a"], expected.callback_metrics["a"])
    options = poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.Sum)
    with pytest.raises(MisErr, match="needs every value"):
        fit(logging(reduce_fx="max"), loader(1, 4), strategy=IPUStrategy(training_opts=options))


def test_a_batch_size_weights_the_mean_of_an_epoch():
    class Weighted(Line):
        def validation_step(self, batch, batch_idx):
            self.log("v", batch[0].sum(), batch_size=len(batch[0]))

    data = loader(4, 30)
    (ours,) = trainer(devices=2).validate(Weighted(), data, verbose=False)
    x = rows(30)[:][0]
    expected = (
        sum(
            (part.reshape(-1, rows_per, 32).sum((1, 2)).mean() * len(part))
            for part, rows_per in [(x[:8], 4), (x[8:16], 4), (x[16:24], 4), (x[24:], 6)]
        )
        / 30
    )
    assert ours["v"] == pytest.approx(expected.item(), rel=1e-4)


def test_two_loaders_have_names_and_programs_of_their_own():
    class Two(Line):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            loss = self.loss(batch)
            self.log("v", loss if dataloader_idx == 0 else 2 * loss)

    data = [loader(4), loader(8, 30)]
    ours = trainer(devices=2).validate(Two(), data, verbose=False)
    theirs = trainer("cpu").validate(Two(), data, verbose=False)
    assert list(ours[0]) + list(ours[1]) == ["v/dataloader_idx_0", "v/dataloader_idx_1"]
    assert [list(found.values()) for found in ours] == [pytest.approx(list(found.values())) for found in theirs]


class LogsIn(Line):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def training_step(self, batch, batch_idx):
        self.log("x", self.value(self(batch[0])))
        return self.loss(batch)

    def predict_step(self, batch, batch_idx):
        self.log("x", self(batch[0]).mean())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda out: out[0], "single element"),
        (lambda out: "a", "cannot be logged"),
        (lambda out: [1, "b"], "cannot be logged"),
    ],
)
def test_what_cannot_be_logged(value, text):
    with pytest.raises(ValueError, match=text):
        fit(LogsIn(value), loader(8))


def test_predictions_are_not_logged():
    with pytest.raises(MisErr, match="doesn't support logging"):
        trainer().predict(LogsIn(None), loader(8))


class Hooks(Line):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("batch_end", float(batch_idx))

    def on_validation_epoch_end(self):
        self.log("epoch_end", 3.0)


def test_logging_in_hooks_is_lightnings_own():
    run = fit(Hooks(), loader(8), loader(8))
    assert run.callback_metrics["batch_end"] == 7
    assert run.callback_metrics["epoch_end"] == 3


def test_rows_of_a_logger_equal_those_of_a_cpu_run(tmp_path):
    def lines(accelerator):
        logger = pl.loggers.CSVLogger(tmp_path, name=accelerator, version=0)
        fit(
            logging(on_step=True, on_epoch=True),
            loader(8),
            loader(8),
            accelerator=accelerator,
            logger=logger,
            max_epochs=2,
            log_every_n_steps=2,
        )
        with (tmp_path / accelerator / "version_0" / "metrics.csv").open() as file:
            return [
                {key: float(value) if value else None for key, value in row.items()} for row in csv.DictReader(file)
            ]

    ours, theirs = lines("ipu"), lines("cpu")
    assert len(ours) == len(theirs) > 5
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


def test_tensorboard(tmp_path):
    logger = pl.loggers.TensorBoardLogger(tmp_path, name="", version="x")
    fit(logging(), loader(8), loader(8), logger=logger, log_every_n_steps=1)
    assert list((tmp_path / "x").glob("events*"))


def test_the_progress_bar_shows_what_is_logged(capsys):
    run = fit(logging(prog_bar=True), loader(8), enable_progress_bar=True)
    assert "a" in run.progress_bar_metrics
    assert "a=" in capsys.readouterr().out


def test_float16_is_averaged_in_float32():
    run = fit(logging(), loader(8), devices=4, precision="16-mixed")
    assert run.callback_metrics["a"].dtype == torch.float32


def test_logging_in_a_part_that_is_computed_twice():
    class Checkpointed(Line):
        def inner(self, x):
            out = self.fc(x)
            self.log("inner", out.mean())
            return out.tanh()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    run = fit(Checkpointed(), loader(8), loader(8))
    assert run.callback_metrics["inner"].isfinite()


# ---- metrics


class Classes(Line):
    """Labels are the larger of two columns."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.mean = torchmetrics.MeanMetric()
        self.both = torchmetrics.MetricCollection(
            {
                "f1": torchmetrics.F1Score("multiclass", num_classes=2),
                "recall": torchmetrics.Recall("multiclass", num_classes=2),
            },
            prefix="both/",
        )

    def scores(self, batch):
        x, y = batch
        return self(x), y.argmax(1)

    def training_step(self, batch, batch_idx):
        scores, labels = self.scores(batch)
        self.accuracy(scores, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return F.cross_entropy(scores, labels)

    def validation_step(self, batch, batch_idx):
        scores, labels = self.scores(batch)
        self.mean.update(scores.mean())
        self.log("mean", self.mean)
        self.log_dict(self.both(scores, labels))


@pytest.mark.parametrize("devices", [1, 4])
def test_metrics_equal_the_cpu(devices):
    (_, ipu), (_, host) = fit_both(
        Classes, batch_size=4, cpu_batch_size=4 * devices, validation=loader(4), devices=devices, max_epochs=2
    )
    for name in ("accuracy_epoch", "accuracy_step", "mean"):
        torch.testing.assert_close(ipu.callback_metrics[name], host.callback_metrics[name])
    assert set(ipu.callback_metrics) == set(host.callback_metrics)


def test_a_collection_that_is_updated_and_logged():
    class Updates(Classes):
        def validation_step(self, batch, batch_idx):
            self.both.update(*self.scores(batch))
            self.log_dict(self.both)

    data = loader(4, 70)
    (ours,) = trainer(devices=2).validate(Updates(), data, verbose=False)
    (theirs,) = trainer("cpu").validate(Updates(), data, verbose=False)
    assert ours == pytest.approx(theirs)
    assert set(ours) == {"both/f1", "both/recall"}


def test_metrics_computed_and_reset_in_a_step():
    class Resets(Classes):
        def validation_step(self, batch, batch_idx):
            self.accuracy.update(*self.scores(batch))
            self.log("now", self.accuracy.compute())
            self.accuracy.reset()

    (ours,) = trainer().validate(Resets(), loader(8), verbose=False)
    (theirs,) = trainer("cpu").validate(Resets(), loader(8), verbose=False)
    assert ours == pytest.approx(theirs)


@pytest.mark.parametrize(
    "use", [lambda v: v + 1, lambda v: v.item(), lambda v: torch.sqrt(v), float], ids=["add", "item", "torch", "float"]
)
def test_the_value_of_a_metric_is_not_computed_with(use):
    class Computes(Classes):
        def validation_step(self, batch, batch_idx):
            use(self.accuracy(*self.scores(batch)))

    with pytest.raises(MisErr, match="known only after the compiled step has run"):
        trainer().validate(Computes(), loader(8), verbose=False)


def test_the_value_of_a_metric_may_be_returned():
    class Returns(Classes):
        def validation_step(self, batch, batch_idx):
            return {"accuracy": self.accuracy(*self.scores(batch))}

    found = []

    class Note(pl.Callback):
        def on_validation_batch_end(self, trainer, module, outputs, *args):
            found.append(outputs["accuracy"])

    trainer(callbacks=[Note()]).validate(Returns(), loader(8), verbose=False)
    assert len(found) == 8
    assert all(0 <= value <= 1 for value in found)


def test_metrics_need_all_results():
    options = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.Final)
    with pytest.raises(MisErr, match=r"OutputMode\.All"):
        fit(Classes(), loader(4), strategy=IPUStrategy(training_opts=options))


def test_functions_of_torchmetrics_run_on_batches_with_other_labels():
    class Functional(Classes):
        def validation_step(self, batch, batch_idx):
            scores, labels = self.scores(batch)
            self.log("f", multiclass_accuracy(scores, labels, num_classes=2, average="micro"))

    (ours,) = trainer().validate(Functional(), loader(2), verbose=False)
    (theirs,) = trainer("cpu").validate(Functional(), loader(2), verbose=False)
    assert ours == pytest.approx(theirs)


# ---- lists and attributes


class Lists(Line):
    def __init__(self):
        super().__init__()
        self.outs, self.by_name = [], {"x": []}

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.outs.append(loss)
        self.by_name["x"].append({"rows": batch[1], "loss": loss})

    def on_validation_epoch_end(self):
        self.log("mean", torch.stack(self.outs).mean())
        self.rows = torch.cat([item["rows"] for item in self.by_name["x"]])
        self.count = len(self.outs)
        self.outs.clear()
        self.by_name["x"] = []


@pytest.mark.parametrize("devices", [1, 2])
def test_lists_receive_one_element_per_batch(devices):
    module = Lists()
    (ours,) = trainer(devices=devices).validate(module, loader(4), verbose=False)
    (theirs,) = trainer("cpu").validate(Lists(), loader(4), verbose=False)
    assert ours == pytest.approx(theirs)
    assert module.count == 16 // devices
    assert torch.equal(module.rows, rows()[:][1])


class Attributes(Line):
    def __init__(self):
        super().__init__()
        self.last, self.counter = None, 0

    def validation_step(self, batch, batch_idx):
        self.last = self.loss(batch)
        self.counter += 1


def test_attributes_that_a_step_sets_are_warned_about():
    module = Attributes()
    with pytest.warns(UserWarning, match="`validation_step` sets self") as caught:
        trainer().validate(module, loader(8), verbose=False)
    texts = [str(w.message) for w in caught]
    assert any("`validation_step` sets self.last" in text for text in texts)
    assert any("`validation_step` sets self.counter" in text for text in texts)
    assert module.last is None


def test_what_a_step_sets_on_the_trainer_is_warned_about():
    class Stops(Line):
        def training_step(self, batch, batch_idx):
            self.trainer.should_stop = True
            return self.loss(batch)

    with pytest.warns(UserWarning, match=r"trainer\.should_stop"):
        fit(Stops(), loader(8))


def test_the_trainer_that_a_step_sees_is_a_trainer():
    class Looks(Line):
        def training_step(self, batch, batch_idx):
            assert isinstance(self.trainer, pl.Trainer)
            assert self.trainer.max_epochs == 1
            return self.loss(batch)

    fit(Looks(), loader(8))
