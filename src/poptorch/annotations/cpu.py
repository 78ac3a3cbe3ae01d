"""`CPU`: run a Python function on the host in the middle of a compiled model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from poptorch.capture import is_capturing, is_capturing_training, off_device
from poptorch.errors import CompileError, explain
from poptorch.ops import host_functions
from poptorch.ops.host_call import Result, host_call
from poptorch.ops.host_functions import HostFunction, outputs_of


class CPU:
    """A function or module that runs on the host at this point of every micro-batch, in inference models.

    Call the object with tensors: the function gets their values, and what it returns goes on in the compiled model. It
    may do anything that Python can, such as using NumPy, printing or writing files. When the model compiles, it is
    called once with zeros to learn the shapes and types of its results, which must be the same in every call.

    `ID` is how a compiled program knows the function. A module's parameters get `requires_grad_(False)`.

    >>> import statistics, torch, poptorch
    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.median = poptorch.CPU(lambda x: torch.tensor(statistics.median(x.tolist())), "median")
    ...     def forward(self, x):
    ...         return self.median(x * 2) + 1
    >>> poptorch.inferenceModel(Model(), poptorch.Options().engine("eager"))(torch.tensor([1.0, 2.0, 9.0]))
    tensor(5.)
    """

    def __init__(self, layer_to_call: HostFunction, ID: str) -> None:
        if not callable(layer_to_call):
            raise CompileError(f"poptorch.CPU takes a function or a module, not {layer_to_call!r}.")
        if isinstance(layer_to_call, nn.Module):
            layer_to_call.requires_grad_(False)
        self.layer_to_call, self.ID = layer_to_call, str(ID)
        self._name = host_functions.register(layer_to_call, self.ID)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of a model calls the copies of its functions."""
        self.__dict__.update(state)
        self._name = host_functions.register(self.layer_to_call, self.ID)

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """What the function returns: a tensor, or a list if it returns a tuple or list."""
        if not is_capturing():
            result = self.layer_to_call(*inputs)
            return list(result) if isinstance(result, (list, tuple)) else result
        self._check(inputs)
        with off_device():
            result = self.layer_to_call(*[torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in inputs])
            types = [Result.of(output) for output in outputs_of(result, self.ID)]
        outputs = host_call(host_functions.KIND, [self._name.id, self._name.number], inputs, types)
        return list(outputs) if isinstance(result, (list, tuple)) else outputs[0]

    def _check(self, inputs: tuple[Any, ...]) -> None:
        if is_capturing_training():
            raise CompileError(
                explain(
                    f"poptorch.CPU {self.ID!r} is called in a training model, and host functions are only supported in "
                    "inference: they have no derivative.",
                    fix="use poptorch.custom_op with a backward function, or call it only if not self.training",
                )
            )
        wrong = [type(value).__name__ for value in inputs if not isinstance(value, torch.Tensor)]
        if wrong:
            raise CompileError(
                explain(
                    f"poptorch.CPU {self.ID!r} is called with {', '.join(wrong)}, and takes only tensors.",
                    fix="give other values to the function itself, for example with functools.partial",
                )
            )
