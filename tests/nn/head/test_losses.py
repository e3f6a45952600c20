"""A loss that the engine does not know, compiled with the head's matrix; and what is not, and says so."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.nn.head import losses
from echelon.nn.head.deferred import _Computed, defer
from echelon.nn.head.losses import CompiledLoss, LossCompiler
from echelon.nn.losses import Sum
from echelon.nn.sample_gathering import Replicas, gather_samples
from echelon.parallel.own_loss import in_float32
from tests.engine.test_compiling import backend

# torch hides this warning of its compiler by what an error passes by.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

TOKENS, WIDTH, VOCABULARY = 12, 16, 1030
SAYS = "the loss runs uncompiled, of whole logits"


@pytest.fixture(autouse=True)
def eager_backend() -> Iterator[None]:
    torch._dynamo.reset()
    with backend("aot_eager"):
        yield


def numbers() -> tuple[Tensor, nn.Parameter, nn.Parameter, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (TOKENS, VOCABULARY))
    bias = nn.Parameter(torch.randn(VOCABULARY, generator=generator).bfloat16())
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return hidden.bfloat16().requires_grad_(), nn.Parameter((weight / 4).bfloat16()), bias, targets


def compiled(loss: Callable[..., Any], *, frees_weights: bool = False) -> CompiledLoss:
    return CompiledLoss(in_float32(loss, torch.bfloat16), None, frees_weights=frees_weights, warns=True)


def total_of(result: Any) -> Tensor:
    root = result.total if isinstance(result, Sum) else result[0] if isinstance(result, tuple) else result
    assert isinstance(root, Tensor)
    return root


def run(loss: Callable[..., Any], make: Callable[..., Tensor], wrap: Callable[[Any], Any]) -> list[Tensor]:
    """The loss, and the gradients of hidden states (used twice), weight and bias."""
    hidden, weight, bias, targets = numbers()
    rows = hidden * 1
    total = total_of(loss(wrap(make(rows, weight, bias)), targets))
    ((total * 0.5) + rows.float().square().sum()).backward()
    assert weight.grad is not None
    assert bias.grad is not None
    assert hidden.grad is not None
    return [total.detach(), hidden.grad, weight.grad, bias.grad]


def plain(output: Any) -> Any:
    return output


def in_a_model_output(output: Any) -> Any:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return CausalLMOutputWithPast(logits=output)


def check(loss: Callable[..., Any], wrap: Callable[[Any], Any] = plain, *, is_compiled: bool = True) -> None:
    with patch.object(_Computed, "forward", wraps=_Computed.forward) as computed:
        found = run(compiled(loss), defer, wrap)
    assert computed.call_count == (0 if is_compiled else 1)
    for each, right in zip(found, run(in_float32(loss, torch.bfloat16), F.linear, wrap), strict=True):
        torch.testing.assert_close(each, right, rtol=1e-2, atol=1e-4)


def smoothed(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets, label_smoothing=0.1)


def with_z_loss(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets) + 1e-2 * output.logsumexp(-1).square().mean()


def capped(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    logits = 3 * torch.tanh(output / 3)
    return F.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def summed(output: Tensor, targets: Tensor) -> Sum:
    return Sum(F.cross_entropy(output, targets, reduction="sum"))


def written_to(output: Tensor, targets: Tensor) -> Tensor:
    output[:, 7] = -1.0
    return F.cross_entropy(output, targets)


def stopped(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets) * output.detach().abs().mean() + output[:, :5].sum()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient * 2


def of_a_function(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(Doubled.apply(output), targets)  # type: ignore[no-untyped-call]


LOSSES = [smoothed, with_z_loss, capped, summed, written_to, stopped, of_a_function]


@pytest.mark.quick_cases(2)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # of torch, by its compiler
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_and_gradients_are_those_of_logits(loss: Callable[..., Any]) -> None:
    check(loss)


def test_logits_in_the_output_of_a_model_of_transformers() -> None:
    check(lambda output, targets: smoothed(output.logits, targets), in_a_model_output)


def printed(output: Tensor, targets: Tensor) -> Tensor:
    print(float(output.detach().sum()))
    return F.cross_entropy(output, targets)


def penalised(output: Tensor, targets: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(output.logsumexp(-1).sum(), output, create_graph=True)
    return F.cross_entropy(output, targets) + gradient.square().sum()


def retained(output: Tensor, targets: Tensor) -> Tensor:
    output.retain_grad()
    return F.cross_entropy(output, targets)


def gathered(output: Tensor, targets: Tensor) -> Tensor:
    """Ranks send messages, which a graph would have once."""
    assert gather_samples(targets).shape == targets.shape
    return F.cross_entropy(gather_samples(output), targets)


@pytest.mark.parametrize("loss", [printed, penalised, retained, gathered])
def test_what_cannot_be_traced_is_called_as_it_is_and_said_once(loss: Callable[..., Any]) -> None:
    with Replicas().gathering(), pytest.warns(UserWarning, match=SAYS) as said:
        check(loss, is_compiled=False)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert "reads weights" not in str(said[0].message)  # as a part of its graph would


def test_hooks_of_logits_change_their_gradient() -> None:
    """Some versions of torch trace them, and others do not."""

    def hooked(output: Tensor, targets: Tensor) -> Tensor:
        output.register_hook(lambda gradient: gradient * 3)
        return F.cross_entropy(output, targets)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(compiled(hooked), defer, plain)
        expected = run(in_float32(hooked, torch.bfloat16), F.linear, plain)
    for each, right in zip(found, expected, strict=True):
        torch.testing.assert_close(each, right, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    "draw",
    [torch.randn_like, lambda x: F.dropout(x, 0.5), lambda x: x.clone().bernoulli_(0.5), F.gumbel_softmax],
)
def test_a_loss_that_draws_is_not_compiled(draw: Callable[[Tensor], Tensor]) -> None:
    def noisy(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output + draw(output), targets)

    loss, (hidden, weight, bias, targets) = compiled(noisy), numbers()
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="draws random numbers"):
        found = loss(defer(hidden, weight, bias), targets)
    torch.manual_seed(0)
    expected = in_float32(noisy, torch.bfloat16)(F.linear(hidden, weight, bias), targets)
    torch.testing.assert_close(found, expected)
    assert not loss.takes_deferred


def test_weights_that_a_loss_reads_have_their_gradient() -> None:
    temperature = torch.tensor(2.0, requires_grad=True)
    hidden, weight, bias, targets = numbers()

    def scaled(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output / temperature, targets)

    with pytest.warns(UserWarning, match="it reads weights"):
        compiled(scaled)(defer(hidden, weight, bias), targets).backward()
    found, temperature.grad = temperature.grad, None
    scaled(F.linear(hidden, weight, bias).float(), targets).backward()
    torch.testing.assert_close(found, temperature.grad)


@pytest.mark.parametrize("frees_weights", [True, False])
def test_tensors_that_a_loss_has(frees_weights: bool) -> None:
    """What is read may be a frozen weight, which zero=3 has freed."""
    hidden, weight, bias, targets = numbers()
    of_classes = torch.rand(VOCABULARY)
    loss = compiled(
        lambda output, y: F.cross_entropy(output, y, weight=of_classes), frees_weights=frees_weights
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = loss(defer(hidden, weight, bias), targets)
    assert any("it reads weights" in str(each.message) for each in said) == frees_weights
    torch.testing.assert_close(
        found,
        F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, weight=of_classes),
        rtol=1e-3,
        atol=0,
    )


def test_a_mistake_of_the_loss_is_its_own() -> None:
    hidden, weight, bias, targets = numbers()
    loss = compiled(lambda output, y: F.cross_entropy(output[:3], y))
    with pytest.raises(ValueError, match="batch_size"):
        loss(defer(hidden, weight, bias), targets)
    assert loss.takes_deferred


class Annealed:
    def __init__(self) -> None:
        self.step = 0

    def __call__(self, output: Tensor, targets: Tensor) -> Tensor:
        self.step += 1
        return F.cross_entropy(output, targets, label_smoothing=0.5 / self.step)


def test_a_loss_that_changes_is_compiled_again_and_after_some_times_no_more() -> None:
    hidden, weight, bias, targets = numbers()
    loss, plain_loss, limits = (
        compiled(Annealed()),
        in_float32(Annealed(), torch.bfloat16),
        {"recompile_limit": 2},
    )
    with patch.object(losses, "_LIMITS", limits), pytest.warns(UserWarning, match=SAYS):
        found = [loss(defer(hidden, weight, bias), targets).detach() for _ in range(5)]
    expected = [plain_loss(F.linear(hidden, weight, bias), targets).detach() for _ in range(5)]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-3, atol=0)
    assert not loss.takes_deferred


def test_another_walk_of_a_graph_that_is_retained() -> None:
    hidden, weight, bias, targets = numbers()
    total = compiled(smoothed)(defer(hidden, weight, bias), targets)
    first = torch.autograd.grad(total, [hidden, weight, bias], retain_graph=True)
    for each, right in zip(torch.autograd.grad(total, [hidden, weight, bias]), first, strict=True):
        assert torch.equal(each, right)


def test_a_frozen_head_and_no_gradients() -> None:
    hidden, weight, _, targets = numbers()
    weight.requires_grad_(False)
    loss = compiled(smoothed)
    loss(defer(hidden * 1, weight, None), targets).backward()
    assert weight.grad is None
    expected = smoothed(F.linear(hidden, weight).float(), targets)
    (right,) = torch.autograd.grad(expected, hidden)
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, right, rtol=1e-2, atol=1e-4)
    with torch.no_grad():
        found = loss(defer(hidden, weight, None), targets)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), rtol=1e-3, atol=0)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_logits_that_were_read_and_what_watches_operations() -> None:
    hidden, weight, bias, targets = numbers()
    loss = compiled(smoothed)
    logits = defer(hidden, weight, bias)
    logits *= 2
    expected = smoothed(2 * F.linear(hidden, weight, bias).float(), targets)
    torch.testing.assert_close(loss(logits, targets), expected, rtol=1e-2, atol=0)
    with Watching():
        loss(defer(hidden, weight, bias), targets)
    assert loss.takes_deferred


def test_equal_compilers_share_their_code() -> None:
    assert LossCompiler(None, frees_weights=True) == LossCompiler(None, frees_weights=True)
    assert hash(LossCompiler({}, frees_weights=True)) == hash(LossCompiler(None, frees_weights=False))
