"""The events of a training. Rank 0 makes them; the display shows them and the logbook keeps them.

metrics.jsonl becomes events again for a run that goes on: what was before its checkpoint stays.
"""

import dataclasses
import math
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echelon.collectives import Move
from echelon.collectives.agreement import gather_values
from echelon.engine import Engine
from echelon.engine.audit import AuditResult
from echelon.memory.meter import METERED_STEPS
from echelon.state.bounded_json import parse_json
from echelon.train import strict_json

FROM_DISK = "from its checkpoint on disk"


@dataclass(frozen=True)
class Starting:
    """The job is valid and has its folder; ranks start next."""

    run: str


@dataclass(frozen=True)
class Started:
    parameters: int
    train_tokens: int
    corpus: str
    device: str
    unit: str = "tokens"  # what the loss counts
    after_step: int = 0  # of the checkpoint that training goes on from; later steps are made again
    lines: tuple[str, ...] = ()  # of metrics.jsonl, up to there: it may lack them
    rollbacks: tuple["RolledBack", ...] = ()  # of the run so far: metrics.jsonl may lack them
    source: str = FROM_DISK  # or 'from memory': the state after that step


@dataclass(frozen=True)
class Audited:
    """The findings of the audit so far, one result per entry; again where a later step has told more."""

    results: tuple[AuditResult, ...]


@dataclass(frozen=True)
class GateLoad:
    """The work of a gate on the global batch of a step; see engine.expert_load()."""

    gate: str  # its name in the model
    tokens: tuple[float, ...]  # slots of each expert
    dropped: float
    entropy: float

    @property
    def largest_share(self) -> float:
        """The load of the busiest expert, as a multiple of the fair share."""
        total = sum(self.tokens)
        return max(self.tokens) * len(self.tokens) / total if total else 1.0


@dataclass(frozen=True)
class Stepped:
    step: int  # how many are done
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    moved_bytes: int
    comm_seconds: float
    comm_hidden_seconds: float
    memory_bytes: int
    skipped: bool = False  # gradients, or the loss, were not finite
    loss_scale: float = 1.0
    experts: tuple[GateLoad, ...] = ()


@dataclass(frozen=True)
class Evaluated:
    step: int
    loss: float
    accuracy: float | None = None  # of images: the part that was named rightly


@dataclass(frozen=True)
class Saved:
    """A checkpoint of the state after a step is made; written while training goes on."""

    step: int


@dataclass(frozen=True)
class Measured:
    """What each rank held at its peak and moved in a step; plain values, as measured.json has them."""

    step: int
    number: int  # of the step, among those that this process has made
    ranks: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Sampled:
    text: str


@dataclass(frozen=True)
class Restarting:
    """A rank was lost. All ranks were ended, and new ones start."""

    reason: str  # 'rank 1 was killed by SIGKILL before it finished'
    number: int  # of restarts since the last checkpoint
    limit: int


@dataclass(frozen=True)
class Noted:
    """Something that a person should know of: a damaged checkpoint was passed over, the plan was changed."""

    text: str


@dataclass(frozen=True)
class Limited:
    """So many steps fit into the minutes of the job."""

    steps: int
    of: int
    minutes: float
    warmup: int  # steps


@dataclass(frozen=True)
class RolledBack:
    """The loss has jumped, or numbers were not finite: training goes on after an earlier step."""

    step: int  # of the checkpoint
    from_step: int  # the last that went wrong
    reason: str
    first_batch: int  # those from here …
    end_batch: int  # … to before this are left out
    number: int  # of rollbacks in this run
    limit: int


Event = (
    Starting
    | Started
    | Audited
    | Stepped
    | Evaluated
    | Saved
    | Measured
    | Sampled
    | Restarting
    | Noted
    | RolledBack
    | Limited
)


METRICS = "metrics.jsonl"
_LONGEST_LINE = 2**22  # bytes


def entry_of(event: Stepped | Evaluated | RolledBack) -> dict[str, Any]:
    plain = dataclasses.asdict(event).items()
    values = {name: value for name, value in plain if value is not None and value != ()}
    kind = {Stepped: "step", Evaluated: "evaluation", RolledBack: "rollback"}[type(event)]
    return {"kind": kind, **values}


def line_of(event: Stepped | Evaluated) -> str:
    """The line of an event, without its end."""
    return strict_json.dump(entry_of(event))


def step_of(line: str) -> int | None:
    """The step of a line of a step or of an evaluation; None for any other text."""
    event = _event(_entry(line) or {})
    return None if event is None else event.step


def read_metrics(path: Path) -> list[Stepped | Evaluated]:
    """The events of a file, in order. Lines that cannot be read are left out: a process that was killed may
    have left half a line."""
    return [event for event in map(_event, _entries(path)) if event is not None]


def last_step(path: Path) -> int:
    return max((event.step for event in read_metrics(path)), default=0)


def metrics_until(path: Path, step: int) -> str:
    """The lines of a file, but for those of later steps and those that cannot be read. A rollback stays: what
    it leaves out is left out also by a training that goes on from an earlier step."""
    return _text(entry for entry in _entries(path) if _is_rollback(entry) or not _is_after(entry, step))


def metrics_with(path: Path, lines: Sequence[str]) -> str | None:
    """Return what a file should have if `lines` were the last to be written; None if it has them."""
    if not lines or set(lines) <= {strict_json.dump(entry) for entry in _entries(path)}:
        return None
    # Of these steps it has some of the lines, or those of an attempt before this one.
    before = min(step for step in map(step_of, lines) if step is not None) - 1
    return metrics_until(path, before) + "".join(f"{line}\n" for line in lines)


def metrics_with_rollbacks(path: Path, rollbacks: Sequence[RolledBack]) -> str | None:
    """Return what a file should have: each of these before the steps that came after it; None if it has."""
    entries, added = list(_entries(path)), [entry_of(each) for each in rollbacks]
    missing = [entry for entry in added if entry not in entries]
    for entry in missing:
        later = (at for at, each in enumerate(entries) if _is_after(each, entry["step"]))
        entries.insert(next(later, len(entries)), entry)
    return _text(entries) if missing else None


def _text(entries: Iterable[dict[str, Any]]) -> str:
    return "".join(f"{strict_json.dump(entry)}\n" for entry in entries)


def count_rollbacks(path: Path) -> int:
    return sum(map(_is_rollback, _entries(path)))


def _is_rollback(entry: dict[str, Any]) -> bool:
    return entry.get("kind") == "rollback"


def _is_after(entry: dict[str, Any], step: int) -> bool:
    value = entry.get("step")
    return isinstance(value, int) and value > step


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):  # a longer one is cut, and cannot be read
            entry = _entry(line.decode(errors="replace"))
            if entry is not None:
                yield entry


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = parse_json(line.encode(errors="replace"))
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _event(entry: dict[str, Any]) -> Stepped | Evaluated | None:
    kind = {"step": Stepped, "evaluation": Evaluated}.get(str(entry.get("kind")))
    if kind is None:
        return None
    names = [field.name for field in dataclasses.fields(kind)]
    # What is not finite is written as null.
    values: dict[str, Any] = {n: math.nan if v is None else v for n, v in entry.items() if n in names}
    try:
        if "experts" in values:
            gates = values["experts"]
            values["experts"] = tuple(
                GateLoad(each["gate"], tuple(each["tokens"]), each["dropped"], each["entropy"])
                for each in gates
            )
        event: Stepped | Evaluated = kind(**values)
    except (KeyError, TypeError):
        return None
    return event if isinstance(event.step, int) else None


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
