"""See every op of a step while it is traced.

`Watch` sits on top of PyTorch's tracing modes. It notes the user's line and submodule on each op, keeps random draws
consistent when activation checkpointing replays them, and freezes values that Python reads into guards.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from poptorch._logging import logger
from poptorch.capture.constants import Constants
from poptorch.capture.context import current_hints, following_paths
from poptorch.capture.direct import Direct
from poptorch.capture.operand_types import check_in_place, may_be_refused
from poptorch.capture.placer import Placer
from poptorch.capture.private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FunctionalTensor,
    OpOverload,
    TorchDispatchMode,
    current_autograd_node,
    disable_current_modes,
    from_fun,
    fx_traceback,
    get_proxy_mode,
    is_functionalising,
    pytree,
    sequence_number,
)
from poptorch.capture.proxies import is_outside, node_of
from poptorch.capture.recorder import Recorder, ValuesNeeded, generator_by_name
from poptorch.capture.residents import Residents
from poptorch.capture.source import KnownLines, current_user_line
from poptorch.capture.static_forms import NO_RESULT, STATIC_FORMS
from poptorch.errors import CompileError, explain
from poptorch.ir import Direction, Guard, Note, Placement, SourceLine, annotation
from poptorch.ir.ops import depends_on_inputs

aten = torch.ops.aten
Op = OpOverload


class Outside(Protocol):
    """What a body of a loop or a branch wants to know: the tensors that its ops take."""

    def notice(self, values: Sequence[Any]) -> None: ...


class Watch(TorchDispatchMode):
    """The observer of one trace. `has_values` tells whether real tensors flow through it, or fake ones."""

    def __init__(self, residents: Residents, placer: Placer, *, has_values: bool) -> None:
        super().__init__()
        self._residents, self._placer = residents, placer
        self._is_forward = False  # whether the user's code runs
        self.direction = Direction.FORWARD
        self.guards: list[tuple[Guard, torch.Tensor]] = []
        self.warnings: list[str] = []
        self._has_values = has_values
        self._notes: dict[int, Note] = {}  # of forward ops, by the number of the op's autograd node
        self._backward: dict[int, Note] = {}  # the same for backward ops
        self._latest = Note(self.direction)
        self._lines: KnownLines = {}
        self._last: Placement | None = None  # of the last op of forward
        self._path: list[str] = [""]
        self.running: list[nn.Module] = []  # the modules inside their forward
        self._draws: dict[Any, tuple[Any, bytes]] = {}  # with the state of the generator after each
        self._generators: dict[torch.Generator, torch.Tensor] = {}  # of the user's, and their states before the trace
        self._constants = Constants()
        self._direct = Direct()
        self._bodies: list[Outside] = []  # of loops and branches that are being recorded, the innermost last

    def __torch_dispatch__(
        self, func: Op, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        note = self._note()
        line = note.line
        if not isinstance(get_proxy_mode(), (Recorder, type(None))):
            raise CompileError(_traced_by_another(line))
        args, kwargs = self._inside(func, args, kwargs)
        for body in self._bodies:
            body.notice(pytree.tree_leaves((args, kwargs)))
        seen = (
            None if self._has_values or self._bodies or func in STATIC_FORMS else self._direct.see(func, args, kwargs)
        )
        if seen is None:
            return self._run(func, args, kwargs, note)
        result = self._direct.record(seen, note)
        if result is NotImplemented:
            result = self._run(func, args, kwargs, note)
            self._direct.learn(seen, result)
        return result

    def _run(self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], note: Note) -> Any:
        """The result of an op that PyTorch's tracing modes see."""
        line = note.line
        with fx_traceback.annotate(annotation(note)):
            if torch.Tag.data_dependent_output in func.tags:
                return self._read(func, args, kwargs, line)
            if func in STATIC_FORMS:
                result = STATIC_FORMS[func](self, args, kwargs, line)
                if result is not None:
                    return None if result is NO_RESULT else result
            draws = torch.Tag.nondeterministic_seeded in func.tags
            if not draws:
                check_in_place(func, args)
                if not self._has_values and may_be_refused(func, args):
                    raise ValuesNeeded
            try:
                return self._draw(func, args, kwargs) if draws else func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                self._refuse_in_body(f"the result of {func.name()} depends on values that Python has to know", line)
                raise ValuesNeeded from error
            except RuntimeError as error:
                if not self._has_values:
                    _try_with_plain_values(func, args, kwargs)
                    raise ValuesNeeded(f"{func} does more than its description says") from error
                raise

    def _note(self) -> Note:
        """The user's line, submodule, hints and block: as they are now, or of the forward op of a backward op."""
        if self.direction is Direction.BACKWARD:
            node = current_autograd_node()
            found = None if node is None else self._of_forward(node._sequence_nr())
            if found is not None:
                return found
        line = current_user_line(self._lines)
        if self._is_forward and line is not None:
            self._last = self._placer.place(line)
        placement = self._last if self.direction is Direction.FORWARD else None
        note = self._now(line, placement)
        if self.direction is Direction.FORWARD and line is not None:
            self._notes.setdefault(sequence_number() - 1, note)  # later ops without history share it
        return note

    def _of_forward(self, number: int) -> Note | None:
        """The note of a backward op whose forward op had this number."""
        found = self._notes.get(number)
        if found is not None and number not in self._backward:
            self._backward[number] = replace(found, direction=Direction.BACKWARD)
        return self._backward.get(number)

    def _now(self, line: SourceLine | None, placement: Placement | None) -> Note:
        """The note of an op that runs now, which is often that of the op before."""
        last, path, hints = self._latest, self._path[-1], current_hints()
        same = last.line is line and last.path is path and last.hints is hints and last.placement is placement
        if not same or last.direction is not self.direction:
            self._latest = Note(self.direction, line, path, hints=hints, placement=placement)
        return self._latest

    @property
    def has_values(self) -> bool:
        """Whether the tensors of the trace have the values of the first batch now."""
        return self._has_values

    def note(self) -> Note:
        """What there is to know about an op that runs now."""
        return self._note()

    @contextmanager
    def inside(self, body: Outside) -> Iterator[None]:
        """Ops belong to the body of a loop or to a branch, where no tensor has the value of a certain run."""
        before, self._has_values = self._has_values, False
        self._bodies.append(body)
        try:
            yield
        finally:
            self._bodies.pop()
            self._has_values = before

    def _refuse_in_body(self, what: str, line: SourceLine | None) -> None:
        if self._bodies:
            raise CompileError(
                explain(
                    f"{what} in the body of a loop or in a branch, which has other values whenever it runs.",
                    where=str(line),
                    fix="compute with tensors there (torch.where, a mask), or read the value before",
                )
            )

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Know which submodule of `module` runs."""
        paths = {submodule: name for name, submodule in module.named_modules()}
        thread = threading.get_ident()  # hooks are called by all of them

        def enter(submodule: nn.Module, args: Any) -> None:
            if threading.get_ident() != thread:
                return
            self._path.append(paths.get(submodule, self._path[-1]))
            self.running.append(submodule)

        def leave(submodule: nn.Module, args: Any, result: Any) -> None:
            if threading.get_ident() != thread:
                return
            last = None
            while last is not submodule:  # those that ended in an exception, which this one caught, come first
                self._path.pop()
                last = self.running.pop()

        depth, self._is_forward = len(self._path), True
        handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave))
        try:
            with following_paths(self._path):
                yield
        finally:
            for handle in handles:
                handle.remove()
            del self._path[depth:]
            self.running.clear()
            self._is_forward = False

    def _inside(
        self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an op, with tensors of the trace in place of all others."""
        if func in _FRESH or not is_functionalising():
            return args, kwargs
        if not any(map(is_outside, pytree.tree_leaves((args, kwargs)))):
            return args, kwargs
        return pytree.tree_map_only(torch.Tensor, self._enter, (args, kwargs))

    def _enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor means in the trace: one of the module's is its stand-in, one from elsewhere is a constant."""
        if not is_outside(tensor):
            return tensor
        with torch.no_grad():
            resident = self._residents.stand_in(tensor)
        return self._constants.of(tensor) if resident is None else resident

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that `forward` returns, as the trace knows it; a constant that it only passes on is itself."""
        if not is_outside(tensor):
            return tensor
        resident = self._residents.stand_in(tensor)
        if resident is not None:
            return resident
        return self._constants.of(tensor) if self._constants.is_written(tensor) else tensor

    def _draw(self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Draw random numbers; from a generator state that was seen before, hand out what was drawn then.

        Checkpointing rewinds the generator to repeat the forward pass, so the same state means the same draw. An op
        that leaves the generator alone has drawn nothing, such as attention without dropout.
        """
        args, kwargs = generator_by_name(func, args, kwargs)
        self._remember(kwargs.get("generator"))
        state = _generator_state()
        described = pytree.tree_map_only(torch.Tensor, lambda t: (t.shape, t.dtype), (args, kwargs))
        key = (func, str(described), state)
        if key in self._draws:
            drawn, following = self._draws[key]
            _set_generator_state(following)
            drawn = pytree.tree_map_only(torch.Tensor, torch.clone, drawn)
            return args[0].copy_(drawn) if func._schema.is_mutable else drawn
        result = _draw_anew(func, args, kwargs)
        if not self._has_values:  # fake ops leave the generator alone, but the next draw must see another state
            with disable_current_modes():
                torch.empty(1).uniform_()
        following = _generator_state()
        if following != state:
            self._draws[key] = (pytree.tree_map_only(torch.Tensor, torch.clone, result), following)
        return result

    def _remember(self, generator: torch.Generator | None) -> None:
        """Know where a generator of the user's was before the first draw of real numbers."""
        if generator is not None and self._has_values and generator not in self._generators:
            with disable_current_modes():
                self._generators[generator] = generator.get_state()

    def rewind_generators(self) -> None:
        """Bring generators of the user's back to where they were: the program has not drawn from them yet."""
        for generator, state in self._generators.items():
            generator.set_state(state)

    def _read(self, func: Op, args: tuple[Any, ...], kwargs: dict[str, Any], line: SourceLine | None) -> Any:
        """Python reads a value: freeze what it is now, and guard it if another batch could change it."""
        traced = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not any(_may_vary(tensor) for tensor in traced):
            return func(*args, **kwargs)
        self._refuse_in_body("Python reads the value of a tensor", line)
        if not self._has_values:
            raise ValuesNeeded
        with disable_current_modes():
            plain = pytree.tree_map_only(torch.Tensor, _plain, (args, kwargs))
            value = func(*plain[0], **plain[1])
        check = _still_true(func, args, value)
        if check is None:
            raise CompileError(
                explain(
                    f"{func.name()} reads a value out of a traced tensor in a way that cannot be guarded.",
                    where=str(line),
                    fix="compute with tensors instead, or move this outside the model",
                )
            )
        self._freeze(check, f"the value {value!r}", line)
        return value

    def known_count(self, counted: torch.Tensor) -> int:
        """The sum of a tensor of the first batch, on which the size of a result depends."""
        self._refuse_in_body("the size of a result depends on the values of a tensor", current_user_line())
        if not self._has_values:
            raise ValuesNeeded
        with disable_current_modes():
            return int(_plain(counted).sum().item())

    def freeze_success(self, status: torch.Tensor, what: str, line: SourceLine | None) -> None:
        """Rely on every element of `status` being zero in every batch; no value of the first batch is frozen."""
        self._refuse_in_body(f"the success of {what} is checked", line)
        self.guards.append((Guard(line, f"the success of {what}"), (status == 0).all()))

    def freeze_count(self, count: torch.Tensor, expected: int, line: SourceLine | None) -> None:
        """Rely on `count` being `expected` in every batch, as that of a constant is anyway."""
        if _may_vary(count):
            self._freeze(count == expected, f"the size {expected} of the result", line)

    def _freeze(self, check: torch.Tensor, what: str, line: SourceLine | None) -> None:
        self.guards.append((Guard(line, what), check))
        self.warnings.append(
            explain(
                f"{what}, computed from the first batch, is now part of the compiled program.",
                where=str(line),
                later="a batch that leads to another value raises poptorch.Error instead of a wrong result",
                fix="use torch.where or a mask if both cases must work",
            )
        )

    def report(self) -> None:
        """Log each freeze once; called when the trace has succeeded."""
        for warning in dict.fromkeys(self.warnings):
            logger.warning("%s", warning)


def _try_with_plain_values(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run an op whose description in Python has refused its operands; raises what the op itself has to say to them.

    It is given zeros and, if it does not take those, ones: what is a size or a limit must not be zero.
    """
    with disable_current_modes(), torch.no_grad():
        for value in (0, 1):
            plain = pytree.tree_map_only(
                torch.Tensor, lambda t, value=value: torch.full(t.shape, value, dtype=t.dtype), (args, kwargs)
            )
            plain = pytree.tree_map_only(torch.Generator, torch.Generator.clone_state, plain)
            try:
                func(*plain[0], **plain[1])
            except RuntimeError:
                if value:
                    raise
            else:
                return


# PyTorch describes these in Python, and does not let them have a generator there.
_WITHOUT_GENERATOR = frozenset({aten.exponential_, aten.geometric_, aten.cauchy_, aten.log_normal_})


def _draw_anew(func: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    own = kwargs.get("generator")
    recorder = get_proxy_mode()
    if own is None or func.overloadpacket not in _WITHOUT_GENERATOR or not isinstance(recorder, Recorder):
        return func(*args, **kwargs)
    result = func(*args, **{name: value for name, value in kwargs.items() if name != "generator"})
    name = func.overloadpacket.__name__.rstrip("_")
    node = next(
        n for n in reversed(recorder.graph.nodes) if getattr(n.target, "overloadpacket", None) is getattr(aten, name)
    )
    node.kwargs = {**node.kwargs, "generator": own}
    return result


_FRESH: frozenset[Op] = frozenset({aten.lift_fresh.default, aten.lift_fresh_copy.default})


def _generator_state() -> bytes:
    with disable_current_modes():
        return bytes(torch.get_rng_state().tolist())


def _set_generator_state(state: bytes) -> None:
    with disable_current_modes():
        torch.set_rng_state(torch.tensor(list(state), dtype=torch.uint8))


def _traced_by_another(line: SourceLine | None) -> str:
    return explain(
        "forward traces a part of itself with make_fx, as torch.func.linearize does: what that computes would be lost.",
        where=str(line),
        fix="call the function itself; torch.func.jvp gives the derivatives that linearize gives",
    )


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return from_fun(tensor) if isinstance(tensor, FunctionalTensor) else tensor  # pyright: ignore[reportReturnType]


def _may_vary(tensor: torch.Tensor) -> bool:
    node: fx.Node | None = node_of(tensor)
    return node is not None and depends_on_inputs(node)


def _still_true(func: Op, args: tuple[Any, ...], value: Any) -> torch.Tensor | None:
    """A 0-d boolean tensor that tells whether a read would give the same value again."""
    if func is aten._local_scalar_dense.default:
        tensor = args[0].reshape(())
        return torch.isnan(tensor) if value != value else tensor == value
    if func is aten.equal.default:
        same = args[0].shape == args[1].shape
        return (args[0] == args[1]).all() == value if same else torch.ones((), dtype=torch.bool)
    if func is aten.allclose.default:
        return torch.isclose(*args).all() == value
    return None
