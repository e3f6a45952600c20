"""The bench `optimizer-step` works on a CPU too, where its figures mean nothing."""

import torch

from benchmarks import optimizer_step


def test_an_update_beside_a_copy_of_its_bytes() -> None:
    settings, rows = optimizer_step.bench(quick=True)
    assert [row.contender for row in rows] == ["copy of its bytes", "update"]
    assert all(row.extras["bytes_per_second"] > 0 for row in rows)
    assert settings["bytes_per_parameter"] == 30


def test_the_update_changes_weights() -> None:
    torch.manual_seed(0)
    update = optimizer_step._update(optimizer_step._SMALL, torch.device("cpu"))
    stepper = update.__closure__[-1].cell_contents  # type: ignore[attr-defined,index,union-attr]
    before = [each.tensor.clone() for each in stepper._local]
    for _ in range(20):
        update()
    assert any(not torch.equal(old, each.tensor) for old, each in zip(before, stepper._local, strict=True))
