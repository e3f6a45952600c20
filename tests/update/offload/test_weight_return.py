"""New weights on their way from the host, and weights of before that come back."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.collectives.boundary import PretendedBoundary
from echelon.state.ownership import LocalParameter
from echelon.update.offload.host_twins import HostTwins, Twin
from echelon.update.offload.weight_return import KeptWeights, Returning, WeightReturn


class HostRun:
    def __init__(self, memory: Tensor) -> None:
        self.memory, self.num_joins = memory, 0

    def join(self) -> None:
        self.num_joins += 1


class Ticket:
    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1


class Host:
    """Two weights, of 1 and 2; the second may stand on the host. Updates make 10 and 20."""

    def __init__(self, *, stands: bool = False) -> None:
        self.boundary = PretendedBoundary(Ledger())
        parameters = [nn.Parameter(torch.full((3,), value)) for value in (1.0, 2.0)]
        self.local = [LocalParameter(str(i), each, each) for i, each in enumerate(parameters)]
        self.run = HostRun(torch.full((3,), 2.0))
        host_runs = {parameters[1]: self.run} if stands else {}
        self.twins = HostTwins(self.local, self.boundary, masters=False, host_runs=host_runs, in_place=False)
        self.twins.allocate()
        self.weights = WeightReturn(self.boundary)
        self.told: list[Any] = []
        self.weights.on_expect = lambda local: self.told.append(("expect", [each.name for each in local]))
        self.weights.on_arrive = lambda local: self.told.append(("arrive", [each.name for each in local]))

    def update(self, twins: list[Twin], *, announce: bool = True) -> Returning:
        returning = self.weights.expect(twins, announce=announce)
        for twin in twins:
            twin.weights.fill_(10.0 * (1 + int(twin.local.name)))
        ticket: Any = Ticket()
        returning.ticket = ticket
        returning.send()
        return returning

    def values(self) -> list[float]:
        return [each.tensor[0].item() for each in self.local]


def test_weights_arrive_when_they_are_first_used() -> None:
    host = Host()
    first, second = host.twins.all
    returning = host.update([first])
    other = host.update([second])
    assert not any(map(math.isfinite, host.values())), "they belong to the copies"
    assert not host.weights.is_changed(first)
    host.weights.wait([first.local.tensor])
    assert host.values()[0] == 10.0
    assert math.isnan(host.values()[1])
    assert host.told == [("expect", ["0"]), ("expect", ["1"]), ("arrive", ["0"])]
    assert (returning.ticket.num_waits, other.ticket.num_waits) == (1, 0)  # type: ignore[union-attr]
    host.weights.wait([first.local.tensor])
    assert returning.ticket.num_waits == 1, "once"  # type: ignore[union-attr]
    host.weights.wait_all()
    assert host.values() == [10.0, 20.0]
    assert not host.weights._on_the_way


def test_a_change_by_hand_is_seen_after_weights_have_come() -> None:
    host = Host()
    first, _ = host.twins.all
    host.update([first])
    host.weights.wait_all()
    assert not host.weights.is_changed(first), "their coming is no change of the user's"
    with torch.no_grad():
        first.local.parameter.fill_(7.0)
    assert host.weights.is_changed(first)
    returning = host.update([first])
    assert not host.weights.is_changed(first), "while others are on their way"
    assert len(returning.earlier) == 1, "the copy before may still read the same memory"
    host.weights.receive_all()
    assert host.values()[0] == 10.0
    assert returning.ticket.num_waits == 0  # type: ignore[union-attr]
    assert not host.weights._on_the_way


def test_a_late_update_stays_on_the_host_until_it_is_sent() -> None:
    host = Host(stands=True)
    twins = host.twins.all
    host.update(twins, announce=False)
    assert (host.values(), host.told, len(host.weights.delayed)) == ([1.0, 2.0], [], 1)
    assert host.weights.changed_twins() == []
    with torch.no_grad():
        host.local[0].parameter.fill_(7.0)
    assert host.weights.changed_twins() == [twins[0]]
    host.weights.send_delayed()
    assert (host.weights.delayed, host.told) == ([], [("expect", ["0", "1"])])
    assert (host.run.memory.tolist(), host.run.num_joins) == ([20.0] * 3, 1)
    host.weights.wait_all()
    assert host.values() == [10.0, 2.0], "the second stands on the host"
    again = host.update(twins, announce=False)
    assert len(again.earlier) == 1
    host.weights.delay_again([again])
    assert host.weights.delayed == [again]


def test_weights_of_before_come_back() -> None:
    host = Host(stands=True)
    kept = KeptWeights(host.twins, host.boundary)
    assert kept.num_bytes() == 24
    assert kept._memory == []
    late = host.update(host.twins.all, announce=False)
    kept.keep([late])
    assert len(kept._memory) == 1
    host.weights.send_delayed()
    host.weights.wait_all()
    assert (host.values()[0], host.run.memory[0].item()) == (10.0, 20.0)
    assert not kept.is_changed()
    with torch.no_grad():
        host.local[0].parameter.add_(1.0)
    assert kept.is_changed()
    joins = host.run.num_joins
    assert list(kept.put_back()) == [late]
    assert (host.values()[0], host.run.memory[0].item()) == (1.0, 2.0)
    assert host.run.num_joins == joins + 1
    assert (list(kept.put_back()), kept.is_changed()) == ([], False)
    memory = kept._memory[0]
    kept.keep([late])
    kept.forget()
    assert list(kept.put_back()) == []
    assert kept._memory[0] is memory, "taken once"
    (holder,) = [held() for name, held in host.boundary._holders if name == "parameters"]
    assert holder == [memory]
