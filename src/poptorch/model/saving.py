"""Write a compiled model to a file: its program and, unless only that is wanted, everything needed to go on with it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poptorch._logging import logger
from poptorch.errors import Error, FileError, explain
from poptorch.executable import Executable
from poptorch.ir.serial import FormatError, input_data
from poptorch.model.optimizers import OptimizerSet
from poptorch.model.owned_state import OwnedState
from poptorch.model.stored_module import module_data
from poptorch.model.variants import Variant
from poptorch.optim.rules import Rule
from poptorch.optim.stored import optimizer_data
from poptorch.options import Options, options_data
from poptorch.store import code_parts, executable_parts, tensors_part, write_container
from poptorch.store.container import json_part
from poptorch.store.files import about_us, programs_digest
from poptorch.structure import structure_data, unknown_types, value_data, value_from

PROGRAM, OPTIONS, RANDOM = "program.json", "options.json", "random.safetensors"
MODEL, WEIGHTS = "model.json", "model.safetensors"
OPTIMIZERS, OPTIMIZER_STATE = "optimizers.json", "optimizers.safetensors"
_FILE_NAME = "model.poptorch"


@dataclass(frozen=True)
class Subject:
    """What is written: a model with one compiled program."""

    module: nn.Module
    forward: inspect.Signature
    variant: Variant
    options: Options
    optimizers: OptimizerSet
    scale_factor: torch.Tensor  # of automatic loss scaling

    @property
    def executable(self) -> Executable:
        return self.variant.session.executable


def savable(variant: Variant) -> Variant:
    """The program, if a file can hold it."""
    executable = variant.session.executable
    if executable.common:
        what, options = "updates some rows of large parameters", "TensorLocations, useReplicatedTensorSharding"
        if executable.share is not None:
            what, options = "has the programs of some stages", "Distributed.processesPerReplica"
        raise FileError(
            explain(
                f"each process {what}, which one file cannot hold.",
                options=options,
                fix="copyWeightsToHost() in all processes, then torch.save of state_dict() in one of them",
            )
        )
    return variant


def target_file(filename: str | os.PathLike[str]) -> Path:
    """The file to write; in a folder it has a name of ours."""
    path = Path(filename)
    if path.is_dir():
        logger.warning("%s is a folder: the model is written to %s in it.", path, _FILE_NAME)
        path = path / _FILE_NAME
    return path


def save(subject: Subject, path: Path, *, export_model: bool, save_rng_state: bool) -> None:
    """Write a file that is complete or not there at all."""
    _check(subject)
    trains = isinstance(subject.variant.state, OwnedState)
    try:
        parts = executable_parts(subject.executable)
    except FormatError as error:
        what = f"the model cannot be saved: its program holds something that a file cannot ({error})."
        raise FileError(explain(what, fix="leave out generators of your own in forward")) from error
    made_from = programs_digest(subject.executable)
    kernels = {k: v for k, v in subject.variant.session.kernels.items() if k != "prepare"}  # not worth native code
    parts |= code_parts(made_from, kernels)
    parts[PROGRAM] = json_part(_program_data(subject))
    parts[OPTIONS] = json_part(options_data(subject.options))
    if save_rng_state:
        state = subject.variant.session.random.state
        parts[RANDOM] = tensors_part({str(index): tensor for index, tensor in enumerate(state.states)})
    if export_model:
        parts |= _model_parts(subject)
    about = {**about_us(), "kind": "model", "trains": trains, "exports_model": export_model}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_container(path, about, parts)
    except OSError as error:
        raise FileError(f"the model cannot be written to {path}: {error.strerror or error}.") from error


def _check(subject: Subject) -> None:
    executable = subject.executable
    if not executable.computes:
        raise Error("the model computes nothing on a device, so there is no program to save.")
    arguments = executable.interface.arguments
    places = {"an argument": [arguments.args, arguments.kwargs], "the result": [executable.interface.result]}
    for place, structures in places.items():
        unknown = [kind for structure in structures for kind in unknown_types(structure_data(structure))]
        if unknown:
            raise FileError(
                explain(
                    f"the model cannot be saved: {place} holds a {unknown[0]}, which a file cannot hold.",
                    fix="pass and return tensors, numbers, texts, and lists, tuples and dictionaries of them",
                )
            )


def _program_data(subject: Subject) -> Any:
    """What is needed to bind the program to its state."""
    variant, state, random = subject.variant, subject.variant.state, subject.variant.session.random.state
    found: dict[str, Any] = {
        "flags": list(variant.flags),
        "seed": random.seed,
        "drew": random.were_used,
    }
    if isinstance(state, OwnedState):
        found["loss_type"] = str(state.loss_type).removeprefix("torch.")
        found["reached"] = sorted(state.reached)
        found["scale_factor"] = subject.scale_factor.item()
        found["groups"] = [
            {
                "index": group.index,
                "names": list(group.names),
                "rule": str(group.plan.rule),
                "layouts": [{key: input_data(spec) for key, spec in each.items()} for each in group.layouts],
            }
            for group in state.trained
        ]
    return found


def _model_parts(subject: Subject) -> dict[str, bytes]:
    data, tensors = module_data(subject.module, subject.forward)
    parts = {MODEL: json_part(data), WEIGHTS: tensors_part(tensors)}
    optimizers = subject.optimizers
    if optimizers.optimizers:
        names = {id(parameter): name for name, parameter in subject.module.named_parameters()}
        kept: dict[str, torch.Tensor] = {}
        encode = _encoder(kept)
        rules: list[list[Rule]] = [[group.rule for group in plan.groups] for plan in optimizers.plans]
        found = [optimizer_data(o, r, names, encode) for o, r in zip(optimizers.optimizers, rules, strict=True)]
        parts[OPTIMIZERS], parts[OPTIMIZER_STATE] = json_part(found), tensors_part(kept)
    return parts


def _encoder(kept: dict[str, torch.Tensor]) -> Callable[[Any], Any]:
    """Gives the data of a value; tensors are kept apart, and named in the data."""

    def encode(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            name = str(len(kept))
            kept[name] = value
            return {"tensor": name}
        if isinstance(value, tuple) and any(isinstance(item, torch.Tensor) for item in value):
            return {"tensors": [encode(item) for item in value]}
        data = {"value": value_data(value)}
        unknown = next(iter(unknown_types([data])), None)
        if unknown is not None:
            what = f"the model cannot be saved: its optimiser holds a {unknown}, which a file cannot hold."
            raise FileError(explain(what, fix="keep numbers and tensors in the groups and the state of the optimiser"))
        return data

    return encode


def decoder(kept: dict[str, torch.Tensor]) -> Callable[[Any], Any]:
    """The reverse of the encoding of values with tensors."""

    def decode(data: Any) -> Any:
        if "tensor" in data:
            return kept[data["tensor"]]
        if "tensors" in data:
            return tuple(decode(item) for item in data["tensors"])
        return value_from(data["value"])

    return decode
