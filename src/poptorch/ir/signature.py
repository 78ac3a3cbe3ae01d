"""What each input and output of a graph is, and where its tensor comes from or goes to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

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
    REPLICA = "replica"  # the value that a buffer has in another replica than the first
    DRAWN = "drawn"  # random numbers, new ones for every run
    USER_INPUT = "input"
    BOUNDARY = "boundary"  # what another part of the step has computed for the same micro-batch

    @property
    def is_state(self) -> bool:
        """Whether a program is bound to it once, instead of being given it in every run."""
        return self not in (Role.USER_INPUT, Role.BOUNDARY)


class OutputRole(Enum):
    """What an output of a graph is for."""

    USER_OUTPUT = "output"
    ANCHOR = "anchor"  # a tensor that the user asked for by name
    GUARD = "guard"
    BOUNDARY = "boundary"  # for another part of the step
    GRADIENT = "gradient"
    NEW_VALUE = "new value"  # of the input with the same name, written back in place
    VALUE_BEFORE_UPDATE = "value before update"  # of a trained parameter that forward itself changes


@dataclass(frozen=True)
class InputSpec:
    """One input of a graph: its name, what it stands for, the tensor it takes, and whom it belongs to.

    Names are for people, and unique in a graph. Parameters and buffers have those that the module gives them; what
    belongs to one of them, or to a group of parameters, is told apart by a colon (`fc.weight:momentum_buffer`,
    `group0:lr`). The fields say the same for programs.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    owner: str = ""  # the parameter or buffer that this is, or belongs to; empty if it belongs to none
    key: str = ""  # what it is to its owner or group: `momentum_buffer`, `lr`
    group: int | None = None  # of parameters, counted over all optimisers, that this belongs to

    def __post_init__(self) -> None:
        if self.role in (Role.PARAMETER, Role.BUFFER):
            object.__setattr__(self, "owner", self.name)

    @classmethod
    def of(
        cls, name: str, role: Role, tensor: torch.Tensor, *, owner: str = "", key: str = "", group: int | None = None
    ) -> InputSpec:
        return cls(name, role, tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), owner, key, group)

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
    is_number: bool = False  # of a program for several micro-batches: a vector with a number for each of them

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
    def passed(self) -> tuple[InputSpec, ...]:
        """What a program is given in every run."""
        return tuple(spec for spec in self.inputs if not spec.role.is_state)

    @property
    def state(self) -> tuple[InputSpec, ...]:
        return tuple(spec for spec in self.inputs if spec.role.is_state)

    @cached_property
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
