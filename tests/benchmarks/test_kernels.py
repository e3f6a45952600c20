"""The bench `kernels` works on a CPU too, where its figures mean nothing."""

import pytest
import torch

from benchmarks import kernels


def test_rows_compare_dropout_and_the_loss_with_torchs() -> None:
    settings, rows = kernels.bench(quick=True)
    assert [(row.case, row.contender) for row in rows] == [
        (case, contender)
        for case in (
            "dropout [2, 4, 6] bfloat16",
            "dropout [2, 4, 6] float32",
            "cross-entropy [8, 16] bfloat16",
        )
        for contender in ("torch", "echelon")
    ]
    assert all(row.extras["host_seconds"] > 0 for row in rows)
    assert settings["p"] == 0.1


def test_a_dropout_of_other_elements_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "mask_of", lambda *_: torch.ones(2, 4, 6, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"dropout of \(2, 4, 6\) in torch.bfloat16 does not keep"):
        kernels.bench(quick=True)


def test_losses_that_differ_give_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "summed_cross_entropy", lambda logits, _: logits.sum())
    with pytest.raises(RuntimeError, match="the losses differ"):
        kernels.bench(quick=True)
