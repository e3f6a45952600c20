"""The bench `selective-costs`: what each operation costs to compute again, beside what it would keep.

A pass is the time in which memory moves as many bytes as the operation returns; a large copy tells how fast
that is. `recompute=selective` computes again what takes few passes; the limit is in
memory/recompute/selective_operations.py. Where there is a GPU, both devices are measured.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.compare import Row, compare
from benchmarks.harness import Contender, alternate, timed
from echelon.nn.dropout.mask import Draw, dropped

_COPY = "copy"
_ROWS = {"cpu": 256, "cuda": 8192}
_REPEATS = {"cpu": 2, "cuda": 20}
_COPIED = {"cpu": 2**25, "cuda": 2**29}  # bytes: no cache holds them
_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
_SHORT, _LONG = 1600, 6400  # the width of GPT-2 1.5B, and of its feed-forward


class Operation(NamedTuple):
    """One operation on `x` and `y`, [rows, columns]."""

    name: str
    compute: Callable[[Tensor, Tensor], Tensor]
    columns: int = _LONG


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """What operations cost to compute again, in passes over what they return."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rounds = 2 if quick else 15
    rows = [row for device in devices for row in _rows(device, rounds, quick=quick)]
    settings = {
        "rows": _ROWS,
        "types": {device: str(dtype).removeprefix("torch.") for device, dtype in _DTYPES.items()},
        "rounds": rounds,
        "copied_bytes": _COPIED,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def operations(device: str, *, quick: bool = False) -> list[Operation]:
    """Those of transformers, and two products: of short rows and of long ones."""
    short, long = (16, 64) if quick else (_SHORT, _LONG)
    dtype = _DTYPES[device]
    matrices = {length: torch.randn(short, length, dtype=dtype, device=device) for length in (short, long)}
    scale = torch.ones(long, dtype=dtype, device=device)
    return [
        Operation("add", torch.add, long),
        Operation("cast to float32", lambda x, _: x.to(torch.float32, copy=True), long),
        Operation("gelu", lambda x, _: F.gelu(x, approximate="tanh"), long),
        Operation("silu times up", lambda x, y: F.silu(x) * y, long),
        Operation("layer norm", lambda x, _: F.layer_norm(x, (long,), scale, scale), long),
        Operation("rms norm", lambda x, _: F.rms_norm(x, (long,), scale), long),
        Operation("softmax", lambda x, _: torch.softmax(x, -1), long),
        Operation("log softmax in float32", lambda x, _: torch.log_softmax(x.float(), -1), long),
        Operation("keyed dropout", lambda x, _: dropped(x, Draw(1, 0, 0.1)), long),
        Operation(f"linear, rows of {short}", lambda x, _: F.linear(x, matrices[short]), short),
        Operation(f"linear, rows of {long}", lambda x, _: F.linear(x, matrices[long]), long),
        Operation("attention", _attention, long),
    ]


def _attention(x: Tensor, y: Tensor) -> Tensor:
    """Of heads 64 wide, over sequences as long as there are rows, but at most 1024."""
    rows, columns = x.shape
    length, width = min(rows, 1024), min(columns, 64)
    query, key = (each.view(rows // length, length, -1, width).transpose(1, 2) for each in (x, y))
    return F.scaled_dot_product_attention(query, key, key, is_causal=True)


@torch.no_grad()
def _rows(device: str, rounds: int, *, quick: bool) -> list[Row]:
    repeats = 1 if quick else _REPEATS[device]
    sizes = (16, 2**10) if quick else (_ROWS[device], _COPIED[device])
    return [
        row
        for operation in operations(device, quick=quick)
        for row in _measure(device, operation, rounds, repeats, *sizes)
    ]


def _measure(
    device: str, operation: Operation, rounds: int, repeats: int, rows: int, copied: int
) -> list[Row]:
    x, y = (torch.randn(rows, operation.columns, dtype=_DTYPES[device], device=device) for _ in range(2))
    source, target = (torch.ones(copied, dtype=torch.uint8, device=device) for _ in range(2))
    output_bytes = operation.compute(x, y).nbytes
    works: dict[str, Callable[[], object]] = {
        _COPY: lambda: target.copy_(source),
        operation.name: lambda: operation.compute(x, y),
    }
    contenders: dict[str, Contender] = {name: timed(_repeated(work, repeats)) for name, work in works.items()}
    compared = compare(device, alternate(contenders, rounds, warmup=2), _COPY)
    moved = 2 * copied  # read and written
    return [
        dataclasses.replace(
            row,
            extras={
                "passes_count": round(row.ratio.median * moved / output_bytes, 1),
                "output_bytes": output_bytes,
            },
        )
        for row in compared
        if row.contender != _COPY
    ]


def _repeated(work: Callable[[], object], times: int) -> Callable[[], object]:
    return lambda: [work() for _ in range(times)]
