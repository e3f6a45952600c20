"""Programs as text: they print, and parse to the very same program.

    schedule: 1f1b                     its name
    stage 0: 0 1                       the ranks that hold a stage; left out where stage s is on rank s
    stage 1: 2
    rank 0: F0 SA0>2 RG0<2 B0 REDUCE NORM UPDATE PUBLISH
    …

`@5` names the stage, where a rank holds several (`F3@5`); `v1` the version of the weights (`F3v1`, `STASH1`).
`microbatches: 8` is written only where the highest number does not tell. `#` starts a comment.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from echelon.errors import did_you_mean
from echelon.program.instruction import COMPUTE, RANK_LEVEL, RECEIVES, SENDS, Instruction, Op, Program

_VERSIONED = (Op.STASH, Op.POP)
_NUMBERED = (*COMPUTE, *SENDS, *RECEIVES, *_VERSIONED)
_WORD = re.compile(r"(?P<op>[A-Za-z_]+)(?P<number>\d{0,9})(?P<rest>(?:[@v<>]\d{1,9})*)")
_LINE = re.compile(r"(?P<key>\w+)\s*(?P<number>\d{0,9})\s*:(?P<rest>.*)", re.DOTALL)
_KEYS = ("rank", "stage", "schedule", "microbatches")


@dataclass(frozen=True)
class Parsed:
    """A program and the line of each rank; or the errors of its text, and then no program.

    `words` are those of each rank's line, and whether they are invalid.
    """

    program: Program | None
    lines: Mapping[int, int]
    errors: Sequence[str]
    words: Mapping[int, Sequence[tuple[str, bool]]]


# --- printing -----------------------------------------------------------------------------------------


def show(program: Program) -> str:
    """The whole program, one line a rank."""
    lines = [f"schedule: {program.name}"]
    if program.microbatches != _told_microbatches(program.ranks):
        lines.append(f"microbatches: {program.microbatches}")
    if program.placement != _in_order(len(program.ranks)):
        lines += [
            f"stage {stage}: {' '.join(map(str, ranks))}" for stage, ranks in enumerate(program.placement)
        ]
    for rank, instructions in enumerate(program.ranks):
        stages = program.stages_of(rank)
        lines.append(" ".join([f"rank {rank}:", *(show_instruction(its, stages) for its in instructions)]))
    return "\n".join([*lines, ""])


def show_instruction(its: Instruction, stages: Sequence[int] = ()) -> str:
    """One word. The stage is left out where a rank that holds `stages` can mean only that one."""
    number = its.version if its.op in _VERSIONED else its.microbatch
    words = [its.op.value, "" if number is None else str(number)]
    if not _is_told(its, stages):
        words.append(f"@{its.stage}")
    if its.version is not None and its.op not in _VERSIONED:
        words.append(f"v{its.version}")
    if its.peer is not None:
        words.append(f"{'>' if its.op in SENDS else '<'}{its.peer}")
    return "".join(words)


def _is_told(its: Instruction, stages: Sequence[int]) -> bool:
    """An instruction of the whole rank is written without a stage if it names the rank's first."""
    return list(stages[:1]) == [its.stage] and (len(stages) == 1 or its.op in RANK_LEVEL)


def _in_order(ranks: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(ranks))


def _told_microbatches(ranks: Sequence[Sequence[Instruction]]) -> int:
    numbers = [its.microbatch for work in ranks for its in work if its.microbatch is not None]
    return 1 + max(numbers, default=-1)


# --- parsing ------------------------------------------------------------------------------------------


def parse(text: str, name: str = "schedule") -> Parsed:
    """Read a program; `name` is its name where the text gives none. All errors at once, with their lines."""
    page = _Page(text)
    placement = page.placement()
    ranks = tuple(tuple(page.instructions(rank, placement)) for rank in sorted(page.ranks))
    title = page.single.get("schedule", name)
    microbatches = page.microbatches(_told_microbatches(ranks))
    program = Program(title, placement, microbatches, ranks)
    errors = [
        f"line {line}: {error}" if line else error for line, error in sorted(page.errors, key=itemgetter(0))
    ]
    lines = {rank: line for rank, (line, _) in page.ranks.items()}
    return Parsed(None if errors else program, lines, errors, page.words)


class _Page:
    """The lines of a text, sorted by what they tell; errors are kept as (line, sentence)."""

    def __init__(self, text: str) -> None:
        self.errors: list[tuple[int, str]] = []
        self.ranks: dict[int, tuple[int, str]] = {}  # the line, and what it says
        self.stages: dict[int, tuple[int, str]] = {}
        self.single: dict[str, str] = {}
        self.words: dict[int, list[tuple[str, bool]]] = {}  # of each rank, and whether they are invalid
        self._line_of: dict[str, int] = {}
        for line, written in enumerate(text.splitlines(), 1):
            content = written.partition("#")[0].strip()
            if content:
                self._sort(line, content)
        if not self.ranks and not self.errors:
            self.errors.append((0, "no rank: write a line for each, like 'rank 0: F0 B0'"))

    def _sort(self, line: int, content: str) -> None:
        found = _LINE.fullmatch(content)
        if found is None:
            self._error(line, f"'{content[:40]}': must begin with 'rank N:' or 'stage N:'")
            return
        key, number, rest = found["key"], found["number"], found["rest"].strip()
        if key not in _KEYS:
            self._error(line, f"'{key}': no line begins so{did_you_mean(key.lower(), _KEYS)}")
        elif key in ("rank", "stage") and not number:
            self._error(line, f"'{key}:' has no number: write '{key} 0: …'")
        elif key in ("rank", "stage"):
            self._keep(line, key, int(number), rest)
        elif number or not rest:
            self._error(line, f"'{content[:40]}': must be written '{key}: …'")
        elif key in self.single:
            self._error(line, f"'{key}' stands twice, on line {self._line_of[key]} before; keep one")
        else:
            self.single[key], self._line_of[key] = rest, line

    def _keep(self, line: int, key: str, number: int, rest: str) -> None:
        kept = self.ranks if key == "rank" else self.stages
        if number in kept:
            self._error(line, f"{key} {number} stands twice, on line {kept[number][0]} before; keep one")
        else:
            kept[number] = (line, rest)

    def _error(self, line: int, error: str) -> None:
        self.errors.append((line, error))

    def microbatches(self, told: int) -> int:
        given = self.single.get("microbatches")
        if given is None:
            return told
        if not re.fullmatch(r"\d{1,9}", given):
            self._error(self._line_of["microbatches"], f"'{given}': must be a whole number of microbatches")
            return told
        return int(given)

    def placement(self) -> tuple[tuple[int, ...], ...]:
        """Which ranks hold each stage: as told, or stage s on rank s."""
        self._demand_all(self.ranks, "rank", "one line for each rank, even if it is empty")
        if not self.stages:
            return _in_order(len(self.ranks))
        self._demand_all(self.stages, "stage", "a line for each stage that names its ranks, or none at all")
        return tuple(self._holders(stage) for stage in sorted(self.stages))

    def _demand_all(self, kept: Mapping[int, object], what: str, mend: str) -> None:
        """Numbers must run from 0 without a gap."""
        missing = [number for number in range(len(kept)) if number not in kept]
        if missing:
            names = ", ".join(map(str, missing))
            self._error(0, f"{what} {names} missing, though there is a {what} {max(kept)}: write {mend}")

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
        told = [stage for stage, ranks in enumerate(placement) if rank in ranks]
        held = told if self.stages else [rank]  # though a rank before it is missing
        read = []
        self.words[rank] = []
        for word in rest.split():
            its = _read(word, held)
            error = its if isinstance(its, str) else self._out_of_bounds(its)
            self.words[rank].append((word, error is not None))
            if error is not None:
                self._error(line, f"'{word}': {error}")
            elif isinstance(its, Instruction):
                read.append(its)
        return read

    def _out_of_bounds(self, its: Instruction) -> str | None:
        stages = self.stages or self.ranks
        if its.stage not in stages:
            return f"there is no stage {its.stage}; the stages are 0 … {max(stages)}"
        if its.peer is not None and its.peer not in self.ranks:
            return f"there is no rank {its.peer}; the ranks are 0 … {max(self.ranks)}"
        return None


def _read(word: str, held: Sequence[int]) -> Instruction | str:
    """The instruction that a word of a rank's line stands for, or its error."""
    found = _WORD.fullmatch(word)
    known = [op.value for op in Op]
    if found is None or found["op"] not in known:
        stem = re.match(r"[A-Za-z_]*", word)
        assert stem is not None
        return f"unknown word{did_you_mean(stem[0].upper() or word, known)}"
    op, number = Op(found["op"]), int(found["number"]) if found["number"] else None
    marks = re.findall(r"([@v<>])(\d+)", found["rest"])
    given = {mark: int(value) for mark, value in marks}
    error = _misformed(op, number, [mark for mark, _ in marks])
    if error is not None:
        return error
    stage = given.get("@", _default_stage(op, held))
    if stage is None:
        return (
            f"which stage? This rank holds {'several' if held else 'none'}: write {word}@{(held or [0])[0]}"
        )
    if op in _VERSIONED:
        return Instruction(op, stage, version=number)
    return Instruction(op, stage, number, given.get(">", given.get("<")), given.get("v"))


def _default_stage(op: Op, held: Sequence[int]) -> int | None:
    return held[0] if len(held) == 1 or (held and op in RANK_LEVEL) else None


def _misformed(op: Op, number: int | None, marks: Sequence[str]) -> str | None:
    """What an instruction must have and may not have."""
    if (number is not None) != (op in _NUMBERED):
        what = "the number of a version" if op in _VERSIONED else "the number of a microbatch"
        return (
            f"{op.value} needs {what}, like {op.value}0" if number is None else f"{op.value} takes no number"
        )
    peer = ">" if op in SENDS else "<" if op in RECEIVES else ""
    if peer and peer not in marks:
        return f"{op.value} needs the other rank, like {op.value}{number}{peer}1"
    allowed = {"@", peer, "v" if op in COMPUTE else ""}
    wrong = [mark for mark in marks if mark not in allowed]
    if wrong:
        return f"{op.value} takes no '{wrong[0]}'"
    return "a mark stands twice; keep one" if len(set(marks)) < len(marks) else None
