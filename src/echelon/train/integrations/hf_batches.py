"""The batches of a Trainer: its own sampler chooses the samples of the global batch, and each rank reads its
replica's part of them. So every plan trains on the batches of one device, in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from torch.utils.data import DataLoader, Dataset, IterableDataset

from echelon.data.dataset_loader import without_samples
from echelon.data.sampler import rows_of_part


@final
class _NoSamples(list[Any]):
    """One sample, which shows what a batch is: this replica has none of the batch."""


@final
class _PartOfBatch(Dataset[Any]):
    def __init__(self, dataset: Any, replica: int, replicas: int) -> None:
        self._dataset, self._part = dataset, (replica, replicas)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, places: Sequence[int]) -> list[Any]:
        rows = rows_of_part(len(places), *self._part)
        own = [places[row] for row in rows] or [places[0]]
        several = getattr(self._dataset, "__getitems__", None)
        samples = several(own) if callable(several) else [self._dataset[place] for place in own]
        return samples if len(rows) else _NoSamples(samples)


@final
class _Collate:
    """Makes a batch of samples; of a stream, which each rank reads whole, of this replica's part of them."""

    def __init__(self, collate: Callable[[list[Any]], Any], replica: int, replicas: int, *, takes_part: bool):
        self._collate, self._part, self._takes_part = collate, (replica, replicas), takes_part

    def __call__(self, samples: list[Any]) -> Any:
        if self._takes_part:
            rows = rows_of_part(len(samples), *self._part)
            samples = [samples[row] for row in rows] if len(rows) else _NoSamples(samples[:1])
        batch = self._collate(samples)
        return without_samples(batch) if isinstance(samples, _NoSamples) else batch


def loader_of_part(loader: "DataLoader[Any]", replica: int, replicas: int) -> "DataLoader[Any]":
    is_stream = isinstance(loader.dataset, IterableDataset)
    options: dict[str, Any] = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    if not is_stream:
        options = {"batch_sampler": loader.batch_sampler}
    for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "worker_init_fn"):
        options[name] = getattr(loader, name)
    dataset = loader.dataset if is_stream else _PartOfBatch(loader.dataset, replica, replicas)
    collate = _Collate(loader.collate_fn, replica, replicas, takes_part=is_stream)
    return DataLoader(dataset, collate_fn=collate, **options)
