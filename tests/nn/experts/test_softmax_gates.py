"""Softmax gates against their formulas, written out with loops in float64."""

import math

import pytest
import torch

from echelon.errors import UserError
from echelon.nn.experts import (
    ExpertChoiceGate,
    GShardGate,
    SoftmaxGate,
    SwitchGate,
)
from tests.nn.experts import reference
from tests.nn.experts.formulas import (
    EXPERTS,
    POSITIONS,
    SAMPLES,
    WIDTH,
    check_loss,
    check_row,
    check_slots,
    column_sums,
    count,
    inputs,
    logits_of,
    prepare,
    route,
    step,
    z_of,
)
from tests.nn.experts.reference import Slots


@pytest.mark.parametrize(("chosen", "is_right"), [(4.0, True), (4.1, False), (0.1, True), (0.0, False)])
def test_how_many_experts_choose_a_token(chosen: float, is_right: bool) -> None:
    if is_right:
        assert ExpertChoiceGate(8, 4, chosen_per_token=chosen).chosen_per_token == chosen
    else:
        with pytest.raises(UserError, match="chosen_per_token"):
            ExpertChoiceGate(8, 4, chosen_per_token=chosen)


@pytest.mark.parametrize(
    ("top_k", "normalize"), [(1, False), (2, False), (2, True), (EXPERTS, False), (EXPERTS, True)]
)
def test_softmax(top_k: int, normalize: bool) -> None:
    gate = prepare(SoftmaxGate(WIDTH, EXPERTS, top_k, normalize=normalize, balance=0.3, z_loss=0.2))
    x = inputs()
    routing, statistics = route(gate, x)
    logits = logits_of(gate.weight, x)
    expected = [reference.softmax_top_k(each, top_k, normalize=normalize) for each in logits]
    check_slots(routing, expected)
    probabilities = [reference.softmax(each) for each in logits]
    check_row(gate, statistics, "tokens", count(expected))
    check_row(gate, statistics, "dropped", [0.0] * EXPERTS)
    check_row(gate, statistics, "probability", column_sums(probabilities))
    total_entropy = float(statistics[gate.rows.index("entropy")].sum())
    assert total_entropy == pytest.approx(sum(map(reference.entropy, probabilities)))
    tokens = SAMPLES * POSITIONS
    fractions = [number / (tokens * top_k) for number in count(expected)]
    means = [each / tokens for each in column_sums(probabilities)]
    balance = EXPERTS * sum(f * p for f, p in zip(fractions, means, strict=True))
    check_loss(gate, statistics, 0.3 * balance + 0.2 * z_of(logits))


@pytest.mark.parametrize("jitter", [0.0, 0.3])
def test_switch(jitter: float) -> None:
    gate = prepare(SwitchGate(WIDTH, EXPERTS, balance=0.3, jitter=jitter))
    x = inputs()
    routing, _ = route(gate, x)
    jittered = x
    if gate.noise is not None:
        with step():
            jittered = x * (1 - jitter + 2 * jitter * gate.noise.uniform(x.shape, x))
    assert torch.equal(jittered, x) == (jitter == 0)
    logits = logits_of(gate.weight, jittered)
    check_slots(routing, [reference.softmax_top_k(each, 1, normalize=False) for each in logits])
    gate.eval()
    logits = logits_of(gate.weight, x)
    check_slots(gate(x), [reference.softmax_top_k(each, 1, normalize=False) for each in logits])


def test_gshard() -> None:
    gate = prepare(GShardGate(WIDTH, EXPERTS, balance=0.3, z_loss=0.2))
    x = inputs()
    routing, statistics = route(gate, x)
    assert gate.noise is not None
    with step():
        uniform = gate.noise.uniform((SAMPLES, POSITIONS, 1), x).flatten().tolist()
    logits = logits_of(gate.weight, x)
    both = [reference.softmax_top_k(each, 2, normalize=True) for each in logits]
    expected = [
        [first, second if 2 * second[1] > u else (EXPERTS, 0.0)]
        for (first, second), u in zip(both, uniform, strict=True)
    ]
    check_slots(routing, expected)
    taken = sum(slots[1][0] < EXPERTS for slots in expected)
    assert 0 < taken < len(expected), "some second experts are used, and some are not"
    check_row(gate, statistics, "tokens", count(expected))
    firsts = count([slots[:1] for slots in expected])
    check_row(gate, statistics, "first", firsts)
    means = [each / len(logits) for each in column_sums([reference.softmax(each) for each in logits])]
    balance = EXPERTS * sum(f / len(logits) * p for f, p in zip(firsts, means, strict=True))
    check_loss(gate, statistics, 0.3 * balance + 0.2 * z_of(logits))
    gate.eval()
    check_slots(gate(x), both)


def test_expert_choice() -> None:
    gate = prepare(ExpertChoiceGate(WIDTH, EXPERTS, chosen_per_token=1.5, z_loss=0.2))
    x = inputs()
    routing, statistics = route(gate, x)
    capacity = math.ceil(1.5 * POSITIONS / EXPERTS)
    logits = logits_of(gate.weight, x)
    scores = [reference.softmax(each) for each in logits]
    expected: list[Slots] = []
    for sample in range(SAMPLES):
        part = scores[sample * POSITIONS : (sample + 1) * POSITIONS]
        chosen = [reference.top([token[i] for token in part], capacity) for i in range(EXPERTS)]
        for position, token in enumerate(part):
            expected.append(
                [(i, token[i]) if position in chosen[i] else (EXPERTS, 0.0) for i in range(EXPERTS)]
            )
    check_slots(routing, expected)
    check_row(gate, statistics, "tokens", [float(SAMPLES * capacity)] * EXPERTS)
    check_loss(gate, statistics, 0.2 * z_of(logits))
