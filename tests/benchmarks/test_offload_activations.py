"""The bench `offload-activations` works on a CPU too, where its times mean nothing."""

import pytest

from benchmarks import offload_activations


def test_rows_compare_each_plan_with_selective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_activations, "_WARMUP", 1)
    monkeypatch.setattr(offload_activations, "_ROUNDS", 1)
    settings, rows = offload_activations.bench(quick=True, only="activations recompute=full")
    assert [row.contender for row in rows] == [
        "recompute=selective",
        "offload=activations recompute=full",
    ]
    selective, both = (row.extras for row in rows)
    assert selective["host_bytes"] == 0
    assert both["host_bytes"] > 0
    assert both["activation_bytes"] < selective["activation_bytes"]
    assert settings["samples"] == 8
    assert offload_activations.bench(quick=True, only="nothing")[1] == []
