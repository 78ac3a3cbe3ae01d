"""Show graphs to the user: after each pass in the folder of `POPTORCH_DUMP`, as captured in a file and in the log."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from poptorch import environment
from poptorch._logging import logger
from poptorch.compiler.passes import Observer
from poptorch.ir import StepGraph


def is_dumping() -> bool:
    """Whether somebody looks at the graphs between passes."""
    return bool(environment.DUMP.read())


def dumping(label: str) -> Observer:
    """An observer that writes `<folder>/<label>/00_capture.txt`, `01_canonicalize.txt`, …, or does nothing."""
    folder = environment.DUMP.read()
    if not folder:
        return lambda name, graph: None
    with _naming(environment.DUMP):
        target = _new_folder(Path(folder), label)
    previous: list[int] = []

    def write(name: str, graph: StepGraph) -> None:
        count = graph.count_ops()
        is_program = name == graph.name  # the passes are over: this is one of the programs that were cut out
        change = f"{previous[-1]} → {count} ops" if previous and not is_program else f"{count} ops"
        number = len(previous)
        previous.append(count)
        text = f"# {number} {name}: {change}\n{graph}\n"
        with _naming(environment.DUMP):
            (target / f"{number:02d}_{name}.txt").write_text(text, encoding="utf-8")

    return write


def show_captured(graph: StepGraph) -> None:
    """Write a graph to the file of `POPTORCH_EXPORT_PROTO_FILE`, and its first lines to the log at DEBUG."""
    if logger.isEnabledFor(logging.DEBUG):
        limit = environment.MAX_GRAPH_LEN.integer()
        lines = str(graph).splitlines()
        rest = [f"  … {len(lines) - limit} lines more"] if 0 < limit < len(lines) else []
        logger.debug("captured %s", "\n".join([*(lines[:limit] if rest else lines), *rest]))
    file = environment.EXPORT_PROTO_FILE.read()
    if not file:
        return
    path = Path(file) / "model.proto" if Path(file).is_dir() else Path(file)
    content = f"{graph}\n".encode()
    content = zlib.compress(content) if environment.EXPORT_PROTO_AS_BINARY.flag() else content
    with _naming(environment.EXPORT_PROTO_FILE):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def _naming(variable: environment.Variable) -> Generator[None, None, None]:
    """Let an error of the system say which variable led to it."""
    try:
        yield
    except OSError as error:
        raise variable.unusable(error) from error


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
