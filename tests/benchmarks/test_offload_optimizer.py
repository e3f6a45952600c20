"""The bench `offload-optimizer` works on a CPU too, where its times mean nothing."""

import pytest

from benchmarks import offload_optimizer


def test_every_contender_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_optimizer, "_WARMUP", 1)
    monkeypatch.setattr(offload_optimizer, "_ROUNDS", 1)
    settings, rows = offload_optimizer.bench(quick=True)
    assert [row.contender for row in rows] == list(offload_optimizer.PLANS) == list(settings["plans"])
    none, *others = rows
    assert none.extras["host_bytes"] == none.extras["host_update_seconds"] == 0
    for row in others:
        assert row.extras["host_bytes"] >= (4 + 8 + 2) * settings["parameters"]["small"]
        assert row.extras["host_update_seconds"] > 0


def test_only_chooses_contenders_beside_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_optimizer, "_WARMUP", 0)
    monkeypatch.setattr(offload_optimizer, "_ROUNDS", 1)
    _, rows = offload_optimizer.bench(quick=True, only="delay")
    assert [row.contender for row in rows] == ["none", "offload, delay=1"]
