from collections.abc import Callable
from contextlib import nullcontext

import pytest

from echelon.bench import collectives
from echelon.launching import Ranks


def test_the_ledger_tells_what_each_way_sends(warm_ranks: Callable[[int], Ranks]) -> None:
    size = 4096
    hub, *others = (measured.sent for measured in warm_ranks(4).run(collectives.measure, size, 1))

    assert hub == {"backend": 1.5 * size, "ring": 1.5 * size, "naive": 3 * size, "shared": 1.5 * size}
    for other in others:
        assert other == {"backend": 1.5 * size, "ring": 1.5 * size, "naive": size, "shared": 1.5 * size}


def test_rows_have_bandwidth_and_the_busiest_ranks_bytes(
    warm_ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "measuring_ranks", lambda count: nullcontext(warm_ranks(count)))

    settings, rows = collectives.bench(quick=True)

    assert settings["ranks"] == [2]
    assert [row.contender for row in rows] == 2 * ["backend", "ring", "naive", "shared"]
    assert [row.case for row in rows[::4]] == ["2 ranks, 1.0 KiB", "2 ranks, 64.0 KiB"]
    for row, size in zip(rows, 4 * [1024] + 4 * [65536], strict=True):
        assert row.extras["bus_bytes_per_second"] == size / row.seconds.median
        assert row.extras["busiest_rank_sent_bytes"] == size
