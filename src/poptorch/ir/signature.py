"""What each input and output of a graph is, and where its tensor comes from or goes to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch


class Role(Enum):
    """What an input of a graph stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "state"
    HYPER = "hyper"
    CONSTANT = "constant"
    DERIVED = "derived"  # computed from parameters and buffers when they are taken over, for inference
    ACCUMULATOR = "accumulator"
    USER_INPUT = "input"


class OutputRole(Enum):
    """What an output of a graph is for."""

    USER_OUTPUT = "output"
    ANCHOR = "anchor"  # a tensor that the user asked for by name
    GUARD = "guard"
    GRADIENT = "gradient"
    NEW_VALUE = "new value"  # of the input with the same name, written back in place
    VALUE_BEFORE_UPDATE = "value before update"  # of a trained parameter that forward itself changes


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph: its name, what it stands for, and the tensor it takes.

    Parameters and buffers have the names that the module gives them. What belongs to one of them, or to none, has a
    colon in its name (`fc.weight:momentum_buffer`, `group0:lr`), which no name of a module has.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, role: Role, tensor: torch.Tensor) -> InputSpec:
        return cls(name, role, tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()))

    @property
    def owner(self) -> str:
        """The parameter or buffer that this is, or belongs to."""
        return self.name.partition(":")[0]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {tensor_type(self.dtype, self.shape)} {self.role.value}"


@dataclass(frozen=True)
class OutputSpec:
    """One output of a graph: its name and what it is for."""

    name: str
    role: OutputRole
    batched: bool = True  # False: the same in every micro-batch, so it is returned once
    accumulated_as: torch.dtype | None = None  # the type in which gradients are added up; None: in their own

    def __str__(self) -> str:
        return f"{self.name} {self.role.value}"


@dataclass(frozen=True)
class Signature:
    """All inputs (state first, then the user's) and outputs of a graph, in order."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]

    @property
    def user_inputs(self) -> tuple[InputSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.role is Role.USER_INPUT)

    @property
    def state(self) -> tuple[InputSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.role is not Role.USER_INPUT)

    @property
    def written(self) -> frozenset[str]:
        """The names of the inputs that the graph gives a new value."""
        return frozenset(spec.name for spec in self.outputs if spec.role is OutputRole.NEW_VALUE)


_SHORT = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def tensor_type(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """The type of a tensor as graphs print it, for example `f32[3,4]`."""
    return f"{_SHORT.get(dtype, str(dtype).removeprefix('torch.'))}[{','.join(map(str, shape))}]"
