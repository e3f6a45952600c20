"""A GAN, actor and critic, and distillation, as people write them, are equal to plain torch: two engines, and
several losses before an update. Each loop is written once, for engines and for plain models."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon import UserError
from echelon.launching import Ranks

Warm = Callable[[int], Ranks]
STEPS = 3
TABLE = {"0": "column", "2": "row", "3": "replicated", "4": "replicated"}


def network(inputs: int, outputs: int, norm: bool = False) -> nn.Module:
    behind = nn.BatchNorm1d(16) if norm else nn.Tanh()
    layers = nn.Linear(inputs, 32), nn.Tanh(), nn.Linear(32, 16), behind, nn.Linear(16, outputs)
    return nn.Sequential(*layers).double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Plain:
    """A model of plain torch, in the words of an engine."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, sgd(model.parameters())

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        return output

    def backward(self, loss: Tensor, *others: "Plain", retain_graph: bool = False) -> None:
        own = [p for each in (self, *others) for p in each.model.parameters()]
        loss.backward(inputs=own, retain_graph=retain_graph)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def local(self, batch: Any) -> Any:
        return batch

    def full_state_dict(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def data(step: int, *widths: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(step)
    return [torch.randn(8, width, generator=source).double() for width in widths]


def judge(output: Tensor, *, real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, torch.full_like(output, float(real)))


def gan(generator: Any, discriminator: Any) -> None:
    for step in range(STEPS):
        noise, real = map(generator.local, data(step, 4, 8))
        discriminator.backward(judge(discriminator(real), real=True))
        fake = generator(noise)
        discriminator.backward(judge(discriminator(fake.detach()), real=False))
        discriminator.update()
        generator.backward(judge(discriminator(fake), real=True))
        generator.update()


def actor_critic(actor: Any, critic: Any) -> None:
    """Two losses of the actor's one forward pass, and several epochs of one batch of observations."""
    for step in range(STEPS):
        seen, rewards, draws = map(actor.local, data(step, 4, 1, 8))
        for _ in range(2):
            log_probabilities, values = F.log_softmax(actor(seen), -1), critic(seen)
            chosen = log_probabilities.gather(1, draws.argmax(1, keepdim=True))
            critic.backward(F.smooth_l1_loss(values, rewards))
            actor.backward(-(chosen * (rewards - values.detach())).mean(), retain_graph=True)
            actor.backward(0.1 * (log_probabilities.exp() * log_probabilities).sum(1).mean())
            critic.update()
            actor.update()


def distillation(teacher: Any, student: Any) -> None:
    """The teacher learns too, in every other step; its outputs are targets that have no gradient."""
    for step in range(STEPS):
        inputs, noise = map(student.local, data(step, 4, 8))
        targets = noise.argmax(1)
        with torch.no_grad():
            soft = F.softmax(teacher(inputs) / 2, -1)
        output = student(inputs)
        loss = F.kl_div(F.log_softmax(output / 2, -1), soft, reduction="batchmean")
        student.backward(loss, retain_graph=True)
        student.backward(F.cross_entropy(output, targets))
        student.backward(F.cross_entropy(student(inputs + 1), targets))
        student.update()
        if step % 2 == 0:
            teacher.backward(F.cross_entropy(teacher(inputs), targets))
            teacher.update()


Loop = Callable[[Any, Any], None]
# Each loop with the networks that it trains.
LOOPS: dict[str, tuple[Loop, Callable[[], tuple[nn.Module, nn.Module]]]] = {
    "gan": (gan, lambda: (network(4, 8, norm=True), network(8, 1))),
    "actor-critic": (actor_critic, lambda: (network(4, 8), network(4, 1))),
    "distillation": (distillation, lambda: (network(4, 8, norm=True), network(4, 8))),
}


def train(name: str, wrap: Callable[[nn.Module], Any]) -> tuple[list[Any], dict[str, Tensor]]:
    loop, make = LOOPS[name]
    torch.manual_seed(0)
    both = [wrap(each) for each in make()]
    loop(*both)
    return both, {f"{i}.{k}": v for i, each in enumerate(both) for k, v in each.full_state_dict().items()}


def check(name: str, plans: Sequence[str]) -> None:
    _, expected = train(name, Plain)
    for plan in plans:
        check_plan(name, plan, expected)


def check_plan(name: str, plan: str, expected: dict[str, Tensor]) -> None:
    table = {"tensor_table": TABLE} if "tensor=" in plan else {}
    engines, weights = train(
        name, lambda each: echelon.parallelize(each, f"{plan} precision=fp64", optimizer=sgd, **table)
    )
    torch.testing.assert_close(
        weights, expected, rtol=0, atol=1e-9, msg=lambda text: f"{name} with '{plan}': {text}"
    )
    for engine in engines:
        engine.close()


MEMORY = ["recompute=full", "offload=optimizer", "offload=parameters", "offload=activations"]
OVER_RANKS = ["data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "tensor=2"]
BOTH = [f"{ranks} {memory}" for ranks in (OVER_RANKS[0], *OVER_RANKS[2:]) for memory in MEMORY]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LOOPS)
def test_on_one_rank(name: str) -> None:
    check(name, ["data=1", *MEMORY, "zero=3 offload=optimizer,parameters,activations recompute=full"])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LOOPS)
def test_over_ranks(warm_ranks: Warm, name: str) -> None:
    warm_ranks(2).run(check, name, [*OVER_RANKS, "data=2 zero=3 recompute=full offload=activations"])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_and_with_less_memory(warm_ranks: Warm, name: str) -> None:
    warm_ranks(2).run(check, name, BOTH)
    warm_ranks(4).run(check, name, ["data=4 zero=3 shard=2", "data=2 tensor=2 zero=3", "data=4 zero=1"])


def refuse(name: str) -> None:
    with pytest.raises(UserError, match=r"engine\(x\) with plan .*pipeline=2.*engine.forward_backward"):
        train(
            name,
            lambda each: echelon.parallelize(
                each, "pipeline=2 microbatches=2 precision=fp64", optimizer=sgd, loss=F.mse_loss
            ),
        )


@pytest.mark.parametrize("name", LOOPS)
def test_stages_refuse_it(warm_ranks: Warm, name: str) -> None:
    warm_ranks(2).run(refuse, name)
