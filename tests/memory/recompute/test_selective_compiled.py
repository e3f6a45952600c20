"""recompute=selective compile=true: the compiler keeps less, and gives what it gives without."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon
from echelon.engine.layer_compiler import LayerCompiler
from echelon.models import ModelConfig, build, cross_entropy
from tests.cases import sgd

# torch warns of what its compiler does itself.
pytestmark = pytest.mark.filterwarnings("ignore")

GPT = ModelConfig("gpt", layers=2, width=64, heads=4, vocab=64, sequence=32, tied=True)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens() -> tuple[Tensor, Tensor]:
    inputs = torch.randint(64, (4, 33), generator=torch.Generator().manual_seed(0))
    return inputs[:, :-1], inputs[:, 1:]


@pytest.mark.slow
def test_a_compiled_model_keeps_less_and_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []
    compiler = LayerCompiler.__call__

    def counted(self: Any, graph: Any, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return compiler(self, graph, inputs)

    monkeypatch.setattr(LayerCompiler, "__call__", counted)
    torch.manual_seed(0)
    model = build(GPT)
    weights, kept = {}, {}
    for recompute in ("none", "selective"):
        plan = f"recompute={recompute} compile=true"
        with echelon.parallelize(
            copy.deepcopy(model), plan, optimizer=sgd, loss=cross_entropy, audit="off"
        ) as engine:
            for _ in range(4):
                engine.step(tokens())
            kept[recompute] = engine.memory().peak["activations"]
            weights[recompute] = engine.full_state_dict()
        assert bool(graphs) == (recompute == "selective"), "each plan has compiled code of its own"
    assert len(graphs) == 4, "embedding, head, and a block with each share"
    assert kept["selective"] < 0.65 * kept["none"]
    for name, weight in weights["none"].items():
        torch.testing.assert_close(weights["selective"][name], weight)
