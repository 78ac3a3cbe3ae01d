"""`ctc_beam_search_decoder`: in compiled models, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import poptorch
from poptorch.ops.beam_search import ctc_beam_search


class Decoder(nn.Module):
    def forward(self, probs, lengths):
        return poptorch.ctc_beam_search_decoder(probs.transpose(0, 1), lengths, beam_width=20, top_paths=2)


@pytest.mark.inductor
def test_a_compiled_model_decodes_each_sequence(engine):
    torch.manual_seed(0)
    probs, lengths = torch.randn(4, 9, 5).log_softmax(-1), torch.tensor([9, 4, 1, 7])
    options = poptorch.Options().engine(engine).deviceIterations(2)
    options.outputMode(poptorch.OutputMode.All)
    scores, sizes, paths = poptorch.inferenceModel(Decoder(), options)(probs, lengths)
    expected = ctc_beam_search(probs.transpose(0, 1), lengths, 0, 20, 2)
    torch.testing.assert_close((scores, sizes, paths), expected)


def test_shapes():
    class Plain(nn.Module):
        def forward(self, probs, lengths):
            return poptorch.ctc_beam_search_decoder(probs, lengths)

    found = poptorch.inferenceModel(Plain())(torch.randn(9, 3, 10).log_softmax(-1), torch.randint(1, 9, (3,)))
    assert [list(tensor.shape) for tensor in found] == [[3, 1], [3, 1], [3, 1, 9]]


PROBS, LENGTHS = torch.zeros(4, 2, 3), torch.tensor([4, 4])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([1.0], LENGTHS), "probs of ctc_beam_search_decoder is a list"),
        ((PROBS, [4, 4]), "lengths of ctc_beam_search_decoder is a list"),
        ((PROBS[0], LENGTHS), r"probs of ctc_beam_search_decoder has shape \[2, 3\]"),
        ((PROBS, LENGTHS[:1]), r"lengths of ctc_beam_search_decoder is torch.int64\[1\]"),
        ((PROBS, LENGTHS.float()), r"lengths of ctc_beam_search_decoder is torch.float32\[2\]"),
        ((PROBS, LENGTHS, 3), "blank is 3, and there are 3 classes"),
        ((PROBS, LENGTHS, 0, 2, 3), "top_paths is 3: .* at most beam_width, 2"),
    ],
)
def test_wrong_arguments_are_refused(arguments, text):
    with pytest.raises(poptorch.Error, match=text):
        poptorch.ctc_beam_search_decoder(*arguments)
