"""`ctc_beam_search_decoder`: from probabilities of labels to labels."""

from __future__ import annotations

import torch

from poptorch.errors import CompileError, explain
from poptorch.ops.beam_search import ctc_beam_search


def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The most probable labels of each sequence, found by a beam search over the beginnings of paths.

    `probs` are log-probabilities of shape [time steps, sequences, classes], `lengths` the number of time steps of each
    sequence. Gives, for each sequence and for `top_paths` paths, best first: minus the logarithm of the path's
    probability, the number of its labels, and the labels, with zeros after them. Sequences that have fewer paths end in
    empty ones of infinite score. No gradient passes.

    >>> import torch, poptorch
    >>> likely = torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]).log().unsqueeze(1)
    >>> score, length, labels = poptorch.ctc_beam_search_decoder(likely, torch.tensor([3]))
    >>> labels[0, 0, : length[0, 0]]
    tensor([1, 1], dtype=torch.int32)
    """
    for what, value in (("probs", probs), ("lengths", lengths)):
        if not isinstance(value, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise CompileError(f"{what} of ctc_beam_search_decoder is a {type(value).__name__}, and must be a tensor.")
    if probs.dim() != 3:
        raise CompileError(
            explain(
                f"probs of ctc_beam_search_decoder has shape {list(probs.shape)}.",
                fix="give log-probabilities of shape [time steps, sequences, classes]",
            )
        )
    if list(lengths.shape) != [probs.shape[1]] or lengths.is_floating_point():
        raise CompileError(
            f"lengths of ctc_beam_search_decoder is {lengths.dtype}{list(lengths.shape)}, and must be an integer for "
            f"each of {probs.shape[1]} sequences."
        )
    if not 0 <= blank < probs.shape[2]:
        raise CompileError(f"blank is {blank}, and there are {probs.shape[2]} classes, from 0.")
    if not 1 <= top_paths <= beam_width:
        raise CompileError(f"top_paths is {top_paths}: it must be at least 1, and at most beam_width, {beam_width}.")
    return ctc_beam_search(probs.detach(), lengths, blank, beam_width, top_paths)
