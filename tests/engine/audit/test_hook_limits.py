"""Hooks on weights: what is not linear is refused where the batch is cut, also above the gradients of now."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon import Plan, UserError
from echelon.engine.audit.hook_limits import refuse_limits, watched_hooks
from tests.cases import mean_loss, sgd, vectors


def add_decay(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.add_(p.detach(), alpha=0.1)


def clip_large(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.data.clamp_(-100, 100)


def read(p: Tensor) -> None:
    assert p.grad is not None
    float(p.grad.sum())


def replace(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad * 2


Register = Callable[[nn.Parameter], object]


@pytest.mark.parametrize(
    "register",
    [
        lambda p: p.register_hook(lambda g: g.clamp(-0.01, 0.01)),
        lambda p: p.register_hook(lambda g: g.clamp(-100, 100)),  # not yet
        lambda p: p.register_hook(lambda g: g / (g.norm() + 1)),
        lambda p: p.register_hook(lambda g: g + 1e-3),
        lambda p: p.register_hook(lambda g: torch.where(g.abs() >= g.abs().median(), g, 0.0)),
        lambda p: p.register_post_accumulate_grad_hook(add_decay),
        lambda p: p.register_post_accumulate_grad_hook(clip_large),
        lambda p: p.register_post_accumulate_grad_hook(replace),
    ],
)
def test_hooks_on_weights_that_are_not_linear_are_refused_where_the_batch_is_cut(register: Register) -> None:
    """They saw parts of the gradient, and one device's sees all of it."""
    for plan in ("data=1", "microbatches=2"):
        model = nn.Linear(6, 5)
        register(model.weight)
        engine = echelon.parallelize(model, plan, optimizer=sgd, loss=mean_loss)
        if plan == "data=1":
            engine.step(vectors(0))
        else:
            with pytest.raises(
                UserError, match=r"on weight sees .* use data=1, microbatches=1|differ from weight"
            ):
                engine.step(vectors(0))
            assert engine.steps == 0
        engine.close()


def test_hooks_that_only_read_or_are_linear_stay() -> None:
    model, seen = nn.Linear(6, 5), list[float]()
    mask = torch.arange(30.0).view(5, 6).fmod(2)
    model.weight.register_hook(lambda g: seen.append(float(g.abs().max())))
    model.bias.register_hook(lambda g: 3 * g - g.mean())
    model.weight.register_hook(lambda g: g * mask)
    model.bias.register_post_accumulate_grad_hook(read)
    hooks = [dict(p._backward_hooks or {}) for p in model.parameters()]
    engine = echelon.parallelize(model, "microbatches=2", optimizer=sgd, loss=mean_loss)
    engine.step(vectors(0))
    assert str(engine.audit[1]) == "gradients: held"
    assert [dict(p._backward_hooks or {}) for p in model.parameters()] == hooks, (
        "nothing is left of the watch"
    )
    assert max(seen) < 100, "a hook that only reads is given real gradients alone"
    engine.close()


def update_by_gradient(p: Tensor) -> None:
    """A user's own update in the backward pass: the gradient is used up."""
    assert p.grad is not None
    p.grad = None


def guard(gradient: Tensor) -> Tensor:
    assert float(gradient.abs().max()) < 1000
    return gradient * 2


def test_hooks_that_use_gradients_up_or_refuse_large_ones_have_no_limit() -> None:
    model = nn.Linear(6, 5)
    model.weight.register_hook(guard)
    model.bias.register_post_accumulate_grad_hook(update_by_gradient)
    with watched_hooks(model.named_parameters()) as found:
        model(torch.ones(2, 6)).sum().backward()
    assert found == {}
    refuse_limits(found, Plan())
