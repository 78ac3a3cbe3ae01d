"""What `executor.weight` gives for a parameter of the top-level module."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx.node import map_aggregate

from poptorch.enums import CommGroupType, VariableRetrievalMode
from poptorch.model.grouping import ReplicaGroups

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHERS = ("neg", "pos", "abs", "invert", "getitem", "setitem")
_CONVERSIONS: tuple[Callable[[Any], Any], ...] = (len, iter, bool, float, int)


class ParameterProxy:
    """A parameter of a model as its executor shows it: a tensor to torch, and what belongs to the executor besides.

    Reading and writing attributes, operators and torch functions all reach the parameter itself. Methods that concern
    the parameter *in this executor*, which a plain parameter cannot have, are methods of this class.
    """

    __slots__ = ("_group", "_parameter")
    __hash__ = object.__hash__

    def __init__(self, parameter: nn.Parameter, group: Callable[[ReplicaGroups], None]) -> None:
        object.__setattr__(self, "_parameter", parameter)
        object.__setattr__(self, "_group", group)

    def replicaGrouping(
        self,
        comm_group_type: CommGroupType,
        shards: int,
        variable_retrieval_mode: VariableRetrievalMode = VariableRetrievalMode.OnePerGroup,
    ) -> None:
        """Give each group of `shards` replicas a weight of its own: entry k of the parameter belongs to group k."""
        groups = ReplicaGroups.checked(comm_group_type, shards, variable_retrieval_mode)
        object.__getattribute__(self, "_group")(groups)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain: Any = map_aggregate((args, kwargs or {}), _unwrap)
        return func(*plain[0], **plain[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(_parameter_of(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_parameter_of(self), name, value)

    def __repr__(self) -> str:
        return repr(_parameter_of(self))

    def __reduce__(self) -> Any:
        return nn.Parameter, (_parameter_of(self).detach(), self.requires_grad)


def _parameter_of(proxy: ParameterProxy) -> nn.Parameter:
    return object.__getattribute__(proxy, "_parameter")


def _unwrap(value: Any) -> Any:
    return _parameter_of(value) if isinstance(value, ParameterProxy) else value


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """A special method, which Python looks for in the class, that applies `function` to the parameter."""
    return lambda proxy, *operands: function(_parameter_of(proxy), *operands)


def _forward_reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda proxy, left: function(left, _parameter_of(proxy))


for _name in (*_OPERATORS, *_COMPARISONS, *_OTHERS):
    setattr(ParameterProxy, f"__{_name}__", _forward(getattr(operator, _name)))
for _name in _OPERATORS:
    setattr(ParameterProxy, f"__r{_name}__", _forward_reflected(getattr(operator, _name)))
for _conversion in _CONVERSIONS:
    setattr(ParameterProxy, f"__{_conversion.__name__}__", _forward(_conversion))
