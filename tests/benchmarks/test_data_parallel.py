from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch.distributed as dist
from benchmarks.data_parallel import Footprint, measure_memory
from benchmarks.replicas import Peer

from benchmarks import Row, data_parallel, replicas
from echelon.launching import RankFailed, Ranks, launch
from echelon.models import ModelConfig

WIDE = ModelConfig("gpt", layers=1, width=512, heads=2, vocab=64, sequence=16, tied=True)
ZERO_1 = replicas.peers()[1]


def fake_memory(contender: str, peer: Peer, _: ModelConfig) -> Footprint:
    return Footprint(peak=10 * dist.get_rank() + peer.level, state=len(contender))


@pytest.mark.slow
def test_rows_compare_echelon_with_a_peer_at_every_level(
    warm_ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_parallel, "measuring_ranks", lambda count: nullcontext(warm_ranks(count)))
    monkeypatch.setattr(data_parallel, "measure_memory", fake_memory)
    of_torch = [peer for peer in replicas.peers() if peer.package == "torch"]
    missing = Peer("no peer", 3, "no_such_package", replicas.compute_only_step)
    monkeypatch.setattr(replicas, "peers", lambda: [*of_torch, missing])

    settings, rows = data_parallel.bench(quick=True)

    assert [(row.case, row.contender, row.baseline) for row in rows] == [
        (f"zero={peer.level}", contender, peer.name)
        for peer in of_torch
        for contender in ("compute only", peer.name, "echelon")
    ]
    assert [row.extras.get("peak_bytes") for row in rows] == [
        peak for level in range(4) for peak in (None, 10 + level, 10 + level)
    ]
    assert rows[2].extras["state_bytes"] == len("echelon")
    assert settings["not_installed"] == ["no_such_package"]
    assert settings["remarks"] == []
    assert settings["parameters"] == data_parallel._SMALL.num_parameters


def test_the_measured_model_has_nineteen_million_parameters() -> None:
    assert 19e6 < data_parallel._FULL.num_parameters < 20e6


def failing_step(config: ModelConfig) -> replicas.Step:
    raise RuntimeError("this peer needs a driver")


# A peer that leaves its replicas apart: its losses differ from the second step on.
APART = Peer("DeepSpeed stage 1", 1, "json", replicas.compute_only_step)
BROKEN = Peer("DeepSpeed stage 2", 2, "json", failing_step)


class CannedRanks:
    """Answers as ranks would that measure these peers."""

    def run(self, fn: object, *args: object) -> list[object]:
        if fn is data_parallel.train_alone:
            return [[4.0, 3.0, 2.0, 1.0]]
        if fn is fake_memory:
            return [Footprint(1, 1)]
        if args[0] is BROKEN:
            raise RankFailed(1, "raised RuntimeError: this peer needs a driver")
        names = ("compute only", APART.name, "echelon")
        losses = {name: [4.0, 3.0, 2.0, 1.0 if name == "echelon" else 1.1] for name in names}
        return [data_parallel.Measured({name: [1.0] for name in names}, losses)] * 2


def check_remarks(settings: dict[str, Any], rows: list[Row]) -> None:
    assert [row.contender for row in rows] == ["compute only", "DeepSpeed stage 1", "echelon"]
    differs, fails = settings["remarks"]
    assert differs.startswith("zero=1: the losses of echelon and DeepSpeed stage 1 differ")
    assert "one device trains as echelon: " in differs
    assert fails.startswith("zero=2: DeepSpeed stage 2 cannot be measured here: ")
    assert "this peer needs a driver" in fails


def test_a_peer_that_trains_differently_or_fails_is_reported_and_the_bench_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The bench ended in a traceback, and nothing was measured.
    monkeypatch.setattr(data_parallel, "measuring_ranks", lambda _: nullcontext(CannedRanks()))
    monkeypatch.setattr(data_parallel, "measure_memory", fake_memory)
    monkeypatch.setattr(replicas, "peers", lambda: [APART, BROKEN])
    check_remarks(*data_parallel.bench(quick=True))
    broken_torch = BROKEN._replace(package="torch")
    monkeypatch.setattr(replicas, "peers", lambda: [broken_torch])
    monkeypatch.setitem(globals(), "BROKEN", broken_torch)
    with pytest.raises(RankFailed):  # there the failure may be echelon's own
        data_parallel.bench(quick=True)


@pytest.mark.slow
def test_such_peers_in_real_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "measure_memory", fake_memory)
    monkeypatch.setattr(replicas, "peers", lambda: [APART, BROKEN])
    check_remarks(*data_parallel.bench(quick=True))


@pytest.mark.slow
@pytest.mark.parametrize("contender", ["echelon", pytest.param(ZERO_1.name, marks=pytest.mark.slow)])
def test_memory_tells_what_a_level_shares_out(contender: str) -> None:
    """Of weights, gradients and AdamW's two moments, ZeRO-1 halves the last between two ranks."""
    weights = 4 * WIDE.num_parameters
    for rank in launch(measure_memory, 2, contender, ZERO_1, WIDE):
        assert rank.state == pytest.approx(3 * weights, rel=0.01)
        assert rank.peak > rank.state
