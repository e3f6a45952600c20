"""The bench `checkpoint`: saves and loads of 500 MB, beside dd, and beside torch.distributed.checkpoint.

save        the same bytes: `dd conv=fsync`, engine.save, torch's save
load        engine.load (which compares all hashes) and torch's load, with the files in memory, or not
stall       what training loses to a save that does not wait: steps with one, less the same without
"""

import math
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.compare import Row, compare, slowest
from benchmarks.harness import alternate, measuring_ranks, timed
from echelon.engine import parallelize
from echelon.engine.engine import Engine
from echelon.launching import TRAINING_MODULES, preload
from echelon.state.ownership import ENGINE, VALUE

_BYTES_PER_PARAMETER = 12  # the weight and both moments of AdamW, in float32
_WIDTH, _LAYERS, _SAMPLES = 2048, 10, 256
_DD, _SAVE, _TORCH_SAVE = "dd conv=fsync", "engine.save", "torch.distributed.checkpoint.save"
_LOAD, _TORCH_LOAD = "engine.load", "torch.distributed.checkpoint.load"
_LOST = "engine.save(wait=False, copy_behind=True): what the steps lose"
_COVER = 3.0  # steps behind a save take so many times as long as a save that waits


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Saves and loads of 500 MB, against dd and torch.distributed.checkpoint; what steps lose to a save."""
    preload(*TRAINING_MODULES, __name__)
    width, layers, rounds = (64, 2, 2) if quick else (_WIDTH, _LAYERS, 9)
    rows: list[Row] = []
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder, measuring_ranks(ranks) as group:
            measured = group.run(measure, folder, width, layers, rounds, ranks)
        suffix = "1 rank" if ranks == 1 else f"{ranks} ranks"
        for case, baseline in CASES.items():
            samples = slowest([each[case] for each in measured])
            rows += compare(f"{case}, {suffix}", samples, baseline)
    return {"parameters": _num_parameters(width, layers), "precision": "fp32", "optimizer": "AdamW"}, rows


CASES = {
    "save": _DD,
    "load, files not in memory": _TORCH_LOAD,
    "load, files in memory": _TORCH_LOAD,
    "stall": _SAVE,
}


def _num_parameters(width: int, layers: int) -> int:
    return layers * (width * width + width)


def measure(
    folder: str, width: int, layers: int, rounds: int, ranks: int
) -> dict[str, dict[str, list[float]]]:
    """In a rank: the samples of each case."""
    warnings.simplefilter("ignore")  # of torch.distributed.checkpoint, about its own parts
    engine = _engine(width, layers, ranks)
    batch = torch.randn(_SAMPLES * ranks, width), torch.randn(_SAMPLES * ranks, width)
    _train(engine, batch, 2)
    places = Path(folder)
    theirs = _state_of(engine)
    saves = _saves(engine, theirs, places, _BYTES_PER_PARAMETER * _num_parameters(width, layers))
    found = {"save": alternate(saves, rounds)}
    for case, prepare in (("load, files not in memory", _drop), ("load, files in memory", _read)):
        loads = {
            _TORCH_LOAD: timed(
                lambda: _torch_load(theirs, places / "torch"), _prepared(prepare, places / "torch")
            ),
            _LOAD: timed(lambda: engine.load(places / "ours"), _prepared(prepare, places / "ours")),
        }
        found[case] = alternate(loads, rounds)
    found["stall"] = _stalls(engine, batch, places, rounds)
    engine.close(restore=False)
    return found


def _engine(width: int, layers: int, ranks: int) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return parallelize(
        model,
        f"data={ranks} zero=1 precision=fp32" if ranks > 1 else "precision=fp32",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-6, foreach=False),
        loss=nn.functional.mse_loss,
        audit="off",
    )


def _train(engine: Engine, batch: Any, steps: int) -> None:
    for _ in range(steps):
        engine.step(engine.local(batch))


def _state_of(engine: Engine) -> dict[str, torch.Tensor]:
    """What this rank would give torch: the weights, whole, of which torch writes one copy and every rank
    loads all; and its own part of the optimizer's state, under a name of its own."""
    state = {f"{name}/value": tensor.detach() for name, tensor in engine.module.state_dict().items()}
    for each in engine.owned():
        if each.slice.part != VALUE and each.slice.name != ENGINE:
            state[f"{each.slice.name}/{each.slice.part}@{engine.mesh.rank}"] = each.tensor.detach()
    return state


def _saves(
    engine: Engine, theirs: dict[str, torch.Tensor], places: Path, num_bytes: int
) -> dict[str, Callable[[], float]]:
    is_first, barrier = engine.mesh.rank == 0, engine.mesh.group("all").barrier
    return {
        _DD: timed(lambda: _dd(places / "dd", num_bytes, is_first, barrier), _clean(places / "dd", barrier)),
        _SAVE: timed(lambda: engine.save(places / "ours"), _clean(places / "ours", barrier)),
        _TORCH_SAVE: timed(lambda: _torch_save(theirs, places / "torch"), _clean(places / "torch", barrier)),
    }


def _clean(path: Path, barrier: Callable[[], None]) -> Callable[[], None]:
    """Before a save: what the one before has left is gone, and on the disk nothing is under way."""

    def clean() -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        os.sync()
        barrier()

    return clean


def _dd(path: Path, num_bytes: int, is_first: bool, barrier: Callable[[], None]) -> None:
    if is_first:
        count = f"count={math.ceil(num_bytes / 2**20)}"
        command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", count, "conv=fsync", "status=none"]
        subprocess.run(command, check=True)
    barrier()


def _torch_save(state: dict[str, torch.Tensor], path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(state), checkpoint_id=path)


def _torch_load(state: dict[str, torch.Tensor], path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    load(dict(state), checkpoint_id=path)


def _prepared(prepare: Callable[[Path], None], folder: Path) -> Callable[[], None]:
    def work() -> None:
        for path in folder.iterdir():
            prepare(path)

    return work


def _drop(path: Path) -> None:
    """From the memory that the system keeps of files."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _read(path: Path) -> None:
    path.read_bytes()


def _stalls(engine: Engine, batch: Any, places: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a save that waits, and what steps lose to one that does not, of the same round."""
    waits = timed(lambda: engine.save(places / "waits"))
    step = timed(lambda: _train(engine, batch, 1))
    seconds = [waits(), waits()][1]
    steps = math.ceil(_COVER * _agreed(engine, seconds) / _agreed(engine, step()))
    contenders = {
        _SAVE: waits,
        "steps": _undisturbed(lambda: _train(engine, batch, steps)),
        "steps and a save": _undisturbed(lambda: _save_and_train(engine, places, batch, steps), engine),
    }
    found = alternate(contenders, rounds)
    lost = [a - b for a, b in zip(found["steps and a save"], found["steps"], strict=True)]
    return {_SAVE: found[_SAVE], _LOST: lost}


def _agreed(engine: Engine, seconds: float) -> float:
    """The longest of all ranks, which must do as many steps."""
    longest = torch.tensor([seconds], device=engine.mesh.device)
    engine.mesh.group("all").all_reduce(longest, op="max")
    return float(longest)


def _save_and_train(engine: Engine, places: Path, batch: Any, steps: int) -> None:
    engine.save(places / "behind", wait=False, copy_behind=True)
    _train(engine, batch, steps)


def _undisturbed(work: Callable[[], None], engine: Engine | None = None) -> Callable[[], float]:
    """Times steps on a disk that is quiet at their start; a save must have ended with them."""
    timed_work = timed(work, os.sync)

    def contender() -> float:
        seconds = timed_work()
        if engine is not None:
            start = time.perf_counter()
            engine.finish_saving()
            seconds += time.perf_counter() - start  # counts as lost if the steps did not cover it
        return seconds

    return contender
