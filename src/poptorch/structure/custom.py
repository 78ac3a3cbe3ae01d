"""Types of the user that may be arguments and results of a model, each with a parser that knows its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch

from poptorch.errors import Error, explain


class ICustomArgParser(ABC):
    """Teaches PopTorch to pass objects of a type of yours in and out of a model."""

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterator[torch.Tensor]:
        """Yield every tensor of `struct`, always in the same order."""

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Make a new object like `original_structure`, taking its tensors from the iterator in that order."""


class CustomTypes:
    """The types that users registered, looked up by exact type first and by `isinstance` second."""

    def __init__(self) -> None:
        self._parsers: dict[type, ICustomArgParser] = {}

    def register(self, kind: type, parser: ICustomArgParser | None) -> None:
        if parser is None:
            self._parsers.pop(kind, None)
        else:
            self._parsers[kind] = parser

    def registered(self) -> dict[type, ICustomArgParser]:
        """A copy of the whole table, in the order of registration."""
        return dict(self._parsers)

    def find(self, value: object) -> ICustomArgParser | None:
        exact = self._parsers.get(type(value))
        if exact is not None:
            return exact
        return next((parser for kind, parser in self._parsers.items() if isinstance(value, kind)), None)

    def of(self, value: object) -> ICustomArgParser:
        """The parser of a value that had one when it was taken apart for the first time."""
        parser = self.find(value)
        if parser is None:
            name = type(value).__name__
            what = f"there is no parser for {name} any more, but the model or loader was made with one."
            raise Error(explain(what, fix=f"registerCustomArgParser({name}, …) again, or make them anew"))
        return parser


CUSTOM_TYPES = CustomTypes()


def registerCustomArgParser(arg_data_type: type, parser: ICustomArgParser | None) -> None:
    """Let objects of a type be arguments and results of models; `None` takes the parser of a type away again."""
    if parser is not None and not isinstance(parser, ICustomArgParser):  # pyright: ignore
        raise Error(f"a parser derives from poptorch.ICustomArgParser; {type(parser).__name__} does not.")
    CUSTOM_TYPES.register(arg_data_type, parser)
