"""Gradients that stay as backward passes compute them: models of transformers train to the same bits as where
autograd converts every product, and a second product is added in float32."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.launching import Ranks
from echelon.parallel.data.sharing import Sharing
from echelon.parallel.observer import StepObserver
from tests.cases import adamw
from tests.engine.test_compiling import backend
from tests.foreign.language import LANGUAGE

Warm = Callable[[int], Ranks]

STEPS = 3
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class GradientTypes(StepObserver):
    """The types of gradients that an update gets."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.seen = model, set[torch.dtype]()

    def before_update(self) -> None:
        self.seen |= {p.grad.dtype for p in self._model.parameters() if p.grad is not None}


class Trained(NamedTuple):
    state: dict[str, Tensor]
    types: set[torch.dtype]
    num_kept: int  # weights whose gradients autograd does not convert


def train(name: str, plan: str, keeps: bool, make: Any = adamw) -> Trained:
    case = LANGUAGE[name]
    torch.manual_seed(0)
    model = case.model()
    kept = nullcontext() if keeps else patch.object(Sharing, "keep_products", lambda *_: None)
    with kept, echelon.parallelize(model, plan, optimizer=make, loss=None) as engine:
        types = GradientTypes(model)
        engine.observe(types)
        for step in range(STEPS):
            engine.step(engine.local(case.batch(step)))
        state = dict(engine.full_state_dict())
        for name, parts in engine.full_optimizer_state().items():
            state |= {f"{part} of {name}": value for part, value in parts.items()}
        num_kept = sum(p.grad_dtype is None for p in model.parameters())
    return Trained({key: value.clone() for key, value in state.items()}, types.seen, num_kept)


def compare(name: str, plan: str, make: Any = adamw) -> tuple[list[str], Trained]:
    """The names of what differs, and the training that keeps products."""
    kept, cast = (train(name, plan, keeps, make) for keeps in (True, False))
    assert cast.num_kept == 0
    assert kept.state.keys() == cast.state.keys()
    return [key for key in kept.state if not torch.equal(kept.state[key], cast.state[key])], kept


def still(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("make", [adamw, momentum, torch.optim.Adafactor])
@pytest.mark.parametrize(
    ("plan", "types"),
    [
        ("precision=bf16", {BF16}),
        ("precision=fp16", {FP16}),
        ("precision=bf16 microbatches=2", {FP32}),
        ("precision=bf16 masters=false", {BF16}),
        ("precision=bf16 offload=optimizer", {BF16}),
    ],
)
def test_a_single_replica_trains_to_the_same_bits(plan: str, types: set[torch.dtype], make: Any) -> None:
    different, kept = compare("llama", plan, make)
    assert different == []
    assert kept.types == types
    assert kept.num_kept == len(list(LANGUAGE["llama"].model().parameters()))


def test_a_weight_that_is_used_twice_is_summed_in_float32() -> None:
    """The embedding of GPT-2, which is its head too."""
    different, kept = compare("gpt2", "precision=bf16")
    assert different == []
    assert kept.types == {BF16, FP32}
    assert kept.num_kept == len(list(LANGUAGE["gpt2"].model().parameters())) - 1


# torch hides this warning of its compiler by what an error passes by.
@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("plan", ["microbatches=2", "microbatches=1"])
def test_compiled_layers_are_recorded_once_and_train_to_the_same_bits(plan: str) -> None:
    """A layer is called while its gradients are none, bf16 and float32."""
    torch._dynamo.reset()
    with backend("aot_eager"):
        different, kept = compare("llama", f"precision=bf16 compile=true {plan}")
        assert different == []
        assert kept.num_kept > 0
        recorded = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        train("llama", f"precision=bf16 compile=true {plan}", keeps=True)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == recorded


PLANS = [
    "data=2 zero=1",
    "data=2 zero=1 microbatches=2",
    "data=2 zero=2 microbatches=2",
    "data=2 zero=3",
    "data=2 microbatches=2",
    "tensor=2",
    "pipeline=2 microbatches=2",
    "offload=parameters zero=1 data=2",
    "data=2 update=backward",
]


def compare_all() -> dict[str, tuple[list[str], int]]:
    results = {plan: compare("llama", f"{plan} precision=bf16") for plan in PLANS}
    return {plan: (different, kept.num_kept) for plan, (different, kept) in results.items()}


def test_ranks_train_to_the_same_bits(warm_ranks: Warm) -> None:
    for results in warm_ranks(2).run(compare_all):
        for plan, (different, num_kept) in results.items():
            assert different == [], plan
            assert num_kept > 0, plan


# Two batches of a loop of one's own are one batch of twice the size, within the rounding of their products.


class FirstGradients(StepObserver):
    def __init__(self, model: nn.Module) -> None:
        self._model, self.found = model, dict[str, Tensor]()

    def before_update(self) -> None:
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            self.found[name] = parameter.grad.float()


def gradients(add: Callable[[Any, Tensor], None]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    tokens = torch.randint(2, 32, (8, 8))
    torch.manual_seed(0)
    model = LANGUAGE["llama"].model()
    with echelon.parallelize(model, "precision=bf16", optimizer=still, loss=None) as engine:
        add(engine, tokens[:4])  # not the first update: the second one knows what is used once
        engine.update()
        found = FirstGradients(model)
        engine.observe(found)
        add(engine, tokens)
        engine.update()
    return found.found


def one_batch(engine: Any, tokens: Tensor) -> None:
    engine.forward_backward({"input_ids": tokens, "labels": tokens})


def two_batches(engine: Any, tokens: Tensor) -> None:
    for part in tokens.chunk(2):
        one_batch(engine, part)


def two_passes(engine: Any, tokens: Tensor) -> None:
    for part in tokens.chunk(2):
        engine.backward(engine(input_ids=part, labels=part).loss)


@pytest.mark.parametrize("add", [two_batches, two_passes])
def test_two_batches_of_an_update_are_one_of_twice_the_size(add: Callable[[Any, Tensor], None]) -> None:
    whole, added = gradients(one_batch), gradients(add)
    assert whole.keys() == added.keys()
    for name, gradient in whole.items():
        distance = (added[name] / 2 - gradient).norm() / gradient.norm()
        assert distance < 2**-7, name
