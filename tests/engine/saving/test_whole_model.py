"""`engine.whole()` and `engine.generate`: the plain model with whole weights, on every rank."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from echelon.engine import Engine, parallelize
from echelon.engine.saving import whole_model
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.memory import meter
from tests.cases import Perceptron, mean_loss, sgd, vectors
from tests.contract_models import ResNet

transformers = pytest.importorskip("transformers")
PROMPTS = torch.tensor([[5, 9, 2, 7], [1, 1, 30, 4]])


def llama() -> nn.Module:
    torch.manual_seed(11)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def text(engine: Engine | None) -> dict[str, Tensor]:
    tokens = torch.randint(0, 96, (4, 9), generator=torch.Generator().manual_seed(3))
    batch = {"input_ids": tokens, "labels": tokens}
    return batch if engine is None else engine.local(batch)


def start(plan: str, **options: Any) -> Engine:
    return parallelize(llama(), f"{plan} precision=fp64", optimizer=sgd, **options)


class Outcome(NamedTuple):
    tokens: list[list[int]]
    sampled: list[list[int]]
    logits: Tensor
    losses: list[float]
    names: list[str]
    is_copied: bool


def generate(plan: str) -> Outcome:
    """Train, generate, call the whole model, and train on."""
    with start(plan) as engine:
        losses = [engine.step(text(engine)).loss]
        tokens = engine.generate(PROMPTS, max_new_tokens=6, do_sample=False)
        torch.manual_seed(engine.mesh.rank)
        before = torch.get_rng_state()
        sampled = engine.generate(PROMPTS, max_new_tokens=6, do_sample=True)
        torch.randint(2**62, (1,), generator=(expected := torch.Generator()).set_state(before))
        assert torch.equal(torch.get_rng_state(), expected.get_state())  # one number was drawn, on every rank
        place = next(iter(engine.module.parameters())).data_ptr() if plan == "data=2" else 0
        with engine.whole() as model:
            assert model is engine.module
            logits = model.eval()(PROMPTS).logits.detach()
            names = list(model.state_dict())
            is_copied = next(iter(model.parameters())).data_ptr() != place
        assert engine.module.training
        losses.append(engine.step(text(engine)).loss)
        return Outcome(tokens.tolist(), sampled.tolist(), logits, losses, names, is_copied)


@pytest.fixture(scope="module")
def plain() -> Outcome:
    """The same in transformers and torch alone."""
    model, losses = llama().double(), []
    optimizer = sgd(model.parameters())
    for step in range(2):
        loss = model(**text(None)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step == 0:
            tokens = model.eval().generate(PROMPTS, max_new_tokens=6, do_sample=False)  # type: ignore[operator]
            logits = model(PROMPTS).logits.detach()
            model.train()
    return Outcome(tokens.tolist(), [], logits, losses, list(model.state_dict()), False)


@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=2"])
@pytest.mark.slow_cases("data=2")
def test_every_rank_generates_what_transformers_does(
    plan: str, plain: Outcome, warm_ranks: Callable[[int], Ranks]
) -> None:
    outcomes = warm_ranks(2).run(generate, plan)
    for outcome in outcomes:
        assert outcome.tokens == plain.tokens
        assert outcome.sampled == outcomes[0].sampled
        torch.testing.assert_close(outcome.logits, plain.logits, rtol=0, atol=1e-9)
        assert outcome.losses == pytest.approx(plain.losses, abs=1e-9)
        assert outcome.names == plain.names
        assert outcome.is_copied == (plan != "data=2")
    assert outcomes[0].sampled != outcomes[0].tokens


def refuse(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        call()
    return str(error.value)


def misuse(plan: str) -> tuple[list[str], list[float]]:
    """Everything that the engine refuses inside, and then what it still does."""
    engine = parallelize(Perceptron(), plan, optimizer=sgd, loss=mean_loss)
    engine.step(engine.local(vectors(0)))
    calls: list[Callable[[], object]] = [
        partial(engine.step, vectors(1)),
        partial(engine.evaluate, vectors(1)),
        engine.full_state_dict,
        engine.weights,
        engine.synchronize,
        partial(engine.generate, PROMPTS),
        partial(engine.load, "nowhere"),
        partial(engine.export, "nowhere"),
        engine.memory,
        engine.close,
        partial(ExitStack().enter_context, engine.whole()),
    ]
    with engine.whole():
        errors = [refuse(call) for call in calls]
    errors.append(refuse(lambda: engine.generate(PROMPTS)))
    return errors, [engine.step(engine.local(vectors(number))).loss for number in range(2)]


def test_calls_of_the_engine_are_refused_inside(warm_ranks: Callable[[int], Ranks]) -> None:
    for errors, losses in warm_ranks(2).run(misuse, "data=2 zero=3"):
        *inside, no_method = errors
        expected = "a call of the engine inside of `with engine.whole() as model:`"
        assert {each.split(",")[0] for each in inside} == {expected}
        assert no_method.startswith("engine.generate: Perceptron has no method generate")
        assert losses[1] < 10


def write(plan: str, through: str) -> tuple[str, bool, list[float]]:
    """Change a weight inside; the error, whether the engine has the change, and what it does next."""
    torch.manual_seed(3)
    engine = parallelize(Perceptron(), plan, optimizer=sgd, loss=mean_loss)
    engine.step(engine.local(vectors(0)))
    before, error = engine.full_state_dict()["first.weight"], ""
    try:
        with engine.whole() as model, torch.no_grad():
            weight = model.first.weight
            if through == "place":
                weight.mul_(2)
            elif through == "data":
                weight.data.mul_(2)
            else:
                weight.data = weight * 2
    except UserError as refused:
        error = str(refused)
    after = engine.full_state_dict()["first.weight"]
    assert torch.equal(after, before) or torch.equal(after, 2 * before)
    losses = [engine.step(engine.local(vectors(number))).loss for number in range(3)]
    return error, not torch.equal(after, before), losses


def written_alone() -> list[float]:
    torch.manual_seed(3)
    model = Perceptron()
    optimizer = sgd(model.parameters())
    losses = []
    for batch in (vectors(0), None, vectors(0), vectors(1), vectors(2)):
        if batch is None:
            model.first.weight.data.mul_(2)
            continue
        loss = mean_loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[1:]


@pytest.mark.parametrize("through", ["place", "data", "memory"])
def test_a_change_of_a_weight_is_taken_over_or_refused(
    through: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    expected = written_alone()
    for error, has_change, losses in warm_ranks(2).run(write, "data=2 zero=1", through):
        assert has_change == (through != "memory")
        assert error == "" if has_change else "was changed inside of engine.whole()" in error
        if has_change:
            assert losses == pytest.approx(expected, abs=1e-5)
    for error, has_change, _ in warm_ranks(2).run(write, "data=2 zero=3", through):
        assert not has_change
        assert "first.weight was changed inside of engine.whole()" in error


def forget(plan: str) -> tuple[bool, bool]:
    """What forwards and backwards inside leave behind: nothing."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 5))
    engine = parallelize(model, plan, optimizer=sgd, loss=mean_loss)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    batch = engine.local((images, torch.tensor([1, 2])))
    engine.step(batch)
    before = engine.full_state_dict()
    with engine.whole() as whole:
        assert whole.training
        whole(images).sum().backward()
        has_gradient = all(p.grad is not None for p in whole.parameters())
        is_moved = not torch.equal(whole[1].running_mean, before["1.running_mean"])  # type: ignore[index]
    after = engine.full_state_dict()
    engine.step(batch)
    return has_gradient and is_moved, all(torch.equal(before[name], after[name]) for name in before)


def test_what_happens_inside_is_forgotten(warm_ranks: Callable[[int], Ranks]) -> None:
    assert warm_ranks(2).run(forget, "data=2") == [(True, True)] * 2


def test_a_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model, "free_bytes", lambda _: 100)
    engine = parallelize(ResNet(), "offload=parameters", optimizer=sgd, loss=mean_loss)
    assert meter.free_bytes(torch.device("cpu")) > 100
    error = refuse(partial(ExitStack().enter_context, engine.whole()))
    assert "engine.weights() returns one whole tensor at a time" in error
    engine.close()
