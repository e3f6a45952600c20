"""The recorder of a trace: keeps what the engine measures of some steps, and gathers it when they are over.

Every step has marks between its instructions (span_timer.py) and the moves of its ledger. The recorder keeps
those of its steps and reads none of them while the window is open: on a GPU, reading waits for the device.
"""

import os
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import torch

from echelon.collectives.agreement import gather_values
from echelon.collectives.ledger import Move, StepMoves
from echelon.collectives.mesh import Mesh
from echelon.engine.step.runtime.span_timer import SpanTimer, StepSpans
from echelon.engine.traces.trace_file import trace_text
from echelon.parallel.observer import StepObserver
from echelon.program import Program, Span

DEFAULT_STEPS: Final = 3


@final
class Recorder(StepObserver):
    """Writes the trace of `steps` to `path`, on rank 0, when the last of them is done."""

    def __init__(
        self,
        steps: range,
        path: Path,
        mesh: Mesh,
        timer: SpanTimer,
        program: Program,
        done: Callable[[], None],
    ) -> None:
        """`done` is called when the file is written, or could not be. The next step may be the first."""
        self._steps, self._path, self._done = steps, path, done
        self._mesh, self._timer, self._program = mesh, timer, program
        self._kept: list[tuple[int, StepSpans, StepMoves]] = []

    def name_instructions(self, next_step: int) -> None:
        """Let profilers of a GPU see the names of instructions, while steps are recorded."""
        if self._mesh.device.type == "cuda":
            self._timer.ranges = NvtxRanges() if next_step in self._steps else None

    def after_timing(self, number: int, metrics: object) -> None:  # noqa: ARG002
        self.name_instructions(number + 1)
        spans = self._timer.take() if number in self._steps else None
        if spans is not None:
            self._kept.append((number, spans, self._mesh.ledger.step_moves()))
        if number + 1 >= self._steps.stop:
            self.finish()

    def finish(self) -> None:
        """Gather and write what there is. All ranks must call this."""
        self._timer.ranges = None
        try:
            rows = gather_values(self._record(), self._mesh.group("all"), self._mesh.device, "trace")
            if self._mesh.rank == 0 and any(row["steps"] for row in rows):
                _write(self._path, trace_text(rows, str(self._mesh.plan)))
        finally:
            self._kept = []
            self._done()

    def _record(self) -> dict[str, Any]:
        mesh, device = self._mesh, self._mesh.device
        stage_rank = mesh.group("pipeline").rank
        return {
            "rank": mesh.rank,
            "host": socket.gethostname(),
            # Hosts agree on the time of day, and not on when a clock of perf_counter began.
            "epoch": time.time() - time.perf_counter(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "position": mesh.position._asdict(),
            "stages": list(self._program.stages_of(stage_rank)),
            "steps": [
                {
                    "step": number,
                    "spans": [_plain_span(span) for span in spans.read()],
                    "moves": [_plain_move(move) for move in moves.read()],
                }
                for number, spans, moves in self._kept
            ],
        }


def _plain_span(span: Span) -> list[Any]:
    return [*span.instruction, float(span.start), float(span.end)]


def _plain_move(move: Move) -> list[Any]:
    times = (move.start, move.seconds, move.wait_start, move.waited)
    return [move.axis, move.operation, move.subject, *move.traffic, *times]


@final
class NvtxRanges:
    """Names of instructions for Nsight."""

    push = staticmethod(torch.cuda.nvtx.range_push)
    pop = staticmethod(torch.cuda.nvtx.range_pop)


def _write(path: Path, text: str) -> None:
    """A trace that cannot be written ends no training."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        warnings.warn(f"the trace {path} cannot be written: {error.strerror or error}", stacklevel=2)
