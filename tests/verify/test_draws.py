"""The contract holds for models that draw in their forward: numbers belong to samples, not to the plan."""

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.verify import assert_equal
from tests.cases import adamw
from tests.draws.models import WIDTH, case, samples, square

pytestmark = pytest.mark.usefixtures("warm_contract")


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
    assert_equal(case(name), plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 pipeline=2 microbatches=2",
        "pipeline=2-1 microbatches=2",
        "pipeline=2 microbatches=3 schedule=interleaved chunks=2",
        "pipeline=2 microbatches=2 schedule=pipedream-2bw",
        "pipeline=2 microbatches=4 schedule=zero-bubble recompute=selective",
    ],
)
def test_every_pipeline_draws_the_same(plan: str) -> None:
    assert_equal(case("layers"), plan)


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
    said: Any
    with pytest.warns(UserWarning) if echelon.launching.rank() == 0 else nothing() as said:
        engine: Engine = echelon.parallelize(model, "data=2", optimizer=adamw, loss=square, audit="off")
        for step in range(3):
            engine.step(engine.local(samples(step)))
    drawn = engine.module.drawn[-1]
    engine.close()
    return drawn, [str(each.message) for each in said or ()], numpy.random.rand()
