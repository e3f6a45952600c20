"""The bench `launch`: from the call of `echelon.launch` to its return.

The ranks do nothing, or make an engine and train one step.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.compare import Row, compare
from benchmarks.harness import Contender, alternate, timed
from echelon.launching import launch, preload

# A rank finds `int` without importing this package, which imports all of echelon.
_FIRST_LAUNCH = """
import time, torch
from echelon.launching import launch
start = time.perf_counter()
launch(int, {ranks})
print(time.perf_counter() - start)
"""


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Seconds to launch ranks that do nothing or train one step, in a warm process and in a fresh one."""
    preload(__name__)  # otherwise every rank would import all benches to find its function
    counts, training_counts = ((1, 2), (1, 2)) if quick else ((1, 2, 4, 32), (2, 32))
    rounds, training_rounds, first_rounds = (2, 1, 1) if quick else (20, 5, 3)
    warm = alternate(_contenders(counts, warm_seconds), rounds)
    training = alternate(_contenders(training_counts, training_seconds), training_rounds)
    first = alternate(_contenders(counts, first_seconds), first_rounds, warmup=0)
    rows = [
        *compare("fork server warm", warm, _name(counts[0])),
        *compare("fork server warm, parallelize and one step", training, _name(training_counts[0])),
        *compare("fresh process, torch imported", first, _name(counts[0])),
    ]
    settings = {
        "ranks": list(counts),
        "training_ranks": list(training_counts),
        "warm_rounds": rounds,
        "training_rounds": training_rounds,
        "first_rounds": first_rounds,
    }
    return settings, rows


def _contenders(counts: tuple[int, ...], seconds: Callable[[int], float]) -> dict[str, Contender]:
    return {_name(ranks): partial(seconds, ranks) for ranks in counts}


def _name(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def warm_seconds(ranks: int) -> float:
    """One launch from this process; the first one also starts the fork server."""
    return timed(lambda: launch(int, ranks))()


def training_seconds(ranks: int) -> float:
    """One launch of ranks that train; in the first of a process, every rank imports torch._dynamo itself."""
    return timed(lambda: launch(train_one_step, ranks, ranks))()


def first_seconds(ranks: int) -> float:
    """The first launch of a fresh process, timed there: the start of Python and of torch do not count."""
    program = [sys.executable, "-c", _FIRST_LAUNCH.format(ranks=ranks)]
    return float(subprocess.run(program, stdout=subprocess.PIPE, check=True).stdout)


def train_one_step(ranks: int) -> float:
    """What a launched rank runs: data parallelism of a small model. Returns the loss."""
    from echelon.engine import parallelize

    def mean_square(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    torch.manual_seed(0)
    engine = parallelize(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        f"data={ranks}",
        optimizer=torch.optim.AdamW,
        loss=mean_square,
    )
    inputs = torch.ones(2, 8)
    return engine.step((inputs, inputs)).loss
