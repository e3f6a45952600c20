"""The timeline of the page: some steps of all ranks, as columns of small numbers."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from echelon.errors import UserError
from echelon.program import Program, Span, check, simulate
from echelon.program.simulate import measured_costs
from echelon.report.analysis import typical_step
from echelon.report.trace_reader import RankStep, Trace

MOST_SLICES = 40_000  # about 800 kB of the page
_MOST_RANKS = 64


def timeline(trace: Trace) -> dict[str, Any] | None:
    """{"steps": [{"step", "rows": [{"rank", "track", "slices": […]}]}], "names", "kinds", "left_out"}."""
    number = typical_step(trace)
    if number is None:
        return None
    numbers = _steps_that_fit(trace, number)
    words, kinds = _Words(), _Words()
    steps = []
    for each in numbers:
        rows = _spread(list(trace.steps[each].values()), _MOST_RANKS)
        start = min(row.start for row in rows)
        tracks = [track for row in rows for track in _tracks(row, start, words, kinds)]
        steps.append({"step": each, "rows": tracks, "seconds": max(row.end for row in rows) - start})
    left_out = len(trace.steps) - len(numbers)
    simulated = simulated_rows(trace, number, words, kinds)
    return {
        "steps": steps,
        "simulated": simulated,
        "names": words.all,
        "kinds": kinds.all,
        "left_out": left_out,
        "num_ranks": max(len(step) for step in trace.steps.values()),
    }


def _steps_that_fit(trace: Trace, first: int) -> list[int]:
    """The typical step, and others of the window while there is room."""
    sizes = {
        number: sum(len(row.spans) + len(row.moves) for row in step.values())
        for number, step in trace.steps.items()
        if any(row.spans for row in step.values())
    }
    kept, room = [first], MOST_SLICES - sizes.pop(first)
    for number, size in sizes.items():
        if size <= room:
            kept.append(number)
            room -= size
    return sorted(kept)


class _Words:
    """Texts by number, so that each is in the page once."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def place(self, word: str) -> int:
        if word not in self._places:
            self._places[word] = len(self.all)
            self.all.append(word)
        return self._places[word]


def _tracks(row: RankStep, start: float, words: _Words, kinds: _Words) -> Iterable[dict[str, Any]]:
    """The instructions of a rank, and a track of each axis, flat: name, kind, start and length in µs, …"""
    work: list[int] = []
    for span in row.spans:
        place, kind = words.place(span.name), kinds.place(span.kind)
        work += _slice(place, kind, span.start - start, span.end - span.start)
    yield {"rank": row.rank, "track": "", "slices": work}
    of_track: dict[tuple[str, int], list[int]] = {}
    for move in row.moves:
        place, kind = words.place(move.name), kinds.place(f"communication: {move.axis}")
        flat = of_track.setdefault((move.axis, move.track), [])
        flat += _slice(place, kind, move.start - start, move.end - move.start)
    for (axis, _), slices in sorted(of_track.items()):
        yield {"rank": row.rank, "track": axis, "slices": slices}


def _slice(name: int, kind: int, start: float, seconds: float) -> list[int]:
    return [name, kind, round(start * 1e6), max(1, round(seconds * 1e6))]


def _spread(items: list[RankStep], most: int) -> list[RankStep]:
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


# The same program, simulated with the costs that were measured.


def simulated_rows(trace: Trace, number: int, words: _Words, kinds: _Words) -> dict[str, Any] | None:
    """The first pipeline of the trace on paper: what it takes if nothing but the program delays it."""
    pipeline = _first_pipeline(trace, number)
    if not pipeline:
        return None
    ranks = [row.rank for row in pipeline]
    complete = [[step[rank] for rank in ranks] for step in trace.steps.values() if set(ranks) <= set(step)]
    try:
        program = _program_of(pipeline)
        check(program)
        steps = [
            [Span(place, s.start, s.end, s.instruction) for place, row in enumerate(rows) for s in row.spans]
            for rows in complete
        ]
        line = simulate(program, measured_costs(steps, program.stages))
    except (UserError, ValueError, IndexError, KeyError, AssertionError):
        return None  # a file of another version, or an order that the check does not know
    tracks = []
    for place, row in enumerate(pipeline):
        slices: list[int] = []
        spans = zip(row.spans, line.starts[place], line.ends[place], strict=True)
        for span, start, end in spans:
            place, kind = words.place(span.name), kinds.place(span.kind)
            if end > start:
                slices += _slice(place, kind, float(start), float(end - start))
        tracks.append({"rank": row.rank, "track": "", "slices": slices})
    measured = median(max(row.end for row in rows) - min(row.start for row in rows) for rows in complete)
    return {
        "rows": tracks,
        "seconds": float(line.makespan),
        "bubble": float(line.bubble_fraction),
        "measured_seconds": measured,
    }


def _first_pipeline(trace: Trace, number: int) -> list[RankStep]:
    """The ranks that take the first microbatches through all stages, by stage."""
    step = trace.steps[number]

    def place(rank: int) -> tuple[object, ...]:
        position = trace.ranks.get(rank, {}).get("position")
        known = position if isinstance(position, dict) else {}
        return tuple(known.get(axis) for axis in ("replica", "context", "tensor"))

    first = min(step)
    return [row for rank, row in step.items() if place(rank) == place(first) and row.spans]


def _program_of(pipeline: Sequence[RankStep]) -> Program:
    """The program that these ranks have run."""
    ranks = tuple(tuple(span.instruction for span in row.spans) for row in pipeline)
    holders: dict[int, list[int]] = {}
    for rank, instructions in enumerate(ranks):
        for stage in sorted({instruction.stage for instruction in instructions}):
            holders.setdefault(stage, []).append(rank)
    placement = tuple(tuple(holders[stage]) for stage in range(len(holders)))
    numbers = [i.microbatch for instructions in ranks for i in instructions if i.microbatch is not None]
    return Program("traced", placement, 1 + max(numbers, default=-1), ranks)
