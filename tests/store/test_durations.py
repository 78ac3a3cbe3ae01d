"""How long compilations took: enough for an estimate, whatever happens to the file."""

from __future__ import annotations

import threading

import pytest

from poptorch.store.durations import FILE, Duration, Durations


def test_there_is_no_estimate_before_anything_was_compiled(tmp_path):
    assert Durations(tmp_path / "none").estimate(100) is None


def test_an_estimate_is_in_proportion_to_programs_of_about_the_size(tmp_path):
    known = Durations(tmp_path / "new")
    for ops, seconds in ((10, 2.0), (100, 10.0), (100, 12.0), (110, 12.1), (10_000, 900.0)):
        known.add(Duration(ops, seconds))
    assert known.estimate(200) == pytest.approx(22.0, rel=0.1)
    assert known.estimate(10) == pytest.approx(2.0)
    assert known.estimate(10_000_000) is None


def test_the_latest_of_equal_size_count(tmp_path):
    known = Durations(tmp_path)
    for seconds in (100.0,) * 20 + (5.0,) * 5:
        known.add(Duration(50, seconds))
    assert known.estimate(50) == 5.0


def test_the_file_does_not_grow_without_end(tmp_path):
    known = Durations(tmp_path)
    for seconds in range(210):
        known.add(Duration(50, float(seconds)))
    assert [known.read()[0].seconds, len(known.read())] == [10.0, 200]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"17", b'{"a": 1}', b"[[0, 1.0]]", b"[[5, -1]]", b"[[5, NaN]]", b"[[5]]", b"[" * 100_000],
)
def test_a_damaged_file_is_as_none_and_is_written_anew(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)
    known = Durations(tmp_path)
    assert known.estimate(5) is None
    known.add(Duration(5, 3.0))
    assert known.estimate(5) == 3.0


def test_a_folder_that_cannot_be_written_does_not_matter(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    Durations(tmp_path / "file").add(Duration(5, 3.0))
    assert Durations(tmp_path / "file").estimate(5) is None


def test_writers_at_the_same_time_leave_a_whole_file(tmp_path):
    known = Durations(tmp_path)
    threads = [threading.Thread(target=lambda: [known.add(Duration(7, 7.0)) for _ in range(10)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert known.read()
    assert set(known.read()) == {Duration(7, 7.0)}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
