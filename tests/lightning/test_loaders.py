"""Loaders: which become ours, in which order their rows come, and what happens at the end of the data."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import poptorch
from lightning_runs import Line, assert_same_weights, fit, fit_both, loader, pl, rows, trainer
from poptorch.lightning import IPUStrategy

MisErr = pl.utilities.exceptions.MisconfigurationException


class Batches(pl.Callback):
    """The rows that steps were given."""

    def __init__(self):
        self.train, self.validate = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.train.append(batch[0])

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if not trainer.sanity_checking:
            self.validate.append(batch[0])


def test_a_torch_loader_becomes_ours():
    run = fit(Line(), loader(2, shuffle=True), loader(2), devices=2)
    assert isinstance(run.train_dataloader, poptorch.DataLoader)
    assert run.train_dataloader.options is run.strategy.training_opts
    assert run.val_dataloaders.options is run.strategy.inference_opts
    assert not isinstance(run.train_dataloader.sampler, DistributedSampler)
    assert isinstance(run.train_dataloader.sampler, RandomSampler)


def test_the_loader_of_the_user_is_left_alone():
    own = poptorch.DataLoader(poptorch.Options().deviceIterations(2), rows(), batch_size=4, drop_last=False)
    run = fit(Line(), own, own, strategy=IPUStrategy(device_iterations=2))
    assert run.train_dataloader is own
    assert run.val_dataloaders is own
    assert own.options.device_iterations == 2
    assert not own.drop_last
    run.validate(Line(), own, verbose=False)
    assert run.val_dataloaders is own
    run.test(Line(), own, verbose=False)
    assert run.test_dataloaders is own
    run.predict(Line(), own)
    assert run.predict_dataloaders is own


def test_batches_are_those_of_calls():
    run = fit(Line(), loader(1), devices=2)
    assert run.num_training_batches == run.global_step == 32
    assert fit(Line(), loader(1), devices=2, limit_train_batches=3).global_step == 3
    assert fit(Line(), loader(1), devices=2, fast_dev_run=True).global_step == 1


def test_the_order_is_that_of_a_cpu_run():
    def order(accelerator):
        seen = Batches()
        torch.manual_seed(3)
        fit(Line(), loader(8, shuffle=True), loader(8), accelerator=accelerator, callbacks=[seen], max_epochs=2)
        return torch.cat(seen.train), torch.cat(seen.validate)

    for ours, theirs in zip(order("ipu"), order("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_that_do_not_fill_a_step_are_skipped_with_a_warning():
    with pytest.warns(UserWarning, match="last 6 rows of each epoch are skipped"):
        run = fit(Line(), loader(4, 70), devices=4)
    assert run.num_training_batches == 4


def test_too_few_rows_are_refused():
    text = r"15 rows, but one step of the IPUs takes 16: 2 \(batch_size\) × 2 .* × 2 .* × 2"
    with pytest.raises(MisErr, match=text):
        fit(Line(), loader(2, 15), devices=2, accumulate_grad_batches=2, strategy=IPUStrategy(device_iterations=2))


@pytest.mark.parametrize("count", [70, 5])
def test_predictions_cover_every_row_in_order(count):
    module = Line()
    found = torch.cat(trainer(devices=4).predict(module, loader(4, count)))
    torch.testing.assert_close(found, module(rows(count)[:][0]).detach())


def test_the_rest_can_be_dropped():
    strategy = IPUStrategy(uneven_eval_batches="drop")
    assert len(torch.cat(trainer(devices=4, strategy=strategy).predict(Line(), loader(4, 70)))) == 64
    assert len(torch.cat(trainer(devices=4).predict(Line(), loader(4, 70, drop_last=True)))) == 64


class Numbers(IterableDataset):
    def __init__(self, count=24):
        self.count = count

    def __iter__(self):
        return iter([rows(self.count)[index] for index in range(self.count)])


def scheduled(module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Module(pl.LightningDataModule):
    def train_dataloader(self):
        return loader(4, 24)

    def val_dataloader(self):
        return [loader(4, 24), loader(2, 8)]

    def test_dataloader(self):
        return loader(4, 24)

    predict_dataloader = test_dataloader


class SomeLoader(Line):
    """Takes what several loaders give."""

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            return self.loss(batch["a"]) + self.loss(batch["b"])
        if isinstance(batch[0], (list, tuple)):
            return self.loss(batch[0]) + self.loss(batch[1])
        return self.loss(batch)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("v", self.training_step(batch, batch_idx))


class Sampled(BatchSampler):
    """A batch sampler of one's own."""


LOADERS = {
    "iterable": lambda: DataLoader(Numbers(), batch_size=4),
    "list": lambda: [loader(4, 24), loader(4, 24)],
    "dict": lambda: {"a": loader(4, 24), "b": loader(4, 24)},
    "combined": lambda: CombinedLoader({"a": loader(4, 24), "b": loader(4, 24)}, "min_size"),
    "batch sampler": lambda: DataLoader(rows(24), batch_sampler=Sampled(SequentialSampler(range(24)), 4, False)),
    "sampler": lambda: DataLoader(rows(24), batch_size=4, sampler=SequentialSampler(range(24))),
}


@pytest.mark.parametrize("name", LOADERS)
def test_other_kinds_of_loaders(name):
    module, reference = SomeLoader(scheduled), SomeLoader(scheduled)
    run = fit(module, LOADERS[name](), LOADERS[name]() if name != "combined" else None, devices=2, max_epochs=2)
    assert run.global_step == 6
    assert run.optimizers[0].param_groups[0]["lr"] == 0.005
    data = LOADERS[name]()
    host = trainer("cpu", max_epochs=2, accumulate_grad_batches=2)
    host.fit(reference, data)
    assert_same_weights(module, reference)


def test_a_data_module():
    module = SomeLoader(scheduled)
    run = trainer(devices=2, max_epochs=2)
    run.fit(module, datamodule=Module())
    assert run.optimizers[0].param_groups[0]["lr"] == 0.005
    assert set(run.callback_metrics) == {"v/dataloader_idx_0", "v/dataloader_idx_1"}
    run.validate(module, datamodule=Module(), verbose=False)
    run.test(module, datamodule=Module(), verbose=False)
    assert len(torch.cat(run.predict(module, datamodule=Module()))) == 24


def test_uneven_ends_of_several_loaders_at_once():
    class Pairs(Line):
        def validation_step(self, batch, batch_idx):
            self.log("v", self.loss(batch["a"]) + self.loss(batch["b"]), batch_size=1)

    def combined():
        return CombinedLoader({"a": loader(4, 22), "b": loader(4, 24)}, "max_size_cycle")

    run = trainer(devices=2)
    run.validate(Pairs(), combined(), verbose=False)
    assert run.callback_metrics["v"].isfinite()


@pytest.mark.long
def test_a_loader_that_loads_ahead():
    options = poptorch.Options().replicationFactor(2)
    fork = {"sharing_strategy": poptorch.SharingStrategy.Fork}
    with poptorch.DataLoader(
        options, rows(), batch_size=4, mode=poptorch.DataLoaderMode.Async, async_options=fork
    ) as ahead:
        module, reference = Line(scheduled), Line(scheduled)
        run = fit(module, ahead, devices=2, max_epochs=2)
        assert run.optimizers[0].param_groups[0]["lr"] == 0.005
    fit(reference, loader(8), accelerator="cpu", max_epochs=2)
    assert_same_weights(module, reference)


class Transfer(Line):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert len(batch[0]) == self.expected
        return [batch[0] + 1, batch[1]]


def test_hooks_around_the_transfer_see_the_whole_batch():
    def make():
        module = Transfer()
        module.expected = 8
        return module

    (ours, _), (theirs, _) = fit_both(make, batch_size=4, cpu_batch_size=8, devices=2)
    assert_same_weights(ours, theirs)


def test_other_trainers_are_not_affected():
    class Nested(Line):
        def on_train_epoch_end(self):
            run = fit(Line(), loader(8), accelerator="cpu")
            assert type(run.train_dataloader) is DataLoader

    fit(Nested(), loader(8))


class OwnIteration(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


class OwnCollation(DataLoader):
    def __init__(self, dataset, **arguments):
        super().__init__(
            dataset,
            collate_fn=lambda samples: [torch.stack(column) for column in zip(*samples, strict=True)],
            **arguments,
        )


def test_subclasses_of_loaders():
    with pytest.raises(MisErr, match="OwnIteration has its own __iter__"):
        fit(Line(), OwnIteration(rows(), batch_size=4))
    run = fit(Line(), OwnCollation(rows(), batch_size=4), devices=2)
    assert run.global_step == 8


@pytest.mark.long
def test_workers():
    seen = Batches()
    fit(Line(), loader(8, num_workers=1), callbacks=[seen])
    assert torch.equal(torch.cat(seen.train), rows()[:][0])


class Writer(pl.callbacks.BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches = []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((len(prediction), batch_indices))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.epoch = batch_indices


def test_a_prediction_writer_gets_the_indices_of_the_rows():
    writer = Writer()
    trainer(devices=4, callbacks=[writer]).predict(Line(), loader(4, 70))
    assert [(count, len(indices)) for count, indices in writer.batches] == [(16, 16)] * 4 + [(6, 6)]
    assert [index for _, indices in writer.batches for index in indices] == list(range(70))
    assert writer.epoch == [[indices for _, indices in writer.batches]]
