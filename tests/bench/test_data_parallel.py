from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch.distributed as dist

from echelon.bench import data_parallel, replicas
from echelon.bench.data_parallel import Footprint, check_equal, measure_memory
from echelon.bench.replicas import Peer
from echelon.launching import Ranks, launch
from echelon.models import ModelConfig

WIDE = ModelConfig("gpt", layers=1, width=512, heads=2, vocab=64, sequence=16, tied=True)
DDP, ZERO_1 = replicas.peers()[:2]


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
    assert settings["parameters"] == data_parallel._SMALL.num_parameters


def test_the_measured_model_has_nineteen_million_parameters() -> None:
    assert 19e6 < data_parallel._FULL.num_parameters < 20e6


def test_contenders_that_train_differently_are_not_compared() -> None:
    """Peers tell their own loss, echelon that of all: 1.5 is the mean of 1 and 2."""
    equal = [{"echelon": [1.5], "torch DDP": [own]} for own in (1.0, 2.0)]
    unequal = [{"echelon": [1.5], "torch DDP": [own]} for own in (1.0, 2.01)]

    check_equal(DDP, equal)
    with pytest.raises(RuntimeError, match="zero=0: the losses of echelon and torch DDP differ"):
        check_equal(DDP, unequal)


def test_a_loss_that_is_not_a_number_is_no_equal() -> None:
    with pytest.raises(RuntimeError, match="differ: "):
        check_equal(DDP, [{"echelon": [float("nan")], "torch DDP": [1.0]}])


@pytest.mark.parametrize("contender", ["echelon", pytest.param(ZERO_1.name, marks=pytest.mark.slow)])
def test_memory_tells_what_a_level_shares_out(contender: str) -> None:
    """Of weights, gradients and AdamW's two moments, ZeRO-1 halves the last between two ranks."""
    weights = 4 * WIDE.num_parameters
    for rank in launch(measure_memory, 2, contender, ZERO_1, WIDE):
        assert rank.state == pytest.approx(3 * weights, rel=0.01)
        assert rank.peak > rank.state
