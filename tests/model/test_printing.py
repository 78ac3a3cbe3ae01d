"""Modules printed with the hooks that run before their layers."""

from __future__ import annotations

from torch import nn

import poptorch


class Note:
    def __init__(self, text):
        self.text = text

    def __call__(self, module, args):
        return None

    def __repr__(self):
        return f"Note({self.text})"


def network():
    return nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 1)))


def test_without_hooks_the_text_is_that_of_pytorch():
    assert poptorch.module_repr(network()) == repr(network())


def test_hooks_stand_in_front_of_their_layer():
    model = network()
    model[1][1].register_forward_pre_hook(Note("a"))
    model[0].register_forward_pre_hook(Note("b"))
    text = poptorch.module_repr(model)
    assert "(0): Note(b) Linear(" in text
    assert "(1): Note(a) Linear(" in text


def test_printing_shows_both_forms_of_a_module_and_leaves_other_objects_alone(capsys):
    model = network()
    model[0].register_forward_pre_hook(Note("b"))
    poptorch.print("x", 3)
    poptorch.print(model)
    out = capsys.readouterr().out
    assert out.startswith("x 3\nSequential(")
    assert out.count("Sequential(\n  (0)") == 2
    assert out.count("Note(b)") == 1
