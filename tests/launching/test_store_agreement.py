import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from echelon.errors import DamagedError, UserError
from echelon.launching import PeerLost, store_agreement
from echelon.launching.store_agreement import agree, fresh_store

RANKS = 3


def report(rank: int) -> dict[str, int]:
    return {"rank": rank}


def agree_on_all_ranks(
    decide: Callable[[list[Any]], object], report: Callable[[int], object] = report
) -> list[Future[Any]]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    with ThreadPoolExecutor(RANKS) as pool:
        return [
            pool.submit(agree, store, rank, RANKS, partial(report, rank), decide)
            for rank in reversed(range(RANKS))
        ]


def test_every_rank_has_the_decision_about_all_reports() -> None:
    calls = []

    def decide(reports: list[Any]) -> object:
        calls.append(reports)
        return ("chosen", len(reports))

    futures = agree_on_all_ranks(decide)
    assert [future.result() for future in futures] == [["chosen", RANKS]] * RANKS
    assert calls == [[{"rank": rank} for rank in range(RANKS)]], "rank 0 alone decides, once"


def test_a_decision_may_take_longer_than_the_store_waits() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))

    def decide(_: list[Any]) -> str:
        time.sleep(0.6)
        return "late"

    def join(rank: int) -> Any:
        return agree(store, rank, RANKS, lambda: None, decide, limit=timedelta(seconds=60))

    with ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(join, range(RANKS))) == ["late"] * RANKS


def test_every_rank_raises_the_same_error() -> None:
    def decide(_: list[Any]) -> object:
        raise UserError("The hosts differ:", ["host a: 2 GPUs", "host b: none"])

    for future in agree_on_all_ranks(decide):
        error = future.exception()
        assert isinstance(error, UserError)
        assert (error.title, error.errors) == ("The hosts differ:", ("host a: 2 GPUs", "host b: none"))


def test_an_error_of_one_rank_is_raised_on_every_rank() -> None:
    """The others would wait for its report."""

    def fail_on_rank_1(rank: int) -> object:
        if rank == 1:
            raise UserError("LOCAL_RANK='x': must be an integer")
        return rank

    errors = [future.exception() for future in agree_on_all_ranks(len, fail_on_rank_1)]
    assert [str(error) for error in errors] == ["LOCAL_RANK='x': must be an integer"] * RANKS


def test_any_error_of_rank_0_reaches_every_rank() -> None:
    """The others would wait for its decision, and that may take days."""
    cause = KeyError("lr")

    def decide(_: list[Any]) -> object:
        raise cause

    *others, first = agree_on_all_ranks(decide)
    assert first.exception() is cause
    for future in others:
        assert repr(future.exception()) == repr(PeerLost("rank 0 raised KeyError: 'lr'"))


def test_a_decision_that_is_no_json_is_an_error_on_every_rank() -> None:
    *others, first = agree_on_all_ranks(lambda _: b"")
    assert isinstance(first.exception(), TypeError)
    assert {type(future.exception()) for future in others} == {PeerLost}


def test_any_error_of_another_rank_reaches_every_rank() -> None:
    cause = OSError("no such device")

    def fail_on_rank_1(rank: int) -> object:
        if rank == 1:
            raise cause
        return rank

    last, failed, first = agree_on_all_ranks(len, fail_on_rank_1)
    assert failed.exception() is cause
    for future in (first, last):
        assert repr(future.exception()) == repr(PeerLost("rank 1 raised OSError: no such device"))


def test_a_rank_that_does_not_report_is_an_error_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stops waiting for its report; the others would wait for a decision for much longer."""
    monkeypatch.setattr(store_agreement, "_READ_SECONDS", 0.01)
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.3))

    def join(rank: int) -> Any:
        return agree(store, rank, RANKS, lambda: None, len, limit=timedelta(seconds=5))

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(join, rank) for rank in range(2))
        assert isinstance(first.exception(), DistStoreError)
        assert str(second.exception()).startswith("rank 0 raised ")


def test_rank_0_keeps_the_store_until_every_rank_has_read_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 may hold the store in its own process: if it ended first, the others would see a lost store."""

    def decide(_: list[Any]) -> object:
        raise UserError("no")

    class WatchedStore(HashStore):
        waited_for: tuple[str, ...] = ()

        def wait(self, keys: list[str], *limit: Any) -> None:
            self.waited_for = tuple(keys)
            super().wait(keys, *limit)

    store = WatchedStore()
    store.set("report-1", '{"value": 1}')
    monkeypatch.setattr(store_agreement, "_READ_SECONDS", 0.01)
    with pytest.raises(UserError, match="no"):  # although rank 1 never reads
        agree(store, 0, 2, int, decide)
    assert store.waited_for == ("all have read",)
    with pytest.raises(UserError, match="no"):
        agree(store, 1, 2, int, decide)
    store.wait(["all have read"])


def test_damage_is_damage_on_every_rank() -> None:
    def find_damage(rank: int) -> None:
        if rank == 1:
            raise DamagedError("a file is missing")

    for future in agree_on_all_ranks(lambda _: None, find_damage):
        with pytest.raises(DamagedError, match="a file is missing"):
            future.result()


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


def test_rank_0_decides_when_all_have_reported_though_one_has_failed() -> None:
    """What follows an error may remove files that another rank still writes."""
    done = []

    def work(rank: int) -> object:
        if rank == 1:
            raise UserError("no space left")
        time.sleep(0.3 if rank == 2 else 0)
        done.append(rank)
        return rank

    def error_of(store: Store, rank: int) -> set[int]:
        with pytest.raises(UserError, match="no space left"):
            agree(store, rank, RANKS, partial(work, rank), len)
        return set(done)

    store = HashStore()
    store.set_timeout(timedelta(seconds=10))
    with ThreadPoolExecutor(RANKS) as pool:
        assert list(pool.map(partial(error_of, store), range(RANKS))) == [{0, 2}] * RANKS
