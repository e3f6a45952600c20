"""What ranks hold and move in a step, once per run: a report shows it beside predictions."""

import os
import socket
from collections.abc import Iterable
from typing import Any

import torch

from echelon.collectives import Move
from echelon.collectives.agreement import gather_values
from echelon.engine import Engine
from echelon.memory.meter import METERED_STEPS
from echelon.train.events import Measured

MEASURED = "measured.json"
# Of those that a process trains. Peaks are of the first steps, in some of which ranks compare what they have
# too; and the steps 1, 2, 4 and 8 may be audited.
MEASURED_STEP = 2 * METERED_STEPS


def measure_ranks(engine: Engine, step: int, number: int) -> Measured:
    """What each rank held at its peak and moved in the step that is just done, the `number`-th of this
    process. All ranks must call this."""
    device = engine.mesh.device
    is_cuda = device.type == "cuda"
    row = {
        "rank": engine.mesh.rank,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "device_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
        "cores": os.cpu_count(),
        "position": engine.mesh.position._asdict(),
        "boundaries": engine.boundaries,
        "description": str(engine).splitlines()[1:],
        "memory": engine.memory()._asdict(),
        "moved": moved_rows(engine.ledger.moves),
    }
    rows = gather_values(row, engine.mesh.group("all"), device, "report")
    return Measured(step, number, tuple(rows))


def moved_rows(moves: Iterable[Move]) -> list[dict[str, Any]]:
    """The bytes of moves, by axis, operation and subject."""
    sums: dict[tuple[str, str, str], list[int]] = {}
    for move in moves:
        total = sums.setdefault((move.axis, move.operation, move.subject), [0, 0, 0, 0])
        for place, number in enumerate((1, *move.traffic)):
            total[place] += number
    names = ("calls", "payload", "sent", "received")
    return [
        {"axis": axis, "operation": operation, "subject": subject, **dict(zip(names, total, strict=True))}
        for (axis, operation, subject), total in sorted(sums.items())
    ]
