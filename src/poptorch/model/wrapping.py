"""`trainingModel`, `inferenceModel` and `load`: the doors into the library."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torch import nn

from poptorch._logging import warn_once
from poptorch.errors import Error
from poptorch.model.executor import PoplarExecutor
from poptorch.model.loading import keep_what_is_compiled, model_of, open_file
from poptorch.model.optimizers import Optimizers
from poptorch.model.wrapped import check_unwrapped
from poptorch.optim import SGD
from poptorch.options import Options
from poptorch.processes import find_place
from poptorch.store import read_container
from poptorch.store.container import json_part


def trainingModel(
    model: nn.Module | PoplarExecutor, options: Options | None = None, optimizer: Optimizers | None = None
) -> PoplarExecutor:
    """Wrap a model whose `forward` returns its loss; each call runs whole training steps, weight update included.

    >>> import poptorch, torch
    >>> class Regression(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = torch.nn.Linear(4, 1)
    ...     def forward(self, x, y):
    ...         out = self.fc(x)
    ...         return out, torch.nn.functional.mse_loss(out, y)
    >>> model = Regression()
    >>> options = poptorch.Options().engine("eager")
    >>> training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> out, loss = training(torch.randn(8, 4), torch.randn(8, 1))
    >>> out.shape, loss.shape
    (torch.Size([8, 1]), torch.Size([]))
    """
    module = _unwrap(model)
    check_unwrapped(module)
    if optimizer is None:
        optimizer = SGD(module.parameters(), lr=0.01)
    return PoplarExecutor(module, options, training=True, optimizer=optimizer)


def inferenceModel(model: nn.Module | PoplarExecutor, options: Options | None = None) -> PoplarExecutor:
    """Wrap a model to run its forward pass as a compiled program.

    >>> import poptorch, torch
    >>> inference = poptorch.inferenceModel(torch.nn.Linear(4, 2), poptorch.Options().engine("eager"))
    >>> inference(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """
    return PoplarExecutor(_unwrap(model), options, training=False)


def load(
    filename: str | os.PathLike[str],
    edit_opts_fn: Callable[[Options], object] | None = None,
    *,
    trust_code: bool = False,
) -> PoplarExecutor:
    """A model from a file that `save` or `compileAndExport` wrote, ready to run or to train on.

    The process need not know the classes of the model: program, weights, state of the optimiser and random numbers are
    in the file. `edit_opts_fn` may change the options; what the program was compiled for stays as it is. A file is
    data, and safe to load wherever it comes from: native code in it is used only if you made it, on this machine.
    With `trust_code` you say that it may run whoever made it; do so only for files that nobody else could have changed.

    >>> import poptorch, tempfile, torch
    >>> inference = poptorch.inferenceModel(torch.nn.Linear(4, 2), poptorch.Options().engine("eager"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     inference.compileAndExport(f"{folder}/linear.poptorch", torch.ones(3, 4))
    ...     loaded = poptorch.load(f"{folder}/linear.poptorch")
    >>> bool((loaded(torch.ones(3, 4)) == inference(torch.ones(3, 4))).all())
    True
    """
    program = open_file(filename, trusts_code=trust_code)
    model = model_of(program)
    compiled = model.options.clone()
    here = find_place()
    if here.count == model.options.Distributed.numProcesses:  # the file was written by one of so many
        model.options.Distributed.configureProcessId(here.index, here.count)
    elif program.trains and model.options.Distributed.numProcesses == 1:
        warn_once(
            f"{filename} was compiled to train in one process: each of the {here.count} processes of this program "
            "trains a model of its own."
        )
    if edit_opts_fn is not None:
        edit_opts_fn(model.options)
    executor = PoplarExecutor(model.module, model.options, program.trains, optimizer=model.optimizers or None)
    programs = executor._programs
    programs.settings = keep_what_is_compiled(programs.settings, compiled, training=program.trains)
    programs.adopt(lambda: program)
    return executor


def importPoptorchMetadataFromFile(filename: str | os.PathLike[str]) -> bytes:
    """What a file says about itself, as JSON text: versions, the kind of model, the processor it was compiled on."""
    return json_part(dict(read_container(Path(filename)).about))


def _unwrap(model: nn.Module | PoplarExecutor) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, nn.Module):
        raise Error(f"a model to wrap is a torch.nn.Module or an executor, not {type(model).__name__}.")
    return model
