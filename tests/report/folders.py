"""Run folders made by hand: of any size, and strange ones."""

import json
import math
from pathlib import Path
from typing import Any

from echelon.engine.trace import trace_text


def write_run(
    path: Path, *, steps: int = 20, ranks: int = 2, name: str = "run", trace: bool = True, **about: Any
) -> Path:
    """A whole run folder; returns it."""
    folder = path / name
    folder.mkdir(parents=True)
    run = {
        "state": "finished",
        "started": "2030-01-02T03:04:05+00:00",
        "plan": f"data={ranks}",
        "job": {"plan": f"data={ranks}", "steps": steps, "batch": 4 * ranks, "model": {"layers": 2}},
        "versions": {"echelon": "0.1.0", "torch": "2.13.0"},
        "events": [
            {
                "kind": "restart",
                "time": "2030-01-02T03:05:05+00:00",
                "reason": "rank 1 was killed",
                "after_step": 7,
            }
        ],
        "summary": {"unit": "tokens", "parameters": 1000},
        **about,
    }
    (folder / "run.json").write_text(json.dumps(run))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(step_row(step)) + "\n")
            if step % max(1, steps // 4) == 0:
                file.write(
                    json.dumps({"kind": "evaluation", "step": step, "loss": 3.0 - step / steps}) + "\n"
                )
    saved = [{"step": step, "time": 1.0} for step in range(5, steps + 1, max(5, steps // 10))]
    (folder / "saved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in saved))
    (folder / "measured.json").write_text(
        json.dumps({"step": 3, "ranks": [rank_row(r) for r in range(ranks)]})
    )
    if trace:
        (folder / "trace.json").write_text(trace_of(ranks))
    return folder


def step_row(step: int) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": step,
        "loss": 3 * math.exp(-step / 1000) + 0.05 * math.sin(step) + (5 if step == 13 else 0),
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 4096,
        "seconds": 0.5 + 0.1 * (step % 7 == 0),
        "moved_bytes": 1000,
        "comm_seconds": 0.1,
        "comm_hidden_seconds": 0.06,
        "memory_bytes": 10**6 + step,
        "skipped": step == 9,
        "loss_scale": 1.0,
    }


def rank_row(rank: int, device: str = "cpu") -> dict[str, Any]:
    peak = {
        "parameters": 400,
        "gradients": 400,
        "optimizer": 800,
        "activations": 1000 * (rank + 1),
        "buffers": 0,
    }
    gradients = {"axis": "data", "operation": "all_reduce", "subject": "gradients"}
    return {
        "rank": rank,
        "host": f"node{rank // 8}",
        "device": device,
        "cores": 8,
        "position": {"pipeline": 0, "data": rank},
        "description": ["stage 0: dense 1,000 parameters over data"],
        "memory": {"peak": peak, "peak_total": sum(peak.values()), "host_peak": {"optimizer": 0}},
        "moved": [{**gradients, "calls": 1, "payload": 400, "sent": 400, "received": 400}],
    }


def traced_rank(rank: int, steps: int = 3, slow: float = 0.0) -> dict[str, Any]:
    """Each step: F0 0–1, B0 1–3 (and `slow` longer), REDUCE until 4.5, UPDATE until 5; an all-reduce 2–4."""
    rows = []
    for step in range(steps):
        at, end = 10.0 * step, 10.0 * step + 3 + slow
        words = (
            ("F", at, at + 1),
            ("B", at + 1, end),
            ("REDUCE", end, at + 4.5),
            ("UPDATE", at + 4.5, at + 5),
        )
        spans = [[op, 0, 0 if op in "FB" else None, None, None, start, stop] for op, start, stop in words]
        move = ["data", "all_reduce", "gradients", 400, 400, 400, at + 2, 2.0, end, at + 4.5 - end]
        rows.append({"step": 10 + step, "spans": spans, "moves": [move]})
    position = {"pipeline": 0, "data": rank, "context": 0, "tensor": 0, "replica": rank}
    return {
        "rank": rank, "host": "node", "epoch": 0.0, "device": "cpu", "position": position, "stages": [0],
        "steps": rows,
    }  # fmt: skip


def trace_of(ranks: int) -> str:
    return trace_text([traced_rank(rank, slow=0.5 * (rank == 1)) for rank in range(ranks)], f"data={ranks}")


def pipeline_trace() -> str:
    """Two stages, one microbatch: F0 SA0>1 … RG0<1 B0 on rank 0, RA0<0 F0 B0 SG0>0 on rank 1."""
    first = [["F", 0, 0, None, None, 0, 2], ["SA", 0, 0, 1, None, 2, 2.1], ["RG", 0, 0, 1, None, 2.1, 7]]
    first += [["B", 0, 0, None, None, 7, 9], *_ends(0, 9)]
    second = [["RA", 1, 0, 0, None, 0, 2.5], ["F", 1, 0, None, None, 2.5, 4], ["B", 1, 0, None, None, 4, 6.5]]
    second += [["SG", 1, 0, 0, None, 6.5, 6.6], *_ends(1, 6.6)]
    rows = []
    for rank, spans in enumerate((first, second)):
        row = traced_rank(rank, 0) | {"stages": [rank], "steps": [{"step": 4, "spans": spans, "moves": []}]}
        row["position"] |= {"pipeline": rank, "data": 0, "replica": 0}
        rows.append(row)
    return trace_text(rows, "pipeline=2")


def _ends(stage: int, start: float) -> list[list[Any]]:
    times = [start, max(start, 9.0) + 0.5, 9.75, 10.0, 10.1]
    ops = ("REDUCE", "NORM", "UPDATE", "PUBLISH")
    return [[op, stage, None, None, None, times[i], times[i + 1]] for i, op in enumerate(ops)]
