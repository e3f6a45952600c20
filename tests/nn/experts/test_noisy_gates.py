"""Noisy gates against their formulas, written out with loops in float64."""

import math

import pytest
import torch

from echelon.nn.experts import (
    HierarchicalGate,
    NoisyTopKGate,
)
from echelon.nn.experts.noisy_gates import choose_noisily
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
    inputs,
    logits_of,
    prepare,
    route,
    step,
    z_of,
)
from tests.nn.experts.reference import Slots


def test_a_noisy_choice_by_hand() -> None:
    clean, spread = torch.tensor([[1.0, 3.0, 2.0]]).double(), torch.zeros(1, 3).double()
    plain = choose_noisily(clean, spread, None, 2)
    assert (plain.indices.tolist(), plain.load.tolist()) == ([[1, 2]], [[0, 1, 1]])
    assert plain.weights[0].tolist() == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])
    noisy = choose_noisily(clean, spread, torch.tensor([[4.0, 0.0, 0.0]]), 1)
    deviation = math.log(2)
    assert noisy.indices.tolist() == [[0]]
    second, first = 3.0, 1 + 4 * deviation
    expected = [(1 - second) / deviation, (3 - first) / deviation, (2 - first) / deviation]
    assert noisy.load[0].tolist() == pytest.approx([(1 + math.erf(x / 2**0.5)) / 2 for x in expected])
    everything = choose_noisily(clean, spread, torch.zeros(1, 3), 3)
    assert everything.load.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_noisy_top_k(top_k: int) -> None:
    gate = prepare(NoisyTopKGate(WIDTH, EXPERTS, top_k, importance=0.3, load=0.2, z_loss=0.1))
    x = inputs()
    routing, statistics = route(gate, x)
    assert gate.noise is not None
    with step():
        noise = gate.noise.normal((SAMPLES, POSITIONS, EXPERTS), x).flatten(0, 1).tolist()
    clean, spread = logits_of(gate.weight, x), logits_of(gate.noise_weight, x)
    results = [reference.noisy_top_k(c, s, e, top_k) for c, s, e in zip(clean, spread, noise, strict=True)]
    expected = [slots for slots, _ in results]
    check_slots(routing, expected)
    importance = [sum(dict(slots).get(i, 0.0) for slots in expected) for i in range(EXPERTS)]
    check_row(gate, statistics, "importance", importance)
    load = column_sums([each for _, each in results])
    check_row(gate, statistics, "load", load)
    balance = 0.3 * reference.cv_squared(importance) + 0.2 * reference.cv_squared(load)
    check_loss(gate, statistics, balance + 0.1 * z_of(clean))
    gate.eval()
    without_noise = [reference.softmax_top_k(each, top_k, normalize=True) for each in clean]
    check_slots(gate(x), without_noise)


def test_noisy_top_k_starts_with_zeros_and_noise_decides() -> None:
    gate = NoisyTopKGate(WIDTH, EXPERTS, 2)
    assert not any(parameter.any() for parameter in gate.parameters())
    assert (gate(torch.randn(64, 8, WIDTH)).indices.flatten().bincount() > 64).all()
    gate.eval()
    assert gate(torch.randn(1, 8, WIDTH)).indices.tolist() == [[0, 1]] * 8, "the first of equal ones"


def test_hierarchical() -> None:
    gate = prepare(HierarchicalGate(WIDTH, 4, 4, top_groups=2, top_experts=3, importance=0.3, load=0.2))
    x = inputs()
    routing, statistics = route(gate, x)
    assert gate.noise is not None
    with step():
        group_noise = gate.noise.normal((SAMPLES, POSITIONS, 4), x).flatten(0, 1).tolist()
        noise = gate.noise.normal((SAMPLES, POSITIONS, 16), x).flatten(0, 1).tolist()
    outer, outer_spread = logits_of(gate.group_weight, x), logits_of(gate.group_noise_weight, x)
    inner, inner_spread = logits_of(gate.weight, x), logits_of(gate.noise_weight, x)
    expected: list[Slots] = []
    importance, load = [0.0] * 16, [0.0] * 16
    group_load, visits = [0.0] * 4, [0] * 4
    for t in range(SAMPLES * POSITIONS):
        groups, probability = reference.noisy_top_k(outer[t], outer_spread[t], group_noise[t], 2)
        group_load = [total + each for total, each in zip(group_load, probability, strict=True)]
        slots: Slots = []
        for group, group_weight in groups:
            inside = slice(4 * group, 4 * group + 4)
            experts, probability = reference.noisy_top_k(
                inner[t][inside], inner_spread[t][inside], noise[t][inside], 3
            )
            slots += [(4 * group + expert, group_weight * weight) for expert, weight in experts]
            visits[group] += 1
            for expert in range(4):
                load[4 * group + expert] += probability[expert]
        for expert, weight in slots:
            importance[expert] += weight
        expected.append(slots)
    check_slots(routing, expected)
    check_row(gate, statistics, "importance", importance)
    assert all(visits)
    load = [group_load[i // 4] * load[i] / visits[i // 4] for i in range(16)]
    balance = 0.3 * reference.cv_squared(importance) + 0.2 * reference.cv_squared(load)
    check_loss(gate, statistics, balance)


def test_a_group_without_tokens_has_no_load() -> None:
    gate = prepare(HierarchicalGate(WIDTH, 4, 4, top_groups=1, top_experts=1))
    _, statistics = route(gate, inputs()[:1, :1])
    loss = gate.auxiliary_loss(statistics)
    assert loss.isfinite()
