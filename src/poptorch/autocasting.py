"""`Policy`: which operations inside `poptorch.autocast()` run in float16, and which in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from poptorch.errors import OptionError

Target = Callable[..., Any] | type[nn.Module]

_DEFAULTS: dict[str, tuple[Target, ...]] = {
    # products: half the memory, and the sums are kept in float32 all the same
    "fp16": (
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(F.linear, torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.baddbmm, torch.einsum),
        F.scaled_dot_product_attention,
    ),
    # what overflows or loses its small terms in float16
    "fp32": (
        *(torch.exp, torch.log, torch.log2, torch.log10, torch.log1p, torch.pow, torch.reciprocal, torch.rsqrt),
        *(torch.softmax, torch.log_softmax, F.softplus, torch.logsumexp, torch.norm, torch.prod, torch.cumsum),
        *(torch.sum, torch.mean, torch.var, torch.std),
        *(F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.cross_entropy, F.nll_loss, F.kl_div, F.binary_cross_entropy),
        *(F.binary_cross_entropy_with_logits, F.cosine_embedding_loss, F.poisson_nll_loss, F.cosine_similarity),
    ),
    "promote": (torch.add, torch.sub, torch.mul, torch.div, torch.addcmul, torch.addcdiv, torch.cat, torch.stack),
    "demote": (),
}


@dataclass(frozen=True, repr=False)
class Policy:
    """Lists of torch functions and of classes of modules; a list that is not given is a usual one.

    `fp16` and `fp32` are cast to that type. `promote` is cast to float32, and `demote` to float16, if its operands have
    both types. A function means its method and operator too: `torch.add` is `x.add(y)` and `x + y`. A class means what
    its modules compute. What a list names, the usual lists leave out.

    >>> import torch, poptorch
    >>> policy = poptorch.autocasting.Policy(fp16=[torch.nn.Conv2d, torch.relu], fp32=[torch.softmax])
    """

    fp16: Iterable[Target] | None = None
    fp32: Iterable[Target] | None = None
    promote: Iterable[Target] | None = None
    demote: Iterable[Target] | None = None

    def __post_init__(self) -> None:
        given = {name: _targets(name, getattr(self, name)) for name in _DEFAULTS if getattr(self, name) is not None}
        named = [_name(target) for targets in given.values() for target in targets]
        twice = sorted({name for name in named if named.count(name) > 1})
        if twice:
            raise OptionError(f"Policy has {', '.join(twice)} in more than one place")
        for name, usual in _DEFAULTS.items():
            rest = tuple(target for target in usual if _name(target) not in named)
            object.__setattr__(self, name, given.get(name, rest))

    def __repr__(self) -> str:
        lists = {field.name: cast("tuple[Target, ...]", getattr(self, field.name)) for field in fields(self)}
        shown = [
            f"{name}=[{', '.join(map(_name, targets))}]"
            for name, targets in lists.items()
            if targets != _DEFAULTS[name]
        ]
        return f"Policy({', '.join(shown)})"


def _targets(name: str, value: object) -> tuple[Target, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise OptionError(f"Policy {name} takes a list of torch functions and module classes, not {value!r}")
    targets = tuple(cast("Iterable[object]", value))
    for target in targets:
        if not callable(target) or not hasattr(target, "__name__"):
            raise OptionError(f"Policy {name} holds {target!r}, which is no torch function and no class of modules")
    return cast("tuple[Target, ...]", targets)


def _name(target: Target) -> str:
    return target.__name__
