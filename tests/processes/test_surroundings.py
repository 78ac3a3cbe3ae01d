"""Files, the cache, data, anchors, counters and the log in several processes."""

from __future__ import annotations

import shutil

import pytest
import torch

from company import Company, Raised
from process_cases import advise_caching, compile_natively, go_on_from_file, load_what_is_not_there, look, lookups


@pytest.fixture(scope="module")
def company():
    started = Company(2, POPTORCH_TIMEOUT="30")
    yield started
    started.close()


def test_programs_from_files_go_on_together(company, tmp_path):
    found = company.run(go_on_from_file, tmp_path, shared=False)
    for whole, loaded, _ in found:
        assert all(torch.equal(whole[name], loaded[name]) for name in whole if "running" not in name)
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1] if "running" not in name)


def test_processes_that_read_the_same_file_draw_different_numbers(company, tmp_path):
    (whole, first, first_drawn), (_, second, second_drawn) = company.run(go_on_from_file, tmp_path, shared=True)
    assert first_drawn != second_drawn
    assert all(torch.equal(first[name], second[name]) for name in first if "running" not in name)
    assert not all(torch.equal(whole[name], first[name]) for name in whole)


def test_a_file_that_one_process_cannot_read_is_an_error_of_all(company, tmp_path):
    company.start(load_what_is_not_there, tmp_path)
    first, second = company.results()
    assert isinstance(first, Raised)
    assert "none.poptorch" in first.text
    assert isinstance(second, Raised)


def test_data_anchors_counters_and_the_log(company, tmp_path):
    found = company.run(look, tmp_path)
    for rank, each in enumerate(found):
        assert each["rows"] == [[0, 1, 2, 3], [4, 5, 6, 7]]  # each process has eight of the sixteen rows
        assert torch.equal(each["anchor"], each["weight"])  # after the last update
        assert all(seconds > 0 for seconds in each["latency"])
        assert "reduce 1 over 2 processes" in each["schedule"]
        assert ("a warning" in each["log"]) == (rank == 0)
        assert "an error" in each["log"]
        assert ("[process 1]" in each["log"]) == (rank == 1)


@pytest.mark.parametrize("caches", [False, True])
def test_without_the_cache_a_warning_recommends_it(company, caches):
    first, second = company.run(advise_caching, caches)
    assert ("with Options.enableExecutableCaching(path) one of them does" in first) is not caches
    assert "enableExecutableCaching" not in second  # warnings are those of the first process


@pytest.mark.long
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler")
def test_one_process_compiles_and_the_others_take_it_from_the_cache(company, tmp_path):
    found = company.run(compile_natively, tmp_path)
    assert sorted(len(compiled) for compiled, _ in found) == [0, 1]
    assert torch.equal(found[0][1], found[1][1])
    module, _ = lookups()
    counts = torch.tensor([2.0, 2, 0, 0, 0, 0, 0, 0])[:, None]  # each process has looked up rows 0 and 1
    torch.testing.assert_close(found[0][1], module.table.weight.detach() * (1 - 0.1 * counts))
