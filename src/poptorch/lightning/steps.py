"""A compiled step of a LightningModule: the program, and what the host does before and after each call of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
Shapes = tuple[torch.Size, ...]


class Step:
    """One step of a module for one stage (and data loader): an executor, with a recording for each of its programs."""

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
        self._recordings: dict[Shapes, Recording] = {}
        self._captured_counts: Counts = {}
        self._captured_stage: Any = None
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
        key = self._key(leaves)
        recording = self._recordings.get(key)
        if recording is not None:
            reason = self._out_of_date(recording, args[0], is_first=counts["batch_idx"] == 0)
            try:
                if reason is None:
                    return recording, self.executor(**leaves)
            except GuardError as error:
                if not self._can_compile_instead(error, recording, counts):
                    raise _with_advice(error) from None
                reason = str(error).partition(": ")[2].splitlines()[0]
            self._package.warn(f"poptorch compiles a step of {type(self._module).__name__} again: {reason}")
            self.forget()
            leaves = self._leaves(args[0], counts)
        return self._capture(key, leaves, args, counts)

    def _capture(
        self, key: Shapes, leaves: dict[str, Any], args: tuple[Any, ...], counts: Counts
    ) -> tuple[Recording, tuple[torch.Tensor, ...]]:
        """Run a call that compiles the program."""
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

        slot = self._wrapper._capture
        slot.run = run
        try:
            with substituted(self._module, recorder):
                outputs = self.executor(**leaves)
        finally:
            slot.run = None
        self._recordings[key] = recorder.recording
        self._warn_about_logs(recorder.recording)
        self._uses_counts = self._uses_counts or bool(recorder.recording.read_counts)
        self._submodules = Submodules(self._module, without=is_metric)
        self._captured_counts, self._captured_stage = dict(counts), self._module.trainer.state.stage
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

    def _key(self, leaves: dict[str, Any]) -> Shapes:
        if not self.executor.options.allow_shape_changes:
            return ()
        return tuple(leaf.shape for leaf in leaves.values() if isinstance(leaf, torch.Tensor))

    # ---- programs that no longer fit

    def _out_of_date(self, recording: Recording, batch: Any, *, is_first: bool) -> str | None:
        """Why a program cannot be used any more, if Python values that it was compiled with have changed."""
        now = vars(self._module)
        for name, constant in recording.read_attributes.items():
            if name in now and not constant.holds(now[name]):
                return constant.change(f"self.{name}", now[name])
        if is_first and self._submodules is not None and (change := self._submodules.change()):
            return change
        if recording.read_texts:
            texts = dict(nested.leaves(batch, batches.NAME))
            for name, value in recording.read_texts.items():
                if texts.get(name) != value:
                    return f"{name}, which it reads, was {value!r} and is {texts.get(name)!r} now."
        stage = self._module.trainer.state.stage
        if recording.depends_on_stage and stage != self._captured_stage:
            return f"it asks the trainer for its state, which was {self._captured_stage} and is {stage} now."
        return None

    def _can_compile_instead(self, error: GuardError, recording: Recording, counts: Counts) -> bool:
        """Whether a guard failed because of a number of Lightning's, before the call has changed anything."""
        changed = any(counts.get(name) != self._captured_counts.get(name) for name in recording.read_counts)
        return changed and error.message.startswith("micro-batch 0 ")

    def forget(self) -> None:
        """Throw the programs away; the next call compiles again."""
        self.executor.destroy()
        self._recordings.clear()
        self._counts, self._uses_counts = None, False


def _with_advice(error: GuardError) -> GuardError:
    """The same error, with what the author of a step can do about it."""
    advice = (
        "log, return or append the tensor itself or its .item(), which need no guard; do in a hook such as "
        "on_train_batch_end what needs the value"
    )
    return GuardError(f"{error.message}\n  step:  {advice}", type=error.type, location=error.location)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """New tensors have this type, unless it is None."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
