"""The sigmoid gate against its formulas, and its bias."""

import pytest
import torch

from echelon.nn.experts import (
    SigmoidGate,
)
from tests.nn.experts import reference
from tests.nn.experts.formulas import (
    DOUBLE,
    EXPERTS,
    WIDTH,
    check_row,
    check_slots,
    count,
    inputs,
    logits_of,
    prepare,
    route,
)


def test_scores_of_a_sigmoid_gate_by_hand() -> None:
    gate = SigmoidGate(2, 2, 1, normalize=False, scale=3.0)
    gate.weight.data = torch.eye(2)
    routing = gate(torch.tensor([[[0.0, 1.0]]]))
    assert routing.indices.tolist() == [[1]]
    assert routing.weights.item() == pytest.approx(3 * torch.tensor(1.0).sigmoid().item())
    gate.train()
    gate(torch.tensor([[[0.0, 1.0]]]))
    assert gate.seen is not None
    gate.after_step(gate.seen)
    assert gate.e_score_correction_bias.tolist() == pytest.approx([0.001, -0.001])
    assert gate.double().e_score_correction_bias.dtype == torch.float64
    assert gate.float().e_score_correction_bias.dtype == torch.float32
    bias = gate.e_score_correction_bias
    gate.to(torch.float32)
    assert torch.equal(gate.e_score_correction_bias, bias)


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
