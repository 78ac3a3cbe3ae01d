"""What happens while a step is compiled: its side effects are written down, to be repeated on the host after each call.

The user's step runs in Python only once. A value that it logs, gives to a metric or appends to a list of the module is
therefore an output of the compiled program, and the `Recording` says what to do with it.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import poptorch
from poptorch.lightning import nested
from poptorch.lightning.batches import HostText
from poptorch.lightning.constants import Constant, remember
from poptorch.lightning.packages import Lightning
from poptorch.lightning.placeholders import (
    Count,
    HostNumber,
    Kept,
    Pending,
    ReadLater,
    Slot,
    host_numbers,
    is_read_later,
    later_read,
)
from poptorch.lightning.results import Output, narrowed, reduction_name

COUNTS = ("batch_idx", "current_epoch", "global_step")  # arrive in a program as tensors, because they change
_TABLES = ("_parameters", "_buffers", "_modules", "__class__")
_DEEPEST = 3
_STEPS = {
    "train": "training_step",
    "sanity_check": "validation_step",
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


def step_name(trainer: Any) -> str | None:
    """The method that belongs to what a trainer is doing."""
    return None if trainer is None or trainer.state.stage is None else _STEPS[trainer.state.stage.value]


@dataclass(frozen=True)
class Logged:
    """One call of `self.log`: the value's place or the value itself, and the arguments as the user gave them."""

    name: str
    value: Any
    arguments: dict[str, Any]
    reduction: str | None


@dataclass(frozen=True)
class HostCall:
    """One call of a method of a metric, which wants what every micro-batch gave, or of a logger, which does not."""

    target: Any
    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    combines: bool


@dataclass(frozen=True)
class Appended:
    """Values that the step appended to a list, which is found by an attribute of the module and keys inside it."""

    path: tuple[Any, ...]
    values: list[Any]

    @property
    def name(self) -> str:
        return f"self.{self.path[0]}" + "".join(f"[{key!r}]" for key in self.path[1:])


@dataclass
class Recording:
    """What one capture of a step has found out."""

    outputs: list[Output] = field(default_factory=list)
    events: list[Logged | HostCall] = field(default_factory=list)
    appended: list[Appended] = field(default_factory=list)
    result: Any = None
    read_counts: set[str] = field(default_factory=set)  # those of COUNTS that the step used
    read_attributes: dict[str, Constant] = field(default_factory=dict)  # Python values of the module that it used
    read_texts: dict[str, str] = field(default_factory=dict)  # strings of the batch that the step used
    depends_on_stage: bool = False


class Recorder:
    """Runs a step under capture, and makes its `Recording`."""

    def __init__(self, package: Lightning, module: Any, trainer: Any, *, training: bool, keeps_all: bool) -> None:
        self.package, self.module, self.trainer = package, module, trainer
        self._training, self._keeps_all = training, keeps_all
        self.recording = Recording()
        self._tensors: list[torch.Tensor] = []
        self._counts: Mapping[str, torch.Tensor] = {}
        self._is_open = False

    # ---- the run of the step

    def run(self, step: Callable[..., Any], args: Callable[[], tuple[Any, ...]], counts: Mapping[str, torch.Tensor]):
        """Run the step, and give the tensors that its program is to return.

        May happen more than once for one program; the last run counts.
        """
        self.recording, self._tensors, self._counts = Recording(), [], counts
        before = contents(self.module)
        self._is_open = True
        try:
            with _StepMode(counts, self.recording.read_counts, self._check_reading):
                with host_numbers(self.trainer):
                    result = step(*args())
                self._is_open = False
                self.recording.result = self._result(result)
                self._find_appended(before)
        finally:
            self._is_open = False
        for appended in self.recording.appended:  # a list that the step only writes to
            self.recording.read_attributes.pop(appended.path[0], None)
        tensors, self._tensors, self._counts = tuple(self._tensors), [], {}
        return tensors

    def _check_reading(self) -> None:
        """Numbers can be read only while the step runs."""
        if not self._is_open:
            self._fail(
                "a number that `.item()` gave in a compiled step is known only after the call, and is used by "
                "something else than the step. Log it with `self.log`, return it, or append it to a list of the module."
            )

    def _result(self, result: Any) -> Any:
        if not self._training:
            return nested.mapped(result, self._template)
        if isinstance(result, Mapping):
            if result.get("loss") is None:
                self._fail(
                    "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
                )
            loss = self._loss(result["loss"])  # first, so that its place is known
            rest = {key: value for key, value in result.items() if key != "loss"}
            return {"loss": loss, **nested.mapped(rest, self._template)}
        return self._loss(result)

    def _loss(self, loss: Any) -> Slot:
        if loss is None:
            self._fail(
                "Skipping backward by returning `None` from your `training_step` is not supported on IPUs: "
                "the compiled step always updates the weights."
            )
        if not isinstance(loss, torch.Tensor):
            self._fail(f"`training_step` must return a loss tensor or a dict with one, not {type(loss).__name__}.")
        if loss.numel() != 1:
            self._fail(
                f"`training_step` returned a loss of shape {list(loss.shape)}, and a loss is one number: "
                "reduce it, for example with .mean()."
            )
        return self._slot(poptorch.identity_loss(loss.reshape(()), "none", final=True), detach=False)

    def _template(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, HostText):
            return Kept(leaf.place)
        if is_read_later(leaf):
            return self._slot(leaf.tensor.reshape(()), is_item=True)
        return self._slot(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _slot(self, tensor: torch.Tensor, *, detach: bool = True, is_item: bool = False) -> Slot:
        self.recording.outputs.append(Output.of(tensor))
        self._tensors.append(narrowed(tensor.detach()) if detach else tensor)
        return Slot(len(self._tensors) - 1, is_item=is_item)

    def _find_appended(self, before: dict[tuple[Any, ...], Any]) -> None:
        new: dict[tuple[Any, ...], int] = {}  # lists that have grown, with the index of their first new element
        for path, box in contents(self.module).items():
            if any(path[: len(grown)] == grown and path[len(grown) :][:1] >= (start,) for grown, start in new.items()):
                continue  # inside an element that was appended
            known = before.get(path)
            if isinstance(box, list) and path[:-1] in before and _has_grown(known or [], box):
                new[path] = len(known or [])
                values = [nested.mapped(item, self._template) for item in box[new[path] :]]
                self.recording.appended.append(Appended(path, values))
            else:
                self._warn_about_changes(path, known, box)

    def _warn_about_changes(self, path: tuple[Any, ...], known: Any, box: Any) -> None:
        items = box.items() if isinstance(box, dict) else enumerate(box)
        old = {} if known is None else dict(known.items() if isinstance(known, dict) else enumerate(known))
        for key, value in items:
            if old.get(key, self) is value or isinstance(value, (list, dict)):
                continue
            name = Appended((*path, key), []).name
            self.package.warn(
                f"`{step_name(self.trainer)}` sets {name}. It runs in Python only while it is compiled, so this "
                "happens once and is undone: return or log the value, append it to a list of the module, or make it a "
                "buffer."
            )

    def _fail(self, text: str) -> NoReturn:
        raise self.package.MisconfigurationException(text)

    # ---- what the step calls and reads meanwhile

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for `LightningModule.log`."""
        if not self._is_open:  # checkpointing repeats parts of a step in the backward pass
            return
        original = type(self.module).log
        if self.trainer.barebones or self.trainer._results is None or not _can_be_logged(value):
            original(self.module, name, value, *args, **kwargs)  # says why that cannot be
            return
        arguments = dict(inspect.signature(original).bind(self.module, name, value, *args, **kwargs).arguments)
        for first in list(arguments)[:3]:
            del arguments[first]
        arguments.update(arguments.pop("kwargs", {}))
        reduction = reduction_name(arguments.get("reduce_fx", "mean"))
        self.recording.events.append(Logged(name, self._logged(name, value), arguments, reduction))

    def _logged(self, name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"`self.log({name}, ...)` was called with a tensor of shape {list(value.shape)}, but the tensor "
                    f"must have a single element. You can try doing `self.log({name}, value.mean())`"
                )
            return self._slot(value.reshape(()))
        if is_read_later(value):
            return self._slot(value.tensor.reshape(()))
        if isinstance(value, numbers.Number) and not isinstance(value, HostNumber):
            self.package.warn(
                f"`self.log({name!r}, ...)` was called with the number {value} in a compiled step: the same number is "
                "logged at every step. Log a tensor instead, or log the number in a hook such as `on_train_batch_end`."
            )
        return value

    def call_metric(self, metric: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """Stands in for a method of a metric."""
        if not self._is_open:
            return None
        if not self._keeps_all:
            self._fail(
                f"a {type(metric).__name__} needs the results of every micro-batch. Choose OutputMode.All in the "
                "options of this stage."
            )
        template = [nested.mapped(value, self._template) for value in (args, kwargs)]
        self.recording.events.append(HostCall(metric, method, template[0], template[1], combines=False))
        if method in ("update", "reset"):
            return None
        event = len(self.recording.events) - 1
        if isinstance(metric, nn.ModuleDict):  # a collection
            return {key: self._pending(metric, event, key) for key in metric.keys()}  # noqa: SIM118
        return self._pending(metric, event, None)

    def call_logger(self, target: Any, method: str, *args: Any, **kwargs: Any) -> None:
        """Stands in for a method of a logger, or of what a logger holds."""
        counts = {id(tensor): name for name, tensor in self._counts.items()}

        def template(name: str, leaf: Any) -> Any:
            return Count(counts[id(leaf)]) if id(leaf) in counts else self._template(name, leaf)

        if self._is_open:
            given = [nested.mapped(value, template) for value in (args, kwargs)]
            self.recording.events.append(HostCall(target, method, given[0], given[1], combines=True))

    def _pending(self, metric: Any, event: int, key: str | None) -> Pending:
        def fail() -> NoReturn:
            self._fail(
                f"the value of {type(metric).__name__} is known only after the compiled step has run: it can be logged "
                "or returned, and nothing else. Compute with it in a hook such as `on_train_batch_end`."
            )

        return Pending(event, key, fail)

    def count(self, name: str) -> torch.Tensor | None:
        """One of COUNTS as a tensor, if the step is running."""
        return self._counts.get(name) if self._is_open else None

    def note_attribute(self, name: str, value: Any) -> None:
        """The step reads an attribute of the module."""
        read = self.recording.read_attributes
        if self._is_open and name not in read and (constant := remember(name, value)) is not None:
            read[name] = constant

    def note_text(self, place: str, text: str) -> None:
        if self._is_open:
            self.recording.read_texts[place] = text

    def note_stage(self) -> None:
        if self._is_open:
            self.recording.depends_on_stage = True


class _StepMode(TorchFunctionMode):
    """Notes which of some tensors a step computes with, and puts off reading numbers until they are needed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], used: set[str], check_reading: Callable[[], None]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._used, self._check_reading = used, check_reading
        self._is_reading = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = [leaf for _, leaf in nested.leaves((args, kwargs or {}), "")]
        self._used.update(self._names[id(leaf)] for leaf in leaves if id(leaf) in self._names)
        if func is torch.Tensor.item and not self._is_reading:
            return ReadLater(args[0], self._read)
        if any(map(is_read_later, leaves)):
            args, kwargs = nested.mapped((args, kwargs or {}), lambda _, leaf: later_read(leaf))
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor as it is in the first batch."""
        self._check_reading()
        self._is_reading = True
        try:
            return tensor.item()
        finally:
            self._is_reading = False


def _can_be_logged(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, numbers.Number, Pending)) or is_metric(value)


def is_metric(value: Any) -> bool:
    """Whether this is a metric of torchmetrics, or a collection of them."""
    return isinstance(value, nn.Module) and any(
        base.__module__.startswith("torchmetrics.") and base.__name__ in ("Metric", "MetricCollection")
        for base in type(value).__mro__
    )


def _has_grown(before: list[Any], now: list[Any]) -> bool:
    return len(now) > len(before) and all(map(is_, before, now))


def contents(module: Any) -> dict[tuple[Any, ...], Any]:
    """Copies of the lists and dictionaries of a module by their path; the path of its attributes is empty."""
    own = {name: value for name, value in vars(module).items() if name not in _TABLES}
    found: dict[tuple[Any, ...], Any] = {}

    def look(path: tuple[Any, ...], box: Any) -> None:
        found[path] = dict(box) if isinstance(box, dict) else list(box)
        if len(path) < _DEEPEST:
            for key, value in box.items() if isinstance(box, dict) else enumerate(box):
                if isinstance(value, (list, dict)):
                    look((*path, key), value)

    look((), own)
    return found
