"""`python -m tests.gpu.large_start`: a Llama of 30 billion parameters on two ranks that share one GPU.

It starts in bf16 with zero=3 over NCCL and evaluates one batch. Prints what each rank took at its peak as
JSON; exits with 1 if that was more than its half and two units on the device, or two units in host memory.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.result import make_result
from benchmarks.start import _peak, _restart_peak

from echelon.engine import parallelize
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.initialization.initial_values import deferred
from echelon.state.ownership import VALUE
from tests.gpu.nccl import environment

LARGE = ModelConfig("llama", layers=56, width=6656, heads=52, ffn=17920, vocab=32000, sequence=2048)
SMALL = ModelConfig("llama", layers=4, width=256, heads=4, vocab=512, sequence=128)


def start(config: ModelConfig, prefetch: int) -> dict[str, Any]:
    """Runs in every rank."""
    on_gpu = torch.cuda.is_available()
    some = torch.ones(8, 8, device="cuda" if on_gpu else "cpu")
    some.matmul(some)  # what CUDA takes at its first product does not count
    model = deferred(lambda: build(config))
    unit = 2 * max(sum(p.numel() for p in layer.parameters()) for layer in model.layers())
    before = _restart_peak()
    begin = time.perf_counter()
    engine = parallelize(
        model,
        "data=2 zero=3 precision=bf16",
        optimizer=torch.optim.AdamW,
        loss=cross_entropy,
        prefetch=prefetch,
    )
    started = time.perf_counter()
    tokens = torch.randint(0, config.vocab, (2, 65), generator=torch.Generator().manual_seed(0))
    evaluation = engine.evaluate(engine.local((tokens[:, :-1], tokens[:, 1:])))
    ended = time.perf_counter()
    owned = sum(each.tensor.nbytes for each in engine.owned() if each.slice.part == VALUE)
    result = {
        "parameters": config.num_parameters,
        "prefetch": prefetch,
        "loss": evaluation.loss,
        "start_seconds": started - begin,
        "evaluate_seconds": ended - started,
        "owned_bytes": owned,
        "unit_bytes": unit,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "device_limit_bytes": owned + 2 * unit,
        "host_peak_bytes": _peak() - before,
        "host_limit_bytes": 2 * unit,
    }
    engine.close()
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.large_start", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model on the CPU, to see that it runs")
    parser.add_argument("--prefetch", type=int, default=0, help="units gathered ahead")
    parser.add_argument("--out", type=Path, help="folder to write large-start.json into")
    options = parser.parse_args(arguments)
    settings = {} if options.small else {"backend": "nccl", "environment": environment}
    with Ranks(2, deadline=300.0, **settings) as ranks:  # type: ignore[arg-type]
        results = ranks.run(start, SMALL if options.small else LARGE, options.prefetch)
    print(json.dumps(results, indent=2))
    if options.out is not None:
        worst = {name: max(result[name] for result in results) for name in results[0]}
        record = make_result("large-start", "python -m tests.gpu.large_start", worst, ())
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record.to_dict(), indent=2) + "\n"
        (options.out / "large-start.json").write_text(text, encoding="utf-8")
    return int(not all(map(_within_limits, results)))


def _within_limits(result: dict[str, Any]) -> bool:
    return all(
        result[f"{where}_peak_bytes"] <= result[f"{where}_limit_bytes"] for where in ("device", "host")
    )


if __name__ == "__main__":
    sys.exit(main())
