"""The bench `launch`: from the call of `echelon.launch` to its return, for a function that does nothing."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from echelon.bench.compare import Row, compare
from echelon.bench.harness import Contender, alternate, timed
from echelon.launching import launch

_FRESH_PROGRAM = "import torch; from echelon.bench import launching; print(launching.warm_seconds({ranks}))"


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Seconds to launch ranks that do nothing, in a warm process and in a fresh one."""
    counts = (1, 2) if quick else (1, 2, 4)
    warm_rounds, cold_rounds = (2, 1) if quick else (20, 3)
    warm = alternate(_contenders(counts, warm_seconds), warm_rounds)
    cold = alternate(_contenders(counts, cold_seconds), cold_rounds, warmup=0)
    rows = [
        *compare("fork server warm", warm, _name(1)),
        *compare("fresh process, torch imported", cold, _name(1)),
    ]
    return {"ranks": list(counts), "warm_rounds": warm_rounds, "cold_rounds": cold_rounds}, rows


def _contenders(counts: tuple[int, ...], seconds: Callable[[int], float]) -> dict[str, Contender]:
    return {_name(ranks): partial(seconds, ranks) for ranks in counts}


def _name(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


def warm_seconds(ranks: int) -> float:
    """One launch from this process; the first one also starts the fork server."""
    return timed(lambda: launch(do_nothing, ranks))()


def cold_seconds(ranks: int) -> float:
    """The first launch of a fresh process, timed there: the start of Python and of torch do not count."""
    program = [sys.executable, "-c", _FRESH_PROGRAM.format(ranks=ranks)]
    return float(subprocess.run(program, stdout=subprocess.PIPE, check=True).stdout)


def do_nothing() -> None:
    """What the launched ranks run."""
