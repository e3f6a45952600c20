"""Snapshots of one rank: what is copied at once, what later, and what must not change meanwhile."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.state.checkpoint import target as target_module
from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.state.checkpoint.saved import open_whole
from echelon.state.ownership import Slice
from tests.state.checkpoint.saving import check_saved, copying_late, names, new_saver, read, save, state


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
    monkeypatch.setattr("echelon.state.checkpoint.snapshot.as_bytes", fail)
    save(saver, tmp_path / "a", state(), wait=False, later=lambda _: True)
    saver.before_changes()
    with pytest.raises(RuntimeError, match="no memory"):
        saver.finish()
    assert names(tmp_path) == []


def test_a_thread_that_cannot_start_is_an_error_and_nobody_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    saver = new_saver()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            save(saver, tmp_path / "a", state(), wait=False, later=is_weight)
    saver.before_changes()
    save(saver, tmp_path / "a", state(), wait=False)
    saver.finish()
    check_saved(tmp_path / "a", state())


def test_an_error_that_passes_while_reports_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError(errno.ESTALE, "Stale file handle")]
    no_links = target_module.no_links

    def open_once(path: str, flags: int) -> int:
        if errors:
            raise errors.pop()
        return no_links(path, flags)

    monkeypatch.setattr(target_module, "no_links", open_once)
    monkeypatch.setattr("echelon.state.checkpoint.storage_errors._pause", lambda _: None)
    saver = new_saver()
    save(saver, tmp_path / "a", state(), wait=False)
    saver.finish()
    assert not errors
    check_saved(tmp_path / "a", state())


class Changing(nn.Module):
    """Its forward pass changes a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(6, 5), nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.data.lerp_(x.mean(0), 0.1)
        result: Tensor = self.layer(x - self.mean)
        return result


class Renormalising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 6, max_norm=0.5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(self.table(x.abs().long() % 8).mean(1))
        return result


def one_engine(model: nn.Module) -> echelon.Engine:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    return echelon.parallelize(
        model, "precision=fp32", optimizer=optimizer, loss=nn.functional.mse_loss, audit="off"
    )


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return 5 * torch.randn(4, 6, generator=generator), torch.randn(4, 5, generator=generator)


@pytest.mark.parametrize(
    ("make", "is_late"), [(lambda: nn.Linear(6, 5), True), (Changing, False), (Renormalising, False)]
)
def test_weights_that_a_forward_pass_changes_are_copied_at_once(
    tmp_path: Path, make: Any, is_late: bool
) -> None:
    with one_engine(make()) as engine, copying_late() as late:
        engine.save(tmp_path / "first", wait=False, copy_behind=True)  # the first step may try things out
        engine.step(batch(0))
        expected = engine.full_state_dict()
        engine.save(tmp_path / "a", wait=False, copy_behind=True)
        engine.step(batch(1))
        engine.finish_saving()
    assert [count > 0 for count in late] == [False, is_late]
    saved = open_whole(tmp_path / "a")
    assert all(torch.equal(read(saved, name), tensor) for name, tensor in expected.items())


def test_a_folder_copies_at_once_unless_it_is_told(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with one_engine(nn.Linear(6, 5)) as engine, copying_late() as late:
        engine.step(batch(0))
        folder.save(engine, 1, {})
        folder.save(engine, 2, {}, copy_behind=True)
        engine.step(batch(1))
    assert [count > 0 for count in late] == [False, True]
