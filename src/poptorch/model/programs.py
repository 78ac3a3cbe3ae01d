"""The programs of a wrapped model: which of them a call needs, how it is made, and which one is current."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from poptorch._logging import limit_repeats, logger
from poptorch.capture import holders_of
from poptorch.engines import CheckedEngine, choose_engine
from poptorch.errors import ArgumentError, Error, FileContentError, FileError
from poptorch.executable import Executable
from poptorch.model.arguments import ArgumentBinder, CallSpec, prepare
from poptorch.model.attachment import Attachment
from poptorch.model.buffers import updatable_buffers
from poptorch.model.build import Blueprint, build, build_loaded
from poptorch.model.grouping import ReplicaGroups
from poptorch.model.loading import Loaded
from poptorch.model.modes import Flags, flags_of
from poptorch.model.optimizers import OptimizerSet, needs_running_mean, with_running_mean
from poptorch.model.processes import Companions
from poptorch.model.replacement import inherit_state
from poptorch.model.synthetic import SyntheticInputs
from poptorch.model.variants import Variant, Variants
from poptorch.model.wrapped import WorkingCopy
from poptorch.optim.plan import plan_optimizers
from poptorch.options import Options, Settings, resolve, validate

NOT_COMPILED = (
    "Model has not been compiled or has been destroyed. Call it, or call compile() with an example batch, first."
)


class Programs:
    """Finds the program for a call, or makes it; the `current` one works on the model's state.

    There is one for each mode of the module, and with `Options.allowShapeChanges` for each kind of call.
    """

    def __init__(self, options: Options, source: WorkingCopy, binder: ArgumentBinder, *, training: bool) -> None:
        self.options = options
        self.settings: Settings = resolve(options, training=training)
        self.source = source
        checks = self.settings.precision.floating_point_checks
        self.engine = CheckedEngine() if checks else choose_engine(self.settings.engine.name)
        self.optimizers = OptimizerSet()
        self.replica_groups: dict[str, ReplicaGroups | tuple[Any, ...]] = {}
        self.companions = Companions(source.module, self.settings)
        self.attachment = Attachment(self.settings.placement, self.settings.batching.replicas)
        self.warned: set[str] = set()  # what is said once for each model
        self._binder = binder
        self._synthetic = SyntheticInputs(self.settings.engine.synthetic_data, self.settings.engine.random_seed)
        self._start()

    def _start(self) -> None:
        self.variants = Variants()
        self.current: Variant | None = None
        self.wanted: Flags | None = None  # of the program for the next call, if it need not be the current one
        self.scale_factor = torch.ones(())  # of automatic loss scaling, the same for all variants

    def compiled(self) -> Variant:
        """The current program; raises if there is none."""
        if self.current is None:
            raise Error(NOT_COMPILED)
        return self.current

    def forget(self) -> None:
        """Back to the state before compilation."""
        self.variants.close()
        self._start()
        self.attachment.detach()

    def forget_since(self, before: Variant | None) -> None:
        """After a call that failed: a program that it compiled and that never ran is as if it had not been."""
        failed = self.current
        if failed is None or failed is before or failed.trace is not None:
            return
        if before is None:
            self.forget()
        else:
            self.variants.remove(failed)
            self.current = before

    # ---- the program for a call

    def inputs_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """What the program is fed in a call, for which the current one is made; find or compile another if need be."""
        return self._fed(self._tensors(args, kwargs))

    def _fed(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the caller as programs take them, or synthetic ones of the same shapes."""
        if self.settings.engine.synthetic_data:
            return self._synthetic.like(tensors)
        return prepare(tensors, self.warned)

    def _tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, after the program for it has become the current one."""
        current = self.current
        if current is None:
            current = self.compile(args, kwargs)
        flags = current.flags if self.wanted is None else self.wanted
        reason = "setOptimizer" if current.is_outdated else ""
        if flags == current.flags:
            try:
                tensors = current.call.tensors(args, kwargs)
                if not current.is_outdated:
                    return tensors
            except ArgumentError as mismatch:
                if not self.settings.engine.allows_shape_changes:
                    raise
                reason = mismatch.message.splitlines()[0]
        found = self.variants.find(flags, args, kwargs, exact=self.settings.engine.allows_shape_changes)
        if found is None:
            call = CallSpec.of(self._binder, args, kwargs)
            reason = reason or ("train()" if all(flags) else "eval()")
            logger.info("compiling again for %s: %s", call, reason)
            with self.companions.compiling(lambda: self.current):
                self._build(call, args, kwargs, reason, flags)
            self.variants.drop_outdated()
            return call.tensors(args, kwargs)
        self._switch(current, found)
        return found.call.tensors(args, kwargs)

    def _switch(self, before: Variant, variant: Variant) -> None:
        """Go on with another program, which starts from what the one before has left."""
        variant.state.take_over(before.state)
        if before.session.executable.written_by_steps:
            variant.bind()
        variant.session.random.go_on_from(before.session.random)
        self.current = variant

    # ---- making programs

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        """Make the first program, if all processes of the program can, and begin with the same weights."""
        self.companions.connect(self.engine.name)
        with self.companions.compiling(lambda: self.current):
            variant = self._compile_alone(args, kwargs)
        self.companions.start(variant)
        return variant

    def _compile_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variant:
        validate(self.options.toDict())
        limit_repeats(self.settings.report.repeats)
        updatable_buffers(self.settings, self.source.module)
        if self.settings.report.counts_cycles and self.attachment.uses_model:
            raise Error("Cycle count logging is only supported on actual IPU hardware, not on the IPU model.")
        call = CallSpec.of(self._binder, args, kwargs)
        self.source.take_attributes()
        self.attachment.before_capture()
        wanted = self.wanted
        try:
            variant = self._build(call, args, kwargs, "the first call", wanted or flags_of(self.source.module))
            self.attachment.after_compilation()
        except BaseException:
            self.forget()
            self.wanted = wanted
            raise
        return variant

    def _build(
        self, call: CallSpec, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str, flags: Flags
    ) -> Variant:
        """Make a program for this call the current one."""
        tensors = self._fed(call.tensors(args, kwargs))
        variant = build(self.blueprint(), call, tensors, flags, reason, before=self.current, placed=self._placed)
        self.attachment.resize(variant.session.executable.ipus)
        self._become(variant)
        if not self.attachment.is_offline:
            self.optimizers.anchored(self.settings.report.anchors)  # raises if there is no such number
        logger.info(
            "compiled a %s model for %s emulated IPU(s) on the %s engine",
            "training" if self.settings.is_training else "inference",
            variant.session.executable.ipus,
            variant.engine,
        )
        return variant

    def blueprint(self) -> Blueprint:
        """What programs are made from, as it is now."""
        return Blueprint(
            self.source.module,
            self.settings,
            self.engine,
            self.optimizers,
            self.replica_groups,
            self.scale_factor,
            self.warned,
            self.companions.seat,
        )

    def _placed(self, executable: Executable) -> None:
        """Before native code is made for the first program, which may take long, get the IPUs that it will run on."""
        if self.current is None:
            self.attachment.before_compilation(executable.ipus)

    def _become(self, variant: Variant) -> None:
        self.variants.add(variant)
        self.current = variant
        self._connect_optimizers()

    # ---- programs from files

    def adopt(self, load: Callable[[], Loaded]) -> None:
        """Make a program from a file the current one, if all processes of the program can."""
        self.companions.connect(self.engine.name)
        with self.companions.compiling(lambda: self.current):
            loaded = load()
            self.companions.check(loaded.executable)
            variant = self._adopt_alone(loaded)
        self.companions.start(variant, goes_on=loaded.random is not None)

    def _adopt_alone(self, loaded: Loaded) -> Variant:
        if loaded.trains is not self.settings.is_training:
            kind, other = ("training", "inference") if loaded.trains else ("inference", "training")
            raise FileContentError(f"{loaded.path} holds a program for {kind}, and this model is wrapped for {other}.")
        limit_repeats(self.settings.report.repeats)
        self.source.take_attributes()
        self.attachment.before_capture()
        try:
            self._placed(loaded.executable)
            self.scale_factor.fill_(loaded.scale_factor)
            variant = build_loaded(self.blueprint(), loaded)
            self._become(variant)
            self.attachment.after_compilation()
        except BaseException as error:
            self.forget()
            if isinstance(error, Error) or not isinstance(error, Exception):
                raise
            raise FileError(f"Invalid file {loaded.path}: {type(error).__name__}: {error}") from error
        return variant

    # ---- optimisers

    def use_optimizers(self, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        """Go on with the settings that these have now; a program that cannot is outdated from now on."""
        automatic = self.settings.training.automatic_loss_scaling
        plans = plan_optimizers(optimizers, self.optimizers.plans, automatic_loss_scaling=automatic)
        if needs_running_mean(plans, self.settings, is_compiled=self.current is not None):
            self.options = with_running_mean(self.options)
            self.settings = resolve(self.options, training=True)
        variants = list(self.variants)
        holders = holders_of(self.source.module, plans) if variants else {}
        accepted = [variant.state.accepts(plans, holders) for variant in variants]  # raises before anything has changed
        if variants:
            inherit_state(self.optimizers.optimizers, optimizers)
        for variant, is_accepted in zip(variants, accepted, strict=True):
            variant.is_outdated = not is_accepted
            if is_accepted:
                variant.state.go_on_with(optimizers, plans, holders)
        self.optimizers.become(optimizers, plans)
        quietly = bool(getattr(self.options, "relax_optimizer_attributes_checks", False))
        self.optimizers.report(self.source.module, quietly=quietly)
        self._connect_optimizers()

    def _connect_optimizers(self) -> None:
        """Let the optimisers show what the program knows; one that never gets a device has nothing to show."""
        if self.current is not None and not self.attachment.is_offline:
            holders = holders_of(self.source.module, self.optimizers.plans)
            self.current.state.connect(self.optimizers, holders, self.settings)
