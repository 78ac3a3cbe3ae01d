"""Parts of a compilation say what they do, and a listener hears it."""

from __future__ import annotations

import threading

from poptorch.progress import listening, working_on


def test_inner_parts_are_named_after_what_they_belong_to():
    heard: list[str] = []
    with listening(heard.append), working_on("program 1 of 2"):
        with working_on("part 1 of 2"):
            pass
        with working_on("part 2 of 2"):
            pass
    with working_on("nobody listens"):
        pass
    assert heard == ["program 1 of 2", "program 1 of 2, part 1 of 2", "program 1 of 2, part 2 of 2"]


def test_parts_may_be_done_by_threads():
    heard: list[str] = []

    def work() -> None:
        with working_on("part 1 of 2"):
            pass

    with listening(heard.append):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert heard == ["part 1 of 2"]
