"""Ranks that are started again with the same store meet each other, and never those before them."""

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from echelon.launching import PeerLost
from echelon.launching.fresh_store import fresh_store

LIMIT = timedelta(seconds=20)


def start(store: Store, ranks: int, late: int | None = None) -> list[PrefixStore]:
    stores: dict[int, PrefixStore] = {}

    def join(rank: int) -> None:
        stores[rank] = fresh_store(store, rank, ranks, LIMIT)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for rank, thread in enumerate(threads):
        if rank != late:
            thread.start()
    if late is not None:
        threading.Event().wait(0.2)  # the others are early, and read the word of an earlier rank
        threads[late].start()
    for thread in threads:
        thread.join()
    return [stores[rank] for rank in range(ranks)]


@pytest.mark.parametrize("late", [None, 0, 2])
def test_each_start_has_a_part_of_its_own(late: int | None) -> None:
    store = HashStore()
    starts = [start(store, 3), start(store, 3, late), start(store, 2)]
    for number, stores in enumerate(starts):
        stores[0].set("key", str(number))
    for number, stores in enumerate(starts):
        assert [each.get("key") for each in stores] == [str(number).encode()] * len(stores)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    with pytest.raises(PeerLost, match="2 ranks did not all start"):
        fresh_store(HashStore(), 0, 2, timedelta(seconds=0.1))
