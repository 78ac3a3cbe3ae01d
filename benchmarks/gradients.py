"""Check the gradient of the first step against eager float64, parameter by parameter.

Losses alone do not show a wrong gradient: with convolution gradients that are entirely wrong, the first eight losses
of `cnn-wide` still agree to three digits. The gradient is read where the optimiser left it: after one step from
nothing, the momentum of SGD is the gradient, and the first moment of Adam is the gradient times (1 - beta1).
"""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.workloads import Workload

RTOL = 0.05  # float32 with batch norm (resnet18) is up to 0.012 away; an error of the program is of order 1
NEGLIGIBLE = 1e-4  # a gradient this small beside the whole is rounding, like that of the bias of attention keys


def worst_gradient_error(workload: Workload, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, str]:
    """The largest relative error of a parameter's first gradient, and the name of that parameter."""
    expected = _float64_gradients(workload)
    total = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    errors: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        size = torch.maximum(expected[name].norm(), NEGLIGIBLE * total)
        errors[name] = float((_gradient(optimizer, parameter) - expected[name]).norm() / size)
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors[worst], worst


def _float64_gradients(workload: Workload) -> dict[str, torch.Tensor]:
    model = workload.training_model().train().double()
    x, y = workload.batches(1)[0]
    model(x.double() if x.is_floating_point() else x, y)[1].backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _gradient(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.Tensor:
    state = optimizer.state[parameter]
    if "exp_avg" in state:
        return state["exp_avg"].double() / (1 - optimizer.param_groups[0]["betas"][0])
    return state["momentum_buffer"].double()
