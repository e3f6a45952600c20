"""`echelon plan --dry-run` and `--measure`: a prediction beside what the code does."""

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from echelon.errors import UserError, raise_errors
from echelon.launching.torchrun import is_under_torchrun
from echelon.quantities import show_bytes, show_seconds

if TYPE_CHECKING:
    from echelon.engine.dry_run import DryRun
    from echelon.planner.cluster.cluster import Cluster
    from echelon.planner.foresight.prediction import Prediction
    from echelon.planner.searching.search import Found
    from echelon.train.rehearsal import Trial, Work

_HELD = ("parameters", "gradients", "optimizer", "activations", "buffers")


def show_dry_run(found: "DryRun", prediction: "Prediction", screen: Console) -> None:
    """Print bytes by category, predicted and by the code, and what the rank sends in a step."""
    memory = _stage_memory(found, prediction)
    table = Table(f"rank {found.rank}", "predicted", "code")
    for name in _HELD:
        table.add_row(name, show_bytes(getattr(memory, name)), show_bytes(found.memory.peak[name]))
    table.add_row("at the peak, all", show_bytes(memory.peak), show_bytes(found.memory.peak_total))
    if memory.host:
        table.add_row("host", show_bytes(memory.host), show_bytes(sum(found.memory.host_peak.values())))
    screen.print(table)
    moved = Table("axis", "operation", "of", "calls", "sent", "received")
    for (axis, operation, subject), each in found.moved[-1].items():
        sizes = (str(each.calls), show_bytes(each.sent), show_bytes(each.received))
        moved.add_row(axis, operation, subject, *sizes)
    screen.print(moved)
    screen.print(f"A step has {len(found.program)} instructions on this rank.")


def _stage_memory(found: "DryRun", prediction: "Prediction") -> Any:
    """What was predicted of the stage that a rank has."""
    from echelon.collectives.layout import Layout

    stage = Layout(found.plan).position(found.rank).pipeline
    index = max(place for place, first in enumerate(prediction.stages) if first <= stage)
    return prediction.memory[index]


def measure(work: "Work", best: tuple["Found", ...], cluster: "Cluster") -> list["Trial"]:
    """Run the best plans here; the fastest first, those that failed last."""
    import torch

    from echelon.planner.cluster.here import devices_here
    from echelon.planner.cluster.read import CPU
    from echelon.train.jobs.machine_fit import most_ranks_here
    from echelon.train.rehearsal import try_plans

    is_processor, gpus = cluster.device.name == CPU, torch.cuda.device_count()
    most = most_ranks_here() if is_processor else gpus
    errors = []
    if is_under_torchrun():
        errors.append("--measure starts its own ranks: run it without torchrun")
    if bool(gpus) == is_processor or cluster.count > most:
        here = f"{gpus} GPUs" if gpus else f"{devices_here()} cores; use --cluster cpu:{devices_here()}"
        asked = f"{cluster.device.name}:{cluster.count}"
        errors.append(f"--measure runs on this machine, which is not {asked}: it has {here}")
    raise_errors("echelon plan", errors)
    trials = try_plans(work, [each.plan for each in best])
    trials.sort(key=lambda trial: trial.seconds or float("inf"))
    if trials[0].seconds is None:
        raise UserError("--measure: no plan could be run", [f"{each.plan}: {each.error}" for each in trials])
    return trials


def show_trials(trials: list["Trial"], best: tuple["Found", ...], screen: Console) -> None:
    """Print a row per plan that was run, the fastest first."""
    predictions = {each.plan: each.prediction for each in best}
    table = Table("plan", "measured", "predicted", "memory", "predicted")
    for trial in trials:
        prediction = predictions[trial.plan]
        if trial.seconds is None or trial.peak is None:
            table.add_row(Text(trial.plan), Text(trial.error), "", "", "")
            continue
        times = (show_seconds(trial.seconds), show_seconds(prediction.step_seconds))
        table.add_row(Text(trial.plan), *times, show_bytes(trial.peak), show_bytes(prediction.peak))
    screen.print(table)
    screen.print(f"The fastest here: {trials[0].plan}", markup=False)
