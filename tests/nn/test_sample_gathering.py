"""`echelon.gather_samples`: losses over the whole batch are those of one device, whatever the replicas."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon import gather_samples
from echelon.engine import Engine, parallelize
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.verify import Case, assert_equal
from tests.cases import adamw, eleven_vectors, mean_loss, sgd

Output = tuple[Tensor, Tensor, Tensor]


class Towers(nn.Module):
    """Two encoders into one space, and a learned temperature, as CLIP has them."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, both: Tensor) -> Output:
        images, texts = both.split([6, 4], 1)
        image, text = F.normalize(self.image(images)), F.normalize(self.text(texts))
        return image, text, self.scale.exp().expand(len(image))


def of_all_pairs(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    logits = scale[0] * images @ texts.T
    pairs = torch.arange(len(logits))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def clip_loss(output: Output, _: Tensor) -> Tensor:
    """Each replica computes the loss of all pairs."""
    images, texts, scale = output
    return of_all_pairs(gather_samples(images), gather_samples(texts), scale)


def local_loss(output: Output, number: Tensor) -> Tensor:
    """Each replica compares its own samples with all others."""
    images, texts, scale = output
    own = scale[0] * images @ gather_samples(texts).T, scale[0] * texts @ gather_samples(images).T
    places = gather_samples(number)
    pairs = torch.stack([(places == each).nonzero()[0, 0] for each in number])
    return sum(F.cross_entropy(logits, pairs) for logits in own) / 2


class Centred(nn.Module):
    """Compares samples in a forward, which may run twice: each less the mean of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.layer(x))
        return y - gather_samples(y).mean(0)


def centred() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Centred(), Centred(), nn.Linear(6, 5))


def joined_loss(output: Output, _: Tensor) -> Tensor:
    return of_all_pairs(*output)


def pairs(step: int, samples: int = 11) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 10, generator=generator), torch.arange(samples)


def case(loss: Callable[..., Tensor]) -> Case:
    return Case(Towers, pairs, loss, adamw, steps=6)


PLANS = ["data=2", "data=4 zero=3", "data=4", "data=3 zero=2"]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", [clip_loss, local_loss])
@pytest.mark.slow_cases(
    *(f"clip_loss-{plan}" for plan in PLANS[2:]), *(f"local_loss-{plan}" for plan in (PLANS[0], *PLANS[2:]))
)
@pytest.mark.usefixtures("warm_contract")
def test_a_loss_over_all_pairs_is_that_of_one_device(plan: str, loss: Callable[..., Tensor]) -> None:
    """Eleven samples: replicas have different numbers of rows."""
    assert_equal(case(loss), plan)


def gathered(rank_rows: int) -> tuple[bool, bool]:
    """Values and gradients of uneven rows, and gradients of gradients, with an engine open."""
    engine = start()
    weights = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]
    rows = torch.arange(7.0, dtype=torch.float64)[:, None] + 1
    begin = 0 if engine.replica == 0 else rank_rows
    end = rank_rows if engine.replica == 0 else 7
    own = rows[begin:end].clone().requires_grad_()
    found = gather_samples(own)
    loss = (weights * found**3).sum() * (1 + engine.replica)  # two shares: their sum is 3 times the loss
    (first,) = torch.autograd.grad(loss, own, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), own)
    expected = 3 * 3 * weights * rows**2
    twice = 2 * expected * 3 * 6 * weights * rows
    return (
        torch.equal(found.detach(), rows),
        torch.allclose(first.detach(), expected[begin:end]) and torch.allclose(second, twice[begin:end]),
    )


def start(plan: str = "data=2", loss: Callable[..., Any] = clip_loss, **options: Any) -> Engine:
    torch.manual_seed(2)
    return parallelize(Towers(), plan, optimizer=sgd, loss=loss, **options)


@pytest.mark.parametrize("rows", [3, 1])
def test_rows_come_in_global_order_and_gradients_are_summed(
    rows: int, warm_ranks: Callable[[int], Ranks]
) -> None:
    assert warm_ranks(2).run(gathered, rows) == [(True, True)] * 2


def refused(plan: str, audit: str, loss: Callable[..., Any] = clip_loss) -> str:
    engine = start(plan, loss, audit=audit)
    with pytest.raises(UserError) as error:
        engine.step(engine.local(pairs(0, 12)))
    return str(error.value)


def double_sum(output: Output, _: Tensor) -> echelon.Sum:
    """Wrong: every replica returns the sum over all samples."""
    return echelon.Sum(clip_loss(output, _) * len(gather_samples(_)))


def test_what_cannot_be_gathered_is_refused(warm_ranks: Callable[[int], Ranks]) -> None:
    for audit in ("sampled", "off"):
        for text in warm_ranks(2).run(refused, "data=2 microbatches=2", audit):
            assert text.startswith(
                "echelon.gather_samples: plan 'data=2 microbatches=2' cuts a replica's samples"
            )
    for text in warm_ranks(2).run(refused, "data=2", "sampled", partial(joined_loss)):
        assert "The loss does not add up over samples" in text or "mixes samples" in text
    for text in warm_ranks(2).run(refused, "data=2", "sampled", double_sum):
        assert "would not train as on one device" in text


def rows_of_other_sizes() -> str:
    engine = start()
    with pytest.raises(UserError) as error:
        gather_samples(torch.ones(2, 3 + engine.replica))
    return str(error.value)


def test_rows_of_different_sizes_are_refused(warm_ranks: Callable[[int], Ranks]) -> None:
    for text in warm_ranks(2).run(rows_of_other_sizes):
        assert text.startswith("echelon.gather_samples: replicas have rows of different sizes")


def empty_replica() -> None:
    engine = start()
    assert not engine.needs_samples
    engine.step(engine.local(pairs(0)))
    assert engine.needs_samples
    engine.step(pairs(1, 3 if engine.replica == 0 else 0))


def test_a_replica_without_a_sample_is_refused() -> None:
    with pytest.raises(UserError, match="a replica has no sample in this batch"):
        echelon.launch(empty_replica, 2)


def without_replicas() -> list[bool]:
    """Where it returns the tensor itself: no engine, one replica, the whole model, a closed engine."""
    x = torch.ones(3)
    found = [gather_samples(x) is x]
    with start() as engine:
        found.append(gather_samples(x) is not x)
        with engine.whole():
            found.append(gather_samples(x) is x)
        evaluated = engine.evaluate(engine.local(pairs(0))).loss
    torch.manual_seed(2)
    plain = Towers()
    inputs, number = pairs(0)
    found.append(abs(float(clip_loss(plain(inputs), number).detach()) - evaluated) < 1e-6)
    found.append(gather_samples(x) is x)
    return found


def test_without_replicas_nothing_is_gathered(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(2).run(without_replicas) == [[True] * 5] * 2


@pytest.mark.parametrize("plan", ["data=2 recompute=full", "data=2 pipeline=2", "data=3 zero=3"])
@pytest.mark.slow_cases("data=2 pipeline=2", "data=3 zero=3")
@pytest.mark.usefixtures("warm_contract")
def test_a_forward_over_all_samples_is_that_of_one_device(plan: str) -> None:
    assert_equal(Case(centred, eleven_vectors, mean_loss, adamw, steps=6), plan)
