"""A short training that is disturbed, and everything that must hold afterwards."""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

from safetensors.numpy import load

from echelon.errors import UserError
from echelon.state.checkpoint.copies.folder import MemoryFolder
from echelon.state.checkpoint.saved import SavedState
from echelon.train.events import Event, Restarting
from echelon.train.jobs.job import Job, ModelJob, OptimizerJob
from echelon.train.trainer import train
from tests.chaos.kill import Kill
from tests.chaos.killer import FINAL, Killer, rank_processes
from tests.launching.processes import still_alive

STEPS, SAVE_EVERY = 24, 2


def short_job(out: Path, plan: str, steps: int = STEPS, keep: int | str = 2) -> Job:
    return Job(
        plan=plan,
        steps=steps,
        batch=6,
        sequence=16,
        evaluate_every=0,
        evaluate_batches=1,
        save_every=SAVE_EVERY,
        keep=keep,
        restarts=100,
        out=str(out),
        model=ModelJob(layers=2, width=32, heads=2, dropout=0.1),
        optimizer=OptimizerJob(warmup=2),
    )


def train_undisturbed(job: Job) -> Path:
    return Path(train(job, lambda _: None)["run"])


def train_disturbed(job: Job, kills: Sequence[Kill]) -> tuple[Path, list[Kill], list[str]]:
    """The run, the kills that hit a rank, and what was wrong on the way and after the end."""
    others = {each.pid for each in rank_processes()}
    launches = launch_folders()  # of other tests
    killer, problems = Killer(kills), []

    def show(event: Event) -> None:
        if isinstance(event, Restarting):
            (run,) = Path(job.out).iterdir()
            problems.extend(half_checkpoints(run))
        killer.show(event)

    with private_temporary_folder() as folder:
        try:
            run = Path(train(job, show)["run"])
        finally:
            killer.stop()
        problems += [f"{path} is left" for path in folder.glob("echelon-*")]
    problems += [f"{path} is left" for path in launch_folders() - launches]
    problems += leftovers(run, killer.pids, others)
    return run, killer.done, problems


def launch_folders() -> set[Path]:
    return set(Path(get_temp_dir()).glob("echelon-*"))


def leftovers(run: Path, pids: set[int], others: Collection[int | None] = ()) -> list[str]:
    """Processes, shared memory and temporary files that outlive a run; `others` belong to other tests."""
    problems = [f"process {pid} is an orphan" for pid in still_alive(pids)]
    alive = [each for each in multiprocessing.active_children() if each.pid not in others]
    problems += [f"{each.name} is left" for each in alive if "rank" in each.name]
    shared = Path("/dev/shm")
    names = [path.name for path in shared.iterdir()] if shared.exists() else []
    problems += [f"/dev/shm/{name} is left" for name in names if any(f"_{pid}_" in name for pid in pids)]
    problems += [f"/dev/shm/{name} is left" for name in names if run.name in name]
    memory = MemoryFolder(run).path
    problems += [f"{memory} is left"] if memory.exists() else []
    problems += half_checkpoints(run)
    # Without the folder, nothing was saved yet.
    unfinished = [path for path in (run / "checkpoints").glob("*") if not FINAL.fullmatch(path.name)]
    return problems + [f"{path} is left" for path in unfinished]


def half_checkpoints(run: Path) -> list[str]:
    """Those with a final name whose files are not what their manifest says."""
    folders = [path for path in (run / "checkpoints").glob("step-*") if FINAL.fullmatch(path.name)]
    return [text for text in map(_damage, folders) if text]


def _damage(folder: Path) -> str:
    try:
        SavedState.open(folder).verify()
    except UserError as error:
        return str(error)
    return ""


def differences(run: Path, reference: Path) -> list[str]:
    """What is not bit for bit the same at the end of two runs."""
    wrong = []
    if _weights(run / "model") != _weights(reference / "model"):
        wrong.append("the weights differ")
    last = max(path.name for path in (reference / "checkpoints").glob("step-*"))
    if _weights(run / "checkpoints" / last) != _weights(reference / "checkpoints" / last):
        wrong.append("the last checkpoint differs")
    lines, expected = _losses(run), _losses(reference)
    if lines != expected:
        steps = [step for step, _ in lines]
        wrong.append(f"metrics.jsonl has other losses, or steps {steps}")
    return wrong


def _weights(folder: Path) -> dict[str, bytes]:
    tensors: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= {name: array.tobytes() for name, array in _load(path).items()}
    return tensors


def _load(path: Path) -> dict[str, Any]:
    """numpy has no bfloat16: bits are all that is compared."""
    data = path.read_bytes()
    try:
        return dict(load(data))
    except (TypeError, KeyError, AttributeError):
        import torch
        from safetensors.torch import load as load_tensors

        return {
            name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            for name, tensor in load_tensors(data).items()
        }


def _losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


@contextmanager
def private_temporary_folder() -> Iterator[Path]:
    """Where this process makes temporary folders meanwhile."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before
            assert os.path.isdir(folder)
