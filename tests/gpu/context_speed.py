"""Attention of one rank of a ring against torch's attention, on one GPU: python -m tests.gpu.context_speed

One process plays one rank: what it would receive is a copy of what it sends. It computes 1/C of the causal
attention of the whole sequence, forward and backward, and the peer is `scaled_dot_product_attention` over all
of it. Both are compared by the operations per second of attention. Prints one JSON object, and exits with 1
if the ring has less than 70 % of torch's.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.collectives import Ledger, Work
from echelon.collectives.recording_group import CompletedWork
from echelon.parallel.context import ring_attention, take
from tests.groups import PartialGroup

LEAST = 0.7  # of torch's operations per second


@final
class Loopback(PartialGroup):
    """What a rank would receive is what it sends."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__("context", rank, size, Ledger())

    def _all_to_all(self, output: Tensor, tensor: Tensor, *_: list[int]) -> Work:
        output.copy_(tensor)
        return CompletedWork()


def measure(
    *,
    tokens: int = 32768,
    heads: int = 32,
    kv_heads: int = 32,
    width: int = 128,
    ranks: int = 4,
    rank: int = 0,
    rounds: int = 10,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Seconds of both, in turns, and the ratio of their operations per second."""
    torch.manual_seed(0)
    shapes = [(1, each, tokens, width) for each in (heads, kv_heads, kv_heads, heads)]
    whole = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    local = [take(x, rank, ranks, dim=2) for x in whole]
    group = Loopback(rank, ranks)
    is_grouped = heads != kv_heads

    def attend_by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)

    def attend_in_ring(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return ring_attention(query, key, value, group)

    steps = {"torch": _step(attend_by_torch, whole), "ring": _step(attend_in_ring, local)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):  # two to warm up
        for name, step in steps.items():
            taken = _timed(step, device)
            if number >= 2:
                seconds[name].append(taken)
    # Two products forward and five backward, each of 2 operations, over half of all pairs of positions.
    operations = 7 * tokens**2 * heads * width
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    rates = {"torch": operations / medians["torch"], "ring": operations / ranks / medians["ring"]}
    return {
        "settings": {
            "tokens": tokens,
            "heads": heads,
            "kv_heads": kv_heads,
            "width": width,
            "ranks": ranks,
            "rank": rank,
            "dtype": str(dtype).removeprefix("torch."),
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "torch": torch.__version__,
        },
        "seconds": medians,
        "teraflops": {name: rate / 1e12 for name, rate in rates.items()},
        "ratio": rates["ring"] / rates["torch"],
        "least": LEAST,
    }


def _step(attend: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Callable[[], None]:
    """A forward and a backward pass."""
    *parts, gradient = (x.detach().clone() for x in inputs)
    leaves = [x.requires_grad_() for x in parts]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        attend(*leaves).backward(gradient)

    return step


def _timed(step: Callable[[], None], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.context_speed")
    for name, default in (("tokens", 32768), ("heads", 32), ("kv-heads", 32), ("width", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=10)
    result = measure(**vars(parser.parse_args(arguments)))
    print(json.dumps(result, indent=2))
    return int(result["ratio"] < LEAST)


if __name__ == "__main__":
    sys.exit(main())
