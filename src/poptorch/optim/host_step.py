"""The rule of an optimiser that we have no rule for: its own `step()`, run on stand-ins for its tensors.

Tracing that run captures the update. It works as long as `step()` only computes with tensors: a number of the group
that it computes with can change later, one that it looks at (`if weight_decay != 0`) is a constant of the program, and
a `step()` that looks at the value of a tensor is refused. What it looks at is found by trial runs on tensors that have
no values.
"""

from __future__ import annotations

import inspect
import numbers
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from poptorch.compiling import as_if_compiling
from poptorch.errors import OptimizerError, explain
from poptorch.optim.rules import Hypers, Rule, State

# How torch's optimisers compute is ours to choose: one tensor after the other, without looking at values.
IMPLEMENTATION = {"foreach": False, "fused": False, "capturable": True, "differentiable": False}
_FOREIGN_TENSOR = "Please convert all Tensors to FakeTensors"  # how torch complains of one that it was not given


@dataclass(frozen=True, kw_only=True)
class HostStep(Rule):
    """The `step()` of one parameter group of an optimiser."""

    optimizer_class: type
    settings: tuple[tuple[str, Any], ...]  # what the group holds beside numbers
    variable: tuple[str, ...] = field(default=(), compare=False, repr=False)  # numbers that step() does not look at
    scalars: frozenset[str] = field(default=frozenset(), compare=False, repr=False)  # state of one number, as `step`
    others: dict[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)  # state, but no tensor
    optimizer: torch.optim.Optimizer = field(compare=False, repr=False)
    group: dict[str, Any] = field(compare=False, repr=False)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, group: dict[str, Any], before: Rule | None = None) -> HostStep:
        """Find out by trial runs which numbers of the group may vary; raise if the step cannot be compiled at all.

        `before` is a rule of the same group from an earlier reading: if it still fits, the trials are not repeated.
        """
        found = read_numbers(group)
        group = {name: value.item() if _is_number_tensor(value) else value for name, value in group.items()}
        not_settings = {"params", *IMPLEMENTATION, *(name.partition(".")[0] for name in found)}
        settings = tuple(sorted((name, value) for name, value in group.items() if name not in not_settings))
        rule = cls(optimizer_class=type(optimizer), settings=settings, optimizer=optimizer, group=group)
        if rule == before and isinstance(before, HostStep) and before._has_constants(found):
            return replace(before, optimizer=optimizer, group=rule.group)
        sample = next((p for p in group["params"] if p.dim() > 0), next(iter(group["params"]), None))
        if sample is None:
            return rule
        try:
            entries = rule._first_entries(sample, rule._existing(sample))
            state = _tensors(entries)
            others = {name: value for name, value in entries.items() if name not in state}
            scalars = {name for name, value in state.items() if value.dim() == 0 and (sample.dim() or name == "step")}
            rule = replace(rule, scalars=frozenset(scalars), others=others)
            rule._check_tensors(sample, state)
            rule._run_without_values(sample, state, ())
            rule._check_repeats(sample)
        except OptimizerError:
            raise
        except Exception as error:
            raise _refusal(optimizer, error) from error
        return replace(rule, variable=tuple(name for name in found if rule._may_vary(name, sample, state)))

    @property
    def hypers(self) -> tuple[str, ...]:
        return self.variable

    @property
    def state(self) -> tuple[str, ...]:
        return ()  # depends on the parameter: see initial_state

    def wide(self, tensor: Tensor) -> Tensor:
        return super().wide(tensor) if is_torchs(self.optimizer_class) else tensor  # others may care about types

    def initial_state(self, parameter: Tensor, values: Mapping[str, float]) -> State:
        return _tensors(self._first_entries(parameter, {}))

    def expected_state(self, parameter: Tensor, values: Mapping[str, float]) -> State:
        """With what the optimiser has already: only its constructor may know how that is made."""
        return _tensors(self._first_entries(parameter, self._existing(parameter)))

    def apply(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        return self.update(params, grads, states, counter, hypers)  # what is complex is the business of step()

    def update(
        self, params: list[Tensor], grads: list[Tensor], states: list[State], counter: Tensor | None, hypers: Hypers
    ) -> tuple[list[Tensor], list[State]]:
        # Numbers are float64 here, as Python's are. A parameter without dimensions would count as a number too, and
        # take part in the choice of types; with one dimension it does not.
        own = [p.clone().reshape(p.shape or (1,)) for p in params]
        entries = [
            {**self.others, **{name: self._stand_in(name, value) for name, value in state.items()}} for state in states
        ]
        flat = [grad.reshape(p.shape) for p, grad in zip(own, grads, strict=True)]
        _run(_shadow(self.optimizer), _with_numbers(self.group, hypers), own, flat, entries)
        new_states = [
            {name: entry[name].reshape(value.shape) for name, value in state.items()}
            for entry, state in zip(entries, states, strict=True)
        ]
        return [new.reshape(p.shape) for new, p in zip(own, params, strict=True)], new_states

    def _has_constants(self, found: Mapping[str, float]) -> bool:
        """Whether the numbers that `step()` looks at are those of this rule."""
        own = read_numbers(self.group)
        return all(found.get(name) == value for name, value in own.items() if name not in self.variable)

    def _stand_in(self, name: str, value: Tensor) -> Tensor:
        return value.double() if name in self.scalars else value.clone().reshape(value.shape or (1,))

    def _existing(self, parameter: Tensor) -> Mapping[str, Any]:
        return self.optimizer.state.get(parameter, {})

    def _first_entries(self, parameter: Tensor, existing: Mapping[str, Any]) -> dict[str, Any]:
        """What exists, and what `step()` puts into the state of a parameter before it updates it for the first time.

        A Python number that the first step changes is kept as a tensor, because a program cannot count in Python.
        """
        entries = _Recorder({name: _copy(value) for name, value in existing.items()})
        with torch.no_grad():
            own = parameter.detach().clone()
            try:
                _run(_shadow(self.optimizer), self.group, [own], [torch.zeros_like(own)], [entries])
            except Exception as error:
                _check_existing(self.optimizer, parameter, existing, error)
                raise
        return {
            name: torch.tensor(float(value)) if _is_number(value) and entries[name] != value else value
            for name, value in entries.first.items()
        }

    def _check_repeats(self, sample: Tensor) -> None:
        """Raise unless the captured update does three times what `step()` does in three steps.

        It does not if `step()` counts in Python outside its state, or starts its state from the first gradient.
        """
        if is_torchs(self.optimizer_class):
            return
        generator = torch.Generator().manual_seed(0)
        grads = [torch.randn(sample.shape, generator=generator).to(sample.dtype) for _ in range(3)]
        with torch.no_grad():
            captured, state = [sample.detach().clone()], self.expected_state(sample, {})
            direct, live = sample.detach().clone(), _shadow(self.optimizer)
            entries = {name: _copy(value) for name, value in self._existing(sample).items()}
            for grad in grads:
                captured, (new,) = self.update(captured, [grad], [state], None, {})
                state = {name: value.to(state[name].dtype) for name, value in new.items()}
                _run(live, self.group, [direct], [grad.clone()], [entries])
        if not torch.allclose(captured[0], direct, rtol=1e-3, atol=1e-5):
            raise OptimizerError(
                explain(
                    f"the optimiser {self.optimizer_class.__name__} cannot be compiled: its step() does not do the "
                    "same in every step.",
                    reason="it counts in Python outside self.state, starts its state from the first gradient, or draws "
                    "random numbers",
                    fix="keep counters as tensors in self.state[p], and start state with zeros",
                )
            )

    def _check_tensors(self, sample: Tensor, state: State) -> None:
        """Raise if `step()` uses a tensor that is neither a parameter nor in its state: a program has no such input."""
        if is_torchs(self.optimizer_class):
            return
        mode = FakeTensorMode()
        p = mode.from_tensor(sample.detach())
        entries: State = {name: mode.from_tensor(value) for name, value in state.items()}
        with mode:
            try:
                self.update([p], [torch.empty_like(p)], [entries], None, {})
            except Exception as error:
                if _FOREIGN_TENSOR not in str(error):
                    return  # the next trial runs into the same, and says it better
                raise OptimizerError(
                    explain(
                        f"the optimiser {self.optimizer_class.__name__} cannot be compiled: its step() uses a tensor "
                        "that is neither a parameter nor in self.state.",
                        reason=str(error).strip().rpartition("Found in ")[2],
                        fix="keep it in self.state[p], or as a Python number in the parameter group",
                    )
                ) from error

    def _may_vary(self, name: str, sample: Tensor, state: State) -> bool:
        try:
            self._run_without_values(sample, state, (name,))
        except Exception:
            return False
        return True

    def _run_without_values(self, sample: Tensor, state: State, variable: Sequence[str]) -> None:
        """A trial run; whatever it raises tells that `step()` looks at a tensor, or at one of these numbers."""
        p = sample.detach().to("meta")
        entries = {name: value.to("meta") for name, value in state.items()}
        hypers = {name: torch.empty((), dtype=torch.float64, device="meta") for name in variable}
        self.update([p], [torch.empty_like(p)], [entries], None, hypers)


class _Recorder(dict[str, Any]):
    """State of one parameter that remembers the first value of every entry."""

    def __init__(self, entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self.first = {name: _copy(value) for name, value in entries.items()}

    def __setitem__(self, name: str, value: Any) -> None:
        self.first.setdefault(name, _copy(value))
        super().__setitem__(name, value)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value


def _tensors(entries: Mapping[str, Any]) -> State:
    return {name: value for name, value in entries.items() if isinstance(value, Tensor)}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def read_numbers(group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a parameter group; those inside a tuple are named `betas.0`, `betas.1`."""
    found: dict[str, float] = {}
    for name, value in group.items():
        if name in ("params", *IMPLEMENTATION):
            continue
        if _is_number(value):
            found[name] = float(value)
        elif isinstance(value, tuple) and value and all(map(_is_number, value)):
            found.update({f"{name}.{index}": float(number) for index, number in enumerate(value)})
    return found


def _is_number(value: object) -> bool:
    return _is_number_tensor(value) or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _is_number_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _with_numbers(group: Mapping[str, Any], hypers: Hypers) -> dict[str, Any]:
    """The group with tensors in place of some of its numbers."""
    changed = dict(group)
    for name, tensor in hypers.items():
        outer, _, index = name.partition(".")
        if index:
            items = list(changed[outer])
            items[int(index)] = tensor
            changed[outer] = tuple(items)
        else:
            changed[outer] = tensor
    return changed


def _shadow(optimizer: torch.optim.Optimizer) -> Any:
    """Another object with the attributes of an optimiser, so that `step()` leaves nothing behind on the original."""
    shadow = object.__new__(type(optimizer))
    vars(shadow).update(vars(optimizer))
    return shadow


def _run(
    shadow: Any,
    group: Mapping[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    entries: Sequence[dict[str, Any]],
) -> None:
    """Let `step()` update these tensors of one group, in place."""
    _step(shadow, [{**group, "params": params}], params, grads, entries)


def _step(
    shadow: Any,
    groups: Sequence[Mapping[str, Any]],
    params: list[Tensor],
    grads: list[Tensor],
    entries: Sequence[dict[str, Any]],
) -> None:
    for p, grad in zip(params, grads, strict=True):
        p.grad = grad
    chosen = [{name: IMPLEMENTATION.get(name, value) for name, value in group.items()} for group in groups]
    shadow.param_groups = chosen
    shadow.state = defaultdict(dict, zip(params, entries, strict=True))
    with torch.no_grad(), _TensorsAsNumbers(), as_if_compiling():
        _plain_step(type(shadow))(shadow)


def is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _plain_step(kind: type) -> Callable[[Any], Any]:
    """The step of a class without the profiler's hooks around it, which would end up in the program."""
    step: Any = kind.step
    if is_torchs(kind):
        return inspect.unwrap(step)
    return step.__wrapped__ if getattr(step, "hooked", False) else step


class _TensorsAsNumbers(TorchFunctionMode):
    """Lets a 0-d tensor stand where torch wants a Python number: `x.add_(y, alpha=lr)`, `x.addcmul_(y, z, value=c)`."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        plain = name.removesuffix("_")
        if plain in ("add", "sub") and isinstance(kwargs.get("alpha"), Tensor):
            args = (args[0], args[1] * kwargs.pop("alpha"))
        elif plain in ("addcmul", "addcdiv") and isinstance(kwargs.get("value"), Tensor):
            product = args[1] * args[2] if plain == "addcmul" else args[1] / args[2]
            func = getattr(Tensor, f"add{name.removeprefix(plain)}")
            args = (args[0], product * kwargs.pop("value"))
        elif plain == "lerp" and isinstance(args[2], Tensor) and args[2].dim() == 0:
            args = (args[0], args[1], args[2].to(args[0].dtype))
        return func(*args, **kwargs)


def check_groups_apart(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless `step()` treats every group by itself: a program updates one after the other.

    It does not if, say, it divides by the norm of all gradients, or takes the first group's learning rate for all.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    if is_torchs(type(optimizer)) or len(groups) < 2:
        return
    generator = torch.Generator().manual_seed(0)
    samples = [group["params"][0].detach() for group in groups]
    grads = [torch.randn(sample.shape, generator=generator).to(sample.dtype) for sample in samples]
    entries = [optimizer.state.get(group["params"][0], {}) for group in groups]

    def run(positions: Sequence[int]) -> list[Tensor]:
        own = [samples[position].clone() for position in positions]
        copies = [{name: _copy(value) for name, value in entries[position].items()} for position in positions]
        chosen = [{**groups[position], "params": [p]} for position, p in zip(positions, own, strict=True)]
        _step(_shadow(optimizer), chosen, own, [grads[position].clone() for position in positions], copies)
        return own

    together = run(range(len(groups)))
    apart = [run([position])[0] for position in range(len(groups))]
    if not all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(together, apart, strict=True)):
        raise OptimizerError(
            explain(
                f"the optimiser {type(optimizer).__name__} cannot be compiled: its step() does not treat each "
                "parameter group by itself.",
                reason="what it does to one group depends on the numbers, parameters or gradients of another",
                fix="use one group, or let step() compute with what a group holds; Options.Training.clipGradNorm "
                "limits the norm of all gradients",
            )
        )


def _check_existing(
    optimizer: torch.optim.Optimizer, parameter: Tensor, entries: Mapping[str, Any], cause: Exception
) -> None:
    """Raise a better error if a step failed because the state that it found belongs to another parameter or type."""
    tensors = {name: value for name, value in entries.items() if isinstance(value, Tensor) and value.dim() > 0}
    for name, value in tensors.items():
        if (value.dtype, value.shape) != (parameter.dtype, parameter.shape):
            raise OptimizerError(
                explain(
                    f"the optimiser {type(optimizer).__name__} has {name} of {value.dtype} and shape "
                    f"{list(value.shape)} for a parameter of {parameter.dtype} and shape {list(parameter.shape)}.",
                    reason=f"its step() failed: {str(cause).strip()}",
                    fix="after model.half(), optimizer.load_state_dict(optimizer.state_dict()) converts the state as "
                    "well; state of another model has to be cleared",
                )
            ) from cause


def _refusal(optimizer: torch.optim.Optimizer, error: Exception) -> OptimizerError:
    """Why an optimiser cannot be compiled, in the words of whatever its `step()` ran into."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return OptimizerError(
        explain(
            f"the optimiser {type(optimizer).__name__} cannot be compiled: its step() failed while it was captured.",
            reason=f"{type(error).__name__}: {reason}",
            supported="poptorch.optim.*, and torch.optim.* except LBFGS and SparseAdam",
            fix="write step() with tensor operations only: no .item(), no branches on values of tensors, no closure",
        )
    )
