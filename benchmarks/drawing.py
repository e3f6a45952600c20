"""Draws a picture in a process that has imported nothing for it.

    python -P benchmarks/drawing.py loss matplotlib loss.svg 10000

Prints as JSON the seconds from the import of what draws to the written file, and the peak memory of this
process. Nothing of the package `benchmarks` is imported, which imports torch.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from echelon.program import Op, Span, build, simulate

OURS, PEER = "echelon", "matplotlib"
LOSS, SCHEDULE = "loss", "schedule"
STAGES = 8
_COLOURS = {Op.FORWARD: ("#d6e8f5", "#0072b2"), Op.BACKWARD: ("#fbdcc8", "#d55e00")}

Lines = Sequence[tuple[str, list[int], list[float]]]


def losses(steps: int) -> Lines:
    """The names, steps and values of a loss that falls, with noise, and of its validation."""
    noise = random.Random(0)
    values = [8 * (step + 1) ** -0.2 + noise.gauss(0, 0.1) for step in range(steps)]
    every = max(1, steps // 100)
    return [
        ("training", list(range(1, steps + 1)), values),
        ("validation", list(range(every, steps + 1, every)), values[every - 1 :: every]),
    ]


def spans(microbatches: int) -> list[Span]:
    """When each computation of a step with schedule 1f1b runs."""
    program = build("1f1b", (1,) * STAGES, microbatches)
    return [span for span in simulate(program).spans() if span.op in _COLOURS]


def loss_by_echelon(lines: Lines, file: Path) -> None:
    from echelon.train.charts import Series, line_chart

    series = [Series(*line) for line in lines]
    file.write_text(line_chart(series, "Loss", "step", "nats per token"), encoding="utf-8")


def schedule_by_echelon(timeline: list[Span], file: Path) -> None:
    from echelon.program.picture import draw

    file.write_text(draw(timeline, STAGES, "1f1b").svg(), encoding="utf-8")


def loss_by_matplotlib(lines: Lines, file: Path) -> None:
    figure = _figure(7.2, 4)
    axes = figure.subplots()
    for name, steps, values in lines:
        axes.plot(steps, values, label=name)
    axes.set(title="Loss", xlabel="step", ylabel="nats per token")
    axes.grid(axis="y")
    axes.legend()
    figure.savefig(file)


def schedule_by_matplotlib(timeline: list[Span], file: Path) -> None:
    """The same boxes with their words, and the bubble hatched behind them."""
    from echelon.program.text import labels

    figure = _figure(16, 4.3)
    axes = figure.subplots()
    length = float(max(span.end for span in timeline))
    for rank in range(STAGES):
        axes.broken_barh(
            [(0, length)], (rank - 0.45, 0.9), facecolor="#f6f7f9", edgecolor="#c3c9d4", hatch="//"
        )
    for op, (fill, edge) in _COLOURS.items():
        for rank in range(STAGES):
            boxes = [(float(s.start), float(s.seconds)) for s in timeline if (s.op, s.rank) == (op, rank)]
            axes.broken_barh(boxes, (rank - 0.45, 0.9), facecolor=fill, edgecolor=edge)
    for span, label in zip(timeline, labels(timeline), strict=True):
        middle = float(span.start + span.end) / 2
        axes.text(middle, span.rank, label, ha="center", va="center", fontsize=8)
    axes.set(title="1f1b", xlabel="time", yticks=range(STAGES))
    axes.set_yticklabels([f"rank {rank}" for rank in range(STAGES)])
    axes.invert_yaxis()
    figure.savefig(file)


def _figure(width: float, height: float) -> Any:
    """Without pyplot, which is for windows; words of an SVG stay words, as ours."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"
    return Figure(figsize=(width, height), dpi=100, layout="tight")


MATERIAL: dict[str, Callable[[int], Any]] = {LOSS: losses, SCHEDULE: spans}
DRAW: dict[tuple[str, str], Callable[[Any, Path], None]] = {
    (LOSS, OURS): loss_by_echelon,
    (LOSS, PEER): loss_by_matplotlib,
    (SCHEDULE, OURS): schedule_by_echelon,
    (SCHEDULE, PEER): schedule_by_matplotlib,
}


def main(case: str, drawer: str, file: str, size: str) -> None:
    material = MATERIAL[case](int(size))
    start = time.perf_counter()
    DRAW[case, drawer](material, Path(file))
    seconds = time.perf_counter() - start
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "peak_bytes": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
