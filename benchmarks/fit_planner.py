"""Fits the shares of `src/echelon/planner/calibration` to published runs, and checks that they carry over.

    python -m benchmarks.fit_planner RUNS.csv RUNS2.csv --devices a100
    python -m benchmarks.fit_planner RUNS.csv RUNS2.csv --devices h100,h200 --folds 4

It changes one figure at a time, keeps what lowers the error, and prints the factors and the errors by source.
With `--folds` it leaves out each part of the models in turn, fits the others, and prints the errors of those
that it has not seen. What programs do (`Practice`) stays as it is, and so do figures of datasheets: folds
judge the figures of devices alone, and `Practice` was chosen with all runs in view.
"""

import argparse
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from echelon.errors import UserError
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.kernels import product_seconds
from echelon.planner.foresight.predict import Forecast
from echelon.planner.validate.rows import Run, read_rows, run_of

Figures = dict[str, float]

# Factors of today's figures; devices of one family keep their ratios.
_FIGURES = ("matrix", "matrix_knee", "stream", "attention", "stragglers", "inside", "between")
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


def start(factor: float = 1.0) -> Figures:
    return dict.fromkeys(_FIGURES, factor)


def errors(runs: list[Run], figures: Figures) -> dict[str, list[float]]:
    """The logarithm of predicted over measured, by source."""
    product_seconds.cache_clear()
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        assert run.seconds
        forecast = Forecast(run.shape, _with(run, figures), run.practice)
        seconds = forecast.predict(run.settings, run.batch).step_seconds
        found[run.source].append(math.log(seconds / run.seconds))
    return found


def _with(run: Run, figures: Figures) -> Cluster:
    cluster, device = run.cluster, run.cluster.device
    inside, between = cluster.inside, cluster.between
    return replace(
        cluster,
        device=replace(
            device,
            matrix=device.matrix * figures["matrix"],
            matrix_knee=device.matrix_knee * figures["matrix_knee"],
            stream=device.stream * figures["stream"],
            attention=device.attention * figures["attention"],
        ),
        stragglers=cluster.stragglers * figures["stragglers"],
        inside=inside._replace(bandwidth=inside.bandwidth * figures["inside"]),
        between=between._replace(bandwidth=between.bandwidth * figures["between"]),
    )


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
    """Parts by model: the runs of one model are all seen, or none."""
    models = sorted({(run.source, run.shape.name) for run in runs})
    random.Random(0).shuffle(models)
    for part in range(count):
        held = set(models[part::count])
        seen = [run for run in runs if (run.source, run.shape.name) not in held]
        yield seen, [run for run in runs if (run.source, run.shape.name) in held]


def show(title: str, by_source: dict[str, list[float]]) -> None:
    print(title)
    for source, found in by_source.items():
        sizes = [math.expm1(abs(each)) for each in found]
        print(f"  {source[:56]:56} {len(found):4} mean {mean(sizes):6.1%} median {median(sizes):6.1%}")
    every = [math.expm1(abs(each)) for found in by_source.values() for each in found]
    print(f"  {'all':56} {len(every):4} mean {mean(every):6.1%} median {median(every):6.1%}")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args(arguments)
    runs = load(options.files, tuple(options.devices.split(",")), options.every)
    if not options.folds:
        figures = fit(runs, start())
        print({name: float(f"{value:.3g}") for name, value in figures.items()})
        show("errors of the runs that were fitted:", errors(runs, figures))
        return
    unseen: dict[str, list[float]] = defaultdict(list)
    for seen, held in folds(runs, options.folds):
        for source, found in errors(held, fit(seen, start(_AWAY))).items():
            unseen[source] += found
    show(f"errors of runs that were not fitted, in {options.folds} parts by model:", unseen)


if __name__ == "__main__":
    main(sys.argv[1:])
