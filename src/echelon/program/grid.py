"""A timeline as text: one row per rank, one column per tick of time.

    time    0  1  2  3  4  5
    rank 0  F0 F1 ·  B0 ·  B1
    rank 1  ·  F0 B0 F1 B1 ·

A computation that takes several ticks continues as ─; · is the bubble. Where a rank holds several stages, a
letter names the stage: F3a is the first, F3b the second. Copies to host memory and back that take time have
rows of their own below their rank, `out` and `in`. The command chooses colours by the `op` of a tick.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from string import ascii_lowercase
from typing import NamedTuple

from echelon.program.instruction import RANK_LEVEL, Instruction, Op
from echelon.program.simulate import Seconds, Span

_MOST_TICKS = 2000
_LONGEST_WORD = 16  # characters of a word that cannot be read
_SHORT = {Op.REDUCE: "R", Op.TIE: "T", Op.NORM: "N", Op.UPDATE: "U", Op.PUBLISH: "P"}


# Copies run beside the computation; each direction has a row.
LANES = {Op.STORE: "  out", Op.FETCH: "  in"}


class Tick(NamedTuple):
    """One column of one row: its text, and the operation that runs there (None: the rank is idle)."""

    text: str
    op: Op | None = None
    marked: bool = False


Line = tuple[str, Sequence[Tick]]  # the label in front, and the columns


@dataclass(frozen=True)
class Grid:
    """Lines of equal length: the time, then one per rank."""

    lines: tuple[Line, ...]

    def blocks(self, width: int) -> Iterator[tuple[Line, ...]]:
        """The grid in parts that are at most `width` characters wide."""
        ticks = self.lines[0][1]
        head, column = len(self.lines[0][0]), len(ticks[0].text) if ticks else 1
        size = max(1, (width - head) // column)
        for start in range(0, max(1, len(ticks)), size):
            yield tuple((label, row[start : start + size]) for label, row in self.lines)

    def text(self, width: int = 110) -> str:
        return "\n\n".join("\n".join(map(line_text, block)) for block in self.blocks(width))


def line_text(line: Line) -> str:
    label, row = line
    return (label + "".join(tick.text for tick in row)).rstrip()


def draw(
    spans: Sequence[Span], ranks: int, marks: Collection[Span] = (), tick: Seconds | None = None
) -> Grid:
    """The grid of all spans that take time. Those in `marks` stand in [brackets]; a column is `tick` long."""
    shown = [span for span in spans if span.end > span.start]
    names = labels(shown)
    texts = [f"[{name}]" if span in marks else name for span, name in zip(shown, names, strict=True)]
    column = 1 + max(map(len, texts), default=1)
    unit = _unit(shown) if tick is None else tick
    size = max((_ticks(span, unit)[1] for span in shown), default=0)
    lanes = [None, *(op for op in LANES if any(span.op is op for span in shown))]
    rows = {(rank, lane): [Tick("·".ljust(column))] * size for rank in range(ranks) for lane in lanes}
    for span, text in zip(shown, texts, strict=True):
        start, end = _ticks(span, unit)
        wide = text.ljust(column) if end - start == 1 else text.ljust((end - start) * column - 1, "─") + " "
        for index in range(start, end):
            part = wide[(index - start) * column :][:column]
            row = rows[span.rank, span.op if span.op in LANES else None]
            row[index] = Tick(part, span.op, span in marks)
    head = len(f"rank {ranks - 1}  ")
    names_of_rows = [f"rank {rank}" if lane is None else LANES[lane] for rank, lane in rows]
    lines = [(name.ljust(head), row) for name, row in zip(names_of_rows, rows.values(), strict=True)]
    return Grid((("time".ljust(head), _times(size, column, unit)), *lines))


def draw_words(rows: Sequence[tuple[int, Sequence[tuple[str, bool]]]]) -> Grid:
    """The words of each rank's line, in their order; marked words stand in [brackets]."""
    texts = [
        (rank, [f"[{word[:_LONGEST_WORD]}]" if marked else word for word, marked in words])
        for rank, words in rows
    ]
    size = max((len(words) for _, words in texts), default=0)
    column = 1 + max((len(word) for _, words in texts for word in words), default=1)
    head = len(f"rank {max((rank for rank, _ in rows), default=0)}  ")
    lines = []
    for rank, words in texts:
        ticks = [Tick(word.ljust(column), marked=word.startswith("[")) for word in words]
        ticks += [Tick(" " * column)] * (size - len(words))
        lines.append((f"rank {rank}".ljust(head), ticks))
    numbers = [Tick(str(number).ljust(column)) for number in range(1, size + 1)]
    return Grid((("word".ljust(head), numbers), *lines))


def labels(spans: Sequence[Span]) -> list[str]:
    """The label of each span: F3, or F3b for the second stage of a rank that has several."""
    stages = stages_of_ranks(spans)
    return [_label(span.instruction, stages[span.rank]) for span in spans]


def stages_of_ranks(spans: Sequence[Span]) -> dict[int, list[int]]:
    """The stages that each rank works on, in the order of the model."""
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.rank, set()).add(span.instruction.stage)
    return {rank: sorted(numbers) for rank, numbers in stages.items()}


def _label(instruction: Instruction, stages: Sequence[int]) -> str:
    op, stage, microbatch, _, version = instruction
    number = version if microbatch is None else microbatch
    name = _SHORT.get(op, op.value) + ("" if number is None else str(number))
    if len(stages) == 1 or op in RANK_LEVEL:
        return name
    chunk = stages.index(stage)
    return name + (ascii_lowercase[chunk] if chunk < 26 else f".{chunk}")


def _ticks(span: Span, unit: Seconds) -> tuple[int, int]:
    start = round(span.start / unit)
    return start, max(start + 1, round(span.end / unit))


def _unit(spans: Sequence[Span]) -> Seconds:
    """The longest tick of which all starts and ends are multiples; of measured spans, the shortest."""
    times = [time for span in spans for time in (span.start, span.end)]
    end = max(times, default=1)
    exact = [Fraction(time) for time in times if not isinstance(time, float)]
    if len(exact) < len(times):
        return max(min(span.seconds for span in spans), end / 200)
    denominator = math.lcm(*(time.denominator for time in exact))
    common = Fraction(math.gcd(*(int(time * denominator) for time in exact)), denominator)
    return max(common or Fraction(1), Fraction(end) / _MOST_TICKS)


def _times(size: int, column: int, unit: Seconds) -> list[Tick]:
    """The time over every column, or over as many columns as there is room for."""
    names = [f"{float(tick * unit):.4g}" for tick in range(size)]
    step = -(-(1 + max(map(len, names), default=0)) // column)
    text = "".join(name.ljust(step * column) for name in names[::step])
    return [Tick(text[tick * column :][:column].ljust(column)) for tick in range(size)]
