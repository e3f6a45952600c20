"""Flags that any rank may set: read only by a rank that does not know the answer by itself."""

import pytest
import torch

from echelon.collectives import RecordingGroup
from echelon.collectives.group import Reduction, Work
from echelon.parallel.data.flags import set_anywhere
from tests.groups import DeferredGroup
from tests.reads import HasReadError, no_reads

CPU = torch.device("cpu")


class OtherRank(RecordingGroup):
    """The other rank has set `flags`."""

    def __init__(self, *flags: bool) -> None:
        super().__init__("data", 0, 2)
        self._flags = flags

    def _all_reduce(self, tensor: torch.Tensor, op: Reduction) -> Work:
        assert op == "max"
        work = super()._all_reduce(tensor, op)
        tensor.copy_(torch.maximum(tensor, torch.tensor(self._flags, dtype=tensor.dtype)))
        return work


def test_a_flag_is_set_where_any_rank_has_set_it() -> None:
    assert list(set_anywhere([True, False, False], OtherRank(False, False, True), CPU)) == [True, False, True]


def test_a_rank_that_has_set_all_flags_takes_part_and_reads_nothing() -> None:
    group = DeferredGroup()
    with no_reads():
        assert list(set_anywhere([True, True], group, CPU)) == [True, True]
        with pytest.raises(HasReadError):
            set_anywhere([True, False], group, CPU)
    assert [move.operation for move in group.ledger.moves] == ["all_reduce", "all_reduce"]
    assert [move.traffic.payload for move in group.ledger.moves] == [2, 2]
