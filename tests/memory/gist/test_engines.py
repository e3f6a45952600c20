"""compress in engines of one rank: what is left of an engine, how a model is divided, what it warns of."""

import copy
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import echelon
from echelon.memory.gist.compression import Compression
from echelon.memory.gist.functions import CompressedModule
from echelon.memory.gist.layer import CompressedLayer, CompressionReport
from echelon.nn.wrapping import find_wrapper
from tests.memory.gist.nets import gradients, is_same

Engine = echelon.Engine


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
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
        results.append([p.detach() for p in model.parameters()])
    assert is_same(*results)


class Checkpointed(nn.Module):
    """A segment that computes again in the backward pass, with functions that the plan encodes."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.use_reentrant = nn.Linear(32, 32), nn.Linear(32, 32), use_reentrant

    def segment(self, x: Tensor) -> Tensor:
        return F.relu(self.first(F.relu(x)))

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.segment, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.last(F.relu(hidden))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_inside_of_a_model_computes_the_same_again(use_reentrant: bool) -> None:
    results = []
    for plan in ("data=1", "compress=gist"):
        torch.manual_seed(0)
        model = Checkpointed(use_reentrant)
        with engine_of(model, plan) as engine:
            engine.step((inputs(), inputs()))
        results.append([p.detach() for p in model.parameters()])
    assert is_same(*results)


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pool = nn.Linear(32, 32), nn.AvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.pool(self.linear(x)[None])[0]
        return output


@pytest.mark.parametrize(
    ("make", "num"), [(Average, 0), (lambda: nn.Sequential(nn.Linear(32, 32), nn.GELU()), 1)]
)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_warning_if_the_first_step_encodes_nothing(
    make: Callable[[], nn.Module], num: int, microbatches: int
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with engine_of(make(), f"compress=gist microbatches={microbatches}") as engine:
            for _ in range(2):
                engine.step((inputs(), inputs()))
    messages = [str(each.message) for each in caught if "saves no memory" in str(each.message)]
    assert len(messages) == num
    assert not any("MiB" in message for message in messages)


def test_the_warning_names_the_bound_of_cuda_devices() -> None:
    plan = echelon.Plan.parse("compress=gist-fp8")
    report = CompressionReport(Compression.of("gist-fp8"), plan, torch.device("cuda"))
    with pytest.warns(UserWarning, match="below 8 MiB stay as they are on a CUDA device"):
        report.after_step()
