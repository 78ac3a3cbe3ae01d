"""Print what was measured: one table per kind, goals with a mark. It displays, it never measures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.loading import Overlap, Throughput
from benchmarks.measure import Comparison
from benchmarks.single import CallCost, CompileTime, HalfCost, Memory, Placed, SideBySide, UpdateCost
from benchmarks.trainer import TrainerCost, TrainerSpeed


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """Text with aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        pairs = zip(cells, widths, strict=True)
        return "  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(pairs)).rstrip()

    rule = line(["-" * width for width in widths])
    return "\n".join([f"## {title}", line(columns), rule, *(line(row) for row in rows), *(f"  {n}" for n in notes)])


def comparison_table(title: str, comparisons: Sequence[Comparison], rivals: Sequence[str]) -> str:
    """Times per peer, the ratio to each, and the ratio to the fastest of the rivals, for which there is a goal."""
    peers = list(dict.fromkeys(peer for comparison in comparisons for peer in comparison.peers))
    others = [peer for peer in peers if not peer.startswith("poptorch")]
    columns = ["workload", "batch", *peers, *(f"vs {peer}" for peer in others)]
    columns += [f"vs best of {'/'.join(rivals)}", "in fastest rounds", "goal", ""]
    rows: list[list[str]] = []
    for c in comparisons:
        ratio = c.ratio(*rivals)
        cells = [c.workload, str(c.batch_size), *(_number(c.time(peer), ".0f") for peer in peers)]
        ratios = [*(c.ratio(peer) for peer in others), ratio, c.ratio(*rivals, of=min)]
        cells += [*map(_number, ratios), f"{c.goal:.1f}"]
        rows.append([*cells, _mark(ratio is not None and ratio >= c.goal)])
    notes = [note for c in comparisons for note in (*c.notes, *_variants(c))]
    return table(title, columns, rows, notes)


def _variants(comparison: Comparison) -> list[str]:
    """The times of the variants of each peer, where there was a choice."""
    return [
        f"{comparison.workload} (batch {comparison.batch_size}), {name}: "
        + ", ".join(f"{variant} {time:.0f}" for variant, time in peer.times().items())
        for name, peer in comparison.peers.items()
        if len(peer.times()) > 1
    ]


def call_cost_table(costs: Sequence[CallCost]) -> str:
    columns = ["deviceIterations", "step us", "kernel us", "overhead us", "goal <", ""]
    rows = [
        [
            str(c.device_iterations),
            *(f"{value:.1f}" for value in (c.step_us, c.kernel_us, c.overhead_us)),
            f"{c.goal_us:.0f}",
            _mark(c.overhead_us < c.goal_us),
        ]
        for c in costs
    ]
    text = table("Cost of a call: one 4 x 4 Linear, time per step beyond its kernel", columns, rows)
    return "\n".join([text, *(_profile(cost) for cost in costs)])


def _profile(cost: CallCost) -> str:
    lines = [f"  under cProfile, deviceIterations={cost.device_iterations} (own time per step; slower than without):"]
    lines += [f"    {row['us']:8.2f} us  {row['calls']:6.2f} calls  {row['where']}" for row in cost.profile]
    return "\n".join(lines)


def update_cost_table(costs: Sequence[UpdateCost]) -> str:
    columns = ["matrices", "and clear", "poptorch us", "fused us", "ratio", "goal >=", "", "compile s"]
    rows = [
        [
            f"{c.width} x {c.width}",
            "yes" if c.accumulates else "no",
            f"{c.poptorch_us:.0f}",
            f"{c.fused_us:.0f}",
            f"{c.ratio:.2f}",
            "1.0",
            _mark(c.ratio >= 1),
            f"{c.compile_s:.0f}",
        ]
        for c in costs
    ]
    return table("One AdamW update of 100 matrices and 100 vectors, against torch's fused kernel", columns, rows)


def placement_table(rows: Sequence[Placed]) -> str:
    return table(
        "A step in parts against the plain step",
        ("kind", "plain us", "in parts us", "time", "plain MiB", "in parts MiB", "peak memory"),
        [
            (
                row.kind,
                f"{row.plain_us:.0f}",
                f"{row.other_us:.0f}",
                f"{row.other_us / row.plain_us:.2f} x",
                f"{row.plain_mib:.1f}",
                f"{row.other_mib:.1f}",
                f"{row.other_mib / row.plain_mib:.2f} x",
            )
            for row in rows
        ],
    )


def side_by_side_table(rows: Sequence[SideBySide]) -> str:
    return table(
        "Four micro-batches for an update: microseconds per call",
        (
            "workload",
            "rows",
            "accumulation",
            "replicas",
            "one after the other",
            "side by side",
            "times faster",
            "one of all",
        ),
        [
            (
                row.workload,
                str(row.rows),
                str(row.accumulation),
                str(row.replicas),
                f"{row.apart_us:.0f}",
                f"{row.together_us:.0f}",
                f"{row.ratio:.2f}",
                f"{row.plain_us:.0f}",
            )
            for row in rows
        ],
        ["one of all: a single micro-batch with all rows, which is what there is to be had."],
    )


def compile_time_table(times: Sequence[CompileTime]) -> str:
    by_workload: dict[str, dict[str, CompileTime]] = {}
    for time in times:
        by_workload.setdefault(time.workload, {})[time.peer] = time
    columns = ["workload", "compile cold", "poptorch cold", "ratio", "compile cached", "poptorch cached", "ratio"]
    rows: list[list[str]] = []
    for workload, peers in by_workload.items():
        theirs, ours = peers["compile"], peers["poptorch"]
        cold = [f"{theirs.cold:.1f}", f"{ours.cold:.1f}", f"{theirs.cold / ours.cold:.2f}"]
        cached = [f"{theirs.cached:.1f}", f"{ours.cached:.1f}", f"{theirs.cached / ours.cached:.2f}"]
        rows.append([workload, *cold, *cached])
    notes = ["imports are not counted; cold: empty cache folder; cached: another process with the folder of the first"]
    return table("Seconds until two training steps have run", columns, rows, notes)


def memory_table(memories: Sequence[Memory]) -> str:
    columns = ["workload", "eager", "poptorch", "ratio", "goal <=", "", "poptorch with compiling"]
    rows = [
        [
            m.workload,
            f"{m.steps['eager']:.0f}",
            f"{m.steps['poptorch']:.0f}",
            f"{m.ratio:.2f}",
            "1.0",
            _mark(m.ratio <= 1),
            f"{m.process['poptorch']:.0f}",
        ]
        for m in memories
    ]
    notes = [
        "high-water mark of the resident memory over the steps after the first three, minus the resident memory when",
        "all libraries were loaded and the model and its batches existed; in the last column the first three steps,",
        "in which poptorch compiles with a filled cache, count too",
    ]
    return table("Peak memory of training, MiB", columns, rows, notes)


def half_table(costs: Sequence[HalfCost]) -> str:
    """Microseconds per step, and how many times those of float32."""
    rows = [
        [
            c.workload,
            *(f"{value:.0f}" for value in (c.float_us, c.half_us, c.mixed_us)),
            *(f"{ratio:.2f}" for ratio in c.ratios),
            f"{c.goal:.1f}",
            _mark(max(c.ratios) <= c.goal),
        ]
        for c in costs
    ]
    columns = ["workload", "float32 us", "half() us", "mixed us", "half / float32", "mixed / float32", "goal <", ""]
    return table("Half precision: a training step against float32", columns, rows)


def _mark(is_reached: bool) -> str:
    return "pass" if is_reached else "FAIL"


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def loading_table(speeds: Sequence[Throughput], hidden: Overlap) -> str:
    """Samples per second, and the time of a step that loads and computes."""
    rows = [
        [s.case, f"{s.torch_per_second:.0f}", f"{s.async_per_second:.0f}", f"{s.ratio:.2f}", f"{s.goal:.2f}"]
        for s in speeds
    ]
    note = (
        f"a step that loads {hidden.part_ms:g} ms and computes {hidden.part_ms:g} ms takes {hidden.async_ms:.1f} ms "
        f"in mode Async (goal: below {hidden.goal_ms:g}) and {hidden.sync_ms:.1f} ms in mode Sync"
    )
    columns = ["loading, samples per second", "torch", "poptorch Async", "ratio", "goal"]
    return table("Loading data, with the same workers", columns, rows, [note])


def trainer_table(speed: TrainerSpeed, cost: TrainerCost) -> str:
    """Epochs with both Trainers, and the cost of a batch."""
    rows = [[speed.case, f"{speed.cpu_ms:.0f}", f"{speed.ipu_ms:.0f}", f"{speed.ratio:.2f}", f"{speed.goal:.1f}"]]
    rows[0].append(_mark(speed.ratio >= speed.goal))
    note = (
        f"a batch of a tiny model takes {cost.executor_us:.0f} us with the executor alone, {cost.ipu_us:.0f} us with a "
        f"Trainer on the IPU ({cost.ipu_logging_us:.0f} us with self.log), and {cost.cpu_us:.0f} us with one on the "
        f"CPU ({cost.cpu_logging_us:.0f} us with self.log)"
    )
    columns = ["ms per epoch", "Trainer on CPU", "Trainer on IPU", "ratio", "goal", ""]
    return table("Lightning", columns, rows, [note])
