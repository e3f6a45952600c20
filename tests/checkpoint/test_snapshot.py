"""Snapshots of one rank: what is copied at once, what later, and what must not change meanwhile."""

from pathlib import Path

import pytest
import torch

from echelon.errors import UserError
from echelon.ownership import Slice
from tests.checkpoint.saving import check_saved, copying_late, names, new_saver, save, state


def is_weight(box: Slice) -> bool:
    return box.name != "half"


def test_what_is_copied_later_is_copied_before_it_changes(tmp_path: Path) -> None:
    saver, tensors = new_saver(), state()
    with copying_late() as late:
        save(saver, tmp_path / "a", tensors, wait=False, later=is_weight)
        tensors["half"].zero_()  # at once
        saver.before_changes()
        for tensor in tensors.values():
            tensor.zero_()
        saver.finish()
    assert late == [len(tensors) - 1]
    check_saved(tmp_path / "a", state())


def test_what_changes_too_early_is_named_and_nothing_is_saved(tmp_path: Path) -> None:
    saver, tensors = new_saver(), state()
    with copying_late():
        save(saver, tmp_path / "a", tensors, wait=False, later=is_weight)
        tensors["wide"].add_(1)
        saver.before_changes()
        with pytest.raises(UserError, match=r"is not saved: wide \(value\) changed while it was copied"):
            saver.finish()
    assert names(tmp_path) == []
    save(saver, tmp_path / "a", tensors, wait=False, later=is_weight)
    saver.finish()
    check_saved(tmp_path / "a", tensors)


def test_changes_behind_the_copy_are_none_of_its_business(tmp_path: Path) -> None:
    saver, tensors = new_saver(), state()
    save(saver, tmp_path / "a", tensors, wait=False, later=is_weight)
    for _ in range(3):
        saver.before_changes()
        for tensor in tensors.values():
            tensor.zero_()
    saver.finish()
    check_saved(tmp_path / "a", state())


def test_a_copy_that_fails_is_an_error_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory for a contiguous copy")

    saver = new_saver()
    monkeypatch.setattr("echelon.checkpoint.snapshot.as_bytes", fail)
    save(saver, tmp_path / "a", state(), wait=False, later=lambda _: True)
    saver.before_changes()
    with pytest.raises(RuntimeError, match="no memory"):
        saver.finish()
    assert names(tmp_path) == []
