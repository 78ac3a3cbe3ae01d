"""Decode sequences of label probabilities, as a network that was trained with the CTC loss gives them.

A path is what is left of a label for each time step when repeats are joined and blanks are dropped; its probability is
the sum over all label sequences that lead to it. The search goes through time and keeps the most probable beginnings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_ROOT = 0
_IMPOSSIBLE = float("-inf")


@dataclass(frozen=True)
class _Beams:
    """The beginnings of paths that are kept: the place of each in the tree, and its log-probabilities."""

    nodes: list[int]
    with_blank: torch.Tensor  # of label sequences that end with a blank
    with_label: torch.Tensor

    @property
    def total(self) -> torch.Tensor:
        return torch.logaddexp(self.with_blank, self.with_label)


class _Tree:
    """All beginnings that were ever kept: each is another one and a label more."""

    def __init__(self) -> None:
        self.parents, self.labels = [-1], [-1]
        self._children: dict[tuple[int, int], int] = {}

    def child(self, node: int, label: int) -> int:
        key = (node, label)
        if key not in self._children:
            self._children[key] = len(self.parents)
            self.parents.append(node)
            self.labels.append(label)
        return self._children[key]

    def path(self, node: int) -> list[int]:
        found: list[int] = []
        while node != _ROOT:
            found.append(self.labels[node])
            node = self.parents[node]
        return found[::-1]


def _advance(beams: _Beams, tree: _Tree, row: torch.Tensor, blank: int, width: int) -> _Beams:
    """The most probable beginnings after one more time step."""
    last = torch.tensor([tree.labels[node] for node in beams.nodes])
    total, is_grown = beams.total, last >= 0
    with_blank = total + row[blank]
    with_label = torch.where(is_grown, beams.with_label + row[last], _IMPOSSIBLE)  # the last label again
    longer = total[:, None] + row
    grown = is_grown.nonzero().squeeze(1)
    longer[grown, last[grown]] = (beams.with_blank + row[last])[grown]  # a label twice takes a blank in between
    longer[:, blank] = _IMPOSSIBLE
    places = {node: index for index, node in enumerate(beams.nodes)}
    known = [(index, places[parent]) for node, index in places.items() if (parent := tree.parents[node]) in places]
    if known:  # what grows to a beginning that is kept already belongs to that
        kept, parents = torch.tensor(known).T
        with_label[kept] = torch.logaddexp(with_label[kept], longer[parents, last[kept]])
        longer[parents, last[kept]] = _IMPOSSIBLE
    return _best(beams, tree, with_blank, with_label, longer, width)


def _best(
    beams: _Beams, tree: _Tree, with_blank: torch.Tensor, with_label: torch.Tensor, longer: torch.Tensor, width: int
) -> _Beams:
    """The beginnings of highest probability among those that stayed and those that grew."""
    count, classes = longer.shape
    scores = torch.cat([torch.logaddexp(with_blank, with_label), longer.flatten()])
    chosen = scores.argsort(descending=True, stable=True)[:width]
    chosen = chosen[scores[chosen] > _IMPOSSIBLE]
    stay, grow = chosen[chosen < count], chosen[chosen >= count] - count
    children = [tree.child(beams.nodes[index // classes], index % classes) for index in grow.tolist()]
    return _Beams(
        [*(beams.nodes[index] for index in stay.tolist()), *children],
        torch.cat([with_blank[stay], torch.full_like(grow, _IMPOSSIBLE, dtype=scores.dtype)]),
        torch.cat([with_label[stay], longer.flatten()[grow]]),
    )


def _decode(rows: torch.Tensor, blank: int, width: int, top: int) -> list[tuple[float, list[int]]]:
    """The most probable paths of one sequence, each with its log-probability."""
    tree = _Tree()
    beams = _Beams([_ROOT], rows.new_zeros(1), rows.new_full((1,), _IMPOSSIBLE))
    for row in rows:
        beams = _advance(beams, tree, row, blank, width)
    total = beams.total
    order = total.argsort(descending=True, stable=True)[:top].tolist()
    return [(float(total[index]), tree.path(beams.nodes[index])) for index in order]


@torch.library.custom_op("poptorch::ctc_beam_search", mutates_args=())
def ctc_beam_search(
    log_probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int
) -> Three:
    """For each sequence the `top_paths` best paths: minus the logarithm of their probability, their length, labels.

    If a sequence has fewer paths, the others have no labels and an infinite score.
    """
    steps, count, _ = log_probs.shape
    scores = torch.full((count, top_paths), float("inf"), dtype=torch.float64)
    sizes = torch.zeros(count, top_paths, dtype=torch.int32)
    paths = torch.zeros(count, top_paths, steps, dtype=torch.int32)
    values = log_probs.detach().double()
    for index, length in enumerate(lengths.tolist()):
        best = _decode(values[: max(length, 0), index], blank, beam_width, top_paths)
        for place, (score, path) in enumerate(best):
            scores[index, place] = -score
            sizes[index, place] = len(path)
            paths[index, place, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return scores.to(log_probs.dtype), sizes, paths


@ctc_beam_search.register_fake
def _(log_probs: torch.Tensor, lengths: torch.Tensor, blank: int, beam_width: int, top_paths: int) -> Three:
    steps, count, _ = log_probs.shape
    return (
        log_probs.new_empty(count, top_paths),
        log_probs.new_empty(count, top_paths, dtype=torch.int32),
        log_probs.new_empty(count, top_paths, steps, dtype=torch.int32),
    )
