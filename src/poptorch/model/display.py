"""Show what a compilation is doing: its phase, the part of how many, and how long it will still take."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from poptorch._logging import logger
from poptorch.model.compilers import Stalls
from poptorch.progress import listening

LONG_SECONDS = 10.0  # what is worth an estimate
_TICK_SECONDS = 1.0


class Display:
    """The line about one compilation."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._phase, self._where = "", ""
        self._expected_end: float | None = None

    def phase(self, name: str) -> None:
        """Another phase begins."""
        logger.debug("%s", name)
        self._phase, self._where, self._expected_end = name, "", None
        self._show()

    @contextmanager
    def compiling(self, estimate: float | None) -> Iterator[None]:
        """While native code is compiled: say which part, how long it takes, and if a compiler does not get on."""
        if estimate is not None:
            self._expected_end = time.monotonic() + estimate
            if estimate > LONG_SECONDS:
                logger.info("compiling takes about %.0f s, as earlier programs of this size did", estimate)
        done = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(done,), daemon=True, name="poptorch-progress")
        with listening(self._at):
            ticker.start()
            try:
                yield
            finally:
                done.set()
                ticker.join()
                self._where, self._expected_end = "", None

    @property
    def text(self) -> str:
        """What the line says now."""
        parts = [self._doing]
        if self._expected_end is not None:
            remaining = self._expected_end - time.monotonic()
            if remaining > LONG_SECONDS:
                parts.append(f"about {remaining:.0f} s left")
        return ", ".join(parts)

    @property
    def _doing(self) -> str:
        return f"{self._phase}, {self._where}" if self._where else self._phase

    def _at(self, where: str) -> None:
        logger.debug("%s: %s", self._phase, where)
        self._where = where
        self._show()

    def _tick(self, done: threading.Event) -> None:
        stalls = Stalls()
        while not done.wait(_TICK_SECONDS):
            stalls.look(os.getpid(), self._doing)
            self._show()

    def _show(self) -> None:
        self._bar.set_description_str(f"Graph compilation: {self.text}")
        self._bar.refresh()


@contextmanager
def displaying(show: bool) -> Iterator[Display]:
    """A bar that names the phases of a compilation; silent if standard error is not a terminal."""
    with tqdm(
        desc="Graph compilation",
        total=None,
        disable=None if show else True,
        leave=False,
        bar_format="{desc} [{elapsed}]",
    ) as bar:
        yield Display(bar)
