"""Read a compiled model from a file: the whole model, or only a program for a model that is there already."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poptorch._version import __version__
from poptorch.capture import TrainedGroup, holders_of
from poptorch.enums import ConnectionType
from poptorch.errors import Error, FileContentError, FileError, explain
from poptorch.executable import Executable
from poptorch.ir.serial import input_from
from poptorch.model.modes import Flags
from poptorch.model.saving import MODEL, OPTIMIZER_STATE, OPTIMIZERS, OPTIONS, PROGRAM, RANDOM, WEIGHTS, decoder
from poptorch.model.stored_module import module_from
from poptorch.ops.registration import know_our_ops
from poptorch.optim.plan import OptimizerPlan
from poptorch.optim.stored import optimizer_from
from poptorch.options import Options, Settings, options_from, resolve
from poptorch.runtime import RandomState
from poptorch.store import Container, read_container, read_executable, tensors_from


@dataclass(frozen=True)
class Loaded:
    """A program from a file, with what is needed to bind it to a model."""

    path: Path
    container: Container
    executable: Executable
    trains: bool
    flags: Flags
    random: RandomState | None
    scale_factor: float
    loss_type: torch.dtype
    reached: frozenset[str]
    groups: tuple[Mapping[str, Any], ...]
    trusts_code: bool  # whether the user said that its native code may run, whoever made it

    def trained_groups(self, module: nn.Module, plans: Sequence[OptimizerPlan]) -> tuple[TrainedGroup, ...]:
        """What the program trains, in the optimisers that a model has now; raises if these follow other rules."""
        holders = holders_of(module, plans)
        found: list[TrainedGroup] = []
        for group in self.groups:
            names = tuple(map(str, group["names"]))
            absent = [name for name in names if name not in holders]
            if absent:
                raise FileContentError(self._unfit(f"no optimiser holds {', '.join(absent)}, which the program trains"))
            holder = holders[names[0]]
            if str(holder.plan.rule) != group["rule"]:
                raise FileContentError(
                    self._unfit(f"the optimiser follows {holder.plan.rule}, and the program {group['rule']}")
                )
            layouts = tuple({str(k): input_from(spec) for k, spec in each.items()} for each in group["layouts"])
            found.append(TrainedGroup(group["index"], holder.optimizer, holder.position, holder.plan, names, layouts))
        return tuple(found)

    def _unfit(self, reason: str) -> str:
        what = f"the program in {self.path} does not belong to this model."
        return explain(what, reason=reason, fix="wrap the model and the optimiser that the file was made from")


def open_file(filename: str | os.PathLike[str], *, trusts_code: bool = False) -> Loaded:
    """Read the program of a file that `save` wrote with this version of poptorch."""
    path = Path(filename)
    container = read_container(path)
    if container.about.get("kind") != "model":
        raise FileError(f"Invalid file {path}: it holds no model, but belongs to a cache.")
    version = container.about.get("poptorch")
    if version != __version__:
        raise FileContentError(
            explain(
                f"Invalid file {path}: poptorch version mismatch.",
                file=str(version),
                here=__version__,
                fix="save the model again with this version, or use that one",
            )
        )
    know_our_ops()
    with _making_sense(path):
        return _loaded(path, container, trusts_code)


@contextmanager
def _making_sense(path: Path) -> Iterator[None]:
    """Turn whatever nonsense in a file leads to into an error that names the file."""
    try:
        yield
    except Error as error:
        raise type(error)(
            error.message if str(path) in error.message else f"Invalid file {path}: {error.message}"
        ) from error
    except Exception as error:
        raise FileError(f"Invalid file {path}: {type(error).__name__}: {error}") from error


def _loaded(path: Path, container: Container, trusts_code: bool) -> Loaded:
    data = container.json(PROGRAM)
    trains = "groups" in data
    random = None
    if RANDOM in container.parts:
        states = tensors_from(container.parts[RANDOM])
        random = RandomState(data["seed"], bool(data["drew"]), tuple(states[str(i)] for i in range(len(states))))
    return Loaded(
        path,
        container,
        read_executable(container),
        trains,
        tuple(map(bool, data["flags"])),
        random,
        float(data["scale_factor"]) if trains else 1.0,
        _dtype(data["loss_type"]) if trains else torch.float32,
        frozenset(map(str, data["reached"])) if trains else frozenset(),
        tuple(data["groups"]) if trains else (),
        trusts_code,
    )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise FileError(f"{name!r} is no type of tensors.")
    return found


@dataclass(frozen=True)
class LoadedModel:
    """A whole model from a file: what an executor is made from."""

    module: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    options: Options


def model_of(loaded: Loaded) -> LoadedModel:
    """The model, the optimisers and the options of a file; raises if it holds a program only."""
    container, path = loaded.container, loaded.path
    if MODEL not in container.parts:
        raise FileContentError(
            explain(
                f"Invalid file {path}: it holds a program without its model.",
                reason="it was saved with export_model=False",
                fix="wrap the model, and call loadExecutable(filename) on what trainingModel or inferenceModel returns",
            )
        )
    with _making_sense(path):
        module = module_from(container.json(MODEL), tensors_from(container.parts.get(WEIGHTS, b"")))
        optimizers: tuple[torch.optim.Optimizer, ...] = ()
        if OPTIMIZERS in container.parts:
            decode = decoder(tensors_from(container.parts.get(OPTIMIZER_STATE, b"")))
            parameters = dict(module.named_parameters())
            optimizers = tuple(optimizer_from(data, parameters, decode) for data in container.json(OPTIMIZERS))
        return LoadedModel(module, optimizers, online(options_from(container.json(OPTIONS))))


def online(options: Options) -> Options:
    """Options of a model that was compiled without a device, as they are when it runs."""
    options.deleteIfExists("ipu_version")
    if options.connection_type is ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    return options


def keep_what_is_compiled(settings: Settings, compiled: Options, *, training: bool) -> Settings:
    """Settings in which everything that shaped the program is as it was when that was compiled."""
    then = resolve(compiled, training=training)
    report = replace(settings.report, anchored=then.report.anchored)
    return replace(settings, batching=then.batching, training=then.training, precision=then.precision, report=report)
