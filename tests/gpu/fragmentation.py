"""`python -m tests.gpu.fragmentation`: a GPT with recompute on batches of varying lengths, with and without
contiguous=true, on one GPU.

Prints for each what was allocated and reserved at most, the difference, and how often the allocator had to
give memory back and try again, as JSON. Exits with 1 if contiguous=true leaves more unused.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.result import make_result

import echelon
from echelon.models import ModelConfig, build, cross_entropy

LARGE = ModelConfig("gpt", layers=24, width=2048, heads=16, vocab=50304, sequence=2048)
SMALL = ModelConfig("gpt", layers=4, width=64, heads=4, vocab=512, sequence=128)
_STATISTICS = {
    "allocated_bytes": "allocated_bytes.all.peak",
    "reserved_bytes": "reserved_bytes.all.peak",
    "inactive_split_bytes": "inactive_split_bytes.all.peak",
    "retries": "num_alloc_retries",
    "allocations": "num_device_alloc",
}


def train(config: ModelConfig, plan: str, steps: int, samples: int) -> dict[str, Any]:
    """A training in which every step has other numbers of samples and tokens."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
    torch.manual_seed(0)
    engine = echelon.parallelize(
        build(config),
        plan,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
        loss=cross_entropy,
        audit="off",
    )
    generator = torch.Generator().manual_seed(0)
    begin, tokens, loss = time.perf_counter(), 0, 0.0
    for _ in range(steps):
        length = config.sequence - int(torch.randint(config.sequence // 2, (), generator=generator))
        number = samples - int(torch.randint(samples // 2 + 1, (), generator=generator))
        batch = torch.randint(config.vocab, (number, length + 1), generator=generator)
        loss = engine.step((batch[:, :-1], batch[:, 1:])).loss
        tokens += number * length
    result = {"plan": plan, "loss": loss, "tokens_per_second": tokens / (time.perf_counter() - begin)}
    result |= _statistics() if on_gpu else dict.fromkeys([*_STATISTICS, "unused_bytes"], 0)
    engine.close()
    return result


def _statistics() -> dict[str, int]:
    statistics = torch.cuda.memory_stats()
    result = {name: int(statistics.get(key, 0)) for name, key in _STATISTICS.items()}
    return result | {"unused_bytes": result["reserved_bytes"] - result["allocated_bytes"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fragmentation", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model, also on the CPU")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="the most in a batch")
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--out", type=Path, help="folder to write fragmentation.json into")
    options = parser.parse_args(arguments)
    config = SMALL if options.small else LARGE
    precision = "fp32" if options.small else "bf16"
    plan = f"recompute={options.recompute} precision={precision} microbatches=2"
    rows = [
        train(config, f"{plan} contiguous={choice}", options.steps, options.samples)
        for choice in ("false", "true")
    ]
    print(json.dumps(rows, indent=2))
    if options.out is not None:
        settings = {"parameters": config.num_parameters, "steps": options.steps, "samples": options.samples}
        settings |= {
            f"{name}_{key}": row[key]
            for row, name in zip(rows, ("plain", "contiguous"), strict=True)
            for key in ("allocated_bytes", "reserved_bytes", "unused_bytes", "allocations")
        }
        record = make_result("fragmentation", "python -m tests.gpu.fragmentation", settings, ())
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record.to_dict(), indent=2) + "\n"
        (options.out / "fragmentation.json").write_text(text, encoding="utf-8")
    same = abs(rows[0]["loss"] - rows[1]["loss"]) <= 1e-3 * abs(rows[0]["loss"])
    return int(not same or rows[1]["unused_bytes"] > rows[0]["unused_bytes"])


if __name__ == "__main__":
    sys.exit(main())
