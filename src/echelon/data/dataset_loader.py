"""`loader`: the batches of any dataset, of which each rank gets its replica's part.

    order    7 2 9 | 0 5 3 | 8 1 6 | 4      one epoch of ten samples, batch_size=3, shuffled
    replica 0 of 2   7 2     0 5     8 1     4
    replica 1 of 2   9       3       6       (no sample)

The global batches depend on the seed and the epoch alone, so every plan sees the same ones, and a run that
stops can go on under another plan. Ranks of one replica get the same batch. A dataset that can only be read
from its beginning on (IterableDataset) is a stream, in its own order:

    stream        s0 s1 s2 s3 s4 s5 …        batch_size=3
    replica 0     s0 s1    s3 s4             every rank reads all of the stream, and keeps its replica's
    replica 1     s2       s5                part of each batch

To go on, a stream that has a `state_dict` is set to where it was; of another one, the samples so far are read
again and left out.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate
from torch.utils.data import IterableDataset as _IterableDataset

from echelon.data.sampler import integer_errors, rows_of_part
from echelon.data.sampler import shuffle as shuffle_places
from echelon.errors import UserError, raise_errors
from echelon.nn.hashing import WEYL, mix

Collate = Callable[[list[Any]], Any]


class Replicas(Protocol):
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
        errors = _argument_errors(order, options) + _stream_errors(order, num_workers, needs_samples)
        raise_errors("the arguments of loader", errors)
        return StreamLoader(dataset, order, collate_fn or default_collate)
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
        _check_state(state, self._order.description())
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

    def description(self, *, of_stream: bool = False) -> dict[str, Any]:
        """Return what the order of samples follows from."""
        names = ("num_samples", "batch_size", "shuffle", "seed", "drop_last")
        of_numbers = ("num_samples", "shuffle") if of_stream else ()
        return {name: getattr(self, name) for name in names if name not in of_numbers}

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


@final
class StreamLoader:
    """An iterable over the batches of one epoch of a stream, and then of the next. Made by `loader`."""

    def __init__(self, stream: Any, order: _Order, collate: Collate) -> None:
        self._stream, self._order, self._collate = stream, order, collate
        self.epoch = self._given = 0
        self._has_state = all(callable(getattr(stream, n, None)) for n in ("state_dict", "load_state_dict"))
        self._first: Any = self._stream.state_dict() if self._has_state else None  # of an epoch

    def __iter__(self) -> Iterator[Any]:
        """Give the batches from the first of the epoch on, or from where `load_state_dict` says."""
        if callable(getattr(self._stream, "set_epoch", None)):
            self._stream.set_epoch(self.epoch)
        samples = iter(self._stream)
        if not self._has_state:
            for batch in range(self._given):
                self._read(samples, batch)
        while read := self._read(samples, self._given):
            if len(read) < self._order.batch_size and self._order.drop_last:
                break
            self._given += 1
            yield self._take(read)
        self.epoch, self._given = self.epoch + 1, 0
        if self._has_state:
            self._stream.load_state_dict(self._first)

    def _read(self, samples: Iterator[Any], batch: int) -> list[Any]:
        # What the stream draws at random is the same on all ranks.
        with seeded(self._order.seed, self.epoch, batch):
            return list(islice(samples, self._order.batch_size))

    def _take(self, read: list[Any]) -> Any:
        rows = rows_of_part(len(read), self._order.replica, self._order.replicas).tolist()
        with seeded(self._order.seed, self.epoch, self._given, self._order.replica):
            batch = self._collate([read[row] for row in rows or [0]])
        return batch if rows else without_samples(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return where to go on, behind the last batch that was given out. The same on every rank."""
        state = {"epoch": self.epoch, "batch": self._given, **self._order.description(of_stream=True)}
        return {**state, "stream": self._stream.state_dict()} if self._has_state else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, under this plan or another."""
        _check_state(state, self._order.description(of_stream=True))
        if self._has_state and "stream" not in state:
            raise UserError("the state of a loader has none of its stream: it is that of another dataset")
        self.epoch, self._given = int(state["epoch"]), int(state["batch"])
        if self._has_state:
            self._stream.load_state_dict(state["stream"])


def _check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    errors = [
        f"{name}={state.get(name)!r}: this loader has {value!r}, which is another order of samples; make it "
        "with the same value"
        for name, value in own.items()
        if state.get(name) != value
    ]
    raise_errors("the state of a loader", errors)


def _stream_errors(order: _Order, num_workers: int, needs_samples: bool) -> list[str]:
    errors = []
    if order.shuffle:
        errors.append(
            "shuffle=True: a stream has its own order; shuffle it itself (a dataset of datasets: "
            ".shuffle(seed=0, buffer_size=10_000))"
        )
    if num_workers:
        errors.append(f"num_workers={num_workers}: each would read the whole stream; use num_workers=0")
    if needs_samples and order.replicas > 1 and not order.drop_last:
        errors.append(
            "drop_last=False: the last batch of a stream may have fewer samples than replicas, and this plan "
            "needs one on each; set drop_last=True"
        )
    return errors


@contextmanager
def seeded(*numbers: int) -> Iterator[Callable[..., None]]:
    """Seed torch, numpy and Python inside; gives a function that seeds again. Then all go on as before."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        _seed(*numbers)
        yield _seed
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def _seed(*numbers: int) -> None:
    mixed = 0
    for number in numbers:
        mixed = mix((mixed ^ number) + WEYL)
    torch.default_generator.manual_seed(mixed)
    np.random.seed(mixed % 2**32)
    random.seed(mixed)


def without_samples(batch: Any) -> Any:
    """Return a batch of the same form with no sample in it."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {name: without_samples(value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(without_samples, batch))
    return type(batch)(map(without_samples, batch)) if isinstance(batch, tuple | list) else batch
