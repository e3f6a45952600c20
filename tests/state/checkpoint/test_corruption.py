"""200 random damages to a checkpoint: each is found before anything is loaded, with the file named."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.errors import UserError
from echelon.state.checkpoint.folder import CheckpointFolder
from echelon.state.checkpoint.manifest import MANIFEST
from echelon.state.checkpoint.saved import SavedState, open_whole
from tests.state.checkpoint.small import FILES, write_small

NAMES = (MANIFEST, *FILES)
Damage = Callable[[Path, Path, random.Random], str]


def flip_bits(folder: Path, other: Path, draw: random.Random) -> str:
    name = draw.choice(NAMES)
    data = bytearray((folder / name).read_bytes())
    for place in draw.sample(range(len(data)), draw.choice((1, 1, 2, 20))):
        data[place] ^= 1 << draw.randrange(8)
    (folder / name).write_bytes(data)
    return name


def cut_short(folder: Path, other: Path, draw: random.Random) -> str:
    name = draw.choice(NAMES)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: draw.randrange(len(data))])
    return name


def lengthen(folder: Path, other: Path, draw: random.Random) -> str:
    name = draw.choice(NAMES)
    with (folder / name).open("ab") as file:
        file.write(draw.randbytes(draw.randint(1, 100)))
    return name


def double(folder: Path, other: Path, draw: random.Random) -> str:
    name = draw.choice(NAMES)
    (folder / name).write_bytes(2 * (folder / name).read_bytes())
    return name


def move_bytes(folder: Path, other: Path, draw: random.Random) -> str:
    """A block of zeros, or of the file itself, as a disk returns that lost a write."""
    name = draw.choice(NAMES)
    data = bytearray((folder / name).read_bytes())
    length = draw.randint(1, len(data) // 2)
    begin, source = draw.randrange(len(data) - length), draw.randrange(len(data) - length)
    block = bytes(length) if draw.random() < 0.5 else data[source : source + length]
    if data[begin : begin + length] == block:
        return flip_bits(folder, other, draw)
    data[begin : begin + length] = block
    (folder / name).write_bytes(data)
    return name


def empty(folder: Path, other: Path, draw: random.Random) -> str:
    name = draw.choice(NAMES)
    (folder / name).write_bytes(b"")
    return name


def remove(folder: Path, other: Path, draw: random.Random) -> str:
    name = draw.choice(NAMES)
    (folder / name).unlink()
    return name


def swap(folder: Path, other: Path, draw: random.Random) -> str:
    first, second = (folder / name for name in FILES)
    first.rename(folder / "x")
    second.rename(first)
    (folder / "x").rename(second)
    return FILES[0]


def copy_other_rank(folder: Path, other: Path, draw: random.Random) -> str:
    source, target = draw.sample(FILES, 2)
    shutil.copy(folder / source, folder / target)
    return target


def take_from_other_checkpoint(folder: Path, other: Path, draw: random.Random) -> str:
    """A file of another step has the same name and size. After another manifest no file fits."""
    name = draw.choice(NAMES)
    shutil.copy(other / name, folder / name)
    return "rank-0000" if name == MANIFEST else name


DAMAGES = (
    *(flip_bits,) * 3,
    cut_short,
    lengthen,
    double,
    move_bytes,
    empty,
    remove,
    swap,
    copy_other_rank,
    take_from_other_checkpoint,
)


class Loads:
    """An engine that only notes what it is told to load."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def save(self, path: str | Path, **_: Any) -> None:
        raise AssertionError(path)

    def load_saved(self, saved: SavedState) -> dict[str, Any]:
        self.loaded.append(saved.path.name)
        return dict(saved.manifest.extra)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", range(4))
def test_50_damages_are_found_and_the_checkpoint_before_is_loaded(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    before, last = tmp_path / "step-00000003", tmp_path / "step-00000004"
    write_small(before, step=3)
    write_small(last, step=4, add=1.0)
    open_whole(last)
    kept = tmp_path.parent / f"kept-{seed}"
    shutil.copytree(last, kept)
    for number in range(50):
        shutil.rmtree(last)
        shutil.copytree(kept, last)
        damage: Damage = DAMAGES[number % len(DAMAGES)]
        name = damage(last, before, draw)
        with pytest.raises(UserError) as refusal:
            open_whole(last)
        assert f"{last}/{name}" in str(refusal.value), damage
        engine, said = Loads(), list[str]()
        assert CheckpointFolder(tmp_path).load_last(engine, said.append) == {"at": [1, 2]}
        assert engine.loaded == [before.name], damage
        assert len(said) == 1
        assert f"{last}/{name}" in said[0]
        assert "trying the one before" in said[0]


def test_without_any_whole_checkpoint_nothing_is_loaded(tmp_path: Path) -> None:
    write_small(tmp_path / "step-00000003")
    (tmp_path / "step-00000003" / FILES[1]).unlink()
    (tmp_path / "step-x").mkdir()
    (tmp_path / ".step-00000004.part").mkdir()
    engine = Loads()
    with pytest.raises(UserError, match="no checkpoint is whole") as refusal:
        CheckpointFolder(tmp_path).load_last(engine, lambda _: None)
    assert FILES[1] in str(refusal.value)
    assert engine.loaded == []
