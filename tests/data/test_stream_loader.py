"""Batches of a stream: those of one device, under every plan, and after a stop."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from echelon.data import StreamLoader, loader
from echelon.errors import UserError
from tests.data.test_dataset_loader import Plan


class Numbers(IterableDataset[int]):
    """Seven numbers, and how many were read."""

    def __init__(self) -> None:
        self.epoch = self.num_read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self._first(), 7):
            self.num_read += 1
            self._note(number + 1)
            yield 10 * self.epoch + number

    def _first(self) -> int:
        return 0

    def _note(self, following: int) -> None:
        pass


class Resumable(Numbers):
    """As datasets of `datasets`: it says where it is, and goes there."""

    def __init__(self) -> None:
        super().__init__()
        self.place = 0

    def _first(self) -> int:
        return self.place

    def _note(self, following: int) -> None:
        self.place = following

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("stream", [Numbers, Resumable])
def test_replicas_have_their_parts_of_the_batches_of_one_device(stream: type[Numbers]) -> None:
    one = loader(stream(), batch_size=3)
    assert isinstance(one, StreamLoader)
    assert lists(one) == [[0, 1, 2], [3, 4, 5], [6]]
    assert lists(one) == [[10, 11, 12], [13, 14, 15], [16]]
    parts = [lists(loader(stream(), batch_size=3, replica=each, replicas=2)) for each in (0, 1)]
    assert parts == [[[0, 1], [3, 4], [6]], [[2], [5], []]]
    assert lists(loader(stream(), batch_size=3, drop_last=True)) == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("stream", "reads"), [(Numbers, 7), (Resumable, 4)])
def test_it_goes_on_at_the_same_sample_under_another_plan(stream: type[Numbers], reads: int) -> None:
    begun = loader(stream(), batch_size=3)
    next(iter(begun))
    numbers = stream()
    rest = loader(numbers, batch_size=3, replica=1, replicas=2)
    rest.load_state_dict(begun.state_dict())
    assert lists(rest) == [[5], []]
    assert numbers.num_read == reads, "one that knows where it is reads no sample again"
    assert lists(rest) == [[12], [15], []]


class Random(Numbers):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            yield torch.rand(1).item()


def test_what_a_stream_draws_is_the_same_on_all_ranks_and_after_a_stop() -> None:
    torch.manual_seed(0)
    whole = lists(loader(Random(), batch_size=2))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    begun = loader(Random(), batch_size=2)
    next(iter(begun))
    rest = loader(Random(), batch_size=2)
    rest.load_state_dict(begun.state_dict())
    assert lists(rest) == whole[1:]
    assert torch.equal(torch.get_rng_state(), state)
    assert lists(loader(Random(), batch_size=2, seed=5)) != whole


def test_what_a_stream_cannot_is_refused_all_at_once() -> None:
    with pytest.raises(UserError) as refusal:
        loader(Numbers(), batch_size=4, shuffle=True, num_workers=2, engine=Plan(0, 2, needs_samples=True))
    assert [error.split(":")[0] for error in refusal.value.errors] == [
        "shuffle=True",
        "num_workers=2",
        "drop_last=False",
    ]


def test_a_state_of_another_stream_is_refused() -> None:
    state = loader(Numbers(), batch_size=3).state_dict()
    with pytest.raises(UserError, match="batch_size=3: this loader has 2"):
        loader(Numbers(), batch_size=2).load_state_dict(state)
    with pytest.raises(UserError, match="it is that of another dataset"):
        loader(Resumable(), batch_size=3).load_state_dict(state)
