"""Programs as text: `show` prints a program, `parse` reads the same program again; and timelines (`draw`).

    schedule: 1f1b                     the name
    stage 0: 0 1                       the ranks that hold a stage; left out where stage s is on rank s
    stage 1: 2
    rank 0: F0 SA0>2 RG0<2 B0 REDUCE NORM UPDATE PUBLISH
    …

`@5` names the stage, where a rank holds several (`F3@5`); `v1` the version of the weights (`F3v1`, `STASH1`).
`microbatches: 8` is written only where it is not one more than the highest number. `#` starts a comment.
"""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import itemgetter
from string import ascii_lowercase
from typing import NamedTuple

from echelon.errors import did_you_mean
from echelon.program.instruction import COMPUTE, COPIES, RANK_LEVEL, RECEIVES, SENDS, Instruction, Op, Program
from echelon.program.simulate import Seconds, Span

_NUMBERED_BY_VERSION = (Op.STASH, Op.POP)
_NUMBERED = (*COMPUTE, *COPIES, *SENDS, *RECEIVES, *_NUMBERED_BY_VERSION)
_WORD = re.compile(r"(?P<op>[A-Za-z_]+)(?P<number>\d{0,9})(?P<rest>(?:[@v<>]\d{1,9})*)")
_LINE = re.compile(r"(?P<key>\w+)\s*(?P<number>\d{0,9})\s*:(?P<rest>.*)", re.DOTALL)
_KEYS = ("rank", "stage", "schedule", "microbatches")


@dataclass(frozen=True)
class Parsed:
    """A program and the line of each rank; or the errors of the text, and then no program. `words` are those
    of each rank's line, and whether they are invalid."""

    program: Program | None
    lines: Mapping[int, int]
    errors: Sequence[str]
    words: Mapping[int, Sequence[tuple[str, bool]]]


def show(program: Program) -> str:
    """The whole program, one line per rank."""
    lines = [f"schedule: {program.name}"]
    if program.microbatches != _implied_microbatches(program.ranks):
        lines.append(f"microbatches: {program.microbatches}")
    if program.placement != _default_placement(len(program.ranks)):
        lines += [
            f"stage {stage}: {' '.join(map(str, ranks))}" for stage, ranks in enumerate(program.placement)
        ]
    for rank, instructions in enumerate(program.ranks):
        stages = program.stages_of(rank)
        words = [show_instruction(instruction, stages) for instruction in instructions]
        lines.append(" ".join([f"rank {rank}:", *words]))
    return "\n".join([*lines, ""])


def show_instruction(instruction: Instruction, stages: Sequence[int] = ()) -> str:
    """One word. The stage is left out where a rank that holds `stages` can mean only that one."""
    op, stage, microbatch, peer, version = instruction
    number = version if op in _NUMBERED_BY_VERSION else microbatch
    parts = [op.value, "" if number is None else str(number)]
    if stage != _implied_stage(op, stages):
        parts.append(f"@{stage}")
    if version is not None and op not in _NUMBERED_BY_VERSION:
        parts.append(f"v{version}")
    if peer is not None:
        parts.append(f"{'>' if op in SENDS else '<'}{peer}")
    return "".join(parts)


def _implied_stage(op: Op, stages: Sequence[int]) -> int | None:
    """The stage of a word that names none, on a rank that holds `stages`."""
    return stages[0] if len(stages) == 1 or (stages and op in RANK_LEVEL) else None


def _default_placement(ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(ranks))


def _implied_microbatches(ranks: Sequence[Sequence[Instruction]]) -> int:
    numbers = [microbatch for work in ranks for _, _, microbatch, _, _ in work if microbatch is not None]
    return 1 + max(numbers, default=-1)


def parse(text: str, name: str = "schedule") -> Parsed:
    """Read a program; `name` is used where the text gives none. All errors are reported, with their lines."""
    document = _Document(text)
    placement = document.placement()
    ranks = tuple(tuple(document.instructions(rank, placement)) for rank in sorted(document.ranks))
    title = document.settings.get("schedule", name)
    microbatches = document.microbatches(_implied_microbatches(ranks))
    program = Program(title, placement, microbatches, ranks)
    numbered = sorted(document.errors, key=itemgetter(0))
    errors = [f"line {line}: {error}" if line else error for line, error in numbered]
    lines = {rank: line for rank, (line, _) in document.ranks.items()}
    return Parsed(None if errors else program, lines, errors, document.words)


class _Document:
    """The lines of a text by their kind; errors are kept as (line, sentence)."""

    def __init__(self, text: str) -> None:
        self.errors: list[tuple[int, str]] = []
        self.ranks: dict[int, tuple[int, str]] = {}  # the line, and the rest of its text
        self.stages: dict[int, tuple[int, str]] = {}
        self.settings: dict[str, str] = {}
        self.words: dict[int, list[tuple[str, bool]]] = {}  # of each rank, and whether they are invalid
        self._line_of: dict[str, int] = {}
        for line, written in enumerate(text.splitlines(), 1):
            content = written.partition("#")[0].strip()
            if content:
                self._add(line, content)
        if not self.ranks and not self.errors:
            self.errors.append((0, "no rank: write a line for each, like 'rank 0: F0 B0'"))

    def _add(self, line: int, content: str) -> None:
        matched = _LINE.fullmatch(content)
        if matched is None:
            self._error(line, f"'{content[:40]}': must begin with 'rank N:' or 'stage N:'")
            return
        key, number, rest = matched["key"], matched["number"], matched["rest"].strip()
        if key not in _KEYS:
            self._error(line, f"'{key}': unknown kind of line{did_you_mean(key.lower(), _KEYS)}")
        elif key in ("rank", "stage") and not number:
            self._error(line, f"'{key}:' has no number: write '{key} 0: …'")
        elif key in ("rank", "stage"):
            lines = self.ranks if key == "rank" else self.stages
            before, _ = lines.setdefault(int(number), (line, rest))
            if before != line:
                self._error(line, f"{key} {int(number)} is already on line {before}; keep one")
        elif number or not rest:
            self._error(line, f"'{content[:40]}': must be written '{key}: …'")
        elif key in self.settings:
            self._error(line, f"'{key}' is already on line {self._line_of[key]}; keep one")
        else:
            self.settings[key], self._line_of[key] = rest, line

    def _error(self, line: int, error: str) -> None:
        self.errors.append((line, error))

    def microbatches(self, implied: int) -> int:
        given = self.settings.get("microbatches")
        if given is None:
            return implied
        if not re.fullmatch(r"\d{1,9}", given):
            self._error(
                self._line_of["microbatches"], f"'{given}': must be an integer number of microbatches"
            )
            return implied
        return int(given)

    def placement(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold each stage: as written, or stage s on rank s."""
        self._require_all(self.ranks, "rank", "one line for each rank, even if it is empty")
        if not self.stages:
            return _default_placement(len(self.ranks))
        self._require_all(self.stages, "stage", "a line for each stage that names its ranks, or none at all")
        return tuple(self._holders(stage) for stage in sorted(self.stages))

    def _require_all(self, lines: Mapping[int, object], key: str, fix: str) -> None:
        """Numbers must run from 0 without a gap."""
        missing = [number for number in range(len(lines)) if number not in lines]
        if missing:
            names = ", ".join(map(str, missing))
            self._error(0, f"{key} {names} missing, though there is a {key} {max(lines)}: write {fix}")

    def _holders(self, stage: int) -> tuple[int, ...]:
        line, rest = self.stages[stage]
        words = rest.split()
        if not words:
            self._error(line, f"stage {stage}: name the ranks that hold it, like 'stage {stage}: 0'")
        if len(set(words)) < len(words):
            self._error(line, f"stage {stage}: '{rest}' names a rank twice; keep one")
        numbers = {word: int(word) if re.fullmatch(r"\d{1,9}", word) else -1 for word in words}
        for word, number in numbers.items():
            if number not in self.ranks:
                self._error(line, f"'{word}': stage {stage} must be on ranks that have a line here")
        return tuple(numbers.values())

    def instructions(self, rank: int, placement: Sequence[Sequence[int]]) -> list[Instruction]:
        line, rest = self.ranks[rank]
        held = [stage for stage, ranks in enumerate(placement) if rank in ranks] if self.stages else [rank]
        instructions = []
        self.words[rank] = []
        for word in rest.split():
            result = _read(word, held)
            error = result if isinstance(result, str) else self._out_of_bounds(result)
            self.words[rank].append((word, error is not None))
            if error is not None:
                self._error(line, f"'{word}': {error}")
            elif isinstance(result, Instruction):
                instructions.append(result)
        return instructions

    def _out_of_bounds(self, instruction: Instruction) -> str | None:
        stages = self.stages or self.ranks
        if instruction.stage not in stages:
            return f"there is no stage {instruction.stage}; the stages are 0 … {max(stages)}"
        if instruction.peer is not None and instruction.peer not in self.ranks:
            return f"there is no rank {instruction.peer}; the ranks are 0 … {max(self.ranks)}"
        return None


def _read(word: str, held: Sequence[int]) -> Instruction | str:
    """The instruction of a word, on a rank that holds the stages `held`; or the error."""
    matched = _WORD.fullmatch(word)
    known = [op.value for op in Op]
    if matched is None or matched["op"] not in known:
        stem = re.match(r"[A-Za-z_]*", word)
        assert stem is not None
        return f"unknown word{did_you_mean(stem[0].upper() or word, known)}"
    op, number = Op(matched["op"]), int(matched["number"]) if matched["number"] else None
    marks = re.findall(r"([@v<>])(\d+)", matched["rest"])
    values = {mark: int(value) for mark, value in marks}
    error = _malformed(op, number, [mark for mark, _ in marks])
    if error is not None:
        return error
    stage = values.get("@", _implied_stage(op, held))
    if stage is None:
        count, example = "several" if held else "none", (held or [0])[0]
        return f"which stage? This rank holds {count}: write {word}@{example}"
    if op in _NUMBERED_BY_VERSION:
        return Instruction(op, stage, version=number)
    return Instruction(op, stage, number, values.get(">", values.get("<")), values.get("v"))


def _malformed(op: Op, number: int | None, marks: Sequence[str]) -> str | None:
    """Return what an instruction lacks, or must not have; None if it is well formed."""
    if number is not None and op not in _NUMBERED:
        return f"{op.value} takes no number"
    if number is None and op in _NUMBERED:
        kind = "version" if op in _NUMBERED_BY_VERSION else "microbatch"
        return f"{op.value} needs the number of a {kind}, like {op.value}0"
    peer = ">" if op in SENDS else "<" if op in RECEIVES else ""
    if peer and peer not in marks:
        return f"{op.value} needs the other rank, like {op.value}{number}{peer}1"
    allowed = {"@", peer, "v" if op in COMPUTE else ""}
    wrong = [mark for mark in marks if mark not in allowed]
    if wrong:
        return f"{op.value} takes no '{wrong[0]}'"
    return "a mark stands twice; keep one" if len(set(marks)) < len(marks) else None


# A timeline as text: one row per rank, one column per tick of time.
#
#     time    0  1  2  3  4  5
#     rank 0  F0 F1 ·  B0 ·  B1
#     rank 1  ·  F0 B0 F1 B1 ·
#
# A computation that takes several ticks continues as ─; · is the bubble. Where a rank holds several stages, a
# letter names the stage: F3a is the first, F3b the second. Copies to host memory and back that take time have
# rows of their own below their rank, `out` and `in`. The command chooses colours by the `op` of a tick.


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
