"""Batches of a stream: a dataset that can only be read from its beginning on (IterableDataset).

    stream        s0 s1 s2 s3 s4 s5 …        batch_size=3
    replica 0     s0 s1    s3 s4             every rank reads all of the stream, and keeps its replica's
    replica 1     s2       s5                part of each batch

So the global batches are those of one device, under every plan. To go on, a stream that has a `state_dict` is
set to where it was; of another one, the samples so far are read again and left out.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, final

from echelon.data.sampler import rows_of_part
from echelon.data.seeding import seeded, without_samples
from echelon.errors import UserError, raise_errors


@final
class StreamLoader:
    """An iterable over the batches of one epoch of a stream, and then of the next. Made by `loader`."""

    def __init__(
        self,
        stream: Any,
        batch_size: int,
        part: tuple[int, int],
        collate: Callable[[list[Any]], Any],
        seed: int,
        *,
        drop_last: bool,
    ) -> None:
        self._stream, self._batch_size, self._part = stream, batch_size, part
        self._collate, self._seed, self._drop_last = collate, seed, drop_last
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
            if len(read) < self._batch_size and self._drop_last:
                break
            self._given += 1
            yield self._take(read)
        self.epoch, self._given = self.epoch + 1, 0
        if self._has_state:
            self._stream.load_state_dict(self._first)

    def _read(self, samples: Iterator[Any], batch: int) -> list[Any]:
        # What the stream draws at random is the same on all ranks.
        with seeded(self._seed, self.epoch, batch):
            return list(islice(samples, self._batch_size))

    def _take(self, read: list[Any]) -> Any:
        rows = rows_of_part(len(read), *self._part).tolist()
        with seeded(self._seed, self.epoch, self._given, self._part[0]):
            batch = self._collate([read[row] for row in rows or [0]])
        return batch if rows else without_samples(batch)

    def state_dict(self) -> dict[str, Any]:
        """Return where to go on, behind the last batch that was given out. The same on every rank."""
        state = {"epoch": self.epoch, "batch": self._given, **self._description()}
        return {**state, "stream": self._stream.state_dict()} if self._has_state else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, under this plan or another."""
        raise_errors(
            "the state of a loader",
            [
                f"{name}={state.get(name)!r}: this loader has {value!r}, which is another order of samples; "
                "make it with the same value"
                for name, value in self._description().items()
                if state.get(name) != value
            ],
        )
        if self._has_state and "stream" not in state:
            raise UserError("the state of a loader has none of its stream: it is that of another dataset")
        self.epoch, self._given = int(state["epoch"]), int(state["batch"])
        if self._has_state:
            self._stream.load_state_dict(state["stream"])

    def _description(self) -> dict[str, Any]:
        return {"batch_size": self._batch_size, "seed": self._seed, "drop_last": self._drop_last}


def stream_errors(
    *, shuffle: bool, drop_last: bool, num_workers: int, replicas: int, needs_samples: bool
) -> list[str]:
    """List what a loader of a stream cannot do."""
    errors = []
    if shuffle:
        errors.append(
            "shuffle=True: a stream has its own order; shuffle it itself (a dataset of datasets: "
            ".shuffle(seed=0, buffer_size=10_000))"
        )
    if num_workers:
        errors.append(f"num_workers={num_workers}: each would read the whole stream; use num_workers=0")
    if needs_samples and replicas > 1 and not drop_last:
        errors.append(
            "drop_last=False: the last batch of a stream may have fewer samples than replicas, and this plan "
            "needs one on each; set drop_last=True"
        )
    return errors
