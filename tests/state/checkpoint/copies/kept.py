"""Engines whose state is kept in memory: functions that ranks can import."""

import errno
import os
import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from echelon.engine import Engine
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.state.checkpoint.copies import folder as folder_module
from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.state.checkpoint.copies.keeper import MemoryCopies
from echelon.state.checkpoint.copies.rank_file import HostCopies
from echelon.state.checkpoint.manifest import OtherVersionError
from echelon.verify.contract import make_engine
from tests.state.checkpoint.copies.host_files import make_other_version
from tests.state.checkpoint.same_plan import SAVED, Training, case_of, end, same
from tests.state.checkpoint.trainings import train


def differences_from_memory(trainings: list[Training], folder: str, hosts: int) -> dict[str, list[str]]:
    """By training, what is not the same in every bit, where ranks go on from their own files in memory."""
    return {
        str(each): _differences(each, Path(folder) / str(number), hosts)
        for number, each in enumerate(trainings)
    }


def differences_on_disk(trainings: list[Training], folder: str) -> dict[str, list[str]]:
    """The same, where the copies are written to disk first, by a process that is no rank."""
    return {
        str(each): _differences(each, Path(folder) / str(number), 1, goes_by_disk=True)
        for number, each in enumerate(trainings)
    }


def open_copies(engine: Engine, folder: Path, hosts: int) -> MemoryCopies:
    """Ranks one after the other are on hosts one after the other, each with a RAM disk of its own."""
    root = folder / f"host-{dist.get_rank() * hosts // dist.get_world_size()}"
    root.mkdir(parents=True, exist_ok=True)
    memory = MemoryFolder(folder, root)
    memory.make(os.getpid())
    return MemoryCopies(memory, str(engine.plan), engine.mesh.group("all"), engine.mesh.device)


def _differences(training: Training, folder: Path, hosts: int, *, goes_by_disk: bool = False) -> list[str]:
    case, plan = case_of(training), Plan.parse(training.plan)
    engine = make_engine(case, plan)
    copies = open_copies(engine, folder, hosts)
    train(engine, case, 0, SAVED)
    copies.save(SAVED, *engine.saved_state({"position": SAVED}))
    expected = end(engine, case)
    copies.finish()
    other = make_engine(case, plan)
    if goes_by_disk:
        assert _load_from_disk(other, folder) == {"position": SAVED}
    else:
        found = open_copies(other, folder, hosts).find(print)
        assert found is not None
        assert found.step == SAVED
        assert other.load_saved(found.saved) == {"position": SAVED}
    actual = end(other, case)
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    return [key for key in expected if not same(expected[key], actual[key])]


def _load_from_disk(engine: Engine, folder: Path) -> dict[str, Any]:
    if dist.get_rank() == 0:
        copies = HostCopies.newest(MemoryFolder(folder, folder / "host-0"), 0, print)
        assert copies is not None
        assert copies.step == SAVED
        copies.save(folder / "on disk", extra=copies.extra)
    dist.barrier()
    return engine.load(folder / "on disk")


PLAN = "data=2 zero=1 precision=bf16"


def recover(folder: str, hosts: int, faults: list[str], plan: str = PLAN) -> tuple[list[str], int, list[int]]:
    """Two saves, then faults, then another engine: what is said, the step that is found, and who had lost its
    file. Checks that this step's state is found in every bit. Step -1: copies are refused."""
    path, case = Path(folder), case_of(Training(PLAN))
    engine = make_engine(case, Plan.parse(PLAN))
    copies = open_copies(engine, path, hosts)
    states = {}
    for step in (1, 2):
        train(engine, case, step - 1, step)
        states[step] = _local_state(engine)
        copies.save(step, *engine.saved_state({"position": step}))
    copies.finish()
    engine.close(restore=False)
    for fault in faults:
        FAULTS[fault](path)
    dist.barrier()
    said: list[str] = []
    other = make_engine(case, Plan.parse(plan))
    try:
        found = open_copies(other, path, hosts).find(said.append)
    except OtherVersionError as error:
        return [str(error)], -1, []
    if found is not None:
        assert other.load_saved(found.saved) == {"position": found.step}
        assert states[found.step] == _local_state(other)
    other.close(restore=False)
    return said, found.step if found else 0, list(found.received) if found else []


def _local_state(engine: Engine) -> dict[str, list[float]]:
    return {
        f"{each.slice}": each.tensor.double().flatten().tolist()
        for each in engine.owned()
        if not each.slice.name.startswith("(")
    }


def _lose_host_1(folder: Path) -> None:
    if dist.get_rank() == 1:
        shutil.rmtree(folder / "host-1")


def _damage(pattern: str, folder: Path) -> None:
    """Change one byte in the middle of each file of step 2 that matches."""
    dist.barrier()
    if dist.get_rank() == 0:
        for manifest in folder.glob(f"{pattern}.00000002-*.json"):
            path = manifest.with_name(manifest.name.split(".")[0] + ".safetensors")
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


def _lower_version(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 1:  # of one rank; all must be told
        make_other_version(MemoryFolder(folder, folder / "host-1"))


FAULTS = {
    "copies of host 1 are of another version": _lower_version,
    "host 1 is lost": _lose_host_1,
    "file of rank 1 is damaged": partial(_damage, "host-1/*/*/rank-00001"),
    "copy of rank 1 is damaged": partial(_damage, "host-0/*/*/rank-00001"),
    "file of rank 1 is damaged, on one host": partial(_damage, "host-0/*/*/rank-00001"),
}


def save_where_rank_1_cannot_write(folder: str) -> str:
    """What a rank is told when the manifest of rank 1 finds no room."""
    case, plan = case_of(Training(PLAN)), Plan.parse(PLAN)
    engine = make_engine(case, plan)
    copies = open_copies(engine, Path(folder), 2)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ExitStack() as stack:
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(folder_module, "write_small", fail))
        copies.save(0, *engine.saved_state({"position": 0}))
        try:
            copies.finish()
        except UserError as error:
            return str(error)
        finally:
            engine.close(restore=False)
    return ""
