"""One process among several: ranks, files, partitions of the data, and values that are exchanged."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

import poptorch
from lightning_runs import Line, loader, pl, rows, trainer
from poptorch.lightning import for_package
from poptorch.lightning.packages import ROOTS

MisErr = pl.utilities.exceptions.MisconfigurationException
POPDIST = {"POPDIST_NUM_TOTAL_REPLICAS": "4", "POPDIST_NUM_LOCAL_REPLICAS": "2", "POPDIST_REPLICA_INDEX_OFFSET": "2"}
MPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.fixture(params=[POPDIST, MPI], ids=["popdist", "mpi"])
def second_of_two(request, monkeypatch):
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    yield request.param
    for name in ROOTS:
        for_package(name).package.set_rank(0)


def test_ranks(second_of_two):
    run = trainer(devices=2)
    assert (run.global_rank, run.world_size, run.is_global_zero) == (1, 2, False)
    assert run._accelerator_connector.is_distributed


def test_the_variables_of_torchrun_make_a_process_one_of_several(monkeypatch):
    for name, value in {
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "GROUP_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    run = trainer(devices=2)
    assert (run.global_rank, run.local_rank, run.world_size) == (3, 3, 4)


def test_only_the_first_writes(second_of_two, tmp_path):
    run = trainer(devices=2)
    run.strategy.save_checkpoint({"x": 1}, tmp_path / "x.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_created_options_and_the_part_of_the_data(second_of_two):
    run = trainer(devices=2)
    module = Line()
    run.strategy.connect(module)
    run._data_connector.attach_data(module)
    run.state.stage = pl.trainer.states.RunningStage.VALIDATING
    assert run.strategy.inference_opts.replication_factor == 2
    assert run.strategy.inference_opts.Distributed.processId == 1
    part = run.strategy.process_dataloader(loader(4))
    assert torch.equal(torch.cat([batch[0] for batch in part]), rows()[:][0][32:])
    with pytest.raises(MisErr, match="cannot be divided among 2 processes"):
        run.strategy.process_dataloader(loader(4, sampler=torch.utils.data.WeightedRandomSampler([1.0] * 64, 64)))


def test_values_need_a_connection(second_of_two):
    strategy = trainer(devices=2).strategy
    for exchange in (strategy.reduce, strategy.broadcast, strategy.all_gather):
        with pytest.raises(MisErr, match="connection"):
            exchange(torch.ones(2))
    strategy.barrier()


def test_alone_everything_stays_as_it_is():
    strategy = trainer().strategy
    value = torch.ones(2)
    assert strategy.reduce(value) is strategy.broadcast(value) is strategy.all_gather(value) is value
    assert strategy.reduce_boolean_decision(True)


def test_training_in_several_processes_is_the_executors_error(second_of_two, monkeypatch):
    run = trainer(devices=2)
    monkeypatch.setattr(type(run.strategy), "reduce", lambda self, tensor, group=None, reduce_op="mean": tensor)
    monkeypatch.setattr(type(run.strategy), "broadcast", lambda self, value, src=0: value)
    with pytest.raises(poptorch.Error, match="nothing says where the others are"):
        run.fit(Line(), loader(4))


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from lightning_runs import Line, loader, trainer

class Logs(Line):
    def validation_step(self, batch, batch_idx):
        self.log("v", self.loss(batch), sync_dist=True)

run = trainer(devices=2)
(found,) = run.validate(Logs(), loader(4), verbose=False)
print(run.global_rank, run.world_size, round(found["v"], 6))
run.strategy.processes.connect()
print(run.strategy.all_gather(__import__("torch").tensor([run.global_rank])).flatten().tolist())
print(run.strategy.broadcast(run.global_rank, 1))
import torch
torch.manual_seed(run.global_rank)
model, run = Line(), trainer(devices=2)
run.fit(model, loader(8))
print("trained", sum(parameter.sum() for parameter in model.parameters()).item())
"""


@pytest.mark.long
def test_two_processes_validate_and_train_together():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    code = PROGRAM.format(tests=os.path.dirname(os.path.dirname(__file__)))
    running = []
    for rank in ("0", "1"):
        variables = {**os.environ, **MPI, "OMPI_COMM_WORLD_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        running.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                stdout=subprocess.PIPE,
                text=True,
                env={**variables, "OMP_NUM_THREADS": "1"},
            )
        )
    outputs = [process.communicate(timeout=300)[0].splitlines() for process in running]
    assert [process.returncode for process in running] == [0, 0]

    class Logs(Line):
        def validation_step(self, batch, batch_idx):
            self.log("v", self.loss(batch))

    (alone,) = trainer("cpu").validate(Logs(), loader(4), verbose=False)
    for rank, lines in enumerate(outputs):
        index, count, value = lines[0].split()
        assert (int(index), int(count)) == (rank, 2)
        assert float(value) == pytest.approx(alone["v"], abs=1e-5)
        assert lines[1:3] == ["[0, 1]", "1"]
        assert lines[3] == outputs[0][3]  # they have trained the same weights
