"""Engines whose state is kept in memory: functions that ranks can import."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from echelon.checkpoint.copies import FoundCopies, MemoryCopies, MemoryFolder
from echelon.engine import Engine
from echelon.plan import Plan
from echelon.verify import Case
from echelon.verify.contract import make_engine
from tests.checkpoint.same_plan import SAVED, Training, case_of, end, same
from tests.checkpoint.trainings import train


def differences_from_memory(trainings: list[Training], folder: str, hosts: int) -> dict[str, list[str]]:
    """By training, what is not the same in every bit, where ranks go on from their own files in memory."""
    return {
        str(each): _differences(each, Path(folder) / str(number), hosts)
        for number, each in enumerate(trainings)
    }


def open_copies(engine: Engine, folder: Path, hosts: int) -> MemoryCopies:
    """Ranks one after the other are on hosts one after the other, each with a RAM disk of its own."""
    root = folder / f"host-{dist.get_rank() * hosts // dist.get_world_size()}"
    root.mkdir(parents=True, exist_ok=True)
    memory = MemoryFolder(folder, root)
    memory.make(os.getpid())
    return MemoryCopies(memory, str(engine.plan), engine.mesh.group("all"), engine.mesh.device)


def _differences(training: Training, folder: Path, hosts: int) -> list[str]:
    case, plan = case_of(training), Plan.parse(training.plan)
    engine = make_engine(case, plan)
    copies = open_copies(engine, folder, hosts)
    train(engine, case, 0, SAVED)
    copies.save(SAVED, *engine.saved_state({"position": SAVED}))
    expected = end(engine, case)
    copies.finish()
    other = make_engine(case, plan)
    found = open_copies(other, folder, hosts).find(print)
    assert found is not None and found.step == SAVED
    assert other.load_own_state(found.saved) == {"position": SAVED}
    actual = end(other, case)
    assert expected.keys() == actual.keys(), expected.keys() ^ actual.keys()
    return [key for key in expected if not same(expected[key], actual[key])]
