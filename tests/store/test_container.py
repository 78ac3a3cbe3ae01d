"""A container gives back what was put in, or says that it is damaged; it is written as a whole or not at all."""

from __future__ import annotations

import io
import os
import random
import signal
import time
import zipfile

import pytest
import torch

import poptorch
from models import Regression
from mutations import damaged, nonsense
from poptorch.errors import FileError
from poptorch.store.atomic import remove_leftovers, write_atomically
from poptorch.store.container import json_part, pack, parse_json, sha256, unpack
from poptorch.store.tensors import tensors_from, tensors_part

PARTS = {"a.json": b"[1]", "code/0.so": bytes(range(256))}


def test_what_was_put_in_comes_out():
    found = unpack(pack({"kind": "test"}, PARTS))
    assert found.parts == PARTS
    assert found.about["kind"] == "test"
    assert found.json("a.json") == [1]
    assert pack({}, PARTS) == pack({}, PARTS)


def test_tensors_of_all_kinds_come_back():
    base = torch.arange(6.0)
    tensors = {
        "plain": base,
        "same memory": base.view(2, 3).t(),
        "complex": torch.tensor([1 + 2j]).conj(),
        "none": torch.zeros(0, 3),
        "number": torch.tensor(True),
        "small": torch.tensor([1.5], dtype=torch.bfloat16),
    }
    found = tensors_from(tensors_part(tensors))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


def rezipped(content, change):
    """The same parts, packed by somebody else, with a checksum that fits."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(buffer, "w") as after:
        change(before, after)
        after.comment = b"0" * 64
    found = buffer.getvalue()[:-64]
    return found + sha256(found).encode()


def copy_all(before, after):
    for entry in before.infolist():
        after.writestr(entry, before.read(entry))


def compressed(before, after):
    for entry in before.infolist():
        after.writestr(entry.filename, before.read(entry), zipfile.ZIP_DEFLATED)


def with_more(before, after):
    copy_all(before, after)
    after.writestr("more.json", b"1")


def with_a_way_out(before, after):
    copy_all(before, after)
    after.writestr("../outside.so", b"1")


@pytest.mark.parametrize("change", [compressed, with_more, with_a_way_out])
def test_containers_that_we_do_not_write_are_refused_even_with_the_right_checksum(change):
    content = pack({}, PARTS)
    assert unpack(rezipped(content, copy_all)).parts == PARTS
    with pytest.raises(FileError):
        unpack(rezipped(content, change))


@pytest.mark.parametrize("text", [b"NaN", b"{", b"[" * 100_000, b"\xff"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(FileError):
        parse_json(text, "part")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The bytes of a file with a small training model."""
    path = tmp_path_factory.mktemp("saved") / "m.poptorch"
    model = Regression()
    training = poptorch.trainingModel(model, optimizer=torch.optim.Adam(model.parameters()))
    training.compileAndExport(path, torch.ones(4, 3), torch.ones(4, 2))
    return path.read_bytes()


def test_every_damage_is_noticed(saved, request):
    count = 10_000 if request.config.getoption("--long") else 300
    for content in damaged(saved, count):
        with pytest.raises(FileError):
            unpack(content)


@pytest.mark.parametrize(
    "part", ["executable.json", "origins.json", "program.json", "model.json", "optimizers.json", "options.json"]
)
def test_a_file_made_up_by_somebody_is_an_error_of_ours_or_a_model(part, saved, tmp_path, request):
    count = 400 if request.config.getoption("--long") else 12
    container = unpack(saved)
    for data in nonsense(container.json(part), count):
        (tmp_path / "m").write_bytes(pack(container.about, {**container.parts, part: json_part(data)}))
        try:
            loaded = poptorch.load(tmp_path / "m")
        except poptorch.Error:
            continue
        loaded.destroy()


def test_an_op_that_writes_files_is_refused(saved, tmp_path):
    container = unpack(saved)
    data = container.json("executable.json")
    target = str(tmp_path / "written")
    data["programs"][0]["graph"]["ops"][0][:3] = ["aten.from_file.default", [target, True, 4], {}]
    (tmp_path / "m").write_bytes(pack(container.about, {**container.parts, "executable.json": json_part(data)}))
    with pytest.raises(FileError, match="no op that data may call"):
        poptorch.load(tmp_path / "m")
    assert not os.path.exists(target)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_live_process_writes_is_no_leftover(tmp_path, monkeypatch):
    seen = []
    replace = os.replace

    def look(source, target):
        seen.append(remove_leftovers(tmp_path))
        replace(source, target)

    monkeypatch.setattr(os, "replace", look)
    write_atomically(tmp_path / "file", b"content")
    assert seen == [0]
    assert (tmp_path / "file").read_bytes() == b"content"


WRITING = """
from pathlib import Path
from poptorch.store.container import write_container
parts = {{"part.bin": bytes(range(256)) * 4000}}
print("begun", flush=True)
while True:
    write_container(Path({path!r}), {{}}, parts)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file_and_no_leftovers(programs, tmp_path, request):
    times = 500 if request.config.getoption("--long") else 4
    chance, path = random.Random(0), tmp_path / "file"
    for _ in range(times):
        program = programs.start(WRITING.format(path=str(path)))
        program.wait_for(lambda program=program: "begun" in program.output, "the first write")
        time.sleep(chance.random() * 0.05)
        os.kill(program.pid, signal.SIGKILL)
        program.wait()
        if path.exists():
            assert unpack(path.read_bytes()).parts["part.bin"] == bytes(range(256)) * 4000
        write_atomically(tmp_path / "other", b"")
        assert set(os.listdir(tmp_path)) <= {"file", "other"}
