"""The bench `kernels`: keyed dropout beside torch's, and the cross-entropy in chunks beside torch's.

A sample is a forward and a backward pass on the device alone: the host queues all of it while the device
sleeps. `host_seconds` is what the host took for that. Both contenders must give the same, or there is no
result: dropout the mask of the CPU, the losses the same sum.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.compare import Row, compare
from benchmarks.harness import Contender, alternate
from echelon.nn.dropout.mask import Draw, mask_of
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.hashing import hash_of, hash_text
from echelon.nn.losses import summed_cross_entropy
from echelon.nn.wrapping import Wrapping

_P = 0.1
_REPEATS = 10  # in a sample
_SLEEP = 40_000_000  # clock cycles, about 0.02 s: longer than the host takes to queue a sample
_WARMUP = 3

_TORCH, _ECHELON = "torch", "echelon"

_ACTIVATIONS = [(8, 1024, 768), (8, 1024, 3072), (8, 12, 1024, 1024)]
_LOGITS = [(16_384, 50_257), (8_192, 128_256)]

Work = Callable[[], object]


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """Keyed dropout and the cross-entropy in chunks, forward and backward, against torch's own."""
    rounds = 2 if quick else 20
    activations = [(2, 4, 6)] if quick else _ACTIVATIONS
    logits = [(8, 16)] if quick else _LOGITS
    cases = [(shape, dtype) for shape in activations for dtype in (torch.bfloat16, torch.float32)]
    rows = [row for shape, dtype in cases for row in _dropout(shape, dtype, rounds)]
    rows += [row for shape in logits for row in _cross_entropy(shape, rounds)]
    settings = {
        "p": _P,
        "rounds": rounds,
        "repeats_per_round": _REPEATS,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    return settings, rows


def _dropout(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> list[Row]:
    x = torch.randn(shape, dtype=dtype, device=_device(), requires_grad=True)
    gradient = torch.randn_like(x)
    model = nn.Sequential(nn.Dropout(_P))
    key_dropout(model, Wrapping())

    def keyed() -> Tensor:
        with scope(seed=0, step=1, first_sample=2):
            dropped: Tensor = model(x)
        return dropped

    expected = mask_of(Draw(hash_of(0, 1, hash_text("0"), 0), 2, _P), shape, "cpu")
    if not torch.equal((keyed() != 0).cpu(), expected & (x != 0).cpu()):
        raise RuntimeError(f"dropout of {shape} in {dtype} does not keep what it keeps on the CPU")
    works: dict[str, Work] = {
        _TORCH: lambda: torch.autograd.grad(F.dropout(x, _P), x, gradient),
        _ECHELON: lambda: torch.autograd.grad(keyed(), x, gradient),
    }
    return _rows(f"dropout {list(shape)} {_name(dtype)}", works, rounds)


def _cross_entropy(shape: tuple[int, int], rounds: int) -> list[Row]:
    logits = torch.randn(shape, dtype=torch.bfloat16, device=_device(), requires_grad=True)
    targets = torch.randint(shape[1], shape[:1], device=_device())
    losses: dict[str, Callable[[], Tensor]] = {
        _TORCH: lambda: F.cross_entropy(logits.float(), targets, reduction="sum"),
        _ECHELON: lambda: summed_cross_entropy(logits, targets),
    }
    values = {name: float(loss().detach()) for name, loss in losses.items()}
    if not math.isclose(*values.values(), rel_tol=1e-4):
        raise RuntimeError(f"cross-entropy of {shape}: the losses differ: {values}")
    works: dict[str, Work] = {name: partial(_backward, loss, logits) for name, loss in losses.items()}
    return _rows(f"cross-entropy {list(shape)} bfloat16", works, rounds)


def _backward(loss: Callable[[], Tensor], logits: Tensor) -> object:
    return torch.autograd.grad(loss(), logits)


def _rows(case: str, works: Mapping[str, Work], rounds: int) -> list[Row]:
    samplers = {name: _Sampler(work) for name, work in works.items()}
    contenders: dict[str, Contender] = {name: sampler.sample for name, sampler in samplers.items()}
    samples = alternate(contenders, rounds, warmup=_WARMUP)
    return [
        dataclasses.replace(row, extras=samplers[row.contender].extras())
        for row in compare(case, samples, _TORCH)
    ]


class _Sampler:
    """Times one contender, on the device if it is a GPU."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._host_seconds: list[float] = []

    def sample(self) -> float:
        """The seconds of the device for one piece of work."""
        on_gpu = _device().type == "cuda"
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
        if on_gpu:
            torch.cuda._sleep(_SLEEP)
            events[0].record()
        start = time.perf_counter()
        for _ in range(_REPEATS):
            self._work()
        self._host_seconds.append((time.perf_counter() - start) / _REPEATS)
        if not on_gpu:
            return self._host_seconds[-1]
        events[1].record()
        torch.cuda.synchronize()
        milliseconds: float = events[0].elapsed_time(events[1])
        return milliseconds / 1e3 / _REPEATS

    def extras(self) -> dict[str, float]:
        """The least time of the host, and on a GPU the memory of one piece of work beside its inputs."""
        figures: dict[str, float] = {"host_seconds": min(self._host_seconds)}
        if _device().type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._work()
            figures["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        return figures


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
