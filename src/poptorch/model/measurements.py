"""What an executor tells about the time its last call took."""

from __future__ import annotations

from poptorch.enums import OutputMode
from poptorch.errors import Error, explain
from poptorch.ipu import cycles_per_second
from poptorch.ir import OutputRole
from poptorch.model.programs import Programs
from poptorch.runtime import NO_LATENCY, Latency, RunTrace, latency


class Measurements:
    """The part of an executor that reports moments, latencies and cycles of the last call."""

    _programs: Programs

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """When each input was wanted and there, and each output computed and handed over, in seconds.

        One list per tensor, one moment per micro-batch; the origin is arbitrary. Without a call the lists are empty.
        """
        if self._programs.current is None:
            return {name: [[]] for name in ("input", "input_complete", "output", "output_complete")}
        trace, executable = self._shown_trace(), self._programs.current.session.executable
        inputs = len(executable.interface.arguments.tensor_names)
        outputs = sum(spec.role is OutputRole.USER_OUTPUT for spec in executable.outputs)
        requested, started, ends = (
            ([], [], []) if trace is None else (trace.requested, trace.started, self._ends(trace))
        )
        return {
            "input": [list(requested) for _ in range(inputs)],
            "input_complete": [list(started) for _ in range(inputs)],
            "output": [list(ends) for _ in range(outputs)],
            "output_complete": [self._handed_over(trace) for _ in range(outputs)],
        }

    def getLatency(self) -> Latency:
        """Minimum, maximum and average seconds from asking for the inputs to handing over the outputs."""
        trace = self._shown_trace()
        return NO_LATENCY if trace is None else latency(trace.requested, self._handed_over(trace))

    def getHostIpuLatency(self) -> Latency:
        """Minimum, maximum and average seconds from asking for the inputs to having them."""
        trace = self._shown_trace()
        return NO_LATENCY if trace is None else latency(trace.requested, trace.started)

    def getComputeLatency(self) -> Latency:
        """Minimum, maximum and average seconds from having the inputs to having computed the outputs."""
        trace = self._shown_trace()
        return NO_LATENCY if trace is None else latency(trace.started, self._ends(trace))

    def getIpuHostLatency(self) -> Latency:
        """Minimum, maximum and average seconds from having computed the outputs to handing them over."""
        trace = self._shown_trace()
        return NO_LATENCY if trace is None else latency(self._ends(trace), self._handed_over(trace))

    def cycleCount(self) -> int:
        """How many cycles the last call took: measured time at the clock of the emulated IPU."""
        if not self._programs.settings.report.counts_cycles:
            raise Error(explain("Cycle count logging is disabled.", fix="set Options.logCycleCount(True)"))
        if self._programs.current is None or self._programs.current.trace is None:
            raise Error("There is no cycle count yet. Please run the model at least once.")
        return max(1, round(self._programs.current.trace.seconds * cycles_per_second()))

    def _shown_trace(self) -> RunTrace | None:
        """The last call; none if the data is synthetic, because nothing is transferred then."""
        if self._programs.current is None or self._programs.settings.engine.synthetic_data:
            return None
        return self._programs.current.trace

    def _ends(self, trace: RunTrace) -> list[float]:
        """When the outputs that the call returned were computed; a sum is done with its last micro-batch."""
        assert self._programs.current is not None
        batching, finished = self._programs.current.session.executable.batching, trace.finished
        if self._programs.settings.batching.output_mode is OutputMode.Sum:
            return finished[-batching.replicas :]
        return [finished[index] for index in batching.kept]

    def _handed_over(self, trace: RunTrace | None) -> list[float]:
        return [] if trace is None else [trace.collected] * len(self._ends(trace))
