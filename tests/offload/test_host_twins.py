"""Twins of local parameters, updated on the host."""

from echelon.collectives import Ledger
from echelon.collectives.boundary import PretendedBoundary
from echelon.offload.host_twins import HostTwins
from echelon.precision import KeyedRounding


def test_a_rank_that_holds_nothing_of_a_unit_calls_its_optimizer_too() -> None:
    """Optimizers whose ranks add up sums would wait for it."""
    twins = HostTwins([], PretendedBoundary(Ledger()), masters=False, rounding=KeyedRounding(7))
    calls: list[str] = []
    twins.update([], [], lambda: calls.append("call"), 0)
    assert calls == ["call"]
