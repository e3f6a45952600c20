"""Who sends how many rows to whom: ranks tell each other before the rows themselves travel.

    rank 0 has      3 slots of expert 0, 1 of expert 1, 2 of expert 2, none of expert 3
    counts          [3 1 | 2 0]     to rank 0, and to rank 1, which holds experts 2 and 3
    rank 1 learns   it will get 2 rows of expert 2, and none of expert 3

Rows come from each rank sorted by expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.nn.autograd.second_run import once
from echelon.parallel.expert.journey import Journey


class Dispatch(NamedTuple):
    """How the slots of all ranks of a group reach the experts.

    `sent`: how many rows leave, also those to this rank itself. `counts` [ranks, experts here]: how many rows
    of each expert come from each rank.
    """

    journey: Journey
    sent: int
    received: int
    counts: Tensor

    @property
    def expert_of_row(self) -> Tensor:
        """Which of this rank's experts each row is for that comes."""
        ranks, experts = self.counts.shape
        numbers = torch.arange(experts, device=self.counts.device).repeat(ranks)
        return numbers.repeat_interleave(self.counts.flatten(), output_size=self.received)


def plan_dispatch(counts: Tensor, group: Group) -> Dispatch:
    """Tell the other ranks how many slots of each expert this one has; all ranks of the group together.

    A forward that runs again finds what the first run has learnt.
    """
    coming, sent, received = once(lambda: _exchange(counts, group))
    return Dispatch(Journey(group, sent, received), sum(sent), sum(received), coming)


def _exchange(counts: Tensor, group: Group) -> tuple[Tensor, list[int], list[int]]:
    coming = torch.empty_like(counts)
    with group.ledger.about("expert counts"):
        group.all_to_all(coming, counts)
    both = torch.stack([counts, coming]).view(2, group.size, -1)
    sent, received = both.sum(2).tolist()  # of all numbers of a step, the ones that the host must know
    return both[1], sent, received
