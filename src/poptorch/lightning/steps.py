"""A compiled step of a LightningModule: the program, and what the host does before and after each call of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import poptorch
from poptorch.errors import GuardError
from poptorch.lightning import batches, nested
from poptorch.lightning.constants import Submodules
from poptorch.lightning.module import LightningIPUModule
from poptorch.lightning.packages import Lightning
from poptorch.lightning.recording import COUNTS, Logged, Recorder, Recording, is_metric
from poptorch.lightning.replay import Replay
from poptorch.lightning.results import Batching
from poptorch.lightning.substitutes import substituted

Counts = dict[str, int]  # COUNTS as they are now
Kind = tuple[Any, ...]  # of a batch
MOST_WAYS = 4  # programs for batches of one kind


@dataclass(frozen=True)
class Way:
    """One way through a step: a constant argument that names it, and under which circumstances it was recorded."""

    name: str
    recording: Recording
    counts: Counts
    stage: Any


class Step:
    """One step of a module for one stage (and data loader): an executor, and what is known of each of its programs.

    There are several if the shapes of batches differ, or if the step branches on something that the host knows.
    """

    def __init__(
        self,
        package: Lightning,
        wrapper: LightningIPUModule,
        executor: poptorch.PoplarExecutor,
        *,
        training: bool,
        combines: bool = True,
        default_dtype: torch.dtype | None = None,
    ) -> None:
        self.executor = executor
        self.batching = Batching.of(executor.options, training=training)
        self._package, self._wrapper, self._training = package, wrapper, training
        self._module = wrapper.lightning_module
        self._combines = combines  # whether results are averaged over micro-batches
        self._default_dtype = default_dtype
        self._ways: dict[Kind, list[Way]] = {}  # the last used first
        self._submodules: Submodules | None = None
        self._counts: torch.Tensor | None = None  # as they were given last
        self._uses_counts = False

    # ---- one call

    def __call__(self, args: tuple[Any, ...], counts: Counts) -> Any:
        """Run the program on one batch of the loader; gives what the step would have returned for it."""
        with torch.inference_mode(False), torch.no_grad():
            leaves = self._leaves(args[0], counts)
            recording, outputs = self._run(leaves, args, counts)
            replay = Replay(self._package, self._module, self.batching, recording, outputs)
            return replay.run(args[0], counts, combines=self._combines)

    def _run(
        self, leaves: dict[str, Any], args: tuple[Any, ...], counts: Counts
    ) -> tuple[Recording, tuple[torch.Tensor, ...]]:
        """Run the program that fits this batch; if there is none, compile one."""
        kind = self._kind(leaves)
        reason = self._out_of_date(is_first=counts["batch_idx"] == 0)
        if reason is not None:
            self.forget()
        for way in tuple(self._ways.get(kind, ())):
            reason = self._does_not_fit(way, args[0])
            if reason is None:
                try:
                    outputs = self.executor(way=way.name, **leaves)
                    self._prefer(kind, way)
                    return way.recording, outputs
                except GuardError as error:
                    reason = self._other_way(error, way, counts)
                    if reason is None:
                        raise _with_advice(error) from None
        self._make_room(kind, reason)
        self._counts = None  # a program is compiled with the numbers as they are
        return self._capture(kind, self._leaves(args[0], counts), args, counts)

    def _make_room(self, kind: Kind, reason: str | None) -> None:
        """Say why another program is compiled, and throw the others away if there may be no more."""
        if reason is None and self._ways:
            reason = (
                "this batch has other shapes or constants than those before. Equal ones, as by padding, avoid this."
            )
        if reason is not None:
            self._package.warn(f"poptorch compiles a step of {type(self._module).__name__} again: {reason}")
        several = self.executor.options.allow_shape_changes
        if len(self._ways.get(kind, ())) >= (MOST_WAYS if several else 1):
            self.forget()

    def _prefer(self, kind: Kind, way: Way) -> None:
        """The next batch probably goes the same way."""
        ways = self._ways[kind]
        if ways[0] is not way:
            ways.remove(way)
            ways.insert(0, way)

    def _capture(
        self, kind: Kind, leaves: dict[str, Any], args: tuple[Any, ...], counts: Counts
    ) -> tuple[Recording, tuple[torch.Tensor, ...]]:
        """Run a call that compiles a program."""
        recorder = Recorder(
            self._package,
            self._module,
            self._module.trainer,
            training=self._training,
            keeps_all=self.batching.returns_all,
        )

        def run(step: Callable[..., Any], given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
            numbers: dict[str, torch.Tensor] = dict(zip(COUNTS, given["counts"].reshape(-1).unbind(), strict=True))

            def arguments() -> tuple[Any, ...]:
                batch = batches.inside(args[0], given, recorder.note_text)
                rest = [recorder.count("batch_idx"), *args[2:]] if len(args) > 1 else []
                return (batch, *rest)

            with _default_dtype(self._default_dtype):
                return recorder.run(step, arguments, numbers)

        ways = self._ways.get(kind, [])
        name = f"way {len(ways)}"
        slot = self._wrapper._capture
        slot.run = run
        try:
            with substituted(self._module, recorder):
                outputs = self.executor(way=name, **leaves)
        finally:
            slot.run = None
        way = Way(name, recorder.recording, dict(counts), self._module.trainer.state.stage)
        self._ways[kind] = [way, *ways]
        self._warn_about_logs(recorder.recording)
        self._uses_counts = self._uses_counts or bool(recorder.recording.read_counts)
        self._submodules = Submodules(self._module, without=is_metric)
        return recorder.recording, outputs

    def _warn_about_logs(self, recording: Recording) -> None:
        names = [event.name for event in recording.events if isinstance(event, Logged)]
        if names and not self.batching.returns_all and self.batching.mode is not poptorch.OutputMode.Sum:
            self._package.warn(
                f"`self.log` of {', '.join(names)} covers only the micro-batches that "
                f"OutputMode.{self.batching.mode.name} returns; with OutputMode.All in the options of this stage it "
                "covers all of them."
            )

    def _leaves(self, batch: Any, counts: Counts) -> dict[str, Any]:
        """The arguments of the program: the leaves of the batch by name; of a number, one element per micro-batch."""
        size = self.batching.micro_batches
        if self._counts is None or self._uses_counts:
            self._counts = torch.tensor([[counts[name] for name in COUNTS]] * size)
        return {"counts": self._counts, **batches.arguments(batch, size)}

    def _kind(self, leaves: dict[str, Any]) -> Kind:
        """What of a batch decides about its program: names, shapes and types of tensors, and values of constants."""
        if not self.executor.options.allow_shape_changes:
            return ()
        return tuple((name, *_kind_of(leaf)) for name, leaf in leaves.items())

    # ---- programs that no longer fit

    def _out_of_date(self, *, is_first: bool) -> str | None:
        """Why no program can be used any more, if Python values that they were compiled with have changed."""
        now = vars(self._module)
        for way in (way for ways in self._ways.values() for way in ways):
            for name, constant in way.recording.read_attributes.items():
                if name in now and not constant.holds(now[name]):
                    return constant.change(f"self.{name}", now[name])
        return self._submodules.change() if is_first and self._submodules is not None else None

    def _does_not_fit(self, way: Way, batch: Any) -> str | None:
        """Why a program cannot be used for a batch, as far as the host knows."""
        recording, stage = way.recording, self._module.trainer.state.stage
        if recording.read_texts:
            texts = dict(nested.leaves(batch, batches.NAME))
            for name, value in recording.read_texts.items():
                if texts.get(name) != value:
                    return f"{name}, which it reads, was {value!r} and is {texts.get(name)!r} now."
        if recording.depends_on_stage and stage != way.stage:
            return f"it asks the trainer for its state, which was {way.stage} and is {stage} now."
        return None

    def _other_way(self, error: GuardError, way: Way, counts: Counts) -> str | None:
        """Why a guard failed, if a number of Lightning's can be the reason and the call has changed nothing yet."""
        names = [name for name in COUNTS if name in way.recording.read_counts and counts[name] != way.counts[name]]
        if not names or not error.message.startswith("micro-batch 0 "):
            return None
        return (
            f"it branches on {' and '.join(names)}, and would go another way now. Compute with the number, as with "
            "torch.where, or branch in a hook such as `on_train_batch_end` to avoid this."
        )

    def forget(self) -> None:
        """Throw the programs away; the next call compiles again."""
        self.executor.destroy()
        self._ways.clear()
        self._counts, self._uses_counts = None, False


def _with_advice(error: GuardError) -> GuardError:
    """The same error, with what the author of a step can do about it."""
    advice = (
        "log, return or append the tensor itself or its .item(), which need no guard; do in a hook such as "
        "on_train_batch_end what needs the value"
    )
    return GuardError(f"{error.message}\n  step:  {advice}", type=error.type, location=error.location)


def _kind_of(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return type(leaf), leaf if isinstance(leaf, Hashable) else repr(leaf)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """New tensors have this type, unless it is None."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
