"""torch's own cross entropy, known by itself and by nothing that calls it."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.engine import parallelize
from echelon.nn.head import deferred
from echelon.nn.head.deferred import _Computed, _FusedLoss, defer, is_deferred
from echelon.nn.head.losses import CrossEntropySettings, TorchCrossEntropy, known_loss, known_settings
from echelon.parallel.own_loss import in_float32

TOKENS, WIDTH, CLASSES = 37, 16, 1030

KNOWN = {
    "function": F.cross_entropy,
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
    "ignoring": partial(F.cross_entropy, ignore_index=7, reduction="mean", weight=None),
    "sum": partial(F.cross_entropy, reduction="sum", label_smoothing=0.3),
    "module": nn.CrossEntropyLoss(),
    "module-ignoring-smoothed": nn.CrossEntropyLoss(ignore_index=3, label_smoothing=1.0),
}


class Own(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input, target) + input.square().mean()


def hooked() -> nn.Module:
    module = nn.CrossEntropyLoss()
    module.register_forward_hook(lambda *_: None)
    return module


def replaced() -> nn.Module:
    module = nn.CrossEntropyLoss()
    module.forward = lambda input, target: F.cross_entropy(input, target) * 2  # type: ignore[method-assign]
    return module


UNKNOWN: list[Callable[..., Any]] = [
    lambda output, target: F.cross_entropy(output, target),
    partial(F.cross_entropy, weight=torch.ones(CLASSES)),
    partial(F.cross_entropy, reduction="none"),
    partial(F.cross_entropy, size_average=False),
    partial(F.cross_entropy, label_smoothing=2.0),
    partial(F.cross_entropy, torch.ones(2, CLASSES)),
    partial(partial, F.cross_entropy),
    partial(nn.CrossEntropyLoss(), reduction="sum"),
    nn.CrossEntropyLoss(weight=torch.ones(CLASSES)),
    nn.CrossEntropyLoss(reduction="none"),
    nn.NLLLoss(),
    Own(),
    hooked(),
    replaced(),
    F.nll_loss,
]


def numbers() -> tuple[Tensor, nn.Parameter, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (TOKENS, CLASSES))
    targets = torch.randint(0, CLASSES, (TOKENS,), generator=generator)
    targets[::5], targets[1::5], targets[2::7] = -100, 3, 7
    bias = nn.Parameter(torch.randn(CLASSES, generator=generator).bfloat16())
    return hidden.bfloat16().requires_grad_(), nn.Parameter((weight / 4).bfloat16()), bias, targets


def without_unknown(loss: Any, targets: Tensor) -> Tensor:
    """torch refuses −100 where another number is ignored."""
    settings = known_settings(loss)
    assert settings is not None
    return targets if settings.ignored == -100 else targets.masked_fill(targets == -100, settings.ignored)


@pytest.mark.parametrize("name", KNOWN)
def test_loss_and_gradients_are_those_of_float64(name: str) -> None:
    loss, (hidden, weight, bias, targets) = KNOWN[name], numbers()
    targets = without_unknown(loss, targets)
    precise = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    expected = loss(F.linear(*precise), targets)
    expected_gradients = torch.autograd.grad(expected, precise)
    with mock.patch.object(_Computed, "forward", side_effect=AssertionError):
        found = in_float32(loss, torch.bfloat16)(defer(hidden, weight, bias), targets)
        gradients = torch.autograd.grad(found * 0.5, [hidden, weight, bias])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2e-4, atol=0)
    for gradient, right in zip(gradients, expected_gradients, strict=True):
        assert float((gradient.double() - right / 2).norm() / right.norm()) < 4e-3


@pytest.mark.parametrize("loss", UNKNOWN)
def test_what_is_not_torch_s_own_gets_logits(loss: Callable[..., Any]) -> None:
    assert known_settings(loss) is None
    assert known_loss(loss, F.mse_loss) is F.mse_loss


def test_settings_are_those_of_the_call() -> None:
    assert known_settings(F.cross_entropy) == CrossEntropySettings(-100, 0.0, True)
    module = nn.CrossEntropyLoss()
    loss = TorchCrossEntropy(module, F.mse_loss)
    assert loss.takes_deferred
    module.label_smoothing = 0.25
    assert known_settings(module) == CrossEntropySettings(-100, 0.25, True)
    module.register_forward_hook(lambda *_: None)
    assert not loss.takes_deferred


def test_a_function_in_place_of_torch_s_is_called() -> None:
    with mock.patch.object(F, "cross_entropy", F.nll_loss):
        assert known_settings(F.cross_entropy) is None
        assert known_settings(nn.CrossEntropyLoss()) is None
    with mock.patch.object(nn.CrossEntropyLoss, "forward", nn.NLLLoss.forward):
        assert known_settings(nn.CrossEntropyLoss()) is None
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert known_settings(nn.CrossEntropyLoss()) is None


def test_the_mean_of_no_samples_is_not_a_number_and_has_no_gradient() -> None:
    hidden, weight, _, targets = numbers()
    found = in_float32(F.cross_entropy, torch.bfloat16)(
        defer(hidden, weight, None), torch.full_like(targets, -100)
    )
    found.backward()
    assert bool(found.isnan())
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("kind", ["probabilities", "more dims"])
def test_other_targets_get_logits(kind: str) -> None:
    hidden, weight, _, targets = numbers()
    output = defer(hidden, weight, None)
    given: Tensor = F.one_hot(targets.clamp(min=0), CLASSES).float()
    if kind == "more dims":
        output, given = defer(hidden[:, None, :] * 1, weight, None), torch.zeros(TOKENS, CLASSES).long()
        given[:] = 0
    found = in_float32(F.cross_entropy, torch.bfloat16)(output, given)
    assert not is_deferred(output)
    expected = F.cross_entropy(F.linear(hidden, weight).view(output.shape).float(), given)
    torch.testing.assert_close(found, expected)


def test_logits_that_were_read_are_taken_as_they_are() -> None:
    hidden, weight, _, targets = numbers()
    output = defer(hidden, weight, None)
    output *= 2
    found = in_float32(F.cross_entropy, torch.bfloat16)(output, targets)
    torch.testing.assert_close(found, F.cross_entropy((2 * F.linear(hidden, weight)).float(), targets))


def train(loss: Any) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    hidden, *_, targets = numbers()
    batch = hidden.detach().float(), targets.clamp(min=0)  # a mean of what is counted is no mean of parts
    with (
        mock.patch.object(_FusedLoss, "forward", wraps=_FusedLoss.forward) as fused,
        parallelize(
            model,
            "precision=bf16 microbatches=2",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=loss,
        ) as engine,
    ):
        losses = [engine.step(batch).loss for _ in range(3)]
        return [*losses, engine.evaluate(batch).loss], fused.call_count


@pytest.mark.parametrize("name", ["function", "smoothed", "module"])
def test_trainings_are_those_of_logits(name: str) -> None:
    losses, fused = train(KNOWN[name])
    assert fused > 0
    with mock.patch.object(deferred, "_LEAST_COLUMNS", 10**9):
        expected, none = train(KNOWN[name])
    assert none == 0
    assert losses == pytest.approx(expected, rel=1e-3)
