from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch.distributed as dist

from benchmarks import collectives
from echelon.launching import Ranks


def test_the_ledger_tells_what_each_way_sends(warm_ranks: Callable[[int], Ranks]) -> None:
    size = 4096
    hub, *others = (measured.sent for measured in warm_ranks(4).run(collectives.measure, size, 1))

    assert hub == {"backend": 1.5 * size, "ring": 1.5 * size, "naive": 3 * size, "shared": 1.5 * size}
    for other in others:
        assert other == {"backend": 1.5 * size, "ring": 1.5 * size, "naive": size, "shared": 1.5 * size}


def measure_in_a_group_called_nccl() -> dict[str, int]:
    with patch.object(dist, "get_backend", lambda *_: "nccl"):
        return collectives.measure(1024, 1).sent


def test_the_device_is_that_of_the_group_whatever_its_name(warm_ranks: Callable[[int], Ranks]) -> None:
    """A group called 'cpu:gloo,cuda:nccl' was measured on the CPU."""
    for sent in warm_ranks(2).run(measure_in_a_group_called_nccl):
        assert sent == dict.fromkeys(["backend", "ring", "naive", "shared"], 1024)


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
