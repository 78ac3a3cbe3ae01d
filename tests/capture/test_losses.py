"""Which value is differentiated: exactly one loss, marked by PyTorch's own functions or by identity_loss."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from poptorch.capture import losses as known


class Net(nn.Module):
    """A linear layer whose result goes through `finish(out, target)`, which returns what forward returns."""

    def __init__(self, finish, outputs: int = 3) -> None:
        super().__init__()
        self.fc = nn.Linear(4, outputs)
        self.finish = finish

    def forward(self, x, target):
        return self.finish(self.fc(x), target)


def wrap(module: nn.Module) -> poptorch.PoplarExecutor:
    options = poptorch.Options().engine("eager")
    return poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.5))


def assert_trains_like(module: nn.Module, target: torch.Tensor, minimised) -> object:
    """One step of `module` equals one step that minimises `minimised(out, target)`; gives what the call returned."""
    reference = copy.deepcopy(module)
    x = torch.randn(len(target), 4, generator=torch.Generator().manual_seed(0))
    result = wrap(module)(x, target)
    minimised(reference.fc(x), target).sum().backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.sub_(0.5 * parameter.grad)
    torch.testing.assert_close(module.state_dict(), reference.state_dict())
    return result


CLASSES = torch.tensor([0, 2, 1, 1])
VALUES = torch.rand(4, 3, generator=torch.Generator().manual_seed(1))
SIGNS = VALUES.sub(0.5).sign()
LABELS = torch.tensor([[0, -1, -1], [2, 1, -1], [-1, -1, -1], [0, 1, 2]])
CHUNKS = nn.LinearCrossEntropyOptions()

BUILT_IN = {
    "l1_loss": (F.l1_loss, VALUES),
    "mse_loss": (F.mse_loss, VALUES),
    "smooth_l1_loss": (F.smooth_l1_loss, VALUES),
    "cross_entropy": (F.cross_entropy, CLASSES),
    "nll_loss": (lambda out, t: F.nll_loss(F.log_softmax(out, 1), t), CLASSES),
    "binary_cross_entropy": (lambda out, t: F.binary_cross_entropy(out.sigmoid(), t), VALUES),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, VALUES),
    "kl_div": (lambda out, t: F.kl_div(F.log_softmax(out, 1), t, reduction="batchmean"), VALUES),
    "poisson_nll_loss": (F.poisson_nll_loss, VALUES),
    "hinge_embedding_loss": (F.hinge_embedding_loss, SIGNS),
    "soft_margin_loss": (F.soft_margin_loss, SIGNS),
    "margin_ranking_loss": (lambda out, t: F.margin_ranking_loss(out, out.flip(1), t), SIGNS),
    "cosine_embedding_loss": (lambda out, t: F.cosine_embedding_loss(out, out.flip(0), t[:, 0]), SIGNS),
    "triplet_margin_loss": (lambda out, t: F.triplet_margin_loss(out, out.flip(0), t), VALUES),
    "huber_loss": (F.huber_loss, VALUES),
    "gaussian_nll_loss": (lambda out, t: F.gaussian_nll_loss(out, t, out.exp()), VALUES),
    "multi_margin_loss": (F.multi_margin_loss, CLASSES),
    "multilabel_margin_loss": (F.multilabel_margin_loss, LABELS),
    "multilabel_soft_margin_loss": (F.multilabel_soft_margin_loss, VALUES.round()),
    "triplet_margin_with_distance_loss": (
        lambda out, t: F.triplet_margin_with_distance_loss(out, out.flip(0), t),
        VALUES,
    ),
    "linear_cross_entropy": (lambda out, t: F.linear_cross_entropy(out, VALUES, t, options=CHUNKS), CLASSES),
    "ctc_loss": (
        lambda out, t: F.ctc_loss(
            F.log_softmax(out.reshape(4, 1, 3), 2), t[:2].reshape(1, 2), torch.tensor([4]), torch.tensor([2])
        ),
        torch.tensor([1, 2, 1, 1]),
    ),
}


def lengths(out, labels):
    """The arguments of a CTC loss for one sequence."""
    return F.log_softmax(out.reshape(4, 1, 3), 2), labels[:2].reshape(1, 2), torch.tensor([4]), torch.tensor([2])


def with_fixed_scores(loss):
    """A module with weights of its own, which are not trained here."""
    return loss.requires_grad_(False)


MODULES = {
    "L1Loss": (nn.L1Loss(), VALUES),
    "MSELoss": (nn.MSELoss(), VALUES),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), CLASSES),
    "NLLLoss": (lambda out, t: nn.NLLLoss()(F.log_softmax(out, 1), t), CLASSES),
    "BCELoss": (lambda out, t: nn.BCELoss()(out.sigmoid(), t), VALUES),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(), VALUES),
    "SmoothL1Loss": (nn.SmoothL1Loss(), VALUES),
    "HuberLoss": (nn.HuberLoss(), VALUES),
    "KLDivLoss": (lambda out, t: nn.KLDivLoss(reduction="batchmean")(F.log_softmax(out, 1), t), VALUES),
    "PoissonNLLLoss": (nn.PoissonNLLLoss(), VALUES),
    "GaussianNLLLoss": (lambda out, t: nn.GaussianNLLLoss()(out, t, VALUES), VALUES),
    "HingeEmbeddingLoss": (nn.HingeEmbeddingLoss(), SIGNS),
    "SoftMarginLoss": (nn.SoftMarginLoss(), SIGNS),
    "MultiMarginLoss": (nn.MultiMarginLoss(), CLASSES),
    "MultiLabelMarginLoss": (nn.MultiLabelMarginLoss(), LABELS),
    "MultiLabelSoftMarginLoss": (nn.MultiLabelSoftMarginLoss(), VALUES.round()),
    "MarginRankingLoss": (lambda out, t: nn.MarginRankingLoss()(out, out.flip(1), t), SIGNS),
    "CosineEmbeddingLoss": (lambda out, t: nn.CosineEmbeddingLoss()(out, out.flip(0), t[:, 0]), SIGNS),
    "TripletMarginLoss": (lambda out, t: nn.TripletMarginLoss()(out, out.flip(0), t), VALUES),
    "TripletMarginWithDistanceLoss": (
        lambda out, t: nn.TripletMarginWithDistanceLoss()(out, out.flip(0), t),
        VALUES,
    ),
    "CTCLoss": (lambda out, t: nn.CTCLoss()(*lengths(out, t)), torch.tensor([1, 2, 1, 1])),
    "LinearCrossEntropyLoss": (with_fixed_scores(nn.LinearCrossEntropyLoss(3, 5)), CLASSES),
}
TORCH = {  # the same functions under another roof, with numbers for reductions
    "kl_div": (lambda out, t: torch.kl_div(F.log_softmax(out, 1), t, 1), VALUES),
    "hinge_embedding_loss": (torch.hinge_embedding_loss, SIGNS),
}


def is_loss(name: str) -> bool:
    return name.endswith(("_loss", "Loss", "cross_entropy", "cross_entropy_with_logits")) or name == "kl_div"


def test_every_loss_of_torch_is_known():
    functions = {name for name in dir(F) if is_loss(name) and not name.startswith("_")}
    assert functions == set(BUILT_IN)
    outside = {name for name in dir(torch) if is_loss(name) and not name.startswith("_")}
    assert {function.__name__ for function in known.BUILT_IN} == functions
    assert {name for name in outside if getattr(torch, name) not in known.BUILT_IN} == {"miopen_ctc_loss"}


def test_every_module_with_a_loss_is_known():
    modules = {name for name in dir(nn) if is_loss(name)}
    assert modules - set(MODULES) == {"AdaptiveLogSoftmaxWithLoss"}  # which has tests of its own


@pytest.mark.parametrize(
    ("loss", "target"),
    [*BUILT_IN.values(), *MODULES.values(), *TORCH.values()],
    ids=[*BUILT_IN, *MODULES, *(f"torch.{name}" for name in TORCH)],
)
def test_losses_of_pytorch_count_by_themselves(loss, target):
    module = Net(lambda out, t: (out, loss(out, t)))
    out, value = assert_trains_like(module, target, loss)
    torch.testing.assert_close(value, loss(out, target))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_reductions_of_a_built_in_loss(reduction):
    loss = lambda out, t: F.mse_loss(out, t, reduction=reduction)  # noqa: E731
    value = assert_trains_like(Net(loss), VALUES, loss)
    assert value.shape == ((4, 3) if reduction == "none" else ())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_identity_loss_marks_a_value_of_the_user(reduction):
    reduce = {"mean": torch.mean, "sum": torch.sum, "none": lambda v: v}[reduction]
    error = lambda out, t: (out - t) ** 2  # noqa: E731
    module = Net(lambda out, t: (out, poptorch.identity_loss(error(out, t), reduction=reduction)))
    out, value = assert_trains_like(module, VALUES, lambda out, t: reduce(error(out, t)))
    torch.testing.assert_close(value, reduce(error(out, VALUES)))


@pytest.mark.parametrize(
    "arrange",
    [
        lambda out, loss: loss,
        lambda out, loss: (loss, out),
        lambda out, loss: [out, [loss]],
        lambda out, loss: {"out": out, "loss": loss},
        lambda out, loss: (out, (loss, None, 3)),
    ],
    ids=["alone", "first", "nested list", "dictionary", "nested tuple"],
)
def test_the_loss_may_stand_anywhere_in_the_result(arrange):
    assert_trains_like(Net(lambda out, t: arrange(out, F.mse_loss(out, t))), VALUES, F.mse_loss)


# ---- samples of the documents: simple, multiple and custom losses


def test_several_losses_added_and_marked():
    def custom_loss(output, target):
        loss1 = F.nll_loss(output, target)
        loss2 = F.nll_loss(output, target) * 5.0
        return loss1 + loss2

    module = Net(lambda out, t: poptorch.identity_loss(custom_loss(F.log_softmax(out, 1), t), reduction="none"))
    assert_trains_like(module, CLASSES, lambda out, t: custom_loss(F.log_softmax(out, 1), t))


def test_several_losses_added_but_not_marked():
    def finish(out, target):
        scores = F.log_softmax(out, 1)
        return out, F.nll_loss(scores, target) + F.nll_loss(scores, target) * 5.0

    with pytest.raises(poptorch.Error, match="Multiple independent losses found in graph") as caught:
        wrap(Net(finish))(torch.randn(4, 4), CLASSES)
    text = str(caught.value)
    assert "return out, F.nll_loss(scores, target) + F.nll_loss(scores, target) * 5.0" in text
    assert "identity_loss" in text


def test_custom_loss_module():
    class CustomLoss(nn.Module):
        def forward(self, out, target):
            return poptorch.identity_loss((out - target).abs(), reduction="mean")

    assert_trains_like(Net(CustomLoss()), VALUES, lambda out, t: (out - t).abs().mean())


def test_marked_loss_around_a_built_in_one():
    module = Net(lambda out, t: poptorch.identity_loss(F.l1_loss(out, t) * 3, reduction="mean"))
    assert_trains_like(module, VALUES, lambda out, t: F.l1_loss(out, t) * 3)


# ---- exactly one


def test_no_loss():
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph") as caught:
        wrap(Net(lambda out, t: ((out - t) ** 2).mean()))(torch.randn(4, 4), VALUES)
    assert "identity_loss" in str(caught.value)


def test_loss_that_is_not_returned_is_no_loss_and_its_line_is_quoted():
    def finish(out, target):
        F.mse_loss(out, target)
        return out

    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph") as caught:
        wrap(Net(finish))(torch.randn(4, 4), VALUES)
    assert "F.mse_loss(out, target)" in str(caught.value)


def test_two_losses_returned_side_by_side():
    with pytest.raises(poptorch.Error, match="Multiple independent losses found in graph"):
        wrap(Net(lambda out, t: (F.mse_loss(out, t), F.l1_loss(out, t))))(torch.randn(4, 4), VALUES)


def test_a_loss_that_flows_into_another_only_computes_its_value():
    def finish(out, target):
        inner = F.l1_loss(out, target)
        return inner, poptorch.identity_loss(inner * 2 + out.mean(), reduction="none")

    module = Net(finish)
    assert_trains_like(module, VALUES, lambda out, t: F.l1_loss(out, t) * 2 + out.mean())


def test_an_unused_second_loss_does_not_count():
    def finish(out, target):
        F.l1_loss(out, target)
        return F.mse_loss(out, target)

    assert_trains_like(Net(finish), VALUES, F.mse_loss)


def test_the_same_loss_may_be_returned_twice():
    def finish(out, target):
        loss = F.mse_loss(out, target)
        return loss, {"again": loss}

    first, second = assert_trains_like(Net(finish), VALUES, F.mse_loss)
    assert torch.equal(first, second["again"])


def test_marking_where_the_marked_result_is_not_returned():
    def finish(out, target):
        loss = ((out - target) ** 2).mean()
        poptorch.identity_loss(loss, reduction="none")
        return out, loss

    assert_trains_like(Net(finish), VALUES, lambda out, t: ((out - t) ** 2).mean())


def test_what_happens_to_the_loss_afterwards_does_not_change_gradients(caplog):
    module = Net(lambda out, t: (out, F.mse_loss(out, t) * 5))
    out, value = assert_trains_like(module, VALUES, F.mse_loss)
    torch.testing.assert_close(value, F.mse_loss(out, VALUES) * 5)
    (record,) = [r for r in caplog.records if "gradients start at the loss" in r.message]
    assert "F.mse_loss(out, t) * 5" in record.message


def test_changing_the_loss_in_place_does_not_change_gradients():
    def finish(out, target):
        loss = F.mse_loss(out, target)
        loss *= 5
        return loss

    assert_trains_like(Net(finish), VALUES, F.mse_loss)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loss_that_reaches_no_parameter_runs_with_one_warning(accumulated, caplog):
    net = Net(lambda out, t: F.mse_loss(out.detach(), t))
    before = copy.deepcopy(net.state_dict())
    options = poptorch.Options().engine("eager")
    options.Training.gradientAccumulation(accumulated)
    training = poptorch.trainingModel(net, options, torch.optim.Adam(net.parameters()))
    for _ in range(2):
        loss = training(torch.randn(4, 4), VALUES)
    assert loss.isfinite()
    (record,) = [r for r in caplog.records if "nothing is trained" in r.message]
    assert "F.mse_loss(out.detach(), t)" in record.message
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_detach_and_no_grad_stop_gradients():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 3) for _ in range(3))

        def forward(self, x, target):
            with torch.no_grad():
                fixed = self.b(x)
            return F.mse_loss(self.a(x) + fixed + self.c(x).detach(), target)

    module = Half()
    before = copy.deepcopy(module)
    wrap(module)(torch.randn(4, 4), VALUES)
    assert not torch.equal(module.a.weight, before.a.weight)
    assert torch.equal(module.b.weight, before.b.weight)
    assert torch.equal(module.c.weight, before.c.weight)


def test_in_inference_losses_are_ordinary_functions():
    module = Net(lambda out, t: (F.mse_loss(out, t), F.l1_loss(out, t)))
    inference = poptorch.inferenceModel(module, poptorch.Options().engine("eager"))
    x = torch.randn(4, 4)
    with torch.no_grad():
        torch.testing.assert_close(inference(x, VALUES), module(x, VALUES))


def test_losses_beside_a_final_one_are_plain_results():
    def finish(out, target):
        other = F.l1_loss(out, target)
        loss = F.mse_loss(out, target) + F.smooth_l1_loss(out, target)
        return poptorch.identity_loss(loss * 2, "none", final=True), other, other.detach() * 3

    _, other, tripled = assert_trains_like(
        Net(finish), VALUES, lambda out, t: 2 * (F.mse_loss(out, t) + F.smooth_l1_loss(out, t))
    )
    torch.testing.assert_close(other * 3, tripled)


def test_two_final_losses_are_too_many():
    def finish(out, target):
        losses = F.l1_loss(out, target), F.mse_loss(out, target)
        return [poptorch.identity_loss(loss, "none", final=True) for loss in losses]

    with pytest.raises(poptorch.Error, match="Multiple independent losses"):
        wrap(Net(finish))(torch.ones(4, 4), VALUES)
