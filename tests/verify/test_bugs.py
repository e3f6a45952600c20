"""How bugs get into an engine: messages that are lost leave each rank with its own part."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from echelon.collectives import Group, Work
from echelon.verify.bugs import Message, alter, lose, then

RANK_1 = cast(Group, SimpleNamespace(size=2, rank=1))


def never() -> Work:
    pytest.fail("a lost message was sent")


def message(*tensors: Tensor, rows: Any = None) -> Message:
    return Message(RANK_1, never, tensors, rows)


def test_of_a_sum_that_is_lost_a_rank_keeps_its_own_summand() -> None:
    whole = torch.tensor([1.0, 2.0])
    lose(message(whole)).wait()
    assert whole.tolist() == [1, 2]
    part = torch.zeros(2)
    lose(message(part, torch.arange(4.0))).wait()
    assert part.tolist() == [2, 3], "the part of rank 1"


def test_of_rows_that_are_lost_only_a_ranks_own_come() -> None:
    incoming, outgoing = torch.full((3, 1), 9.0), torch.tensor([[1.0], [2.0], [3.0]])
    lose(message(incoming, outgoing, rows=([1, 2], [1, 2]))).wait()
    assert incoming.flatten().tolist() == [0, 2, 3]


def test_what_has_come_is_altered_after_it_has_come() -> None:
    number = torch.zeros(1)

    class Arrives:
        def wait(self) -> None:
            number.fill_(2.0)

    sent = Message(RANK_1, lambda: cast(Work, Arrives()), (number,), None)
    then(lambda received: received.tensors[0].mul_(10) and None)(sent).wait()
    assert number.item() == 20


def test_a_group_of_one_rank_has_no_message_to_alter() -> None:
    assert not alter(cast(Group, SimpleNamespace(size=1)), "gradients", lose)
