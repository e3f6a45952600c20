"""A step in parts: several batches, each with a loss of its own, add up to one update as on one device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

import echelon
from echelon import UserError
from echelon.engine.engine import Engine
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy

Warm = Callable[[int], Ranks]
VOCABULARY = 32


def model() -> nn.Module:
    torch.manual_seed(0)
    config = ModelConfig("gpt", layers=4, width=16, heads=4, vocab=VOCABULARY, sequence=8)
    return build(config).double()


def batches(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (12, 9), generator=generator)
    tokens[3, 4:] = -100  # of one sample: what losses count is not what batches hold
    pairs = [(part[:, :-1].clamp(min=0), part[:, 1:]) for part in tokens.split([8, 4])]
    return [(inputs, targets.contiguous()) for inputs, targets in pairs]


def mean_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Another kind of loss than the engine's own: a mean over samples."""
    rows = F.cross_entropy(output.transpose(1, 2), targets.clamp(min=0), reduction="none")
    return 3 * rows.mean(1).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    plain_model, losses = model(), []
    optimizer = sgd(plain_model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        (a, b), (c, d) = batches(step)
        total, count = cross_entropy(plain_model(a), b)
        first, second = total / count, mean_loss(plain_model(c), d)
        first.backward()
        second.backward()
        optimizer.step()
        losses += [first.item(), second.item(), (first + second).item()]
    return losses, plain_model.state_dict()


def in_parts(plan: str, *, last: bool) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    with echelon.parallelize(model(), f"{plan} precision=fp64", optimizer=sgd, loss=cross_entropy) as engine:
        for step in range(3):
            one, other = map(engine.local, batches(step))
            first = engine.forward_backward(one)
            second = engine.forward_backward(other, mean_loss, last=last)
            losses += [first.loss, second.loss, engine.update().loss]
        return losses, engine.full_state_dict()


def check_parts(plan: str, last: bool) -> None:
    losses, weights = in_parts(plan, last=last)
    expected, plain_weights = plain()
    assert losses == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(weights, plain_weights, rtol=0, atol=1e-9)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", ["data=1", "microbatches=2", "recompute=full", "offload=optimizer"])
def test_on_one_rank(plan: str) -> None:
    check_parts(plan, False)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        "data=2",
        "data=2 zero=1",
        "data=2 zero=2 microbatches=2",
        "data=2 zero=3",
        "data=2 zero=1 offload=optimizer",
        "tensor=2",
        "context=2",
        "pipeline=2 microbatches=4",
        "pipeline=2 microbatches=4 schedule=zero-bubble",
        "pipeline=2 microbatches=4 schedule=interleaved chunks=2",
    ],
)
def test_over_ranks(warm_ranks: Warm, plan: str, last: bool) -> None:
    warm_ranks(2).run(check_parts, plan, last)


def test_over_four_ranks(warm_ranks: Warm) -> None:
    warm_ranks(4).run(check_parts, "data=2 pipeline=2 microbatches=2 zero=1", False)


def drawn(plan: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    dropping = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)).double()
    with echelon.parallelize(
        dropping, f"{plan} precision=fp64", optimizer=sgd, loss=F.cross_entropy
    ) as engine:
        generator = torch.Generator().manual_seed(0)
        inputs, targets = (
            torch.randn(4, 6, generator=generator).double(),
            torch.randint(5, (4,), generator=generator),
        )
        first = engine.forward_backward(engine.local((inputs, targets)))
        second = engine.forward_backward(engine.local((inputs, targets)))
        engine.update()
        assert first.loss != second.loss, "each batch of an update has masks of its own"
        return engine.full_state_dict()


def masks(plan: str) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in drawn(plan).values()]


def test_dropout_is_that_of_one_device(warm_ranks: Warm) -> None:
    (alone,) = warm_ranks(1).run(masks, "data=1")
    for of_rank in warm_ranks(2).run(masks, "data=2"):
        for row, expected in zip(of_rank, alone, strict=True):
            assert row == pytest.approx(expected, abs=1e-12)


def normed(plan: str | None) -> dict[str, Tensor]:
    """Each batch iterates the largest singular value once, as each forward pass of one device does."""
    torch.manual_seed(0)
    layers = nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 5)).double()
    generator = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(8, 6, generator=generator).double(), torch.randint(5, (8,), generator=generator))
        for _ in range(4)
    ]
    if plan is None:
        optimizer = sgd(layers.parameters())
        for first, second in (pairs[:2], pairs[2:]):
            for inputs, targets in (first, second):
                F.cross_entropy(layers(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        return layers.state_dict()
    with echelon.parallelize(layers, f"{plan} precision=fp64", optimizer=sgd, loss=F.cross_entropy) as engine:
        for first, second in (pairs[:2], pairs[2:]):
            engine.forward_backward(engine.local(first))
            engine.forward_backward(engine.local(second))
            engine.update()
        return engine.full_state_dict()


def test_spectral_norms_iterate_once_for_each_batch(warm_ranks: Warm) -> None:
    expected = normed(None)
    for plan in ("data=2", "data=2 microbatches=2"):
        for weights in warm_ranks(2).run(normed, plan):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


# Refusals.


def engine_of(plan: str = "data=1", **options: Any) -> Engine:
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    options = {"loss": F.cross_entropy, "optimizer": sgd} | options
    return echelon.parallelize(small, f"{plan} precision=fp64", **options)


def small_batch() -> tuple[Tensor, Tensor]:
    return torch.ones(4, 6).double(), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize("plan", ["update=backward", "pipeline=1 schedule=1f1b update=last-backward"])
def test_updates_within_passes_have_no_parts(plan: str) -> None:
    with engine_of(plan) as engine, pytest.raises(UserError, match="weights are updated while passes run"):
        engine.forward_backward(small_batch())


def test_an_update_needs_gradients() -> None:
    with engine_of() as engine, pytest.raises(UserError, match="no gradients wait for it"):
        engine.update()


@pytest.mark.parametrize("call", ["step", "synchronize", "save"])
def test_gradients_that_wait_are_not_lost(call: str, tmp_path: Any) -> None:
    with engine_of() as engine:
        engine.forward_backward(small_batch())
        arguments = {"step": [small_batch()], "synchronize": [], "save": [tmp_path / "saved"]}[call]
        with pytest.raises(UserError, match=r"engine.update\(\) first, or engine.zero_grad"):
            getattr(engine, call)(*arguments)
        engine.update()


def test_gradients_that_are_dropped_change_nothing() -> None:
    with engine_of() as engine, engine_of() as other:
        engine.forward_backward(small_batch())
        engine.zero_grad()
        engine.forward_backward(small_batch())
        other.forward_backward(small_batch())
        assert engine.update().loss == other.update().loss
        torch.testing.assert_close(engine.full_state_dict(), other.full_state_dict(), rtol=0, atol=0)


def counts_half(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A count that no look at the targets tells."""
    counted = targets % 2 == 0
    rows = F.cross_entropy(output, targets, reduction="none")
    return (rows * counted).sum(), counted.sum()


def test_counts_that_no_batch_tells_are_refused_before_the_update() -> None:
    inputs = torch.ones(4, 6).double()
    with engine_of("microbatches=2", loss=counts_half) as engine:
        before = engine.full_state_dict()
        engine.forward_backward((inputs, torch.tensor([0, 1, 2, 3])))
        engine.forward_backward((inputs, torch.tensor([0, 1, 1, 3])))
        with pytest.raises(UserError, match="what they counted was not known"):
            engine.update()
        torch.testing.assert_close(engine.full_state_dict(), before, rtol=0, atol=0)
        engine.step((inputs, torch.tensor([0, 1, 2, 3])))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", ["data=4 zero=3 shard=2", "data=4 zero=2 shard=2 microbatches=2"])
def test_copies_of_shards_sum_their_parts(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(4).run(check_parts, plan, False)


def joined(first: Any, second: Any) -> dict[str, Tensor]:
    """Two batches with these losses, under tensor=2."""
    with echelon.parallelize(model(), "tensor=2 precision=fp64", optimizer=sgd, loss=first) as engine:
        one, other = batches(0)
        engine.forward_backward(one)
        engine.forward_backward(other, second)
        engine.update()
        return engine.full_state_dict()


def check_joined() -> None:
    """A loss of parts of the vocabulary is given whole logits where the engine's own loss needs them."""
    plain_model = model()
    for batch, loss in zip(batches(0), (mean_loss, cross_entropy), strict=True):
        result = loss(plain_model(batch[0]), batch[1])
        (result[0] / result[1] if isinstance(result, tuple) else result).backward()
    sgd(plain_model.parameters()).step()
    torch.testing.assert_close(joined(mean_loss, cross_entropy), plain_model.state_dict(), rtol=0, atol=1e-9)


def test_losses_of_parts_and_of_whole_logits_meet(warm_ranks: Warm) -> None:
    warm_ranks(2).run(check_joined)


def test_with_a_delay_the_newest_weights_wait() -> None:
    with engine_of("offload=optimizer delay=1") as engine:
        engine.forward_backward(small_batch())
        with pytest.raises(UserError, match="delay=1: the newest weights"):
            engine.evaluate(small_batch())
        engine.update()


def test_forward_passes_without_gradients_to_wait_for_are_forgotten() -> None:
    with engine_of() as engine:
        engine(small_batch()[0])
        engine.step(small_batch())
        engine.step(small_batch())
        with pytest.raises(UserError, match="no gradients wait"):
            engine.update()
