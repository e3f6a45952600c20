"""Fits the shares of `src/echelon/planner/calibration` to published runs, and checks that they carry over.

    python -m benchmarks.fit_planner RUNS.csv RUNS2.csv --devices a100
    python -m benchmarks.fit_planner RUNS.csv RUNS2.csv --devices h100,h200 --folds 4
    python -m benchmarks.fit_planner MEGATRON_GOLDEN.csv --devices a100 --figures host --folds 2
    python -m benchmarks.fit_planner MEGATRON_GOLDEN.csv --devices h100 --figures host_pace

It changes one figure at a time, keeps what lowers the error, and prints the factors and the errors by source.
With `--folds` it leaves out each part of the models in turn, fits the others, and prints the errors of those
that it has not seen. What programs do (`Practice`) stays as it is, and so do figures of datasheets: folds
judge the figures of devices alone, and `Practice` was chosen with all runs in view. Only what hosts take is
fitted there too: with `--figures host`, the seconds and shares of the programs whose runs are given; with
`--figures host_pace`, how the host of a device compares with that of an A100.
"""

import argparse
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import TypeVar

from echelon.errors import UserError
from echelon.planner.cluster.cluster import Cluster, Device
from echelon.planner.foresight.kernels import product_seconds
from echelon.planner.foresight.practice import Practice
from echelon.planner.foresight.predict import Forecast
from echelon.planner.validate.rows import Run, read_rows, run_of

Figures = dict[str, float]

# Factors of today's figures; devices of one family keep their ratios.
_FIGURES = ("matrix", "matrix_knee", "stream", "attention", "stragglers", "inside", "between")
_OF_HOSTS = ("host_layer", "host_chunk", "host_step", "host_expert", "host_context")  # of a `Practice`
_CHOICES = {"device": _FIGURES, "host": _OF_HOSTS, "host_pace": ("host_pace",)}
_LIMITS = (0.5, 1.5)
_AWAY = 0.8  # where folds start: today's figures know all runs
_MOST_ERROR = 0.4  # of a run: one that is far off must not decide
_STEPS = 140


def load(paths: list[Path], devices: tuple[str, ...], every: int) -> list[Run]:
    """The runs with a measured time on these devices; of vTrain's many small ones every n-th."""
    runs = []
    for index, row in enumerate(row for path in paths for row in read_rows(path)):
        if "single" in row["source"] and index % every:
            continue
        try:
            run = run_of(row)
        except UserError:
            continue
        if run.seconds and run.cluster.device.name.startswith(devices):
            runs.append(run)
    return runs


def start(names: Iterable[str] = _FIGURES, factor: float = 1.0) -> Figures:
    return dict.fromkeys(names, factor)


def errors(runs: list[Run], figures: Figures) -> dict[str, list[float]]:
    """The logarithm of predicted over measured, by source."""
    product_seconds.cache_clear()
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        assert run.seconds
        forecast = Forecast(run.shape, _cluster(run, figures), _practice(run, figures))
        seconds = forecast.predict(run.settings, run.batch).step_seconds
        found[run.source].append(math.log(seconds / run.seconds))
    return found


def _cluster(run: Run, figures: Figures) -> Cluster:
    cluster = run.cluster
    inside, between = cluster.inside, cluster.between
    return replace(
        cluster,
        device=_scaled(cluster.device, figures),
        stragglers=cluster.stragglers * figures.get("stragglers", 1.0),
        inside=inside._replace(bandwidth=inside.bandwidth * figures.get("inside", 1.0)),
        between=between._replace(bandwidth=between.bandwidth * figures.get("between", 1.0)),
    )


def _practice(run: Run, figures: Figures) -> Practice:
    return _scaled(run.practice, {name: figures[name] for name in _OF_HOSTS if name in figures})


_Scaled = TypeVar("_Scaled", Device, Practice)


def _scaled(figured: _Scaled, figures: Figures) -> _Scaled:
    """With the factors of its own figures."""
    own = vars(figured)
    return replace(figured, **{name: own[name] * factor for name, factor in figures.items() if name in own})


def score(runs: list[Run], figures: Figures) -> float:
    """The mean error; a source weighs as the root of its runs."""
    by_source = errors(runs, figures)
    weights = {source: math.sqrt(len(found)) for source, found in by_source.items()}
    sums = (
        weights[source] * mean(min(abs(each), _MOST_ERROR) for each in found)
        for source, found in by_source.items()
    )
    return sum(sums) / sum(weights.values())


def fit(runs: list[Run], figures: Figures, steps: int = _STEPS) -> Figures:
    """Change one figure at a time by less and less, and keep what lowers the score."""
    draw = random.Random(0)
    best, sizes = score(runs, figures), dict.fromkeys(figures, 0.15)
    for step in range(steps):
        name = list(figures)[step % len(figures)]
        for sign in (1, -1):
            low, high = _LIMITS
            changed = figures[name] * math.exp(sign * sizes[name] * draw.uniform(0.5, 1.5))
            candidate = {**figures, name: min(max(changed, low), high)}
            if (now := score(runs, candidate)) < best:
                best, figures, sizes[name] = now, candidate, sizes[name] * 1.3
                break
        else:
            sizes[name] *= 0.6
    return figures


def folds(runs: list[Run], count: int) -> Iterator[tuple[list[Run], list[Run]]]:
    """Parts by model: the runs of one model, or of one of Megatron's tests, are all seen, or none."""
    models = sorted(set(map(_model, runs)))
    random.Random(0).shuffle(models)
    for part in range(count):
        held = set(models[part::count])
        seen = [run for run in runs if _model(run) not in held]
        yield seen, [run for run in runs if _model(run) in held]


def _model(run: Run) -> tuple[str, str]:
    return run.source, run.shape.name.partition("/golden_values")[0].removesuffix("_1node")


def show(title: str, by_source: dict[str, list[float]]) -> None:
    print(title)
    for source, found in by_source.items():
        sizes = [abs(math.expm1(each)) for each in found]
        print(f"  {source[:56]:56} {len(found):4} {_summary(sizes)}")
    every = [abs(math.expm1(each)) for found in by_source.values() for each in found]
    print(f"  {'all':56} {len(every):4} {_summary(every)}")


def _summary(sizes: list[float]) -> str:
    nine = sorted(sizes)[int(0.9 * len(sizes))]
    return f"mean {mean(sizes):6.1%} median {median(sizes):6.1%} 90th percentile {nine:6.1%}"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--figures", choices=_CHOICES, default="device")
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args(arguments)
    runs = load(options.files, tuple(options.devices.split(",")), options.every)
    names = _CHOICES[options.figures]
    show("errors of today's figures:", errors(runs, start(names)))
    if not options.folds:
        figures = fit(runs, start(names))
        print({name: float(f"{value:.3g}") for name, value in figures.items()})
        show("errors of the runs that were fitted:", errors(runs, figures))
        return
    unseen: dict[str, list[float]] = defaultdict(list)
    for seen, held in folds(runs, options.folds):
        for source, found in errors(held, fit(seen, start(names, _AWAY))).items():
            unseen[source] += found
    show(f"errors of runs that were not fitted, in {options.folds} parts by model:", unseen)


if __name__ == "__main__":
    main(sys.argv[1:])
