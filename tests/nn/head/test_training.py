"""Trainings in bf16 whose logits are never whole, and the same with whole logits; models of others too."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.engine import parallelize
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.head import deferred
from echelon.nn.head.deferred import _Computed, _Factors, _FusedLoss
from tests.engine.test_compiling import backend

VOCABULARY = 1101  # two ranks pad it


def gpt() -> nn.Module:
    return build(ModelConfig("gpt", layers=2, width=16, heads=2, vocab=VOCABULARY, sequence=8, tied=True))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes))


def capped(output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of what a fused loss knows nothing."""
    logits = 30 * torch.tanh(output.flatten(0, -2) / 30)
    return F.cross_entropy(logits, targets.flatten(), reduction="sum"), (targets != -100).sum()


def batch(model: str) -> Any:
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(0))
    labels = tokens.masked_fill(tokens % 5 == 0, -100)
    if model == "llama":
        return {"input_ids": tokens[:, :8], "labels": labels[:, :8]}
    return tokens[:, :-1], labels[:, 1:]


def train(plan: str, model: str) -> tuple[list[float], dict[str, Tensor], int, int]:
    """Losses of steps and of an evaluation, weights, and how many losses were fused and logits computed."""
    torch.manual_seed(0)
    loss = {"gpt": cross_entropy, "llama": None, "capped": capped}[model]
    with (
        patch.object(_FusedLoss, "forward", wraps=_FusedLoss.forward) as fused,
        patch.object(_Computed, "forward", wraps=_Computed.forward) as computed,
        parallelize(
            llama() if model == "llama" else gpt(),
            plan if "precision" in plan else f"precision=bf16 {plan}",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=loss,
        ) as engine,
    ):
        losses = [engine.step(engine.local(batch(model))).loss for _ in range(3)]
        losses.append(engine.evaluate(engine.local(batch(model))).loss)
        weights = engine.full_state_dict()
        return losses, weights, fused.call_count, computed.call_count


def check(plan: str, model: str) -> None:
    """Runs in every rank."""
    losses, weights, fused, computed = train(plan, model)
    if model == "capped" and "tensor" in plan:
        assert fused == 0  # it gets all logits, gathered
    with patch.object(deferred, "_LEAST_COLUMNS", 10**9):
        expected, right, *calls = train(plan, model)
    assert calls == [0, 0]
    assert computed == 0
    assert model == "capped" or "pipeline" in plan or fused > 0
    assert fused == 0 or model != "capped"  # of a loss that is the user's
    assert losses == pytest.approx(expected, abs=2e-3)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.float(), right[name].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", ["gpt", "llama", "capped"])
@pytest.mark.parametrize("plan", ["", "microbatches=2 recompute=full"])
def test_one_rank(plan: str, model: str) -> None:
    check(plan, model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", ["gpt", "llama", "capped"])
@pytest.mark.parametrize(
    "plan", ["data=2 zero=3 microbatches=2", "pipeline=2 schedule=zero-bubble microbatches=2"]
)
def test_two_ranks(plan: str, model: str, warm_ranks: Callable[[int], Ranks]) -> None:
    warm_ranks(2).run(check, plan, model)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", ["gpt", "llama", "capped"])
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=2 microbatches=2",
        "tensor=2 sequence=true precision=fp16",
        pytest.param("tensor=2 recompute=full", marks=pytest.mark.slow),
        pytest.param("tensor=2 update=backward", marks=pytest.mark.slow),
    ],
)
def test_a_vocabulary_that_is_split(plan: str, model: str, warm_ranks: Callable[[int], Ranks]) -> None:
    warm_ranks(2).run(check, plan, model)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=2 data=2 zero=3 microbatches=2",
        "tensor=2 pipeline=2 schedule=zero-bubble microbatches=2",
        "tensor=2 pipeline=2 schedule=1f1b sequence=true microbatches=3",
        "tensor=2 context=2",
        "tensor=2 data=2 zero=2 offload=optimizer",
    ],
)
def test_a_vocabulary_that_is_split_under_other_axes(
    plan: str, model: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    warm_ranks(4).run(check, plan, model)


# torch hides this warning of its compiler by what an error passes by.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_layers_that_are_compiled_leave_them_alone(model: str) -> None:
    torch._dynamo.reset()
    with backend("aot_eager"):
        losses, _, fused, computed = train("compile=true", model)
    with patch.object(deferred, "_LEAST_COLUMNS", 10**9):
        expected, *_ = train("", model)
    assert computed == 0
    assert fused > 0
    assert losses == pytest.approx(expected, abs=2e-3)


def check_compiled(plan: str, *, is_here: bool) -> None:
    """In each rank. `is_here`: the head is, on every rank."""
    torch._dynamo.reset()
    with (
        backend("aot_eager"),
        patch.object(_Factors, "forward", wraps=_Factors.forward) as factors,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        losses, weights, fused, computed = train(f"{plan} compile=true", "capped")
    with patch.object(deferred, "_LEAST_COLUMNS", 10**9):
        expected, right, *_ = train(plan, "capped")
    assert (fused, computed) == (0, 0)
    assert factors.call_count > 0 or not is_here
    assert losses == pytest.approx(expected, abs=2e-3)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.float(), right[name].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["microbatches=2", "precision=fp16", "microbatches=2 recompute=full"])
def test_a_loss_that_is_not_known_is_compiled_with_the_head(plan: str) -> None:
    check_compiled(plan, is_here=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=3 microbatches=2",
        "pipeline=2 schedule=1f1b microbatches=3",
        "data=2 zero=1 offload=optimizer",
    ],
)
def test_a_loss_is_compiled_on_the_ranks_that_have_the_head(
    plan: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    warm_ranks(2).run(partial(check_compiled, is_here="pipeline" not in plan), plan)


def compare_compiled(model: str) -> None:
    torch._dynamo.reset()
    with backend("aot_eager"):
        losses, _, fused, computed = train("tensor=2 sequence=true compile=true", model)
    with patch.object(deferred, "_LEAST_COLUMNS", 10**9):
        expected, *_ = train("tensor=2 sequence=true", model)
    assert computed == 0
    assert fused > 0
    assert losses == pytest.approx(expected, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt"])
def test_a_split_head_in_a_compiled_layer(model: str, warm_ranks: Callable[[int], Ranks]) -> None:
    warm_ranks(2).run(compare_compiled, model)


def test_outputs_that_others_see_are_logits() -> None:
    torch.manual_seed(0)
    with parallelize(
        gpt(), "precision=bf16", optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=cross_entropy
    ) as engine:
        predicted = engine.predict(batch("gpt"))
        assert type(predicted) is Tensor
        assert bool(predicted.isfinite().all())
        accuracy = engine.evaluate(
            batch("gpt"), lambda output, targets: (output.argmax(-1) == targets).float().mean()
        )
        assert accuracy.loss == pytest.approx(engine.evaluate(batch("gpt")).loss, abs=1e-3)
