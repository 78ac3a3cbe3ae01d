"""What a step finds in its batch."""

from __future__ import annotations

import pytest
import torch

import poptorch
from lightning_runs import Line, assert_same_weights, fit, rows, trainer
from poptorch.lightning import IPUStrategy, batches


def test_arguments_have_the_names_of_their_places():
    batch = {"x": torch.zeros(4, 2), "n": 3, "f": 0.5, "text": "a", "flag": True, "more": [None]}
    found = batches.arguments(batch, 2)
    assert list(found) == ["batch[x]", "batch[n]", "batch[f]", "batch[flag]", "batch[more][0]"]
    assert found["batch[n]"].tolist() == [3, 3]
    assert found["batch[f]"].tolist() == [0.5, 0.5]
    assert found["batch[flag]"] is True


READS = {
    "compare": lambda text: text == "a",
    "hash": lambda text: {"a": 1}[text],
    "format": lambda text: f"{text}",
    "method": lambda text: text.upper(),
    "length": len,
    "slice": lambda text: text[0],
    "add": lambda text: text + "b",
    "add on the right": lambda text: "b" + text,
    "int": lambda text: int(text + "1", 16),
    "print": str,
    "truth": bool,
    "order": sorted,
}


@pytest.mark.parametrize("name", READS)
def test_reading_a_string_is_noted(name):
    seen = []
    text = batches.inside(["a"], {}, lambda place, value: seen.append((place, value)))[0]
    assert isinstance(text, str)
    assert seen == []
    READS[name](text)
    assert set(seen) == {("batch[0]", "a")}


class Named:
    """Batches with names that differ."""

    def __init__(self, kinds=("a",) * 4):
        self.kinds = kinds

    def __len__(self):
        return len(self.kinds)

    def __iter__(self):
        for index, kind in enumerate(self.kinds):
            x, y = rows(4, seed=index)[:]
            yield {"rows": (x, y), "ids": [f"{index}-{row}" for row in range(4)], "kind": kind}


class Unread(Line):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["rows"])

    def predict_step(self, batch, batch_idx):
        return {"id": batch["ids"], "scores": self(batch["rows"][0])}


def test_strings_that_a_step_does_not_read_may_differ():
    fit(Unread(), Named())


def test_strings_are_returned_as_they_are_in_each_batch():
    found = trainer(devices=2).predict(Unread(), Named())
    assert [batch["id"] for batch in found] == [[f"{n}-{row}" for row in range(4)] for n in range(4)]
    assert found[0]["scores"].shape == (4, 2)


class Branches(Line):
    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch["rows"])
        self.log("v", loss if batch["kind"] == "a" else 2 * loss, batch_size=4)


def test_a_string_that_a_step_reads_compiles_again_when_it_changes():
    data = Named(("a", "a", "b", "b"))
    with pytest.warns(UserWarning, match=r"batch\[kind\], which it reads, was 'a' and is 'b' now"):
        (ours,) = trainer().validate(Branches(), data, verbose=False)
    (theirs,) = trainer("cpu").validate(Branches(), data, verbose=False)
    assert ours == pytest.approx(theirs)


class Flags:
    def __iter__(self):
        for flag in (True, False, True):
            yield {"rows": rows(4)[:], "flag": flag}


class ReadsFlag(Line):
    def training_step(self, batch, batch_idx):
        return self.loss(batch["rows"]) * (1 if batch["flag"] else 3)


def test_each_value_of_a_constant_has_a_program():
    ours, theirs = ReadsFlag(), ReadsFlag()
    with pytest.warns(UserWarning, match="other shapes or constants"):
        fit(ours, Flags(), limit_train_batches=3)
    fit(theirs, Flags(), accelerator="cpu", limit_train_batches=3)
    assert_same_weights(ours, theirs)


def test_another_constant_is_refused_with_options_of_the_user():
    strategy = IPUStrategy(training_opts=poptorch.Options())
    with pytest.raises(poptorch.Error, match=r"Value mismatch for batch\[flag\]: expected True but got False"):
        fit(ReadsFlag(), Flags(), limit_train_batches=2, strategy=strategy)
