"""Each replica reads its part of the batches that a sampler of the whole chooses."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from echelon.train.integrations.hf_batches import loader_of_part


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class Reads(list[int]):
    """Samples 0, 1, 2, …, that remember which were read."""

    read: set[int]

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        self.read.add(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("dataset", [Reads(range(7)), Stream()], ids=["by number", "stream"])
def test_parts_make_up_the_batches_of_the_whole(dataset: object) -> None:
    dataset_read = dataset.__dict__.setdefault("read", set())
    whole = DataLoader(dataset, batch_size=3)  # type: ignore[arg-type, var-annotated]
    parts = [list(loader_of_part(whole, replica, 2)) for replica in range(2)]
    assert [len(part) for part in parts[1]] == [1, 1, 0], "a replica may have no sample"
    joined = [torch.cat(both).tolist() for both in zip(*parts, strict=True)]
    assert joined == [batch.tolist() for batch in whole] == [[0, 1, 2], [3, 4, 5], [6]]
    if dataset_read:
        dataset_read.clear()
        list(loader_of_part(whole, 0, 2))
        assert dataset_read == {0, 1, 3, 4, 6}, "samples of others are not read"


def test_an_epoch_is_as_long_as_that_of_the_whole() -> None:
    whole: DataLoader[Tensor] = DataLoader(list(range(7)), batch_size=3, drop_last=True)  # type: ignore[arg-type]
    part = loader_of_part(whole, 1, 2)
    assert (len(part), len(part.dataset)) == (2, 7)  # type: ignore[arg-type]
