"""What an executor tells about the time its last call took."""

from __future__ import annotations

from poptorch.enums import OutputMode
from poptorch.errors import Error, explain
from poptorch.ipu import cycles_per_second
from poptorch.options import Options
from poptorch.runtime import CallTimes, Latency, Session, latency


class Measurements:
    """The part of an executor that reports moments, latencies and cycles of the last call."""

    _session: Session | None
    _options: Options
    _counts_cycles: bool

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """When each input was wanted and there, and each output computed and handed over, in seconds.

        One list per tensor, one moment per micro-batch; the origin is arbitrary. Without a call the lists are empty.
        """
        if self._session is None:
            return {name: [[]] for name in ("input", "input_complete", "output", "output_complete")}
        times, executable = self._times(), self._session.executable
        inputs, outputs = len(executable.step.signature.user_inputs), self._session.number_of_outputs
        ends = self._ends(times)
        return {
            "input": [list(times.requested) for _ in range(inputs)],
            "input_complete": [list(times.started) for _ in range(inputs)],
            "output": [list(ends) for _ in range(outputs)],
            "output_complete": [[times.collected] * len(ends) for _ in range(outputs)],
        }

    def getLatency(self) -> Latency:
        """Minimum, maximum and average seconds from asking for the inputs to handing over the outputs."""
        times = self._times()
        return latency(times.requested, self._handed_over(times))

    def getHostIpuLatency(self) -> Latency:
        """Minimum, maximum and average seconds from asking for the inputs to having them."""
        times = self._times()
        return latency(times.requested, times.started)

    def getComputeLatency(self) -> Latency:
        """Minimum, maximum and average seconds from having the inputs to having computed the outputs."""
        times = self._times()
        return latency(times.started, self._ends(times))

    def getIpuHostLatency(self) -> Latency:
        """Minimum, maximum and average seconds from having computed the outputs to handing them over."""
        times = self._times()
        return latency(self._ends(times), self._handed_over(times))

    def cycleCount(self) -> int:
        """How many cycles the last call took: measured time at the clock of the emulated IPU."""
        if not self._counts_cycles:
            raise Error(explain("Cycle count logging is disabled.", fix="set Options.logCycleCount(True)"))
        if self._session is None or not self._session.times.finished:
            raise Error("There is no cycle count yet. Please run the model at least once.")
        return max(1, round(self._session.times.seconds * cycles_per_second()))

    def _times(self) -> CallTimes:
        """The moments of the last call; none if the data is synthetic, because nothing is transferred then."""
        if self._session is None or self._options._Popart.options.get("syntheticDataMode", 0):
            return CallTimes()
        return self._session.times

    def _ends(self, times: CallTimes) -> list[float]:
        """When the outputs that the call returned were computed; a sum is done with its last micro-batch."""
        if self._session is None or not times.finished:
            return []
        batching = self._session.executable.batching
        if self._options.output_mode is OutputMode.Sum:
            return times.finished[-batching.replicas :]
        return [times.finished[index] for index in batching.kept]

    def _handed_over(self, times: CallTimes) -> list[float]:
        return [times.collected] * len(self._ends(times))
