"""The bench `optimizer-step`: an update of bf16 weights with float32 masters, beside a copy of its bytes.

Per parameter an update reads the gradient (4 bytes), and reads and writes the master (8) and both moments
(16), and writes the weight (2). The copy moves as many bytes, reading half and writing half.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.compare import Row, compare
from benchmarks.harness import alternate, timed
from echelon.models import ModelConfig, build, preset
from echelon.state.ownership import LocalParameter
from echelon.update.precision.stepper import MasterStepper

_BYTES_PER_PARAMETER = 30
_SMALL = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=16, tied=True)
_BUFFER = 2**30  # bytes of a copy
_COPY, _UPDATE = "copy of its bytes", "update"


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """AdamW with float32 masters, against moving its bytes once."""
    config = _SMALL if quick else preset("gpt-xl")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_bytes = _BYTES_PER_PARAMETER * config.num_parameters
    works = {_COPY: _copies(num_bytes, device), _UPDATE: _update(config, device)}
    samples = alternate({name: timed(work) for name, work in works.items()}, 2 if quick else 20, warmup=3)
    rows = [
        dataclasses.replace(row, extras={"bytes_per_second": num_bytes / row.seconds.median})
        for row in compare("AdamW, fused, float32 masters", samples, _COPY)
    ]
    settings = {
        "model": dataclasses.asdict(config),
        "parameters": config.num_parameters,
        "bytes_per_parameter": _BYTES_PER_PARAMETER,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _copies(num_bytes: int, device: torch.device) -> Callable[[], object]:
    """Moves so many bytes: half are read, half written."""
    size = min(_BUFFER, num_bytes // 2)
    source, target = (torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2))
    times, rest = divmod(num_bytes // 2, size)

    def copy() -> None:
        for _ in range(times):
            target.copy_(source)
        target[:rest].copy_(source[:rest])

    return copy


def _update(config: ModelConfig, device: torch.device) -> Callable[[], object]:
    with device:
        model = build(config).to(torch.bfloat16)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.full_like(parameter, 1e-3, dtype=torch.float32)
    local = [LocalParameter(name, p, p, 0) for name, p in model.named_parameters()]
    is_deferred = device.type == "cuda"
    stepper = MasterStepper(_adamw(parameters), local, deferred=is_deferred)
    factor = torch.ones((), device=device) if is_deferred else 1.0
    skip = torch.zeros((), dtype=torch.bool, device=device) if is_deferred else False
    return lambda: stepper.step(factor, skip)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    given: list[nn.Parameter] = list(parameters)
    return torch.optim.AdamW(given, lr=1e-5, fused=True)
