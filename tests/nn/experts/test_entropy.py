"""The entropy of a gate's distribution is a mean over tokens, however many experts each has."""

import pytest
import torch
from torch import Tensor

from echelon.engine.step.balance import load_of
from tests.nn.experts.all_gates import GATES
from tests.nn.experts.models import WIDTH
from tests.nn.experts.statistics import statistics_of


@pytest.mark.parametrize("name", GATES)
def test_entropy_is_a_mean_over_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    gate = GATES[name]().double()
    for parameter in gate.parameters():
        torch.nn.init.normal_(parameter)
    seen: list[Tensor] = []
    entr = torch.special.entr
    monkeypatch.setattr(torch.special, "entr", lambda p: seen.append(entr(p)) or seen[-1])
    statistics = statistics_of(gate, torch.randn(3, 5, WIDTH, dtype=torch.float64))
    (entropies,) = seen
    assert float(gate.num_tokens(statistics)) == pytest.approx(15)
    assert load_of(gate, statistics).entropy == pytest.approx(float(entropies.sum(-1).mean()))
