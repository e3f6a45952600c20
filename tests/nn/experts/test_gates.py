"""Every gate against its formulas, written out with loops in float64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.dropout import key_dropout, scope
from echelon.nn.experts import (
    ExpertChoiceGate,
    Gate,
    GShardGate,
    HierarchicalGate,
    NoisyTopKGate,
    Routing,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
    recording,
)
from echelon.nn.wrapping import Wrapping
from tests.nn.experts import reference
from tests.nn.experts.reference import Slots
from tests.nn.experts.statistics import Kept

SAMPLES, POSITIONS, WIDTH, EXPERTS = 2, 5, 6, 4
DOUBLE = torch.float64


@contextmanager
def step() -> Iterator[None]:
    with scope(seed=3, step=1, first_sample=0):
        yield


def prepare(gate: Gate) -> Gate:
    """The gate in float64, with weights that are not all alike."""
    torch.manual_seed(1)
    gate.double()
    for parameter in gate.parameters():
        nn.init.normal_(parameter)
    key_dropout(gate, Wrapping())
    return gate


def inputs() -> Tensor:
    return torch.randn(SAMPLES, POSITIONS, WIDTH, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))


def route(gate: Gate, x: Tensor) -> tuple[Routing, Tensor]:
    kept = Kept()
    with step(), recording(kept):
        routing = gate(x)
    (statistics,) = kept.passes
    return routing, statistics


def check_slots(routing: Routing, expected: list[Slots]) -> None:
    assert routing.indices.tolist() == [[expert for expert, _ in slots] for slots in expected]
    weights = torch.tensor([[weight for _, weight in slots] for slots in expected], dtype=DOUBLE)
    torch.testing.assert_close(routing.weights, weights, rtol=0, atol=1e-12)


def check_row(gate: Gate, statistics: Tensor, name: str, expected: list[float]) -> None:
    row = statistics[gate.rows.index(name)]
    torch.testing.assert_close(row, torch.tensor(expected, dtype=DOUBLE), rtol=0, atol=1e-10)


def check_loss(gate: Gate, statistics: Tensor, expected: float) -> None:
    assert gate.has_loss
    assert float(gate.auxiliary_loss(statistics).detach()) == pytest.approx(expected, abs=1e-10)


def count(slots: list[Slots], num_experts: int = EXPERTS) -> list[float]:
    return [float(sum(expert == i for each in slots for expert, _ in each)) for i in range(num_experts)]


def column_sums(rows: list[list[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def logits_of(weight: Tensor, x: Tensor) -> list[list[float]]:
    return [reference.dot(weight.tolist(), token) for token in x.flatten(0, 1).tolist()]


def z_of(logits: list[list[float]]) -> float:
    return sum(math.log(sum(map(math.exp, each))) ** 2 for each in logits) / len(logits)


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


def test_sigmoid() -> None:
    gate = prepare(SigmoidGate(WIDTH, 8, 3, groups=4, top_groups=2, scale=2.5))
    gate.e_score_correction_bias.copy_(torch.linspace(-0.5, 0.4, 8))
    x = inputs()
    routing, statistics = route(gate, x)
    bias = gate.e_score_correction_bias.tolist()
    logits = logits_of(gate.weight, x)
    expected = [reference.sigmoid_top_k(each, bias, 3, 4, 2, 2.5) for each in logits]
    check_slots(routing, expected)
    unlimited = [reference.sigmoid_top_k(each, bias, 3, 1, 1, 2.5) for each in logits]
    unbiased = [reference.sigmoid_top_k(each, [0.0] * 8, 3, 4, 2, 2.5) for each in logits]
    assert expected not in (unlimited, unbiased), "groups and bias decide here"
    tokens = count(expected, 8)
    check_row(gate, statistics, "tokens", tokens)
    assert not gate.has_loss
    gate.after_step(statistics)
    mean = sum(tokens) / 8
    changed = [b + 0.001 * ((mean > n) - (mean < n)) for b, n in zip(bias, tokens, strict=True)]
    assert gate.e_score_correction_bias.tolist() == pytest.approx(changed, abs=1e-15)


def test_the_bias_of_a_sigmoid_gate_is_not_rounded() -> None:
    gate = SigmoidGate(WIDTH, EXPERTS, 2)
    gate.e_score_correction_bias.fill_(1.001)
    gate = gate.bfloat16()
    assert gate.weight.dtype == torch.bfloat16
    assert gate.e_score_correction_bias.tolist() == [pytest.approx(1.001, rel=1e-6)] * EXPERTS
    gate.double()
    assert gate.e_score_correction_bias.dtype == DOUBLE


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


@pytest.mark.parametrize("factor", [0.3, 0.75])
@pytest.mark.parametrize("top_k", [1, 2])
def test_capacity(top_k: int, factor: float) -> None:
    gate = prepare(SoftmaxGate(WIDTH, EXPERTS, top_k, normalize=top_k > 1, capacity=factor))
    x = inputs()
    routing, statistics = route(gate, x)
    logits = logits_of(gate.weight, x)
    whole = [reference.softmax_top_k(each, top_k, normalize=top_k > 1) for each in logits]
    capacity = math.ceil(factor * POSITIONS * top_k / EXPERTS)
    expected = [
        slots
        for sample in range(SAMPLES)
        for slots in reference.drop_over_capacity(
            whole[sample * POSITIONS : (sample + 1) * POSITIONS], capacity, EXPERTS
        )
    ]
    assert expected != whole
    check_slots(routing, expected)
    check_row(gate, statistics, "tokens", count(whole))
    dropped = [all_ - kept for all_, kept in zip(count(whole), count(expected), strict=True)]
    check_row(gate, statistics, "dropped", dropped)
