"""Which vector instructions native code uses.

Inductor finds that out by building and loading three programs, in each new folder for its code. They take seconds, and
nearly always say what the processor says. So the processor is believed: if compiler or library turn out not to know its
instructions, the first real program cannot be built, and is compiled again after Inductor has looked.
What is left of the search runs in the background.
"""

from __future__ import annotations

import threading
from typing import Any

from poptorch.engines.private import config, supported_vec_isa_list, valid_vec_isa_list

_SECONDS = 300.0  # Inductor itself gives each program a minute


class Search:
    """Inductor's search, which it makes once per process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.believes = True  # what the processor says

    def begin(self, patches: dict[str, Any]) -> None:
        """Search in the background, with these settings of Inductor."""
        if self._thread is None:
            self._thread = threading.Thread(target=_search, args=({**patches, **self.config},), daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Let the search come to its end, because Inductor would otherwise begin another one."""
        if self._thread is not None:
            self._thread.join(_SECONDS)

    def look_again(self) -> None:
        """Do not believe the processor any more."""
        if self.believes:
            self.wait()
            self.believes = False
            valid_vec_isa_list.cache_clear()
            for isa in supported_vec_isa_list:
                getattr(type(isa).__bool__, "cache_clear", int)()

    @property
    def config(self) -> dict[str, Any]:
        return {"cpp.vec_isa_ok": True if self.believes else None}


def _search(patches: dict[str, Any]) -> None:
    with config.patch(patches):
        valid_vec_isa_list()


SEARCH = Search()
