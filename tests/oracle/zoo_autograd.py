"""Models that reach into autograd: hooks, functions of their own, checkpoints, gradients of gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import poptorch
from oracle.zoo import Supervised, adam, add, case, normal, regression


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        out = self.second(torch.tanh(self.first(x)))
        return out, F.mse_loss(out, y)


class Clamp(torch.autograd.Function):
    """Saves a tensor and a number; the gradient is not the true one."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.where(x.abs() < ctx.limit, 1.0, 0.1), None


class Split(torch.autograd.Function):
    """Two outputs, one without a gradient; written with `setup_context`."""

    @staticmethod
    def forward(x):
        return torch.relu(x), (x > 0).sum(1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        return grad * (ctx.saved_tensors[0] > 0)


class ScaleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


@case(regression(3))
class CustomFunctions(TwoLayers):
    def forward(self, x, y):
        hidden, positive = Split.apply(Clamp.apply(self.first(x), 0.5))
        hidden = ScaleInPlace.apply(hidden + 0)
        out = self.second(hidden) + 0.1 * self.second(Reverse.apply(hidden))
        return out, F.mse_loss(out, y), positive


@torch.library.custom_op("zoo::squared", mutates_args=())
def squared(x: torch.Tensor) -> torch.Tensor:
    """An op that PyTorch cannot look into, with a gradient of its own."""
    return x * x


@torch.library.custom_op("zoo::shift_", mutates_args=("x",))
def shift_(x: torch.Tensor, amount: float) -> None:
    """An op that changes its argument."""
    x.add_(amount)


squared.register_fake(torch.empty_like)
squared.register_autograd(
    lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@case(regression(3))
class OpsOfALibrary(TwoLayers):
    def forward(self, x, y):
        hidden = squared(self.first(x))
        mask = hidden.detach().sign()
        shift_(mask, 0.5)
        shift_(mask[:, 0], -0.25)
        out = self.second(hidden * mask)
        return out, F.mse_loss(out, y)


@case(regression(3))
class StraightThrough(TwoLayers):
    def forward(self, x, y):
        hidden = self.first(x)
        hidden = hidden + (hidden.round() - hidden).detach()
        out = self.second(hidden)
        return out, F.mse_loss(out, y)


class NamedTarget(TwoLayers):
    def forward(self, x, *, y):
        return super().forward(x, y)


def _forward_hooks() -> nn.Module:
    module = NamedTarget()
    module.first.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    module.first.register_forward_hook(lambda m, args, out: out + args[0].mean())
    module.register_forward_pre_hook(lambda m, args, kwargs: (args, {"y": kwargs["y"] + 1}), with_kwargs=True)
    module.register_forward_hook(lambda m, args, out: (*out, out[0].abs().max()))
    return module


add("ForwardHooks", _forward_hooks, lambda g: ((normal(g, 3),), {"y": normal(g, 2)}))


@case(regression(3))
class FeaturesTakenByHooks(TwoLayers):
    """A hook collects activations into a list; the loss uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[torch.Tensor] = []
        self.first.register_forward_hook(lambda m, args, out: self.features.append(out))

    def forward(self, x, y):
        self.features.clear()
        out = self.second(torch.tanh(self.first(x)))
        loss = F.mse_loss(out, y) + 0.1 * sum(f.pow(2).mean() for f in self.features)
        return out, poptorch.identity_loss(loss, reduction="none")


def _backward_hooks() -> nn.Module:
    module = TwoLayers()
    module.second.register_full_backward_hook(lambda m, grad_in, grad_out: (grad_in[0] * 0.5,))
    module.second.register_full_backward_pre_hook(lambda m, grad_out: (grad_out[0].clamp(-0.05, 0.05),))
    return module


add("BackwardHooks", _backward_hooks, regression(3))


@case(regression(3))
class TensorHooks(TwoLayers):
    def forward(self, x, y):
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 3)
            hidden.retain_grad()
        out = self.second(hidden)
        return out, F.mse_loss(out, y)


def _parameter_hooks() -> nn.Module:
    module = TwoLayers()
    module.first.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    module.first.weight.register_hook(lambda grad: grad * 2)
    module.second.bias.register_hook(lambda grad: None)
    return module


add("ParameterHooks", _parameter_hooks, regression(3))


def _accumulate_hooks() -> nn.Module:
    module = TwoLayers()

    def clip(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-0.01, 0.01)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return module


add("PostAccumulateGradHooks", _accumulate_hooks, regression(3))


@case(regression(3))
class SavedTensorHooks(TwoLayers):
    """Activations are packed between forward and backward."""

    def forward(self, x, y):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 2, "packed"), lambda pack: pack[0] / 2):
            hidden = torch.tanh(self.first(x)) ** 2
        out = self.second(hidden)
        return out, F.mse_loss(out, y)


class Checkpointed(TwoLayers):
    def __init__(self, use_reentrant: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.use_reentrant, self.dropout = use_reentrant, nn.Dropout(dropout)

    def block(self, x):
        return self.dropout(torch.tanh(self.first(x)))

    def forward(self, x, y):
        if not torch.is_grad_enabled():
            return self.finish(self.block(x) + self.block(x * 2), y)
        x = x.detach().requires_grad_(True)  # the reentrant kind looks at its inputs
        hidden = checkpoint(self.block, x, use_reentrant=self.use_reentrant) + checkpoint(
            self.block, x * 2, use_reentrant=self.use_reentrant
        )
        return self.finish(hidden, y)

    def finish(self, hidden, y):
        out = self.second(hidden)
        return out, F.mse_loss(out, y)


add("CheckpointReentrant", lambda: Checkpointed(True), regression(3))
add("Checkpoint", lambda: Checkpointed(False), regression(3))
add("CheckpointReentrantWithDropout", lambda: Checkpointed(True, 0.5), regression(3), is_random=True)
add("CheckpointWithDropout", lambda: Checkpointed(False, 0.5), regression(3), is_random=True)


@case(regression(3))
class CheckpointOfBatchNorm(nn.Module):
    """The recomputation updates running statistics a second time, as it does in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, x, y):
        out = self.head(checkpoint_sequential(self.block, 1, x, use_reentrant=False))
        hidden = checkpoint(self.block, x, use_reentrant=False)
        out = out + self.head(hidden)
        return out, F.mse_loss(out, y)


@case(regression(4))
class Autocast(nn.Module):
    """Half of the model in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = torch.relu(self.first(x))
            with torch.autocast("cpu", enabled=False):
                out = self.second(hidden.float())
        return out, F.mse_loss(out, y), hidden


@case(regression(3))
class GradientPenalty(TwoLayers):
    """The gradient with respect to the input is part of the loss."""

    def forward(self, x, y):
        with torch.enable_grad():
            x = x.detach().requires_grad_(True)
            out = self.second(torch.tanh(self.first(x)))
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, y) + (slope.norm(dim=1) - 1).pow(2).mean()
        return out, poptorch.identity_loss(loss, reduction="none"), slope


@case(regression(3))
class InnerGradientStep(TwoLayers):
    """A step of gradient descent on copies of the weights inside forward, and the loss after it."""

    def forward(self, x, y):
        with torch.enable_grad():
            weight = (
                self.second.weight if self.second.weight.requires_grad else self.second.weight.clone().requires_grad_()
            )
            hidden = torch.tanh(self.first(x))
            inner = (F.linear(hidden, weight) - y).pow(2).mean()
            (grad,) = torch.autograd.grad(inner, weight, create_graph=True)
            out = F.linear(hidden, weight - 0.1 * grad, self.second.bias)
        return out, F.mse_loss(out, y)


@case(regression(3))
class FunctionalCall(TwoLayers):
    def forward(self, x, y):
        scaled = {name: parameter * 0.9 for name, parameter in self.first.named_parameters()}
        hidden = torch.func.functional_call(self.first, scaled, (x,))
        out = self.second(torch.tanh(hidden))
        return out, F.mse_loss(out, y)


@case(regression(3))
class FunctionTransforms(TwoLayers):
    """vmap, and the Jacobian of a row, from torch.func."""

    def forward(self, x, y):
        def row(value):
            return torch.tanh(self.first(value))

        jacobian = torch.func.vmap(torch.func.jacrev(row))(x)
        out = self.second(torch.func.vmap(row)(x) + jacobian.sum(2))
        return out, F.mse_loss(out, y)


@case(regression(3))
class PartsWithoutGradient(TwoLayers):
    """no_grad as a block and as a decorator, detach, and grad mode read by Python."""

    @torch.no_grad()
    def target(self, x):
        return torch.tanh(self.first(x))

    def forward(self, x, y):
        with torch.no_grad():
            scale = self.second.weight.norm()
        hidden = self.first(x) / scale
        hidden = hidden + self.target(x).detach() if not torch.is_inference_mode_enabled() else hidden
        with torch.set_grad_enabled(False):
            hidden = hidden + 0 * self.first(x)
        hidden = torch.tanh(self.first(x)) + hidden
        out = self.second(hidden)
        return out, F.mse_loss(out, y)


@case(regression(3))
class InPlaceOnViews(TwoLayers):
    """In-place ops on views of values that have a gradient."""

    def forward(self, x, y):
        hidden = self.first(x)
        hidden[:, :2] *= 2
        hidden.narrow(1, 2, 2).add_(hidden.narrow(1, 0, 2))
        hidden.unsqueeze_(0).squeeze_(0).t_().t_()
        hidden[1:3, 1].zero_()
        hidden[hidden < -1] = 0
        hidden.masked_fill_(hidden > 2, 2.0)
        out = self.second(hidden.relu_())
        out.diagonal().add_(1)
        return out, F.mse_loss(out, y)


add(
    "SeveralActivations",
    lambda: Supervised(nn.Linear(4, 6), nn.GLU(), nn.Hardswish(), nn.Softplus(), nn.ELU(inplace=True), nn.Linear(3, 2)),
    regression(4),
    optimizer=adam,
)
