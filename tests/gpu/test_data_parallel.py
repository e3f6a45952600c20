"""Data parallelism on a GPU: two ranks that share one, over Gloo. Run by hand: pytest -m gpu tests/gpu"""

import dataclasses

import pytest
import torch

import echelon
from echelon.models import build as build_model
from echelon.models import cross_entropy, preset
from echelon.verify import assert_equal
from tests.cases import adamw
from tests.contract_models import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["gpt", "llama", "encoder", "twice"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_levels_are_equal_to_one_device(name: str, level: int) -> None:
    case = dataclasses.replace(CASES[name], options={"smallest_unit": 0})
    assert_equal(case, f"data=2 zero={level} microbatches=2")


@pytest.mark.parametrize("sync", ["parameter-server", "async staleness=0"])
def test_servers_are_equal_to_one_device(sync: str) -> None:
    assert_equal(CASES["gpt"], f"data=2 sync={sync}")


def states(plan: str) -> dict[str, int]:
    engine = echelon.parallelize(build_model(preset("gpt-small")), plan, optimizer=adamw, loss=cross_entropy)
    batch = torch.randint(50257, (2, 64), generator=torch.Generator().manual_seed(0))
    engine.step(engine.local((batch, batch)))
    engine.step(engine.local((batch, batch)))
    assert engine.mesh.device.type == "cuda"
    return engine.memory().now


@pytest.mark.parametrize(("level", "bytes_each"), [(0, 18.0), (1, 12.0), (2, 10.0), (3, 9.0)])
def test_model_state_takes_the_bytes_of_the_formula(level: int, bytes_each: float) -> None:
    for now in echelon.launch(states, 2, f"data=2 zero={level} precision=bf16"):
        state = now["parameters"] + now["gradients"] + now["optimizer"]
        assert state / preset("gpt-small").num_parameters == pytest.approx(bytes_each, rel=0.02)
