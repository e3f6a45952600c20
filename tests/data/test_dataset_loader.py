"""Batches of any dataset, a part for each replica."""

import random
from collections import namedtuple
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, Subset, TensorDataset

from echelon.data import Loader, StreamLoader, loader
from echelon.data.dataset_loader import seeded, without_samples
from echelon.errors import UserError

TEN = [{"x": torch.tensor([float(n)]), "labels": n} for n in range(10)]


class Plan(NamedTuple):
    """As an engine says it."""

    replica: int
    replicas: int
    needs_samples: bool = False


def samples(loaded: Loader) -> list[list[int]]:
    return [batch["labels"].tolist() for batch in loaded]


def joined(replicas: int, epochs: int = 1, **options: Any) -> list[list[int]]:
    """The global batches that all replicas together see."""
    parts = [loader(TEN, engine=Plan(r, replicas), **options) for r in range(replicas)]
    batches = [[samples(part) for _ in range(epochs)] for part in parts]
    return [list(chain(*rows)) for epoch in zip(*batches, strict=True) for rows in zip(*epoch, strict=True)]


def test_every_plan_sees_the_same_batches_in_order() -> None:
    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    alone = joined(1, epochs=2, **options)
    assert [len(batch) for batch in alone] == [4, 4, 2] * 2
    assert sorted(chain(*alone[:3])) == list(range(10))
    assert alone[:3] != alone[3:], "another order in each epoch"
    assert joined(2, epochs=2, **options) == joined(3, epochs=2, **options) == alone
    assert joined(2, batch_size=4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert joined(2, batch_size=4, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_replica_without_a_sample_gets_a_batch_of_none() -> None:
    part = list(loader(TEN, batch_size=3, replica=1, replicas=2))
    assert [len(batch["labels"]) for batch in part] == [1, 1, 1, 0]
    assert part[-1]["x"].shape == (0, 1)
    empty = list(
        loader(TensorDataset(torch.zeros(4, 2), torch.zeros(4)), batch_size=3, replica=1, replicas=2)
    )[-1]
    assert [tuple(tensor.shape) for tensor in empty] == [(0, 2), (0,)]


@pytest.mark.parametrize("workers", [0, 1])
def test_it_goes_on_where_it_stopped_under_another_plan(workers: int) -> None:
    options: Any = {"batch_size": 4, "shuffle": True, "seed": 5, "num_workers": workers}
    whole = loader(TEN, **options)
    expected = samples(whole) + samples(whole)
    first = loader(TEN, **options)
    seen = samples(first)
    for batch in first:
        seen.append(batch["labels"].tolist())
        break  # workers have loaded more
    state = first.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 1)
    parts = [loader(TEN, replica=r, replicas=2, **options) for r in range(2)]
    for part in parts:
        part.load_state_dict(state)
    rest = [list(chain(*rows)) for rows in zip(*map(samples, parts), strict=True)]
    assert seen + rest == expected
    assert parts[0].epoch == 2


def test_a_state_behind_the_last_batch_is_the_next_epoch() -> None:
    first = loader(TEN, batch_size=5)
    batches = iter(first)
    next(batches)
    assert next(batches)["labels"].tolist() == [5, 6, 7, 8, 9]
    second = loader(TEN, batch_size=5)
    second.load_state_dict(first.state_dict())
    assert (second.epoch, len(samples(second))) == (1, 2)


def test_a_look_at_the_first_batch_takes_nothing_away() -> None:
    loaded = loader(TEN, batch_size=5)
    next(iter(loaded))
    assert samples(loaded) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert (len(loaded), loaded.epoch) == (2, 1)


class Noisy:
    """Draws at random for each sample, as augmentation does."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, _: int) -> torch.Tensor:
        return torch.rand(1) + np.random.rand() + random.random()


NOISY: Any = Noisy()


@pytest.mark.parametrize("dataset", [NOISY, Subset(NOISY, range(6))], ids=["one by one", "read at once"])
def test_what_a_sample_draws_depends_on_the_sample_and_the_epoch(dataset: Any) -> None:
    """Ranks of one replica drew differently, and trained on different batches. Where a dataset reads samples
    at once, only the first one was seeded."""
    options: Any = {"batch_size": 3, "shuffle": True}
    alone = loader(dataset, **options)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one, other = torch.cat(list(alone)), torch.cat(list(alone))
    assert torch.equal(torch.get_rng_state(), state), "the model's own numbers go on as before"
    assert not set(one[:, 0].tolist()) & set(other[:, 0].tolist())
    parts = [list(loader(dataset, replica=r, replicas=2, **options)) for r in range(2)]
    assert torch.equal(torch.cat([torch.cat(rows) for rows in zip(*parts, strict=True)]), one)


def test_a_collate_function_and_datasets_that_are_read_at_once() -> None:
    batches = list(loader(Subset(TEN, range(4)), batch_size=2, collate_fn=len))  # type: ignore[arg-type]
    assert batches == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 1, "replicas": 2}, "batch_size=1 for 2 replicas: .* use at least 2"),
        ({"batch_size": 0}, "batch_size=0: must be an integer, at least 1"),
        ({"batch_size": 4, "replica": 2, "replicas": 2}, "replica=2 of replicas=2: must be below it"),
        ({"batch_size": 20, "drop_last": True}, "the dataset has 10 samples: no batch of 20"),
        ({"batch_size": 4, "sampler": []}, "sampler: the loader chooses the samples of each rank itself"),
        (
            {"batch_size": 3, "engine": Plan(0, 2, needs_samples=True)},
            "the last batch .* 1 of 10",
        ),
        ({"batch_size": 2, "dataset": 3}, "dataset is a int: must have a length"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        loader(**{"dataset": TEN, **arguments})


def test_a_state_of_another_order_is_refused() -> None:
    state = loader(TEN, batch_size=5, shuffle=True).state_dict()
    with pytest.raises(UserError, match="batch_size=5: this loader has 2") as refusal:
        loader(TEN, batch_size=2).load_state_dict(state)
    assert [error.split("=")[0] for error in refusal.value.errors] == ["batch_size", "shuffle"]


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


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_numbers_follow_the_seed_and_generators_go_on_as_before() -> None:
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = draws()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    with seeded(1, 2) as seed_again:
        first = draws()
        seed_again(1, 2)
        assert draws() == first
    with seeded(2, 1):
        assert draws() != first
    assert draws() == expected


def test_a_batch_without_samples_has_the_same_form() -> None:
    Pair = namedtuple("Pair", "x y")
    batch = {"a": torch.ones(2, 3), "b": [torch.ones(2)], "c": Pair(torch.ones(2), "text"), "d": 4}
    empty = without_samples(batch)
    assert empty["a"].shape == (0, 3)
    assert empty["b"][0].shape == (0,)
    assert (empty["c"].x.shape, empty["c"].y, empty["d"]) == ((0,), "text", 4)
