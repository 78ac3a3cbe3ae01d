"""`trainingModel` and `inferenceModel`: the two doors into the library."""

from __future__ import annotations

from torch import nn

from poptorch.errors import Error
from poptorch.model.executor import PoplarExecutor
from poptorch.model.optimizers import Optimizers
from poptorch.model.wrapped import check_unwrapped
from poptorch.optim import SGD
from poptorch.options import Options


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


def _unwrap(model: nn.Module | PoplarExecutor) -> nn.Module:
    if isinstance(model, PoplarExecutor):
        return model.model
    if not isinstance(model, nn.Module):
        raise Error(f"a model to wrap is a torch.nn.Module or an executor, not {type(model).__name__}.")
    return model
