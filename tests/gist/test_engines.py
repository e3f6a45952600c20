"""compress in engines of one rank: what is left of an engine, how a model is divided, what it warns of."""

import copy

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import echelon
from echelon.gist import CompressedLayer, CompressedModule
from echelon.wrapping import find_wrapper
from tests.gist.nets import gradients, is_same

Engine = echelon.Engine


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def engine_of(model: nn.Module, plan: str) -> Engine:
    return echelon.parallelize(model, plan, optimizer=sgd, loss=squares, audit="off")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.ReLU()) for _ in range(2)))


def inputs() -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


def is_compressed(model: nn.Module) -> bool:
    kinds = (CompressedLayer, CompressedModule)
    return any(find_wrapper(module, kind) is not None for module in model.modules() for kind in kinds)


def test_a_plan_without_compression_takes_away_that_of_an_engine_that_was_not_closed() -> None:
    model, expected = network(), gradients(network(), inputs())
    with engine_of(model, "compress=gist-fp8"):
        assert not is_same(gradients(model, inputs()), expected)
        with engine_of(model, "compress=none"):
            assert not is_compressed(model)
            assert is_same(gradients(model, inputs()), expected)


def test_a_copy_of_a_compressed_model_rounds_nothing() -> None:
    model, expected = network(), gradients(network(), inputs())
    with engine_of(model, "compress=gist-fp8"):
        assert is_same(gradients(copy.deepcopy(model), inputs()), expected)


def test_what_is_rounded_does_not_depend_on_other_fields_of_the_plan() -> None:
    """A model of transformers is divided into its layers, as with recompute."""
    results = []
    for plan in ("compress=gist-fp8", "compress=gist-fp8 recompute=full"):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=50,
        )
        model = LlamaForCausalLM(config)
        tokens = torch.randint(50, (2, 16))
        with echelon.parallelize(model, plan, optimizer=sgd, audit="off") as engine:
            engine.step((tokens, tokens))
        results.append(list(model.parameters()))
    assert is_same(*results)
