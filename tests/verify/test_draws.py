"""The contract holds for models that draw in their forward: numbers belong to samples, not to the plan."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.launching import Ranks
from echelon.verify import assert_equal, verify
from tests.cases import adamw
from tests.nn.draws.models import WIDTH, Vae, case, samples, square, vae_loss

Warm = Callable[[int], Ranks]

pytestmark = pytest.mark.usefixtures("warm_contract")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [("vae", "data=2 microbatches=2"), ("layers", "pipeline=2 microbatches=2 recompute=full")],
)
def test_a_model_that_draws_trains_as_on_one_device(name: str, plan: str) -> None:
    assert_equal(case(name), plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vae", "diffusion", "layers"])
@pytest.mark.parametrize(
    "plan",
    [
        "microbatches=3",
        "data=2",
        "data=3 microbatches=2",
        "data=2 zero=3 recompute=full",
        "data=2 zero=2 microbatches=2 recompute=selective",
        "data=2 update=backward",
        "data=2 zero=1 offload=optimizer",
    ],
)
def test_every_plan_draws_the_same(name: str, plan: str) -> None:
    updates_early = "update=backward" in plan  # before the norm is known
    assert_equal(replace(case(name), clip=None) if updates_early else case(name), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 pipeline=2 microbatches=2",
        "pipeline=2-1 microbatches=2",
        "pipeline=2 microbatches=4 schedule=interleaved chunks=2",
        "pipeline=2 microbatches=2 schedule=pipedream-2bw",
        "pipeline=2 microbatches=4 schedule=zero-bubble recompute=selective",
    ],
)
def test_every_pipeline_draws_the_same(plan: str) -> None:
    assert_equal(replace(case("layers"), clip=None) if "pipedream" in plan else case("layers"), plan)


class NumpyNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.from_numpy(numpy.random.randn(*x.shape)).to(x.dtype)
        self.drawn.append(float(noise.sum()))
        output: Tensor = self.linear(x) + noise
        return output


def train_numpy() -> tuple[float, list[str], float]:
    """What the last step drew, what was said, and what numpy draws after it."""
    numpy.random.seed(0)
    model = NumpyNoise()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine: Engine = echelon.parallelize(model, "data=2", optimizer=adamw, loss=square, audit="off")
        for step in range(4):
            engine.step(engine.local(samples(step)))
    engine.close()
    texts = [str(each.message) for each in said if "numpy" in str(each.message)]
    return model.drawn[-1], texts, numpy.random.rand()


def test_numbers_of_numpy_differ_on_each_replica_and_are_named_once(warm_ranks: Warm) -> None:
    (first, texts, after), (second, others, after_second) = warm_ranks(2).run(train_numpy)
    assert first != second
    assert len(texts) == 1
    assert texts[0].startswith("numpy.random in the model draws random numbers that do not belong to samples")
    assert others == []
    assert after == after_second  # whoever shuffles by it shuffles alike


class Late(nn.Module):
    """Begins to draw at its fourth call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.linear(x)
        return output if self.calls < 4 else output + torch.randn_like(output)


def train_late() -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine = echelon.parallelize(Late(), "data=1", optimizer=adamw, loss=square, audit="off")
        for step in range(4):
            engine.step(engine.local(samples(step)))
        state = torch.get_rng_state()
        for step in range(2):
            engine.step(engine.local(samples(step)))
    assert torch.equal(torch.get_rng_state(), state)  # drawn by sample
    engine.close()
    return [str(each.message) for each in said if "drawn from torch" in str(each.message)]


def test_a_model_that_draws_later_is_named_and_drawn_by_sample_from_then_on() -> None:
    assert len(train_late()) == 1


def test_without_a_seed_torch_draws() -> None:
    torch.manual_seed(0)
    engine = echelon.parallelize(Vae(), "data=1", optimizer=adamw, loss=vae_loss, seed=None, audit="off")
    state = torch.get_rng_state()
    engine.step(samples(0))
    assert not torch.equal(torch.get_rng_state(), state)
    engine.close()


def test_every_evaluation_draws_the_same() -> None:
    torch.manual_seed(0)
    engine = echelon.parallelize(Vae(), "data=1", optimizer=adamw, loss=vae_loss, audit="off")
    losses = [engine.evaluate(samples(0)).loss for _ in range(2)]
    assert losses[0] == losses[1]
    engine.close()


def count_from_zero(engine: Engine) -> None:
    """Samples of every replica have the numbers of the first one's."""
    scopes = engine._runner._scopes
    scopes._replica = 0


def test_replicas_that_count_from_zero_are_found() -> None:
    assert not verify(case("vae", steps=2), "data=2", inject_bug=count_from_zero).equal
