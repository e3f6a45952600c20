"""`loader`: the batches of any dataset, of which each rank gets its replica's part.

    order    7 2 9 | 0 5 3 | 8 1 6 | 4      one epoch of ten samples, batch_size=3, shuffled
    replica 0 of 2   7 2     0 5     8 1     4
    replica 1 of 2   9       3       6       (no sample)

The global batches depend on the seed and the epoch alone, so every plan sees the same ones, and a run that
stops can go on under another plan. Ranks of one replica get the same batch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate
from torch.utils.data import IterableDataset as _IterableDataset

from echelon.data.sampler import integer_errors, rows_of_part
from echelon.data.sampler import shuffle as shuffle_places
from echelon.data.seeding import seeded, without_samples
from echelon.data.stream_loader import StreamLoader, stream_errors
from echelon.errors import raise_errors

Collate = Callable[[list[Any]], Any]


class Replicas(Protocol):
    """The replicas of an engine."""

    @property
    def replica(self) -> int: ...
    @property
    def replicas(self) -> int: ...
    @property
    def needs_samples(self) -> bool: ...


def loader(
    dataset: Any,
    *,
    batch_size: int,
    engine: Replicas | None = None,
    replica: int = 0,
    replicas: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    collate_fn: Collate | None = None,
    drop_last: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> "Loader | StreamLoader":
    """Batches for `engine.step`. `batch_size` is that of the global batch, whatever the plan.

    `engine` says which replica this rank is of; without one, give `replica` and `replicas`. `shuffle` draws
    another order for each epoch, from the seed. Further options are those of torch's DataLoader. A dataset
    that can only be read from its beginning (IterableDataset) is a stream, in its own order.

        for batch in echelon.data.loader(dataset, batch_size=32, engine=engine, shuffle=True):
            engine.step(batch)
    """
    if engine is not None:
        replica, replicas = engine.replica, engine.replicas
    num_samples = len(dataset) if hasattr(dataset, "__len__") else 0
    order = _Order(num_samples, batch_size, shuffle, seed, drop_last, replica, replicas)
    needs_samples = engine is not None and engine.needs_samples
    if is_stream(dataset):
        errors = _argument_errors(order, options) + stream_errors(
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=num_workers,
            replicas=replicas,
            needs_samples=needs_samples,
        )
        raise_errors("the arguments of loader", errors)
        part = (replica, replicas)
        return StreamLoader(
            dataset, batch_size, part, collate_fn or default_collate, seed, drop_last=drop_last
        )
    raise_errors("the arguments of loader", _errors(dataset, order, needs_samples, options))
    parts = _Parts(dataset, collate_fn or default_collate, seed)
    own_numbers = torch.Generator().manual_seed(seed)  # torch would draw seeds of workers from the model's
    batches: DataLoader[Any] = DataLoader(
        parts,
        batch_size=None,
        sampler=order,
        collate_fn=_keep,
        num_workers=num_workers,
        generator=own_numbers,
        **options,
    )
    return Loader(batches, order)


@final
class Loader:
    """An iterable over the batches of one epoch, and then of the next. Made by `loader`."""

    def __init__(self, batches: DataLoader[Any], order: "_Order") -> None:
        self._batches, self._order = batches, order
        self._given = 0  # batches of this epoch that were given out

    @property
    def epoch(self) -> int:
        return self._order.epoch

    def __len__(self) -> int:
        return self._order.num_batches

    def __iter__(self) -> Iterator[Any]:
        """Give the batches from the first of the epoch on, or from where `load_state_dict` says."""
        self._given = self._order.first
        for batch in self._batches:
            self._given += 1
            yield batch
        self._go_to(self.epoch + 1, 0)

    def _go_to(self, epoch: int, batch: int) -> None:
        self._order.epoch, self._order.first, self._given = epoch, batch, batch

    def state_dict(self) -> dict[str, Any]:
        """Return where to go on, behind the last batch that was given out. The same on every rank."""
        return {"epoch": self.epoch, "batch": self._given, **self._order.description()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, under this plan or another."""
        own = self._order.description()
        errors = [
            f"{name}={state.get(name)!r}: this loader has {value!r}, which is another order of samples; make "
            "it with the same value"
            for name, value in own.items()
            if state.get(name) != value
        ]
        raise_errors("the state of a loader", errors)
        epoch, batch = int(state["epoch"]), int(state["batch"])
        is_over = batch == len(self)  # and the loop had not noticed
        self._go_to(*((epoch + 1, 0) if is_over else (epoch, batch)))


class Place(NamedTuple):
    """The samples of one replica's part of a batch. `is_empty`: none; then one, to see what a batch is."""

    epoch: int
    samples: tuple[int, ...]
    is_empty: bool


@final
@dataclass(eq=False)
class _Order(Sampler[Place]):
    """The order of samples: those of each batch, and those of them that are this replica's."""

    num_samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    replica: int
    replicas: int
    epoch: int = 0
    first: int = 0  # the batch of the epoch to begin with

    @property
    def num_batches(self) -> int:
        missing = 0 if self.drop_last else self.batch_size - 1
        return (self.num_samples + missing) // self.batch_size

    def description(self) -> dict[str, Any]:
        """Return what the order of samples follows from."""
        names = ("num_samples", "batch_size", "shuffle", "seed", "drop_last")
        return {name: getattr(self, name) for name in names}

    def __len__(self) -> int:
        return self.num_batches - self.first

    def __iter__(self) -> Iterator[Place]:
        epoch = self.epoch
        for batch in range(self.first, self.num_batches):
            begin = batch * self.batch_size
            size = min(self.batch_size, self.num_samples - begin)
            places = begin + rows_of_part(size, self.replica, self.replicas)
            chosen = places if len(places) else np.array([begin])
            if self.shuffle:
                chosen = shuffle_places(chosen, self.num_samples, self.seed, epoch)
            yield Place(epoch, tuple(chosen.tolist()), is_empty=not len(places))


@final
class _Parts(Dataset[Any]):
    """The batch at a place: its samples, collated.

    What a dataset draws at random for a sample is seeded by the sample and the epoch: ranks of one replica
    must draw the same, and so do all plans.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate, seed

    def __getitem__(self, place: Place) -> Any:
        samples = []
        with seeded(self._seed, place.epoch, place.samples[0]) as seed_again:
            for index in place.samples:
                seed_again(self._seed, place.epoch, index)
                gets_several = callable(getattr(self._dataset, "__getitems__", None))
                samples.append(
                    self._dataset.__getitems__([index])[0] if gets_several else self._dataset[index]
                )
            seed_again(self._seed, place.epoch, place.samples[0])  # for what the collate function draws
            batch = self._collate(samples)
        return without_samples(batch) if place.is_empty else batch


def _keep(batch: Any) -> Any:
    return batch


def is_stream(dataset: Any) -> bool:
    """Return whether a dataset has no samples by number, and can be read from its beginning on."""
    has_numbers = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    is_iterable = isinstance(dataset, _IterableDataset) or callable(getattr(dataset, "__iter__", None))
    return is_iterable and (isinstance(dataset, _IterableDataset) or not has_numbers)


def _argument_errors(order: _Order, options: Mapping[str, Any]) -> list[str]:
    errors = integer_errors(
        ("batch_size", order.batch_size, 1),
        ("replica", order.replica, 0),
        ("replicas", order.replicas, 1),
        ("seed", order.seed, 0),
    )
    errors += [
        f"{name}: the loader chooses the samples of each rank itself; use torch's DataLoader for your own, "
        "with a sampler of num_replicas=engine.replicas, rank=engine.replica"
        for name in ("sampler", "batch_sampler", "generator")
        if name in options
    ]
    return errors or _part_errors(order)


def _part_errors(order: _Order) -> list[str]:
    if order.replica >= order.replicas:
        return [f"replica={order.replica} of replicas={order.replicas}: must be below it; they count from 0"]
    if order.batch_size < order.replicas:
        return [
            f"batch_size={order.batch_size} for {order.replicas} replicas: it is that of all replicas "
            f"together, and each needs a sample; use at least {order.replicas}"
        ]
    return []


def _errors(dataset: Any, order: _Order, needs_samples: bool, options: Mapping[str, Any]) -> list[str]:
    errors = _argument_errors(order, options)
    if not hasattr(dataset, "__getitem__"):
        errors.append(
            f"dataset is a {type(dataset).__name__}: must have a length and samples by number, or be iterable"
        )
    return errors or _size_errors(order, needs_samples)


def _size_errors(order: _Order, needs_samples: bool) -> list[str]:
    if order.num_batches == 0:
        return [f"the dataset has {order.num_samples} samples: no batch of {order.batch_size}; give it more"]
    rest = order.num_samples % order.batch_size
    if needs_samples and not order.drop_last and 0 < rest < order.replicas:
        return [
            f"the last batch of an epoch has {rest} of {order.num_samples} samples, and this plan needs one "
            f"for each of its {order.replicas} replicas; set drop_last=True, or use another batch_size"
        ]
    return []
