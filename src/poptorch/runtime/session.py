"""Run an executable: cut a call into micro-batches, run the programs on bound state, collect the outputs.

State that belongs to the user is bound from outside and changed in place. The session owns only what nobody else
sees: gradient accumulators, and the buffers of every replica but the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from poptorch.errors import GuardError, explain
from poptorch.executable import Executable, Program
from poptorch.runtime.engine import Call, Kernel
from poptorch.runtime.random import RandomStreams


class Session:
    """An executable with kernels and state, ready to be called."""

    def __init__(self, executable: Executable, kernels: Mapping[str, Kernel], state: Mapping[str, torch.Tensor]) -> None:
        self._executable = executable
        self._kernels = kernels
        self.random = RandomStreams(executable.random_seed, executable.batching.replicas)
        self._replicas: list[dict[str, torch.Tensor]] = []
        self._accumulators: list[torch.Tensor] = []
        self.bind(state)

    @property
    def executable(self) -> Executable:
        return self._executable

    def bind(self, state: Mapping[str, torch.Tensor]) -> None:
        """Work on these tensors from now on; accumulators start at zero, replicas get copies of changing buffers."""
        executable = self._executable
        step, update = executable.step, executable.update
        accumulators = {
            spec.name: torch.zeros(spec.shape, dtype=spec.dtype).as_strided(spec.shape, self._stride(spec))
            for program in executable.programs
            for spec in program.state
            if spec.role.value == "accumulator"
        }
        self._accumulators = list(accumulators.values())
        shared = {**step.constants, **state, **accumulators}
        private = [name for name in step.written_state if name not in accumulators] if update is not None else []
        self._replicas = [shared]
        for _ in range(executable.batching.replicas - 1):
            self._replicas.append({**shared, **{name: shared[name].detach().clone() for name in private}})
        if update is None and executable.batching.replicas > 1:  # inference: every replica has its own buffers
            for replica in self._replicas[1:]:
                replica.update({name: shared[name].detach().clone() for name in step.written_state})
        self._steps: list[Call] = [self._bind(step, replica) for replica in self._replicas]
        self._update: Call | None = None if update is None else self._bind(update, shared)
        self._volatile = [r[name].detach() for r in self._replicas for name in private]

    def _stride(self, spec: object) -> tuple[int, ...]:
        name: str = spec.name  # pyright: ignore
        for kernel in self._kernels.values():
            if name in kernel.strides:
                return kernel.strides[name]
        return spec.stride  # pyright: ignore

    def _bind(self, program: Program, state: Mapping[str, torch.Tensor]) -> Call:
        return self._kernels[program.name].bind([state[spec.name] for spec in program.state])

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run every micro-batch of a call and give the collected outputs."""
        micro_batches = self._micro_batches(tensors)
        for check in self._executable.checks:
            for checked in (micro_batches if check.ops is not None else (tensors,)):
                check.check(checked)
        with self.random.active(self._executable.step.draws_random_numbers):
            if self._update is None:
                outputs = self._run_fused(micro_batches)
            else:
                outputs = self._run_split(micro_batches, self._update)
        return self._collect(outputs)

    def _micro_batches(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        count = self._executable.batching.micro_batches
        if count == 1:
            return [list(tensors)]
        if not tensors:
            return [[] for _ in range(count)]
        parts = [tensor.split(tensor.shape[0] // count) for tensor in tensors]
        return [list(micro_batch) for micro_batch in zip(*parts, strict=True)]

    def _run_fused(self, micro_batches: list[list[torch.Tensor]]) -> list[Sequence[torch.Tensor]]:
        """One program per micro-batch: inference, or training in which every micro-batch is an update."""
        batching = self._executable.batching
        kept, outputs = frozenset(batching.kept), list[Sequence[torch.Tensor]]()
        guarded = bool(self._executable.step.guards)
        for index, micro_batch in enumerate(micro_batches):
            replica = index % batching.replicas
            self.random.enter(replica)
            result = self._steps[replica](micro_batch)
            if guarded:
                self._check_guards(result[-1], index)
            if index in kept:
                outputs.append(result)
        return outputs

    def _run_split(self, micro_batches: list[list[torch.Tensor]], update: Call) -> list[Sequence[torch.Tensor]]:
        """Accumulate over the micro-batches of each update; nothing of an update that fails stays behind."""
        batching = self._executable.batching
        kept, outputs = frozenset(batching.kept), list[Sequence[torch.Tensor]]()
        guarded = bool(self._executable.step.guards)
        for start in range(0, batching.micro_batches, batching.micro_batches_per_update):
            saved = [tensor.clone() for tensor in self._volatile]
            try:
                for index in range(start, start + batching.micro_batches_per_update):
                    replica = index % batching.replicas
                    self.random.enter(replica)
                    result = self._steps[replica](micro_batches[index])
                    if guarded:
                        self._check_guards(result[-1], index)
                    if index in kept:
                        outputs.append(result)
            except BaseException:
                torch._foreach_zero_(self._accumulators)
                if saved:
                    torch._foreach_copy_(self._volatile, saved)
                raise
            update([])
        return outputs

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
        executable = self._executable
        specs = [spec for spec in executable.outputs if spec.role.value == "output"]
        if not specs:
            return []
        if executable.batching.sums:
            replicas = executable.batching.replicas
            outputs = [_sum(outputs[r::replicas], len(specs)) for r in range(replicas)]
        if len(outputs) == 1:
            return list(outputs[0][: len(specs)])
        return [
            _join([result[i] for result in outputs]) if spec.batched else outputs[-1][i]
            for i, spec in enumerate(specs)
        ]


def _sum(outputs: Sequence[Sequence[torch.Tensor]], count: int) -> list[torch.Tensor]:
    return [torch.stack([result[i] for result in outputs]).sum(0, dtype=outputs[0][i].dtype) for i in range(count)]


def _join(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors)
