"""New weights on their way: whoever uses one first waits for it."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.errors import UserError
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.zero.freed import FreedParameter
from echelon.parallel.data.zero.new_weights import NewWeights, ResidentWeights
from echelon.state.ownership import LocalParameter
from tests.sets import set_of


class Waiting:
    """The weights of a model of two layers, and what was waited for."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        self.model[1].empty = nn.Parameter(torch.empty(0))
        self.local = [LocalParameter(name, p, p) for name, p in self.model.named_parameters()]
        self.waited: list[str] = []
        self.wrapping = Wrapping()
        parameters = set_of(self.model, RecordingGroup("data"))
        self.weights = NewWeights(parameters, self.local, self.wait, self.wrapping)

    def wait(self, local: Sequence[LocalParameter]) -> None:
        self.waited += [each.name for each in local]
        self.weights.arrive(local)

    def kinds(self) -> list[type]:
        return [type(parameter) for parameter in self.model.parameters()]


def test_a_module_waits_for_the_weights_of_its_unit() -> None:
    waiting = Waiting()
    waiting.weights.expect(waiting.local)
    assert waiting.kinds() == [FreedParameter, FreedParameter, nn.Parameter], "nothing to wait for is there"
    waiting.model[1](torch.ones(1, 2))
    assert waiting.waited == ["1.weight", "1.empty"]
    assert waiting.kinds() == [FreedParameter, nn.Parameter, nn.Parameter]
    waiting.model(torch.ones(1, 2))
    assert waiting.waited[2:] == ["0.weight", "1.weight", "1.empty"]


def test_whoever_reads_a_weight_waits_for_that_one() -> None:
    waiting = Waiting()
    waiting.weights.hide()
    assert waiting.model[0].weight.detach().shape == (2, 2)
    assert waiting.waited == ["0.weight"]
    assert waiting.kinds()[:2] == [nn.Parameter, FreedParameter]


def test_weights_of_other_sets_stay_as_they_are() -> None:
    waiting = Waiting()
    other = nn.Parameter(torch.ones(1))
    waiting.weights.expect([LocalParameter("other", other, other)])
    assert type(other) is nn.Parameter
    waiting.weights.arrive([LocalParameter("other", other, other)])
    waiting.wrapping.remove()
    waiting.model(torch.ones(1, 2))
    assert waiting.waited == []


def test_resident_weights_ask_before_they_are_read() -> None:
    one, empty = nn.Parameter(torch.ones(2)), nn.Parameter(torch.empty(0))

    def refuse() -> None:
        raise UserError("closed")

    resident = ResidentWeights([("one", one), ("empty", empty)], refuse)
    assert one.tolist() == [1.0, 1.0]
    resident.hide()
    assert (type(one), type(empty)) == (FreedParameter, nn.Parameter)
    with pytest.raises(UserError, match="closed"):
        one.sum()
