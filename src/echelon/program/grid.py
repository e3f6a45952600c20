"""A timeline as text: ranks below each other, time to the right, one column a tick.

    time    0  1  2  3  4  5
    rank 0  F0 F1 ·  B0 ·  B1
    rank 1  ·  F0 B0 F1 B1 ·

A computation that takes several ticks goes on as ─; · is the bubble. Where a rank holds several stages, a
letter tells which: F3a is its first, F3b its second. Colours are the command's: a tick says what it is of.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from string import ascii_lowercase
from typing import NamedTuple

from echelon.program.instruction import RANK_LEVEL, Instruction, Op
from echelon.program.timeline import Seconds, Span

_MOST_TICKS = 2000
_LONGEST = 16  # of a word that cannot be read
_SHORT = {Op.REDUCE: "R", Op.TIE: "T", Op.NORM: "N", Op.UPDATE: "U", Op.PUBLISH: "P"}


class Tick(NamedTuple):
    """One column of one row: what is written there, and what is done there (None: nothing)."""

    text: str
    op: Op | None = None
    marked: bool = False


Line = tuple[str, Sequence[Tick]]  # what stands in front, and the columns


@dataclass(frozen=True)
class Grid:
    """Lines of equal length: the time, then the ranks."""

    lines: tuple[Line, ...]

    def blocks(self, width: int) -> Iterator[tuple[Line, ...]]:
        """The grid cut into parts that are `width` characters wide, or a little less."""
        ticks = self.lines[0][1]
        head, column = len(self.lines[0][0]), len(ticks[0].text) if ticks else 1
        size = max(1, (width - head) // column)
        for start in range(0, max(1, len(ticks)), size):
            yield tuple((front, row[start : start + size]) for front, row in self.lines)

    def text(self, width: int = 110) -> str:
        return "\n\n".join("\n".join(map(plain, block)) for block in self.blocks(width))


def plain(line: Line) -> str:
    front, row = line
    return (front + "".join(tick.text for tick in row)).rstrip()


def draw(
    spans: Sequence[Span], ranks: int, marks: Collection[Span] = (), tick: Seconds | None = None
) -> Grid:
    """The grid of all that takes time. What is in `marks` stands in [brackets]; a column is `tick` long."""
    shown = [span for span in spans if span.end > span.start]
    names = labels(shown)
    texts = [f"[{name}]" if span in marks else name for span, name in zip(shown, names, strict=True)]
    column = 1 + max(map(len, texts), default=1)
    unit = _unit(shown) if tick is None else tick
    size = max((_ticks(span, unit)[1] for span in shown), default=0)
    rows = [[Tick("·".ljust(column))] * size for _ in range(ranks)]
    for span, text in zip(shown, texts, strict=True):
        start, end = _ticks(span, unit)
        long = text.ljust(column) if end - start == 1 else text.ljust((end - start) * column - 1, "─") + " "
        for place in range(start, end):
            part = long[(place - start) * column :][:column]
            rows[span.rank][place] = Tick(part, span.instruction.op, span in marks)
    head = len(f"rank {ranks - 1}  ")
    lines = [(f"rank {rank}".ljust(head), row) for rank, row in enumerate(rows)]
    return Grid((("time".ljust(head), _times(size, column, unit)), *lines))


def draw_words(rows: Sequence[tuple[int, Sequence[tuple[str, bool]]]]) -> Grid:
    """The words of each rank's line, in their order; those that are marked stand in [brackets]."""
    texts = [
        (rank, [f"[{word[:_LONGEST]}]" if marked else word for word, marked in words]) for rank, words in rows
    ]
    size = max((len(words) for _, words in texts), default=0)
    column = 1 + max((len(word) for _, words in texts for word in words), default=1)
    head = len(f"rank {max((rank for rank, _ in rows), default=0)}  ")
    lines = []
    for rank, words in texts:
        ticks = [Tick(word.ljust(column), marked=word.startswith("[")) for word in words]
        ticks += [Tick(" " * column)] * (size - len(words))
        lines.append((f"rank {rank}".ljust(head), ticks))
    return Grid(
        (("word".ljust(head), [Tick(str(place).ljust(column)) for place in range(1, size + 1)]), *lines)
    )


def labels(spans: Sequence[Span]) -> list[str]:
    """F3, or F3b where the rank has several stages and this is its second; and so on."""
    stages = stages_of_ranks(spans)
    return [_label(span.instruction, stages[span.rank]) for span in spans]


def stages_of_ranks(spans: Sequence[Span]) -> dict[int, list[int]]:
    """By rank the stages that it works on, in the order of the model."""
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.rank, set()).add(span.instruction.stage)
    return {rank: sorted(its) for rank, its in stages.items()}


def _label(its: Instruction, stages: Sequence[int]) -> str:
    number = its.version if its.microbatch is None else its.microbatch
    name = _SHORT.get(its.op, its.op.value) + ("" if number is None else str(number))
    chunk = stages.index(its.stage)
    if len(stages) == 1 or its.op in RANK_LEVEL:
        return name
    return name + (ascii_lowercase[chunk] if chunk < 26 else f".{chunk}")


def _ticks(span: Span, unit: Seconds) -> tuple[int, int]:
    start = round(span.start / unit)
    return start, max(start + 1, round(span.end / unit))


def _unit(spans: Sequence[Span]) -> Seconds:
    """The longest tick that all starts and ends are multiples of; about that, where they are measured."""
    moments = [moment for span in spans for moment in (span.start, span.end)]
    whole = max(moments, default=1)
    exact = [Fraction(moment) for moment in moments if not isinstance(moment, float)]
    if len(exact) < len(moments):
        return max(min(span.end - span.start for span in spans), whole / 200)
    return max(reduce(_common, exact, Fraction(0)) or Fraction(1), Fraction(whole) / _MOST_TICKS)


def _common(one: Fraction, other: Fraction) -> Fraction:
    """The greatest of which both are multiples."""
    bottom = math.lcm(one.denominator, other.denominator)
    return Fraction(math.gcd(int(one * bottom), int(other * bottom)), bottom)


def _times(size: int, column: int, unit: Seconds) -> list[Tick]:
    """The time over every column, or over as many as there is room for."""
    names = [f"{float(tick * unit):.4g}" for tick in range(size)]
    step = -(-(1 + max(map(len, names), default=0)) // column)
    text = "".join(name.ljust(step * column) for name in names[::step])
    return [Tick(text[tick * column :][:column].ljust(column)) for tick in range(size)]
