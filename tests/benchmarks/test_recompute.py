"""The bench `recompute` works on a CPU too, where its times mean nothing."""

import pytest

from benchmarks import recompute, run
from echelon.errors import UserError


def test_rows_compare_each_way_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "_OTHERS", ("selective",))
    settings, rows = recompute.bench(quick=True)
    assert [(row.case, row.contender, row.baseline) for row in rows] == [
        ("small, eager", "none", "none"),
        ("small, eager", "selective", "none"),
    ]
    none, selective = (row.extras for row in rows)
    assert selective["activation_bytes"] < 0.7 * none["activation_bytes"]
    assert selective["tokens_per_second"] > 0
    assert settings["precision"] == "bf16"


def test_some_rows_alone() -> None:
    assert recompute.bench(quick=True, only="compiled") == (recompute.bench(True, "compiled")[0], [])
    with pytest.raises(UserError, match="bench step has no part to choose with --only; recompute, "):
        run("step", quick=True, only="GPT")


def test_both_models_are_those_of_their_names() -> None:
    parameters = [size.config.num_parameters / 1e9 for size in recompute._sizes()]
    assert parameters == pytest.approx([1.56, 3.21], abs=0.01)
