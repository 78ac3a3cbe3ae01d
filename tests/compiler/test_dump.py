"""Graphs as readable text: after each pass, and as captured in a file and in the log."""

from __future__ import annotations

import logging
import zlib

import pytest
import torch

import poptorch
from models import Gate, Regression
from poptorch.engines.passes.eager import EAGER


@pytest.fixture
def dump(tmp_path, monkeypatch):
    """The folder that receives the texts."""
    monkeypatch.setenv("POPTORCH_DUMP", str(tmp_path))
    return tmp_path


def train(module, inputs, **counts):
    options = poptorch.Options().engine("eager").runSideBySide(counts.get("wide", False))
    options.Training.gradientAccumulation(counts.get("G", 1))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(module, options, optimizer)
    training.compile(*inputs)
    return training


def texts(folder) -> str:
    """The graph as it was captured and the programs that run, without the passes between, which come and go."""
    forms = {path.stem[3:]: path.read_text().partition("\n")[2] for path in sorted(folder.iterdir())}
    return "\n".join(
        f"== {name}\n{forms[name]}" for name in ("capture", "step", "micro_step", "update") if name in forms
    )


def test_dump_of_inference(dump, golden):
    inference = poptorch.inferenceModel(Regression(), poptorch.Options().engine("eager"))
    inference.compile(torch.ones(4, 3), torch.ones(4, 2))
    golden.check(texts(dump / "inference"))


def test_dump_of_training(dump, golden):
    train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)))
    golden.check(texts(dump / "training"))


def test_dump_of_training_with_accumulation(dump, golden):
    train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)), G=2)
    golden.check(texts(dump / "training"))


def test_dump_of_training_with_a_guard(dump, golden):
    train(Gate(), (torch.ones(4, 3), torch.ones(4, 1)))
    golden.check(texts(dump / "training"))


def test_files_are_numbered_and_count_ops(dump):
    train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)))
    names = sorted(path.name for path in (dump / "training").iterdir())
    assert names[0] == "00_capture.txt"
    assert names[1:3] == ["01_settle_hints.txt", "02_canonicalize.txt"]
    assert all((dump / "training" / name).read_text().startswith(f"# {int(name[:2])} {name[3:-4]}: ") for name in names)


def test_host_passes_of_each_program_are_shown_after_it(dump):
    train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)), G=2)
    names = [path.stem[3:] for path in sorted((dump / "training").iterdir())]
    for program in ("micro_step", "update"):
        shown = [name.partition(".")[2] for name in names if name.startswith(f"{program}.")]
        assert shown == [apply.__name__ for apply in EAGER]
        assert names.index(program) < names.index(f"{program}.{shown[0]}")


def test_every_compilation_has_a_folder_of_its_own(dump):
    for _ in range(2):
        train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)))
    assert sorted(path.name for path in dump.iterdir()) == ["training", "training_1"]


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("POPTORCH_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_binary", ["0", "1"])
def test_captured_graph_goes_to_a_file_in_folders_that_are_made(is_binary, tmp_path, monkeypatch):
    file = tmp_path / "my_dir" / "my_model.proto"
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(file))
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_AS_BINARY", is_binary)
    train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)))
    content = zlib.decompress(file.read_bytes()) if is_binary == "1" else file.read_bytes()
    assert content.startswith(b"step(fc.weight: f32[2,3] parameter")
    assert b"y = self.fc(x)" in content


def test_captured_graph_in_an_existing_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path))
    poptorch.inferenceModel(torch.nn.ReLU(), poptorch.Options().engine("eager")).compile(torch.ones(1))
    assert [path.name for path in tmp_path.iterdir()] == ["model.proto"]


@pytest.mark.parametrize("variable", ["POPTORCH_DUMP", "POPTORCH_EXPORT_PROTO_FILE"])
def test_a_folder_that_cannot_be_written_to_is_an_error_that_names_the_variable(variable, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "folder"))
    with pytest.raises(poptorch.Error, match=f"{variable} is '.*', which cannot be used: "):
        train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)))


@pytest.mark.parametrize(("limit", "cut"), [("3", True), ("0", False), (None, True)])
def test_log_shows_the_first_lines_of_a_graph(limit, cut, caplog, monkeypatch):
    if limit is None:
        monkeypatch.delenv("POPTORCH_MAX_GRAPH_LEN", raising=False)
    else:
        monkeypatch.setenv("POPTORCH_MAX_GRAPH_LEN", limit)
    with caplog.at_level(logging.DEBUG, logger="poptorch::python"):
        train(Regression(), (torch.ones(4, 3), torch.ones(4, 2)))
    (shown,) = [record.message for record in caplog.records if record.message.startswith("captured step(")]
    assert ("lines more" in shown) is cut
    if cut:
        assert len(shown.splitlines()) == int(limit or 10) + 1
    else:
        assert "as fc.bias new value" in shown
