"""Private names that public programs reach for."""

from __future__ import annotations

import importlib

import torch

import poptorch
import poptorch._args_parser
import poptorch._impl
import poptorch._poplar_executor
from poptorch.model.arguments import ArgumentBinder

GROUPS = [
    "_DistributedOptions",
    "_GraphProcessingOptions",
    "_IExecutionStrategy",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
]


def test_aliases_are_the_real_things():
    assert poptorch._poplar_executor.PoplarExecutor is poptorch.PoplarExecutor
    assert poptorch._args_parser.ArgsParser is ArgumentBinder
    assert poptorch.options.ConfigFileError is poptorch.ConfigFileError
    assert all(isinstance(getattr(poptorch.options, name), type) for name in GROUPS)
    assert isinstance(poptorch.Options().Training, poptorch.options._TrainingOptions)


def test_unwrapping_for_a_checkpoint_and_rewrapping_keeps_the_model():
    model = torch.nn.Linear(2, 1)
    poptorch.trainingModel(model)
    assert poptorch._impl.unwrapModelIfNecessary(model) is model
    assert poptorch._impl.rewrapModelIfNecessary(model) is model


def test_modules_that_programs_import_exist():
    for name in ("enums", "options", "optim", "profiling", "testing", "poptorch_core", "_impl", "_logging"):
        importlib.import_module(f"poptorch.{name}")
    assert poptorch.__version__


def test_wrapping_accepts_an_executor():
    model = torch.nn.Linear(2, 1)
    options = poptorch.Options().engine("eager")
    training = poptorch.trainingModel(model, options)
    inference = poptorch.inferenceModel(training, options)
    assert torch.equal(inference.weight, model.weight)
    training.destroy()
    assert poptorch.trainingModel(training, options).model is model
