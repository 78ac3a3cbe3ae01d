"""A line of the user's code, as messages quote it."""

from __future__ import annotations

from poptorch.ir import SourceLine


def test_quotes_file_function_and_text(tmp_path):
    file = tmp_path / "train.py"
    file.write_text("import torch\n    y = self.fc(x)\n")
    line = SourceLine.read(str(file), 2, "Model.forward")
    file.write_text("changed since\nthen\n")
    assert str(line) == "train.py:2, in Model.forward: y = self.fc(x)"


def test_code_without_a_file_still_has_a_place():
    assert str(SourceLine.read("<stdin>", 2, "forward")) == "<stdin>:2, in forward"
