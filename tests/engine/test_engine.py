"""One engine: on one device here, on ranks through the contract and these."""

from collections.abc import Callable

import torch

import echelon
from echelon.engine import Engine
from echelon.launching import Ranks
from tests.cases import Perceptron, adamw, mean_loss, perceptron_case, vectors

Warm = Callable[[int], Ranks]


def engine_for(plan: str = "data=1", **options: object) -> Engine:
    torch.manual_seed(0)
    return echelon.parallelize(
        Perceptron(),
        plan,
        **({"optimizer": adamw, "loss": mean_loss} | options),  # type: ignore[arg-type]
    )


def test_the_loss_falls_and_weights_move() -> None:
    engine = engine_for()
    before = engine.full_state_dict()
    losses = [engine.step(vectors(0)).loss for _ in range(30)]
    after = engine.full_state_dict()
    assert losses[-1] < losses[0] / 2
    assert not torch.equal(before["first.weight"], after["first.weight"])
    assert torch.equal(before["frozen"], after["frozen"])
    assert torch.equal(after["middle.weight"], after["again.weight"])


def fingerprint() -> list[bytes]:
    engine = engine_for("data=2 microbatches=2")
    for step in range(5):
        engine.step(engine.local(vectors(step)))
    return [value.numpy().tobytes() for value in engine.full_state_dict().values()]


def test_training_is_deterministic_to_the_bit(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(fingerprint), warm_ranks(2).run(fingerprint)
    assert first == second
    assert first[0] == first[1]


def test_the_case_of_the_contract_is_deterministic() -> None:
    case = perceptron_case()
    first, second = case.build().state_dict(), case.build().state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
