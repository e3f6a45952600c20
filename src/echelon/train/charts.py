"""Line charts as SVG text, and sparklines for terminals.

A chart has its own background, so it looks the same on a white and on a dark page. The caller chooses what to
draw.
"""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from echelon.program.picture import QUIET_INK, Words, nice_step, page, svg

# The colours of Okabe and Ito, chosen to differ for colour-blind readers too; without their yellow, which is
# faint on white. The eighth line starts again, dashed.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333")
_GRID = "#e9ecf1"
_MARGIN, _BOTTOM = 24, 54
_LEGEND_ROW = 20
_GAP = 12  # between charts
_CHARACTER = 6.8  # mean width of a character of 12 pixels: SVG cannot measure text
_MAX_NAME = 40
_MAX_POINTS = 1000

_BLOCKS = "▁▂▃▄▅▆▇█"

T = TypeVar("T")


class Series(NamedTuple):
    """One line of a chart. Where x or y is NaN or infinite, the line has a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Point(NamedTuple):
    x: float
    y: float


class Axis(NamedTuple):
    """From the values low … high to the pixels start … end, with a tick at every multiple of `step`."""

    low: float
    high: float
    step: float
    start: float
    end: float

    def pixel(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        # The small part of a step lets the last tick in where rounding puts it just outside.
        first, last = self.low / self.step - 1e-6, self.high / self.step + 1e-6
        return [index * self.step for index in range(math.ceil(first), math.floor(last) + 1)]

    def label(self, value: float) -> str:
        """With as many digits as neighbouring ticks need to differ: 0.25, 1,500, 2.5e9."""
        step_power = math.floor(math.log10(self.step))
        size = max(abs(self.low), abs(self.high))
        if step_power >= -4 and size < 1e7:
            return f"{value:,.{max(0, -step_power)}f}"
        digits = math.floor(math.log10(size)) - step_power
        mantissa, power = f"{value:.{max(0, digits)}e}".split("e")
        return f"{mantissa}e{int(power)}" if value else "0"


def line_chart(
    series: Sequence[Series], title: str, x_label: str, y_label: str, width: int = 720, height: int = 400
) -> str:
    """One self-contained SVG element.

    line_chart([Series("train", steps, losses)], "Loss", "step", "nats per token")

    Width and height are in pixels; a legend of more than one row adds to the height.
    """
    runs = [_runs(_thin(_points(line_series))) for line_series in series]
    shown = [point for lines in runs for line in lines for point in line]
    legend, rows = _legend([line_series.name for line_series in series], width)
    top = 50 + rows * _LEGEND_ROW
    height += max(0, rows - 1) * _LEGEND_ROW
    y_axis = _axis([point.y for point in shown], height - _BOTTOM, top, height // 60)
    lowest, highest = math.floor(y_axis.low / y_axis.step + 1e-6), math.ceil(y_axis.high / y_axis.step - 1e-6)
    y_axis = y_axis._replace(low=lowest * y_axis.step, high=highest * y_axis.step)  # from a tick to a tick
    left = _MARGIN + 24 + _CHARACTER * max(len(y_axis.label(value)) for value in y_axis.ticks())
    x_axis = _axis([point.x for point in shown], left, width - _MARGIN, width // 90)
    middle_x, middle_y = (x_axis.start + x_axis.end) / 2, (y_axis.start + y_axis.end) / 2
    upright = svg(Words(0, 0, y_label, 12, QUIET_INK, "middle"))
    parts = [
        svg(Words(_MARGIN, 32, title, 16, bold=True)),
        *legend,
        *_grid(x_axis, y_axis),
        svg(Words(middle_x, height - 12, x_label, 12, QUIET_INK, "middle")),
        f'<g transform="translate(22 {middle_y:.1f}) rotate(-90)">{upright}</g>',
        *(_line(lines, x_axis, y_axis, index) for index, lines in enumerate(runs)),
    ]
    if not shown:
        parts.append(svg(Words(middle_x, middle_y, "no data", 14, QUIET_INK, "middle")))
    return page(width, height, title, parts)


def side_by_side(charts: Sequence[str], columns: int) -> str:
    """Charts in rows of so many, as one SVG element. A chart may be higher than others."""
    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    placed, top, widest = [], 0, 0
    for row in rows:
        left = 0
        for chart in row:
            placed.append(f'<g transform="translate({left} {top})">{chart}</g>')
            left += _size_of(chart)[0] + _GAP
        top += max(_size_of(chart)[1] for chart in row) + _GAP
        widest = max(widest, left)
    size = f'width="{widest - _GAP}" height="{top - _GAP}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', *placed, "</svg>", ""])


def _size_of(chart: str) -> tuple[int, int]:
    found = re.search(r'viewBox="0 0 (\d+) (\d+)"', chart)
    assert found is not None, chart[:80]
    return int(found[1]), int(found[2])


def sparkline(values: Iterable[float], width: int = 40) -> str:
    """The values in at most `width` block characters; a space where a value is missing.

    sparkline([1, 2, 3, 5, 8])  ->  '▁▂▃▅█'
    """
    numbers = list(values)
    columns = [_mean(bucket) for bucket in _buckets(numbers, min(width, len(numbers)))]
    shown = [value for value in columns if value is not None]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    highest = len(_BLOCKS) - 1
    heights = [
        None
        if value is None
        else round((value - low) / (high - low) * highest)
        if high > low
        else highest // 2
        for value in columns
    ]
    return "".join(" " if block is None else _BLOCKS[block] for block in heights)


def _mean(values: Sequence[float]) -> float | None:
    usable = [value for value in values if _is_usable(value)]
    return sum(usable) / len(usable) if usable else None


def _is_usable(value: float) -> bool:
    # False for NaN and infinity, and for sizes whose differences would be infinite.
    return abs(value) < 1e300


def _points(series: Series) -> list[Point | None]:
    """The points in order; None for one that cannot be drawn."""
    pairs = zip(series.x, series.y, strict=True)
    return [Point(x, y) if _is_usable(x) and _is_usable(y) else None for x, y in pairs]


def _thin(points: list[Point | None]) -> list[Point | None]:
    """At most _MAX_POINTS points: the lowest and the highest of each bucket, so that no spike is lost."""
    if len(points) <= _MAX_POINTS:
        return points
    kept: list[Point | None] = []
    for bucket in _buckets(points, _MAX_POINTS // 2):
        drawn = [(point.y, index, point) for index, point in enumerate(bucket) if point is not None]
        ends = sorted({min(drawn), max(drawn)}, key=lambda end: end[1]) if drawn else []
        kept += [point for _, _, point in ends] or [None]
    return kept


def _buckets(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`count` consecutive parts of nearly the same length."""
    bounds = [len(items) * index // max(1, count) for index in range(count + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


def _runs(points: list[Point | None]) -> list[list[Point]]:
    """The runs of points between gaps."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if point is not None:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _axis(values: list[float], start: float, end: float, ticks: int) -> Axis:
    """An axis over just the values, with about `ticks` ticks."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    size = max(abs(low), abs(high))
    if high - low <= 1e-9 * size or size < 1e-290:  # one value: make room on both sides of it
        room = size / 2 if size >= 1e-290 else 1.0
        low, high = low - room, high + room
    return Axis(low, high, nice_step((high - low) / max(1, ticks)), start, end)


def _grid(x_axis: Axis, y_axis: Axis) -> list[str]:
    parts = []
    for value in y_axis.ticks():
        y = y_axis.pixel(value)
        parts.append(_rule(x_axis.start, y, x_axis.end, y, _GRID))
        parts.append(svg(Words(x_axis.start - 10, y + 4, y_axis.label(value), 12, QUIET_INK, "end")))
    for value in x_axis.ticks():
        x = x_axis.pixel(value)
        parts.append(_rule(x, y_axis.start, x, y_axis.start + 5, QUIET_INK))
        parts.append(svg(Words(x, y_axis.start + 20, x_axis.label(value), 12, QUIET_INK, "middle")))
    return [*parts, _rule(x_axis.start, y_axis.start, x_axis.end, y_axis.start, QUIET_INK)]


def _legend(names: Sequence[str], width: int) -> tuple[list[str], int]:
    """A sample of each line beside its name, in rows below the title; and how many rows."""
    parts: list[str] = []
    x, row = float(_MARGIN), 0
    for index, name in enumerate(names):
        short = name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 1] + "…"
        room = 46 + _CHARACTER * len(short)
        if x > _MARGIN and x + room > width - _MARGIN + 20:
            x, row = float(_MARGIN), row + 1
        y = 54 + row * _LEGEND_ROW
        parts.append(f'<path d="M{x:.1f} {y - 4}h20" {_stroke(index)}/>')
        parts.append(svg(Words(x + 26, y, short, 12)))
        x += room
    return parts, row + 1 if names else 0


def _line(runs: list[list[Point]], x_axis: Axis, y_axis: Axis, index: int) -> str:
    """The line as one path; a run of a single point is a dot."""
    path: list[str] = []
    dots: list[str] = []
    for run in runs:
        places = [f"{x_axis.pixel(point.x):.1f} {y_axis.pixel(point.y):.1f}" for point in run]
        path.append("M" + "L".join(places))
        if len(run) == 1:
            cx, cy = places[0].split()
            dots.append(f'<circle cx="{cx}" cy="{cy}" r="3" fill="{_COLOURS[index % len(_COLOURS)]}"/>')
    return f'<path d="{"".join(path)}" {_stroke(index)}/>{"".join(dots)}' if path else ""


def _stroke(index: int) -> str:
    dash = ' stroke-dasharray="6 4"' if index // len(_COLOURS) % 2 else ""
    colour = _COLOURS[index % len(_COLOURS)]
    ends = 'stroke-linejoin="round" stroke-linecap="round"'
    return f'fill="none" stroke="{colour}" stroke-width="1.8" {ends}{dash}'


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'
