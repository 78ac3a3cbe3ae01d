"""Run an executable: cut a call into micro-batches, run the programs on bound state, collect the outputs.

State that belongs to the user is bound from outside and changed in place. The session owns only what nobody else
sees: gradient accumulators, and the buffers of every replica but the first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter

import torch

from poptorch.errors import FloatError, GuardError, explain
from poptorch.executable import AnchorPlan, Executable, InputSpec, OutputRole, Program, Role
from poptorch.runtime.counters import CallTimes
from poptorch.runtime.engine import Call, Kernel
from poptorch.runtime.layout import with_stride
from poptorch.runtime.random import RandomStreams

_RECURRENT = torch.ops.aten.mkldnn_rnn_layer.default
_RECURRENT_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default


class Session:
    """An executable with kernels and state, ready to be called."""

    def __init__(
        self, executable: Executable, kernels: Mapping[str, Kernel], state: Mapping[str, torch.Tensor]
    ) -> None:
        self._executable = executable
        self._kernels = kernels
        self._input_batches = executable.batching.input_batches
        self._kept = frozenset(executable.batching.kept)
        self._groupings = executable.groupings
        self._ranks = range(executable.batching.replicas)
        self._is_guarded = bool(executable.step.guards)
        self._grad_mode = _grad_mode(executable.step)
        self._outputs = [spec for spec in executable.outputs if spec.role is OutputRole.USER_OUTPUT]
        self._anchors = [anchor for anchor in executable.anchors if anchor.state is None]
        self._state_anchors = [anchor for anchor in executable.anchors if anchor.state is not None]
        self.anchored: dict[str, torch.Tensor] = {}  # of the last call
        self._collected: dict[str, list[torch.Tensor]] = {}
        self.times = CallTimes()  # of the last call
        self.random = RandomStreams(executable.random_seed, executable.batching.replicas)
        self.bind(state)

    @property
    def number_of_outputs(self) -> int:
        return len(self._outputs)

    @property
    def executable(self) -> Executable:
        return self._executable

    def bind(self, state: Mapping[str, torch.Tensor]) -> None:
        """Work on these tensors from now on; accumulators start at zero, replicas get copies of changing buffers."""
        step, update = self._executable.step, self._executable.update
        accumulators = {spec.name: self._zeros(spec) for spec in step.state if spec.role is Role.ACCUMULATOR}
        owned = {**step.constants, **state, **accumulators}
        buffers = [s.name for s in step.state if s.role is Role.BUFFER and s.name in step.written_state]
        self._replicas = [self._part(owned, [g.of_replicas[r] for g in self._groupings]) for r in self._ranks]
        for replica in self._replicas[1:]:
            replica.update({name: owned[name].detach().clone() for name in buffers})
        derived = [self._derived(replica) for replica in (self._replicas if self._groupings else self._replicas[:1])]
        for rank, replica in enumerate(self._replicas):
            replica.update(derived[rank % len(derived)])
        self._steps = self._bind_steps(step)
        self._updates = [] if update is None else [self._bind(update, part) for part in self._update_parts(owned)]
        self._accumulators = list(accumulators.values())
        self._volatile: list[torch.Tensor] = []
        if update is not None:  # what the step writes before the update that belongs to it
            changing = [name for name in step.written_state if name not in accumulators]
            tensors = {id(replica[name]): replica[name].detach() for replica in self._replicas for name in changing}
            self._volatile = list(tensors.values())
        self._saved = [tensor.clone() for tensor in self._volatile]  # what to go back to if an update fails

    def _zeros(self, spec: InputSpec) -> torch.Tensor:
        """An accumulator, with an entry for each group if it belongs to a grouped parameter."""
        groups = [grouping.groups for grouping in self._groupings if grouping.name == spec.owner]
        stride = self._stride(spec)
        if not groups:
            return torch.empty_strided(spec.shape, stride, dtype=spec.dtype).zero_()
        shape = (*groups, *spec.shape)
        return torch.empty_strided(shape, (math.prod(spec.shape), *stride), dtype=spec.dtype).zero_()

    def _part(self, owned: Mapping[str, torch.Tensor], chosen: Sequence[int]) -> dict[str, torch.Tensor]:
        """The state in which each grouped parameter, and what belongs to it, is that of the chosen group."""
        entry = {grouping.name: group for grouping, group in zip(self._groupings, chosen, strict=True)}
        owners = {name: name.partition(":")[0] for name in owned}
        return {n: t.detach()[entry[owners[n]]] if owners[n] in entry else t for n, t in owned.items()}

    def _update_parts(self, owned: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """The state for each run of the update: one run, or one for each group of the most finely grouped parameter.

        Runs after the first get copies of everything that was updated already, and nobody looks at those.
        """
        runs = max((grouping.groups for grouping in self._groupings), default=1)
        parts = [self._part(owned, [min(run, g.groups - 1) for g in self._groupings]) for run in range(runs)]
        for run, part in enumerate(parts[1:], start=1):
            due = {grouping.name for grouping in self._groupings if run < grouping.groups}
            for spec in self._executable.state:
                if spec.owner not in due and spec.role is not Role.HYPER:
                    part[spec.name] = part[spec.name].detach().clone()
        return parts

    def _derived(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What an inference step wants computed from the weights before it runs."""
        prepare = self._executable.prepare
        if prepare is None:
            return {}
        results = self._bind(prepare, state)([])
        specs = {spec.name: spec for spec in self._executable.step.state}
        named = zip((spec.name for spec in prepare.returned), results, strict=True)
        return {name: with_stride(tensor, self._stride(specs[name])) for name, tensor in named}

    def _stride(self, spec: InputSpec) -> tuple[int, ...]:
        wanted = [kernel.strides[spec.name] for kernel in self._kernels.values() if spec.name in kernel.strides]
        return wanted[0] if wanted else spec.stride

    def _bind(self, program: Program, state: Mapping[str, torch.Tensor]) -> Call:
        return self._kernels[program.name].bind([state[spec.name] for spec in program.state])

    def _bind_steps(self, step: Program) -> list[Call]:
        """The step of each replica; replicas that work on the same tensors share one."""
        calls: dict[tuple[int, ...], Call] = {}
        found: list[Call] = []
        for replica in self._replicas:
            key = tuple(id(replica[spec.name]) for spec in step.state)
            if key not in calls:
                calls[key] = self._bind(step, replica)
            found.append(calls[key])
        return found

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run every micro-batch of a call and give the collected outputs."""
        micro_batches = self._micro_batches(tensors)
        for check in self._executable.checks:
            for checked in micro_batches if check.ops is not None else (tensors,):
                check.check(checked)
        times = CallTimes.begin()
        self._collected = {anchor.name: [] for anchor in self._executable.anchors}
        if self._executable.step.draws_random_numbers:
            with self.random.active():
                outputs = self._run(micro_batches, times)
        else:
            outputs = self._run(micro_batches, times)
        collected = self._collect(outputs)
        self.anchored = {anchor.name: self._anchored(anchor) for anchor in self._executable.anchors}
        times.collected = perf_counter()
        self.times = times
        return collected

    def _run(self, micro_batches: list[list[torch.Tensor]], times: CallTimes) -> list[Sequence[torch.Tensor]]:
        if self._grad_mode not in (None, torch.is_grad_enabled()):
            with torch.set_grad_enabled(bool(self._grad_mode)):
                return self._run(micro_batches, times)
        if not self._updates:
            return self._run_fused(micro_batches, times)
        return self._run_split(micro_batches, times)

    def _micro_batches(self, tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
        count, sources = self._input_batches, self._executable.batching.sources
        if len(sources) == 1:
            return [tensors]
        if not tensors:
            return [[] for _ in sources]
        parts = [tensor.split(tensor.shape[0] // count) if tensor.dim() else (tensor,) for tensor in tensors]
        batches = [list(batch) for batch in zip(*parts, strict=True)]
        return batches if count == len(sources) else [list(batches[source]) for source in sources]

    def _run_fused(self, micro_batches: list[list[torch.Tensor]], times: CallTimes) -> list[Sequence[torch.Tensor]]:
        """One program per micro-batch: inference, or training in which every micro-batch is an update."""
        replicas, outputs = len(self._steps), list[Sequence[torch.Tensor]]()
        for index, micro_batch in enumerate(micro_batches):
            replica = index % replicas
            self.random.enter(replica)
            times.started.append(perf_counter())
            result = self._steps[replica](micro_batch)
            times.finished.append(perf_counter())
            if self._is_guarded:
                self._check_guards(result[-1], index)
            if self._collected:
                self._collect_anchors(result, index)
                self._collect_state(range(index, index + 1))
            if index in self._kept:
                outputs.append(result)
        return outputs

    def _run_split(self, micro_batches: list[list[torch.Tensor]], times: CallTimes) -> list[Sequence[torch.Tensor]]:
        """Accumulate over the micro-batches of each update; nothing of an update that fails stays behind."""
        batching = self._executable.batching
        outputs = list[Sequence[torch.Tensor]]()
        for start in range(0, batching.micro_batches, batching.micro_batches_per_update):
            if self._volatile:
                torch._foreach_copy_(self._saved, self._volatile)
            try:
                for index in range(start, start + batching.micro_batches_per_update):
                    replica = index % batching.replicas
                    self.random.enter(replica)
                    times.started.append(perf_counter())
                    result = self._steps[replica](micro_batches[index])
                    times.finished.append(perf_counter())
                    if self._is_guarded:
                        self._check_guards(result[-1], index)
                    if self._collected:
                        self._collect_anchors(result, index)
                    if index in self._kept:
                        outputs.append(result)
            except BaseException:
                self._undo()
                raise
            try:
                for update in self._updates:
                    update([])
            except FloatError:  # which is raised before anything is written
                self._undo()
                raise
            if self._collected:
                self._collect_state(range(start, start + batching.micro_batches_per_update))
        return outputs

    def _undo(self) -> None:
        """Take back what micro-batches did whose update does not come."""
        torch._foreach_zero_(self._accumulators)
        if self._volatile:
            torch._foreach_copy_(self._volatile, self._saved)

    def _collect_anchors(self, result: Sequence[torch.Tensor], index: int) -> None:
        """Keep what a micro-batch computed for the anchors, which the step returns after the user's outputs."""
        for position, anchor in enumerate(self._anchors, start=len(self._outputs)):
            if index in anchor.kept:
                self._collected[anchor.name].append(result[position])

    def _collect_state(self, indices: range) -> None:
        """Keep the state that these micro-batches, or the update they belong to, left behind."""
        for anchor in self._state_anchors:
            for index in indices:
                if index in anchor.kept:
                    state = self._replicas[index % len(self._replicas)]
                    self._collected[anchor.name].append(state[str(anchor.state)].detach().clone())

    def _anchored(self, anchor: AnchorPlan) -> torch.Tensor:
        values = self._collected[anchor.name]
        if anchor.sums:
            replicas = len(self._replicas)
            values = [torch.stack(values[replica::replicas]).sum(0) for replica in range(replicas)]
        return values[0] if len(values) == 1 else _join(values)

    def _check_guards(self, holds: torch.Tensor, micro_batch: int) -> None:
        if bool(holds.all()):
            return
        guard = self._executable.step.guards[int((~holds).nonzero()[0])]
        raise GuardError(
            explain(
                f"micro-batch {micro_batch} of this call contradicts {guard.expected}, "
                "which the first batch froze into the compiled program.",
                where=str(guard.line),
                state="the model and the optimiser are as they were after the last finished update",
                fix="make forward independent of the data (torch.where, masks), or call destroy() to compile again",
            )
        )

    def _collect(self, outputs: list[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Join what the micro-batches returned, as the output mode asks for."""
        count = len(self._outputs)
        if self._executable.batching.sums:
            replicas = len(self._steps)
            outputs = [self._sum(outputs[replica::replicas]) for replica in range(replicas)]
        if len(outputs) == 1:
            return list(outputs[0][:count])
        return [
            _join([result[i] for result in outputs]) if spec.batched else outputs[-1][i]
            for i, spec in enumerate(self._outputs)
        ]

    def _sum(self, outputs: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Add up what the micro-batches returned; what is the same in all of them is not multiplied."""
        return [
            torch.stack([result[i] for result in outputs]).sum(0, dtype=outputs[0][i].dtype)
            if spec.batched
            else outputs[0][i]
            for i, spec in enumerate(self._outputs)
        ]


def _grad_mode(step: Program) -> bool | None:
    """The mode that kernels must run in; None if they do not look at it.

    oneDNN's recurrent layers do: they keep what their backward pass needs in grad mode, and are faster outside.
    """
    ops = {node.target for node in step.graph.ops.nodes}
    return _RECURRENT_BACKWARD in ops if _RECURRENT in ops else None


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)
