"""Checkpoints of a model in training: folders that `torch.distributed.checkpoint` writes and reads.

Every process writes what it has, so that no process ever needs the weights or the optimiser's state of all. A folder
holds numbered checkpoints and a link `latest` to the last one that is complete, whatever was killed on the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from poptorch._logging import logger
from poptorch.errors import Error, FileContentError, FileError, explain
from poptorch.model.locking import Lock, one_at_a_time
from poptorch.model.optimizers import OptimizerSet
from poptorch.model.program_state import Rows
from poptorch.model.programs import Programs
from poptorch.processes import Group, together

LATEST, _ABOUT = "latest", "poptorch.json"
_UNFINISHED = ".unfinished-"


class Replica(NamedTuple):
    """What a replica has of its own: where its random numbers stand, and the buffers that its steps change."""

    random: torch.Tensor
    buffers: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Training:
    """What a checkpoint holds: the state of a model in training, as far as this process has it."""

    module: nn.Module
    optimizers: OptimizerSet
    rows: Sequence[Rows]  # of the optimisers' state that is shared out over processes
    replicas: Sequence[Replica]  # of this process
    first_replica: int  # among those of all processes
    scale_factor: torch.Tensor

    def tensors(self) -> dict[str, Any]:
        """Every tensor, nested as `torch.distributed.checkpoint.state_dict` nests those of a plain PyTorch program."""
        state = self.module.state_dict()
        model = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and not value.is_meta}
        if self.first_replica:  # what differs from replica to replica is that of the first of all
            model = {key: value for key, value in model.items() if key not in self.replicas[0].buffers}
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        shared_out = {(id(each.parameter), each.spec.key): _as_distributed(each) for each in self.rows}
        optim: dict[str, dict[str, Any]] = {}
        for optimizer in self.optimizers.optimizers:
            for parameter, entries in optimizer.state.items():
                name = names.get(id(parameter))
                if name is not None:
                    own = {key: shared_out.get((id(parameter), key), value) for key, value in entries.items()}
                    kept = {key: value for key, value in own.items() if isinstance(value, torch.Tensor)}
                    optim[name] = {key: value for key, value in kept.items() if not value.is_meta}
        replicas = {
            str(number): {"random": replica.random, "buffers": dict(replica.buffers)}
            for number, replica in enumerate(self.replicas, start=self.first_replica)
        }
        return {"model": model, "optim": {"state": optim}, "replicas": replicas, "scale_factor": self.scale_factor}

    def groups(self) -> list[dict[str, Any]]:
        """The numbers of all groups of the optimisers, with names instead of parameters."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return [
            {**group, "params": [names.get(id(parameter), "") for parameter in group["params"]]}
            for optimizer in self.optimizers.optimizers
            for group in optimizer.param_groups
        ]


def save(training: Training, folder: Path, progress: Any, keep: int, group: Group | None) -> Path:
    """Write a checkpoint that is complete or not there at all; all processes must do so. Gives its folder."""
    from torch.distributed.checkpoint import FileSystemWriter, save  # takes a while, so only when needed

    with _together(group, "saving a checkpoint", folder):
        about = json.dumps({"progress": progress})  # raises for what is no plain data, before anything is written
        number = 1 + max(_numbers(folder), default=0)
    with _together(group, "saving a checkpoint", folder):
        number = number if group is None else group.number_of_first(number)
        unfinished, finished = folder / f"{_UNFINISHED}{number:06d}", folder / f"{number:06d}"
        if group is None or group.index == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _remove(folder.glob(f"{_UNFINISHED}*"))
            unfinished.mkdir()
    state = training.tensors()
    state["optim"]["param_groups"] = training.groups()
    with _together(group, "saving a checkpoint", folder):
        members = None if group is None else group.members
        with _quietly():
            save(state, storage_writer=FileSystemWriter(unfinished), process_group=members, no_dist=group is None)
    with _together(group, "saving a checkpoint", folder):
        if group is None or group.index == 0:
            (unfinished / _ABOUT).write_text(about)
            os.replace(unfinished, finished)
            _point_to(finished)
            _remove(folder / f"{number:06d}" for number in sorted(_numbers(folder))[: -max(1, keep)])
    logger.debug("wrote checkpoint %s", finished)
    return finished


def load(training: Training, folder: Path, group: Group | None, take: Callable[[list[dict[str, Any]]], None]) -> Any:
    """Go on from the last checkpoint; gives its progress, or None if there is none. All processes must do so.

    If something cannot be read, nothing has changed. `take` gets the numbers of the groups of the optimisers.
    """
    from torch.distributed.checkpoint import FileSystemReader, load

    found = ""
    with _together(group, "loading a checkpoint", folder, lambda: found):
        found = os.readlink(folder / LATEST) if (folder / LATEST).is_symlink() else ""
    if not found:
        return None
    current = training.tensors()
    read = _map(current, torch.empty_like)
    read["optim"]["param_groups"] = training.groups()
    with _together(group, "loading a checkpoint", folder):
        members = None if group is None else group.members
        with _quietly():
            reader = FileSystemReader(folder / found)
            _leave_out_new_replicas(reader, read)
            load(read, storage_reader=reader, process_group=members, no_dist=group is None)
        progress = json.loads((folder / found / _ABOUT).read_text())["progress"]
    groups = read["optim"].pop("param_groups")
    with torch.no_grad():
        _copy(current, read)
    take(groups)
    return progress


def _leave_out_new_replicas(reader: Any, wanted: dict[str, Any]) -> None:
    """Replicas that the checkpoint does not have begin anew."""
    known = reader.read_metadata().state_dict_metadata
    missing = [replica for replica in wanted["replicas"] if f"replicas.{replica}.random" not in known]
    for replica in missing:
        del wanted["replicas"][replica]
    if missing:
        logger.warning(
            "the checkpoint is of fewer replicas: replica %s begins with random numbers and statistics of its own.",
            ", ".join(missing),
        )


def _as_distributed(rows: Rows) -> torch.Tensor:
    """Rows of this process as torch's checkpoints know them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (rows.processes,))
    whole = rows.spec
    stride = torch.empty(whole.shape, device="meta").stride()
    return DTensor.from_local(
        rows.tensor, mesh, [Shard(0)], run_check=False, shape=torch.Size(whole.shape), stride=stride
    )


def _map(nested: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(nested, dict):
        return {key: _map(value, function) for key, value in nested.items()}
    return function(nested)


def _copy(target: Any, source: Any) -> None:
    for key, value in source.items():
        if isinstance(value, dict):
            _copy(target[key], value)
        else:
            target[key].copy_(value)


def _numbers(folder: Path) -> list[int]:
    """The numbers of the checkpoints in a folder."""
    try:
        return [int(entry.name) for entry in folder.iterdir() if entry.name.isdigit() and entry.is_dir()]
    except OSError:
        return []


def _point_to(finished: Path) -> None:
    """Let `latest` lead to a checkpoint, from one moment to the next."""
    link = finished.parent / f"{_UNFINISHED}{LATEST}"
    with contextlib.suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(finished.name)
    os.replace(link, finished.parent / LATEST)


def _remove(paths: Any) -> None:
    for path in paths:
        if path.is_symlink() or path.is_file():
            path.unlink(missing_ok=True)
        else:
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about its own functions
        yield


@contextlib.contextmanager
def _together(group: Group | None, doing: str, folder: Path, facts: Callable[[], str] = str) -> Iterator[None]:
    """All processes do what is inside, and all raise if one of them cannot."""
    from torch.distributed.checkpoint import CheckpointException

    with together(group, doing, facts):
        try:
            with contextlib.nullcontext() if group is None else group.exchange():
                yield
        except OSError as error:
            raise _failed(folder, doing, error) from error
        except CheckpointException as failures:
            error, _ = next(iter(failures.failures.values()))
            raise _failed(folder, doing, error) from error


def _failed(folder: Path, doing: str, error: BaseException) -> FileError | FileContentError:
    if isinstance(error, OSError):
        return FileError(f"{doing} in {folder} failed: {error.strerror or error}.")
    return FileContentError(
        explain(
            f"{doing} in {folder} failed.",
            reason=str(error).strip().splitlines()[-1],
            fix="use a checkpoint of the same model, with an optimiser of the same kind",
        )
    )


class Checkpoints:
    """The part of an executor that is about checkpoints."""

    _lock: Lock
    _training: bool
    _user_model: nn.Module
    _programs: Programs

    def setOptimizer(self, optimizer: Any) -> None:
        """Use the settings that the optimiser has now."""
        raise AssertionError("executors know their optimisers")

    @one_at_a_time
    def saveCheckpoint(self, folder: str | os.PathLike[str], progress: Any = None, keep: int = 2) -> Path:
        """Write weights, optimiser state and random numbers to a new checkpoint in a folder; gives where it is.

        All processes of a program must call it, and each writes what it has. `progress` is plain data of yours, such
        as the number of the epoch; `keep` checkpoints stay in the folder. `torch.distributed.checkpoint` reads them.
        """
        return save(self._in_training(), Path(folder), progress, keep, self._programs.companions.group)

    @one_at_a_time
    def loadCheckpoint(self, folder: str | os.PathLike[str]) -> Any:
        """Go on from the last checkpoint in a folder; gives its `progress`, or None if there is no checkpoint yet.

        Needs a compiled model, and all processes of a program must call it; there may be more or fewer of them than
        those that wrote it. If the checkpoint cannot be used, nothing has changed.
        """
        training, current = self._in_training(), self._programs.compiled()
        found = load(training, Path(folder), self._programs.companions.group, self._take_groups)
        current.session.random.restore([replica.random for replica in training.replicas])
        return found

    def _in_training(self) -> Training:
        current = self._programs.compiled()
        if not self._training:
            raise Error("checkpoints are of models in training: call this on what poptorch.trainingModel returns.")
        random, rows = current.session.random, current.state.rows
        replicas = [Replica(*each) for each in zip(random.save(), current.session.replica_buffers, strict=True)]
        return Training(
            self._user_model,
            self._programs.optimizers,
            rows,
            replicas,
            random.first_replica,
            self._programs.scale_factor,
        )

    def _take_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Give the optimisers the numbers of a checkpoint."""
        mine = [group for optimizer in self._programs.optimizers.optimizers for group in optimizer.param_groups]
        for own, read in zip(mine, groups, strict=True):
            own.update((key, value) for key, value in read.items() if key != "params")
        self.setOptimizer(self._programs.optimizers.optimizers)
