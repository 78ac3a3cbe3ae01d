"""The programs of the first documentation of IPUs in Lightning (2021), as they were written."""

from __future__ import annotations

import pytest
import pytorch_lightning
import torch

import poptorch
from lightning_runs import QUIET, assert_same_weights, line_class, loader

PROGRAMS = {
    "eight IPUs": """
trainer = pl.Trainer(ipus=8) # Train using data parallel on 8 IPUs
""",
    "mixed precision": """
import pytorch_lightning as pl

my_model = MyLightningModule()
trainer = pl.Trainer(ipus=8, precision=16)
trainer.fit(my_model)
""",
    "half precision": """
import pytorch_lightning as pl
from pytorch_lightning.plugins import IPUPlugin

my_model = MyLightningModule()
trainer = pl.Trainer(ipus=8, precision=16, plugins=IPUPlugin(convert_model_to_half=True))
trainer.fit(my_model)
""",
    "device iterations": """
import pytorch_lightning as pl
from pytorch_lightning.plugins import IPUPlugin

my_model = MyLightningModule()
trainer = pl.Trainer(ipus=8, plugins=IPUPlugin(device_iterations=32))
trainer.fit(my_model)
""",
    "options": """
import pytorch_lightning as pl
from pytorch_lightning.plugins import IPUPlugin

my_model = MyLightningModule()
inference_opts = poptorch.Options()
inference_opts.deviceIterations(32)

training_opts = poptorch.Options()
training_opts.deviceIterations(32)

trainer = Trainer(
    ipus=8,
    plugins=IPUPlugin(inference_opts=inference_opts, training_opts=training_opts)
)
trainer.fit(my_model)
""",
}


Base = line_class(pytorch_lightning)


class Data(Base):
    """Brings its own data: 512 rows."""

    def train_dataloader(self):
        return loader(1, 512)

    def val_dataloader(self):
        return loader(2, 512)


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:.*historical reasons", "ignore:.*devices=8.*is ignored"
)
@pytest.mark.parametrize(
    ("name", "steps", "weights"),
    [
        ("eight IPUs", None, None),
        ("mixed precision", 64, torch.float32),
        ("half precision", 64, torch.float16),
        ("device iterations", 2, torch.float32),
        ("options", 16, torch.float32),
    ],
)
def test_program(name, steps, weights, monkeypatch):
    for variable, value in {
        "MAX_EPOCHS": "1",
        "ENABLE_PROGRESS_BAR": "False",
        "LOGGER": "False",
        "ENABLE_MODEL_SUMMARY": "False",
    }.items():
        monkeypatch.setenv(f"PL_TRAINER_{variable}", value)
    names = {
        "MyLightningModule": Data,
        "pl": pytorch_lightning,
        "poptorch": poptorch,
        "Trainer": pytorch_lightning.Trainer,
    }
    exec(PROGRAMS[name], names)
    trainer = names["trainer"]
    assert trainer.num_devices == 8
    if steps is not None:
        assert trainer.global_step == steps
        assert {parameter.dtype for parameter in names["my_model"].parameters()} == {weights}


class Usual(Base):
    """What most LightningModules have: logs, Adam, a schedule."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


WAYS = {
    "cpu": lambda: {"accelerator": "cpu"},
    "ipu": lambda: {"accelerator": "ipu", "devices": 4, "accumulate_grad_batches": 2},
    "2021": lambda: {"ipus": 4, "plugins": pytorch_lightning.plugins.IPUPlugin(), "accumulate_grad_batches": 2},
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Be aware that when using `ckpt_path`")
def test_a_usual_program_gives_the_same_on_the_cpu_now_and_in_2021(tmp_path):
    found = {}
    for name, arguments in WAYS.items():
        module = Usual()
        saved = pytorch_lightning.callbacks.ModelCheckpoint(tmp_path / name, monitor="val_loss", save_last=True)
        stopping = pytorch_lightning.callbacks.EarlyStopping("val_loss", min_delta=0.05)
        trainer = pytorch_lightning.Trainer(
            **{**QUIET, "enable_checkpointing": True, "max_epochs": 12}, callbacks=[saved, stopping], **arguments()
        )
        trainer.fit(module, loader(16 if name == "cpu" else 2), loader(16 if name == "cpu" else 2, 60))
        found[name] = module, trainer, saved
    for name in ("ipu", "2021"):
        module, trainer, saved = found[name]
        assert_same_weights(module, found["cpu"][0])
        assert trainer.global_step == found["cpu"][1].global_step
        assert trainer.current_epoch == found["cpu"][1].current_epoch < 12
        for metric, value in found["cpu"][1].callback_metrics.items():
            torch.testing.assert_close(trainer.callback_metrics[metric], value)
        assert saved.best_model_score == pytest.approx(found["cpu"][2].best_model_score.item(), rel=1e-5)

    goals = []
    for name, arguments in WAYS.items():  # each goes on from the checkpoint of the IPU
        module = Usual()
        trainer = pytorch_lightning.Trainer(**{**QUIET, "max_epochs": 14}, **arguments())
        trainer.fit(module, loader(16 if name == "cpu" else 2), ckpt_path=found["ipu"][2].last_model_path)
        goals.append(module)
    assert_same_weights(goals[1], goals[0])
    assert_same_weights(goals[2], goals[0])
