"""The CTC beam search: against the sum over all label sequences."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from poptorch.ops.beam_search import ctc_beam_search


def all_paths(log_probs: torch.Tensor, blank: int) -> dict[tuple[int, ...], float]:
    """Every path of one sequence with its probability."""
    probabilities = log_probs.double().exp()
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for labels in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        joined = [label for label, _ in itertools.groupby(labels)]
        path = tuple(label for label in joined if label != blank)
        found[path] += math.prod(float(probabilities[step, label]) for step, label in enumerate(labels))
    return found


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_a_wide_search_finds_the_best_paths_and_their_probabilities(blank, length):
    torch.manual_seed(length)
    log_probs = torch.randn(5, 2, 3).log_softmax(-1)
    scores, sizes, paths = ctc_beam_search(log_probs, torch.tensor([length, 5]), blank, 1000, 4)
    for index, rows in enumerate((log_probs[:length, 0], log_probs[:, 1])):
        best = sorted(all_paths(rows, blank).items(), key=lambda item: -item[1])[:4]
        for place, (path, probability) in enumerate(best):
            size = sizes[index, place]
            assert tuple(paths[index, place, :size].tolist()) == path
            assert scores[index, place].item() == pytest.approx(-math.log(probability), abs=1e-4)


def test_a_narrow_search_keeps_the_most_probable_beginning():
    # The best path is (1, 1), which a search without the blank in between would join to (1,).
    log_probs = torch.tensor([[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.8, 0.1]]).log().unsqueeze(1)
    _, sizes, paths = ctc_beam_search(log_probs, torch.tensor([3]), 0, 2, 1)
    assert paths[0, 0, : sizes[0, 0]].tolist() == [1, 1]


def test_sequences_with_fewer_paths_end_in_empty_ones():
    scores, sizes, paths = ctc_beam_search(torch.zeros(1, 1, 2).log_softmax(-1), torch.tensor([1]), 0, 10, 3)
    assert scores[0, :2].tolist() == pytest.approx([math.log(2)] * 2)
    assert scores[0, 2] == float("inf")
    assert sorted(sizes[0].tolist()) == [0, 0, 1]
    assert paths.shape == (1, 3, 1)


def test_labels_that_cannot_be_stay_out():
    log_probs = torch.full((4, 1, 3), float("-inf"))
    log_probs[:, 0, 1] = 0
    scores, sizes, paths = ctc_beam_search(log_probs, torch.tensor([4]), 0, 5, 2)
    assert (scores[0].tolist(), sizes[0].tolist()) == ([0, float("inf")], [1, 0])
    assert paths[0, 0, 0] == 1


def test_types_are_those_of_the_probabilities():
    scores, sizes, paths = ctc_beam_search(torch.zeros(2, 1, 2).half(), torch.tensor([2]), 0, 5, 1)
    assert (scores.dtype, sizes.dtype, paths.dtype) == (torch.float16, torch.int32, torch.int32)
