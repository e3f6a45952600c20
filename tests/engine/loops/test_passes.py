"""engine(x), engine.backward(loss) and engine.update(): the loops that people write, under plans without
stages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon import UserError
from echelon.engine.engine import Engine
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.losses import Sum

Warm = Callable[[int], Ranks]
STEPS = 3

# A generator, and the discriminator that judges it: a graph leads through two engines.


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8)).double()
    discriminator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 1)).double()
    return generator, discriminator


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def data(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=source).double(), torch.randn(8, 4, generator=source).double()


def judge(output: Tensor, *, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, float(real)))


def plain_gan() -> dict[str, Tensor]:
    generator, discriminator = networks()
    of_g, of_d = sgd(generator.parameters()), sgd(discriminator.parameters())
    for step in range(STEPS):
        real, noise = data(step)
        of_d.zero_grad()
        judge(discriminator(real), real=True).backward()
        fake = generator(noise)
        judge(discriminator(fake.detach()), real=False).backward()
        of_d.step()
        of_g.zero_grad()
        judge(discriminator(fake), real=True).backward()
        of_g.step()
    return generator.state_dict() | {f"d.{name}": each for name, each in discriminator.state_dict().items()}


def gan(plan: str) -> dict[str, Tensor]:
    engines = [echelon.parallelize(each, f"{plan} precision=fp64", optimizer=sgd) for each in networks()]
    generator, discriminator = engines
    for step in range(STEPS):
        real, noise = map(generator.local, data(step))
        discriminator.backward(judge(discriminator(real), real=True))
        fake = generator(noise)
        discriminator.backward(judge(discriminator(fake.detach()), real=False))
        discriminator.update()
        generator.backward(judge(discriminator(fake), real=True))
        generator.update()
    weights = generator.full_state_dict()
    weights |= {f"d.{name}": each for name, each in discriminator.full_state_dict().items()}
    for engine in engines:
        engine.close()
    return weights


def check_gan(plan: str) -> None:
    torch.testing.assert_close(gan(plan), plain_gan(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("plan", ["data=1", "offload=optimizer", "recompute=full", "offload=activations"])
def test_two_networks_on_one_rank(plan: str) -> None:
    check_gan(plan)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "plan", ["data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "data=2 zero=3 recompute=full"]
)
def test_two_networks_over_ranks(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(2).run(check_gan, plan)


# One loss of two engines, and replicas with different numbers of samples.


def parts_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    inputs = torch.randn(5, 6, generator=source).double()
    targets = torch.randint(5, (5,), generator=source)
    return (inputs[:3], targets[:3]) if rank == 0 else (inputs[3:], targets[3:])


def halves() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh()).double(), nn.Linear(8, 5).double()


def plain_halves() -> dict[str, Tensor]:
    lower, upper = halves()
    optimizer = sgd([*lower.parameters(), *upper.parameters()])
    for step in range(STEPS):
        both = [parts_of(step, rank) for rank in (0, 1)]
        inputs, targets = (torch.cat(each) for each in zip(*both, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(upper(lower(inputs)), targets).backward()
        optimizer.step()
    return lower.state_dict() | {f"u.{name}": each for name, each in upper.state_dict().items()}


def check_halves(plan: str) -> None:
    lower, upper = (echelon.parallelize(each, f"{plan} precision=fp64", optimizer=sgd) for each in halves())
    for step in range(STEPS):
        inputs, targets = parts_of(step, lower.replica)
        lower.backward(F.cross_entropy(upper(lower(inputs)), targets), upper)
        upper.update()
        lower.update()
    weights = lower.full_state_dict()
    weights |= {f"u.{name}": each for name, each in upper.full_state_dict().items()}
    lower.close()
    upper.close()
    torch.testing.assert_close(weights, plain_halves(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=3"])
def test_one_loss_of_two_engines_and_uneven_replicas(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(2).run(check_halves, plan)


def scaled_halves(lower_scale: float, upper_scale: float) -> dict[str, Tensor]:
    lower, upper = (
        echelon.parallelize(each.float(), "precision=fp16", optimizer=sgd, loss_scale=scale)
        for each, scale in zip(halves(), (lower_scale, upper_scale), strict=True)
    )
    for step in range(STEPS):
        inputs, targets = parts_of(step, 0)
        if step:
            upper.backward(upper(inputs.new_ones(2, 8)).float().square().mean())
        lower.backward(F.cross_entropy(upper(lower(inputs.float())).float(), targets), upper)
        upper.backward(upper(inputs.new_ones(2, 8)).float().square().mean())
        assert upper.update().grad_norm < 10
        lower.update()
    weights = lower.full_state_dict() | {f"u.{name}": each for name, each in upper.full_state_dict().items()}
    lower.close()
    upper.close()
    return weights


def test_one_loss_of_two_engines_with_other_loss_scales() -> None:
    torch.testing.assert_close(scaled_halves(8.0, 1024.0), scaled_halves(64.0, 64.0), rtol=0, atol=1e-3)


# A sum, and refusals.


def engine_of(plan: str = "data=1", **options: Any) -> Engine:
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    return echelon.parallelize(small, f"{plan} precision=fp64", optimizer=sgd, **options)


def check_sum(plan: str) -> None:
    with engine_of(plan) as engine, engine_of("data=1") as mean:
        inputs, targets = engine.local((torch.ones(4, 6).double(), torch.tensor([0, 1, 2, 3])))
        total = F.cross_entropy(engine(inputs), targets, reduction="sum")
        engine.backward(Sum(total))
        loss = engine.update().loss
        whole = F.cross_entropy(mean(torch.ones(4, 6).double()), torch.tensor([0, 1, 2, 3])) * 4
        mean.backward(whole)
        assert loss == pytest.approx(mean.update().loss, rel=1e-12)
        torch.testing.assert_close(engine.full_state_dict(), mean.full_state_dict(), rtol=0, atol=1e-9)


def test_a_sum_is_added_up_over_replicas(warm_ranks: Warm) -> None:
    check_sum("data=1")
    warm_ranks(2).run(check_sum_of_two)


def check_sum_of_two() -> None:
    with engine_of("data=2") as engine:
        inputs, targets = engine.local((torch.ones(4, 6).double(), torch.tensor([0, 1, 2, 3])))
        total = F.cross_entropy(engine(inputs), targets, reduction="sum")
        engine.backward(Sum(total))
        summed = torch.tensor([engine.update().loss])
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        expected = F.cross_entropy(
            plain(torch.ones(4, 6).double()), torch.tensor([0, 1, 2, 3]), reduction="sum"
        )
        torch.testing.assert_close(summed.double(), expected.detach().view(1), rtol=1e-6, atol=0)
        expected.backward()
        sgd(plain.parameters()).step()
        torch.testing.assert_close(engine.full_state_dict(), plain.state_dict(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=2", "context=2"])
def test_a_model_in_parts_cannot_be_called(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(2).run(check_refused, plan)


def check_refused(plan: str) -> None:
    config = ModelConfig("gpt", layers=2, width=8, heads=2, vocab=8, sequence=4)
    gpt = build(config)
    refused = pytest.raises(UserError, match=r"engine\(x\) with plan .* call engine.forward_backward")
    with echelon.parallelize(gpt, plan, optimizer=sgd, loss=cross_entropy) as engine, refused:
        engine(torch.zeros(2, 4, dtype=torch.int64))


def test_what_is_no_loss_of_this_engine_is_refused() -> None:
    with engine_of() as engine:
        with pytest.raises(UserError, match="was not called since its last update"):
            engine.backward(engine.module(torch.ones(2, 6).double()).sum())
        output = engine(torch.ones(2, 6).double())
        with pytest.raises(UserError, match=r"of shape \(2, 5\): must be a tensor of one number"):
            engine.backward(output)
        with pytest.raises(UserError, match="does not depend on the parameters"):
            engine.backward(output.sum().detach())


def test_without_gradients_it_is_a_plain_call() -> None:
    with engine_of() as engine:
        with torch.no_grad():
            output = engine(torch.ones(2, 6).double())
        torch.testing.assert_close(output, engine.module(torch.ones(2, 6).double()).detach())
        engine.synchronize()


# Graphs of before an update, and losses of another engine. torch saw the first by the versions of weights,
# but not where these are gathered: gradients were of old activations and new weights, in silence.


def check_old_graphs(plan: str) -> None:
    inputs, targets = torch.ones(2, 6).double(), torch.tensor([0, 1])
    with engine_of(plan) as lower, engine_of(plan) as upper:

        def loss() -> Tensor:
            between = F.pad(lower(inputs), (0, 1))
            return F.cross_entropy(upper(between), targets)

        old = loss()
        upper.backward(loss())
        upper.update()
        with pytest.raises(UserError, match=r"came before the last update of this engine.*docs/loops.md"):
            lower.backward(old)
        lower.backward(loss())
        lower.update()
        own = F.cross_entropy(lower(inputs), targets)
        lower.backward(own, retain_graph=True)
        lower.update()
        lower(inputs)
        with pytest.raises(UserError, match="came before the last update of this engine"):
            lower.backward(own)


@pytest.mark.parametrize("plan", ["data=1", "offload=parameters"])
def test_a_graph_of_before_an_update_is_refused(plan: str) -> None:
    check_old_graphs(plan)


@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=2", "data=2 zero=3"])
def test_a_graph_of_before_an_update_is_refused_over_ranks(warm_ranks: Warm, plan: str) -> None:
    warm_ranks(2).run(check_old_graphs, plan)


def test_a_loss_of_other_models_is_refused() -> None:
    inputs, plain = torch.ones(2, 6).double(), nn.Linear(6, 5).double()
    with engine_of() as engine, engine_of() as other:
        for model in (other, plain):
            engine(inputs)
            with pytest.raises(UserError, match="does not depend on what this engine has returned"):
                engine.backward(model(inputs).sum())
        engine.backward(engine(inputs).sum() + plain(inputs).sum())
        engine.update()


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), "4", torch.ones(2)])
def test_a_count_is_a_number_of_samples(count: Any) -> None:
    with engine_of() as engine:
        loss = engine(torch.ones(2, 6).double()).sum()
        with pytest.raises(UserError, match=r"engine.backward: count must be"):
            engine.backward(loss, count=count)
        with pytest.raises(UserError, match=r"engine.average: count must be"):
            engine.average(1.0, count)
        engine.backward(loss, count=torch.tensor(2))  # type: ignore[arg-type]
        engine.update()
