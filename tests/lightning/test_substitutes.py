"""What a step finds in place of its logger and its metrics while it is compiled."""

from __future__ import annotations

import csv

import pytest
import torchmetrics

from lightning_runs import Line, fit, loader, pl, trainer


class Experiment:
    """What a logger writes to."""

    name = "an experiment"

    def __init__(self):
        self.notes = []

    def note(self, what, value, step=None):
        self.notes.append((what, float(value), step))


class Notes(pl.loggers.logger.Logger):
    """A logger that only remembers."""

    name = version = save_dir = "notes"

    def __init__(self):
        super().__init__()
        self.experiment = Experiment()

    def log_metrics(self, metrics, step=None):
        for name, value in metrics.items():
            self.experiment.note(name, value, step)

    def log_hyperparams(self, *args, **kwargs):
        pass


class WritesItself(Line):
    """Calls its logger from a step, without `self.log`."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        assert isinstance(self.logger, Notes)
        assert self.logger.name == "notes"
        assert self.logger.experiment.name == "an experiment"
        self.logger.experiment.note("loss", loss.detach(), step=self.global_step)
        self.logger.log_metrics({"item": loss.item()}, step=self.global_step)
        for logger in self.trainer.loggers:
            logger.experiment.note("epoch", self.current_epoch)
        return loss


@pytest.mark.parametrize("devices", [1, 2])
def test_calls_of_a_logger_are_those_of_a_cpu_run(devices):
    ours, theirs = Notes(), Notes()
    fit(WritesItself(), loader(8 // devices), devices=devices, logger=ours, max_epochs=2)
    fit(WritesItself(), loader(8), accelerator="cpu", logger=theirs, max_epochs=2)
    assert len(ours.experiment.notes) == 48
    for mine, other in zip(ours.experiment.notes, theirs.experiment.notes, strict=True):
        assert mine == (other[0], pytest.approx(other[1], abs=1e-5), other[2])


class WritesRows(Line):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.logger.log_metrics({"own": loss}, step=self.global_step)
        return loss


def test_rows_that_a_step_writes_to_a_file(tmp_path):
    def lines(accelerator):
        fit(WritesRows(), loader(8), accelerator=accelerator, logger=pl.loggers.CSVLogger(tmp_path, accelerator, 0))
        with (tmp_path / accelerator / "version_0" / "metrics.csv").open() as file:
            return [float(row["own"]) for row in csv.DictReader(file) if row["own"]]

    assert lines("ipu") == pytest.approx(lines("cpu"), abs=1e-5)


def test_tensorboard_inside_a_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    class Board(Line):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.logger.experiment.add_scalar("own/loss", loss, self.global_step)
            return loss

    def scalars(accelerator):
        logger = pl.loggers.TensorBoardLogger(tmp_path, name=accelerator, version=0)
        fit(Board(), loader(8), accelerator=accelerator, logger=logger)
        events = EventAccumulator(logger.log_dir)
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("own/loss")]

    ours, theirs = scalars("ipu"), scalars("cpu")
    assert [step for step, _ in ours] == [step for step, _ in theirs] == list(range(8))
    assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], abs=1e-5)


class LooseMetrics(Line):
    """Has its metrics in a dictionary and a list, where `modules()` does not find them."""

    def __init__(self):
        super().__init__()
        self.by_name = {"a": torchmetrics.MeanMetric()}
        self.listed = [torchmetrics.MetricCollection({"m": torchmetrics.MeanMetric()})]

    def validation_step(self, batch, batch_idx):
        self.by_name["a"].update(self.loss(batch))
        self.listed[0].update(self.loss(batch) * 2)

    def on_validation_epoch_end(self):
        self.log("a", self.by_name["a"].compute())
        self.log_dict(self.listed[0].compute())


def test_metrics_in_containers_are_metrics():
    ours, theirs = (trainer(kind).validate(LooseMetrics(), loader(8), verbose=False) for kind in ("ipu", "cpu"))
    assert ours[0] == pytest.approx(theirs[0])
