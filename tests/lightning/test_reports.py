"""Reports of a run."""

from __future__ import annotations

import json
import os

import pytest

import poptorch
from lightning_runs import Line, fit, loader
from poptorch.lightning import IPUStrategy


def test_a_report_of_each_kind_of_model(tmp_path):
    folder = tmp_path / "reports"
    fit(Line(), loader(8), loader(8), strategy=IPUStrategy(autoreport=True, autoreport_dir=str(folder)))
    assert (folder / "training" / "profile.pop").exists()
    assert (folder / "inference" / "profile.pop").exists()
    assert json.loads(os.environ["POPLAR_ENGINE_OPTIONS"]) == {
        "autoReport.all": True,
        "autoReport.directory": str(folder),
    }


def test_a_report_is_of_the_last_run(tmp_path):
    file = tmp_path / "training" / "profile.pop"
    for _ in range(2):
        fit(Line(), loader(8), strategy=IPUStrategy(autoreport_dir=str(tmp_path)))
        first = file.read_text()
        assert set(json.loads(first)["seconds"]) == {"latency", "host to IPU", "compute", "IPU to host"}
        file.write_text(first + " ")
    assert file.read_text() == first + " "
    file.write_text("a report of the executor")
    fit(Line(), loader(8), strategy=IPUStrategy(autoreport_dir=str(tmp_path)))
    assert file.read_text() == "a report of the executor"


def test_the_variable_of_the_user_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps({"debug.x": 1, "autoReport.all": "false"}))
    strategy = IPUStrategy(autoreport_dir=str(tmp_path))
    assert strategy.autoreport
    wanted = {"debug.x": 1, "autoReport.all": "false", "autoReport.directory": str(tmp_path)}
    assert json.loads(os.environ["POPLAR_ENGINE_OPTIONS"]) == wanted


def test_a_broken_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "{")
    with pytest.raises(poptorch.Error, match="POPLAR_ENGINE_OPTIONS"):
        IPUStrategy(autoreport=True)


def test_without_a_request_there_is_no_report(tmp_path):
    fit(Line(), loader(8))
    assert list(tmp_path.iterdir()) == []
    assert "POPLAR_ENGINE_OPTIONS" not in os.environ
