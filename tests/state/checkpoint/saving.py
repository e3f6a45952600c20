"""A saver of one rank without an engine, and what it saves."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.collectives import RecordingGroup
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.rank_save import SaveOptions
from echelon.state.checkpoint.save import Saver
from echelon.state.checkpoint.saved import SavedState, open_whole
from echelon.state.checkpoint.snapshot import Snapshot
from echelon.state.ownership import ENGINE, OwnedSlice, Slice, whole_slice

CPU = torch.device("cpu")
ABOUT = Manifest(step=3, plan="data=1", ranks=1, saved="2026-11-17", versions={}, extra={"at": 3})


def new_saver() -> Saver:
    return Saver(RecordingGroup("all"), CPU)


def state(value: float = 1.0) -> dict[str, Tensor]:
    """Types of all widths, a transposed tensor, a scalar, and one without elements."""
    return {
        "wide": torch.full((7, 5), value, dtype=torch.float64),
        "half": torch.full((3, 3, 3), value, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.arange(12.0).add(value).reshape(3, 4).T,
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 4),
    }


def owned(tensors: dict[str, Tensor]) -> list[OwnedSlice]:
    steps = OwnedSlice(Slice(ENGINE, "steps", (), (), ()), torch.tensor(3))
    return [*(OwnedSlice(whole_slice(name, tensor), tensor) for name, tensor in tensors.items()), steps]


def save(saver: Saver, path: str | Path, tensors: dict[str, Tensor], **options: Any) -> None:
    saver.save(path, owned(tensors), ABOUT, SaveOptions(**options))


def save_and_finish(saver: Saver, path: str | Path, tensors: dict[str, Tensor], **options: Any) -> None:
    save(saver, path, tensors, **options)
    saver.finish()


def check_saved(path: str | Path, expected: dict[str, Tensor]) -> None:
    """Every file as its hash says, and every tensor in every bit."""
    saved = open_whole(path)
    assert set(saved.manifest.tensors) == set(expected)
    assert saved.manifest.numbers == {"steps": 3}
    assert saved.manifest.extra == {"at": 3}
    for name, tensor in expected.items():
        assert torch.equal(read(saved, name), tensor), name


def read(saved: SavedState, name: str) -> Tensor:
    described = saved.parts(name)["value"]
    out = torch.empty(described.shape, dtype=described.dtype)
    saved.read(whole_slice(name, out), out)
    return out


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def copying_late() -> Iterator[list[int]]:
    """What may be copied later is copied as late as can be: when the training waits for it. Yields how many
    tensors were copied so, by each snapshot."""
    is_awaited = threading.Event()
    before_changes, wait, late = Snapshot.before_changes, Snapshot.wait, list[int]()

    def copy_late(snapshot: Snapshot) -> None:
        late.append(len(snapshot._rest))
        assert not snapshot._rest or is_awaited.wait(30)
        wait(snapshot)

    def tell(snapshot: Snapshot) -> None:
        is_awaited.set()
        before_changes(snapshot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "wait", copy_late)
        patch.setattr(Snapshot, "before_changes", tell)
        yield late
