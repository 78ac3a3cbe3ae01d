"""Write the graph after each pass to the folder that `POPTORCH_DUMP` names."""

from __future__ import annotations

from pathlib import Path

from poptorch import environment
from poptorch.compiler.passes import Observer
from poptorch.ir import StepGraph


def dumping(label: str) -> Observer:
    """An observer that writes `<folder>/<label>/00_capture.txt`, `01_canonicalize.txt`, …, or does nothing."""
    folder = environment.DUMP.read()
    if not folder:
        return lambda name, graph: None
    target = _new_folder(Path(folder), label)
    previous: list[int] = []

    def write(name: str, graph: StepGraph) -> None:
        count = graph.count_ops()
        is_program = name == graph.name  # the passes are over: this is one of the programs that were cut out
        change = f"{previous[-1]} → {count} ops" if previous and not is_program else f"{count} ops"
        number = len(previous)
        previous.append(count)
        text = f"# {number} {name}: {change}\n{graph}\n"
        (target / f"{number:02d}_{name}.txt").write_text(text, encoding="utf-8")

    return write


def _new_folder(folder: Path, label: str) -> Path:
    """A folder for one compilation; the first gets the plain label, later ones a number."""
    number = 0
    while True:
        target = folder / (label if number == 0 else f"{label}_{number}")
        try:
            target.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return target
