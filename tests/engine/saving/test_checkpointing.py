"""Saves of several ranks: an error on one is an error on all; training goes on behind a save."""

import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon
from echelon.engine.engine import Engine
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.state.checkpoint import snapshot, target
from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.state.checkpoint.part_writer import DirectFile
from echelon.state.checkpoint.saved import open_whole
from tests.cases import Perceptron, adamw, mean_loss, vectors
from tests.state.checkpoint.saving import copying_late, names, read

Warm = Callable[[int], Ranks]


def new_engine(plan: str) -> Engine:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model = Perceptron() if "pipeline" not in plan else nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    finally:
        torch.set_default_dtype(torch.float32)
    return echelon.parallelize(model, f"{plan} precision=fp64", optimizer=adamw, loss=mean_loss, audit="off")


def step(engine: Engine, number: int) -> None:
    engine.step(engine.local(vectors(number)))


class FullDisk:
    """A file on a disk that has no space left."""

    def __init__(self, path: Path) -> None:
        path.touch()

    def write(self, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finish(self) -> None: ...

    def close(self) -> None: ...


def message_of(work: Callable[[], None]) -> str:
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


def save_behind_steps(folder: Path, plan: str) -> bool:
    """Whether what was saved while training went on is what it was when the save was called."""
    engine = new_engine(plan)
    step(engine, 0)
    engine.save(folder / "a", wait=False, extra={"at": 1})
    expected = engine.full_state_dict()
    for number in range(1, 4):
        step(engine, number)
    engine.save(folder / "b", wait=False)  # when the first is whole
    assert open_whole(folder / "a").manifest.step == 1
    engine.close()  # when the second is
    loaded = new_engine(plan)
    assert loaded.load(folder / "a") == {"at": 1}
    found = loaded.full_state_dict()
    loaded.close()
    return all(torch.equal(found[name], expected[name]) for name in expected)


def copy_behind_a_step(folder: Path, plan: str) -> tuple[bool, bool]:
    """Whether anything was copied late, and whether weights and state are those that they were."""
    engine = new_engine(plan)
    step(engine, 0)
    weights, state = engine.full_state_dict(), engine.full_optimizer_state()
    with copying_late() as late:
        engine.save(folder / "a", wait=False, copy_behind=True)
        step(engine, 1)
        engine.close()
    loaded = new_engine(plan)
    loaded.load(folder / "a")
    same = [torch.equal(found, weights[name]) for name, found in loaded.full_state_dict().items()]
    for name, found in loaded.full_optimizer_state().items():
        same += [torch.equal(found[part], state[name][part]) for part in state[name]]
    loaded.close()
    return late[0] > 0, all(same)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("plan", "is_late"),
    [
        ("data=2 zero=1", True),
        ("data=2 zero=3", True),
        ("pipeline=2 microbatches=2", True),
        ("data=2 zero=2 offload=optimizer", True),
        ("data=2 zero=3 offload=parameters", True),
        ("data=2 update=backward", False),
        ("data=2 offload=optimizer delay=1", False),
        ("pipeline=2 microbatches=2 schedule=pipedream", False),
        ("data=2 sync=parameter-server", True),
    ],
)
def test_a_step_updates_when_its_weights_are_copied(
    warm_ranks: Warm, tmp_path: Path, plan: str, is_late: bool
) -> None:
    found = warm_ranks(2).run(copy_behind_a_step, tmp_path, plan)
    assert any(late for late, _ in found) == is_late  # a server has all
    assert all(same for _, same in found)


@pytest.mark.parametrize("plan", ["data=2 zero=3", "data=2 zero=1"])
def test_steps_do_not_change_what_is_being_saved(warm_ranks: Warm, tmp_path: Path, plan: str) -> None:
    assert warm_ranks(2).run(save_behind_steps, tmp_path, plan) == [True, True]
    assert names(tmp_path) == ["a", "b"]


def save_behind_workers(folder: Path) -> bool:
    """Whether a server whose copies take long saves what it had when the save was called."""
    engine = new_engine("data=2 sync=async staleness=4")
    step(engine, 0)
    expected = engine.full_state_dict()
    with pytest.MonkeyPatch.context() as patch:
        if engine.mesh.rank == 0:
            as_bytes = snapshot.as_bytes
            patch.setattr(snapshot, "as_bytes", lambda tensor: (time.sleep(0.05), as_bytes(tensor))[1])
        engine.save(folder / "a", wait=False)
    for number in range(1, 4):
        step(engine, number)
    engine.close()
    saved = open_whole(folder / "a")
    found = set(expected) & set(saved.manifest.tensors)  # a tied weight has one of two names
    return bool(found) and all(torch.equal(read(saved, name), expected[name]) for name in found)


def test_workers_do_not_change_what_their_server_saves(warm_ranks: Warm, tmp_path: Path) -> None:
    assert warm_ranks(2).run(save_behind_workers, tmp_path) == [True, True]


def save_to_full_disk(folder: Path, wait: bool, finish: str) -> list[str]:
    """The messages of a save to a disk that is full for rank 1, and of what comes after it."""
    engine = new_engine("data=2 zero=1")
    step(engine, 0)
    engine.save(folder / "a")
    said = []
    try:
        if engine.mesh.rank == 1:
            target.DirectFile = FullDisk
        said.append(message_of(lambda: engine.save(folder / "b", wait=wait)))
        step(engine, 1)
        if finish == "close":
            said.append(message_of(engine.close))
            return said
        said.append(message_of(lambda: engine.save(folder / "c")))
        said.append(message_of(engine.finish_saving))
    finally:
        target.DirectFile = DirectFile
    said.append(message_of(lambda: engine.save(folder / "c")))
    engine.close()
    return said


@pytest.mark.parametrize(("wait", "finish"), [(True, "save"), (False, "save"), (False, "close")])
def test_an_error_of_one_rank_is_raised_on_all(
    warm_ranks: Warm, tmp_path: Path, wait: bool, finish: str
) -> None:
    first, second = warm_ranks(2).run(save_to_full_disk, tmp_path, wait, finish)
    assert first == second
    errors = [bool(message) for message in first]
    assert (
        errors == {True: [True, True, False, False], False: [False, True, False, False]}[wait][: len(errors)]
    )
    assert "b: the checkpoint cannot be written: No space left on device" in first[0 if wait else 1]
    assert names(tmp_path) == (["a"] if finish == "close" else ["a", "c"])


def lose_rank(folder: Path) -> list[str]:
    """A rank fails while a save is under way: what it leaves."""
    engine = new_engine("data=2")
    step(engine, 0)
    if engine.mesh.rank == 1:
        target.FolderTarget.report = lambda *_: None  # type: ignore[method-assign]  # it never comes
    engine.save(folder / "a", wait=False)
    with pytest.raises(ZeroDivisionError):
        fail_in(engine)
    return names(folder)


def fail_in(engine: Engine) -> None:
    with engine:
        raise ZeroDivisionError


def test_a_failed_engine_waits_for_nobody(tmp_path: Path) -> None:
    echelon.launch(lose_rank, 2, tmp_path)
    assert names(tmp_path) == []


def delete_while_loading(folder: Path) -> str:
    engine = new_engine("data=1")
    step(engine, 0)
    engine.save(folder / "a")
    with pytest.MonkeyPatch.context() as patch:

        def open_and_delete(path: Path, *, verify: bool = True) -> object:
            saved = open_whole(path, verify=verify)
            shutil.rmtree(path)
            return saved

        patch.setattr("echelon.engine.core.open_whole", open_and_delete)
        return message_of(lambda: engine.load(folder / "a") and None)


def test_a_checkpoint_that_is_deleted_while_it_loads_is_an_error(tmp_path: Path) -> None:
    message = delete_while_loading(tmp_path)
    assert "rank-00000.safetensors" in message
    assert "cannot be read" in message


def test_a_checkpoint_without_its_numbers_changes_nothing(tmp_path: Path) -> None:
    with new_engine("data=1") as engine:
        engine.save(tmp_path / "a")
        step(engine, 0)
        before = engine.full_state_dict()
        manifest = open_whole(tmp_path / "a").manifest
        data = dataclasses.replace(manifest, numbers={}).as_bytes()
        (tmp_path / "a" / "manifest.json").write_bytes(data)
        message = message_of(lambda: engine.load(tmp_path / "a") and None)
        assert "there is no 'begun steps'" in message
        after = engine.full_state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        step(engine, 1)


def keep_on_ranks(folder: Path) -> tuple[list[int], int]:
    engine, checkpoints = new_engine("data=2 zero=1"), CheckpointFolder(folder, keep=2)
    for number in range(5):
        step(engine, number)
        checkpoints.save(engine, number + 1, {"next": number + 1})
    engine.finish_saving()
    again = new_engine("data=2 zero=3")
    extra = checkpoints.load_last(again)
    assert extra is not None
    again.close()
    engine.close()
    return checkpoints.steps(), extra["next"]


def test_ranks_keep_the_last_checkpoints(warm_ranks: Warm, tmp_path: Path) -> None:
    assert warm_ranks(2).run(keep_on_ranks, tmp_path) == [([5, 4], 5)] * 2
    assert (tmp_path / "latest").read_text() == "step-00000005"


def test_close_waits_for_a_save_also_when_a_step_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine("data=1")
    late, find = UserError("a step was refused"), target.FolderTarget.find_report
    monkeypatch.setattr(target.FolderTarget, "find_report", lambda *a: (time.sleep(0.2), find(*a))[1])
    engine.save(tmp_path / "a", wait=False)
    monkeypatch.setattr(engine._step, "late_error", lambda **_: late)
    monkeypatch.setattr(engine, "synchronize", lambda: None)
    monkeypatch.setattr(engine, "full_state_dict", dict)
    assert message_of(engine.close) == "a step was refused"
    assert names(tmp_path) == ["a"]
