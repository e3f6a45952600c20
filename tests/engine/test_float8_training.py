"""Trainings with precision=fp8: close to bf16, and under every plan those of one device, within rounding."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine.audit.reference import Reference
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.float8 import Float8Linear
from echelon.nn.wrapping import is_wrapped

tools = pytest.importorskip("tests.float8", reason="torchao is not installed")

Warm = Callable[[int], Ranks]
VOCAB, SEQUENCE, STEPS = 80, 16, 4


@pytest.fixture(autouse=True)
def _emulated() -> Iterator[None]:
    with tools.emulated():
        yield


def gpt() -> nn.Module:
    return build(ModelConfig("gpt", layers=2, width=32, heads=4, vocab=VOCAB, sequence=SEQUENCE))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, use_cache=False, **sizes, **heads))


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": gpt, "llama": llama}


def batch_of(name: str, step: int) -> Any:
    """Tokens in which each next one follows from the last, so that there is something to learn."""
    generator = torch.Generator().manual_seed(step)
    starts, steps = torch.randint(VOCAB, (2, 8, 1), generator=generator)
    tokens = (starts + (1 + steps % 3) * torch.arange(SEQUENCE + 1)) % VOCAB
    if name == "llama":
        return {"input_ids": tokens, "labels": tokens}
    return tokens[:, :-1], tokens[:, 1:]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """In proportion to gradients: Adam would make as much of one that is almost 0 as of the largest."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def engine_of(name: str, plan: str, **options: Any) -> echelon.Engine:
    torch.manual_seed(0)
    loss = None if name == "llama" else cross_entropy
    return echelon.parallelize(MODELS[name](), plan, optimizer=momentum, loss=loss, **options)


Trained = tuple[list[float], dict[str, Tensor]]


def train(name: str, plan: str) -> Trained:
    """Losses and weights; the audit compares gradients in steps 1, 2 and 4."""
    with tools.emulated(), engine_of(name, plan) as engine:
        losses = [engine.step(engine.local(batch_of(name, step))).loss for step in range(STEPS)]
        return losses, engine.full_state_dict()


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    squares = [(one[name].double() - other[name].double()).square().sum() for name in one]
    return float(sum(squares) / sum(value.double().square().sum() for value in one.values())) ** 0.5


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Trained]:
    return {name: train(name, "precision=fp8") for name in MODELS}


@pytest.fixture(scope="module")
def in_bf16() -> dict[str, Trained]:
    return {name: train(name, "precision=bf16") for name in MODELS}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_it_learns_as_bf16_does(
    name: str, on_one_device: dict[str, Trained], in_bf16: dict[str, Trained]
) -> None:
    losses, weights = on_one_device[name]
    assert losses == pytest.approx(in_bf16[name][0], rel=5e-3)
    assert losses[-1] < losses[0]
    assert 1e-3 < distance(weights, in_bf16[name][1]) < 2e-2  # products were rounded otherwise


@pytest.mark.parametrize("plan", ["recompute=full", "recompute=selective", "offload=optimizer,activations"])
def test_what_saves_memory_changes_no_bit(plan: str, on_one_device: dict[str, Trained]) -> None:
    losses, weights = train("gpt", f"precision=fp8 {plan}")
    assert losses == on_one_device["gpt"][0]
    assert all(torch.equal(value, on_one_device["gpt"][1][key]) for key, value in weights.items())


PLANS = (
    "data=2 microbatches=2",
    "tensor=2",
    "data=2 zero=3 recompute=full offload=optimizer",
    "tensor=2 sequence=true recompute=selective",
    "pipeline=2 microbatches=2",
    "data=2 zero=1",
    "context=2",
    "data=2 zero=2 gradients=same",
)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_plans_are_nearer_to_one_device_than_that_is_to_bf16(
    name: str,
    plan: str,
    warm_ranks: Warm,
    on_one_device: dict[str, Trained],
    in_bf16: dict[str, Trained],
) -> None:
    losses, weights = warm_ranks(2).run(train, name, f"precision=fp8 {plan}")[0]
    wanted, others = on_one_device[name]
    assert losses == pytest.approx(wanted, rel=2e-3)
    assert distance(weights, others) < distance(others, in_bf16[name][1])


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_the_head_s_logits_wait_as_in_bf16(precision: str) -> None:
    torch.manual_seed(0)
    model = build(ModelConfig("gpt", layers=1, width=32, heads=4, vocab=1040, sequence=SEQUENCE))
    with echelon.parallelize(
        model, f"precision={precision}", optimizer=momentum, loss=cross_entropy
    ) as engine:
        assert "head ×1" in repr(engine)


def test_a_training_goes_on_from_its_files_to_the_bit(
    tmp_path: Path, on_one_device: dict[str, Trained]
) -> None:
    with engine_of("gpt", "precision=fp8") as engine:
        for step in range(2):
            engine.step(batch_of("gpt", step))
        engine.save(tmp_path)
    with engine_of("gpt", "precision=fp8 recompute=full") as engine:
        engine.load(tmp_path)
        losses = [engine.step(batch_of("gpt", step)).loss for step in range(2, STEPS)]
        weights = engine.full_state_dict()
    assert losses == on_one_device["gpt"][0][2:]
    assert all(torch.equal(value, on_one_device["gpt"][1][key]) for key, value in weights.items())


def calls_of(name: str, plan: str) -> int:
    """How many products of one step are in 8 bits."""
    calls, multiply = 0, Float8Linear.multiply

    def counted(self: Float8Linear, *arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return multiply(self, *arguments)

    with (
        tools.emulated(),
        tools.patch.object(Float8Linear, "multiply", counted),
        engine_of(name, plan, audit="off") as engine,
    ):
        engine.step(engine.local(batch_of(name, 0)))
    return calls


@pytest.mark.parametrize(("name", "products"), [("gpt", 12), ("llama", 14)])  # of two layers
def test_tensor_ranks_multiply_their_parts_in_8_bits(name: str, products: int, warm_ranks: Warm) -> None:
    assert calls_of(name, "precision=fp8") == products
    assert warm_ranks(2).run(calls_of, name, "precision=fp8 tensor=2") == [products, products]


def compiled(plan: str) -> list[float]:
    return train("gpt", plan)[0]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["microbatches=2", "recompute=selective", "tensor=2", "data=2 zero=3"])
def test_compiled_layers_multiply_in_8_bits(
    plan: str, warm_ranks: Warm, on_one_device: dict[str, Trained]
) -> None:
    plan = f"precision=fp8 compile=true {plan}"
    losses = warm_ranks(echelon.Plan.parse(plan).ranks).run(compiled, plan)[0]
    assert losses == pytest.approx(on_one_device["gpt"][0], rel=5e-3)


def test_the_audit_compares_with_products_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    multiply, run = Float8Linear.multiply, Reference.run
    inside = False

    def counted(self: Float8Linear, *arguments: Any) -> Tensor:
        calls.append(inside)
        return multiply(self, *arguments)

    def marked(self: Reference, *arguments: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return run(self, *arguments)
        finally:
            inside = False

    monkeypatch.setattr(Float8Linear, "multiply", counted)
    monkeypatch.setattr(Reference, "run", marked)
    with engine_of("gpt", "precision=fp8 microbatches=2", audit="first") as engine:
        engine.step(batch_of("gpt", 0))
        assert "float8 ×12" in repr(engine)
        assert [result.outcome for result in engine.audit] == ["held", "held"]
    assert True in calls
    assert False in calls


def test_the_audit_finds_what_a_plan_trains_otherwise() -> None:
    """The number of samples, which is another one in a part of the batch."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.last(self.first(x).relu()) * len(x)
            return output

    torch.manual_seed(0)
    plan = "precision=fp8 microbatches=2"
    engine = echelon.parallelize(Counting(), plan, optimizer=momentum, loss=nn.functional.mse_loss)
    with engine, pytest.raises(UserError, match="one device"):
        engine.step((torch.randn(8, 32), torch.randn(8, 32)))


def test_products_of_8_bits_end_with_the_engine() -> None:
    model = gpt()
    with echelon.parallelize(model, "precision=fp8", optimizer=momentum, loss=cross_entropy):
        assert any(map(is_wrapped, model.modules()))
    assert not any(map(is_wrapped, model.modules()))


def test_it_is_refused_where_it_cannot_be() -> None:
    with (
        tools.patch.object(tools.float8, "EMULATES", False),
        pytest.raises(UserError, match="no products of 8"),
    ):
        engine_of("gpt", "precision=fp8")
    with pytest.raises(UserError, match="one piece, for inputs and weights"):
        echelon.Plan.parse("precision=fp8 pipeline=2 microbatches=2 schedule=zero-bubble")
