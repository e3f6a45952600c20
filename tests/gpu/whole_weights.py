"""`python -m tests.gpu.whole_weights`: the memory that `engine.weights()` takes, over NCCL on one GPU.

A Llama of many tensors under zero=3, tensor and pipeline, on eight ranks. Prints what each rank took at its
peak as JSON; exits with 1 if that was more, on the device or on the host, than the largest tensor + 256 MB.
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
from tests.gpu.nccl import environment

PLAN = "data=2 tensor=2 pipeline=2 zero=3"
LARGE = ModelConfig("llama", layers=16, width=2048, heads=16, ffn=5632, vocab=32000, sequence=2048)
SMALL = ModelConfig("llama", layers=4, width=256, heads=4, vocab=512, sequence=128)
_MORE = 256 << 20


def publish(config: ModelConfig) -> dict[str, Any]:
    """Runs in every rank."""
    on_gpu = torch.cuda.is_available()
    with parallelize(
        deferred(lambda: build(config)), PLAN, optimizer=torch.optim.SGD, loss=cross_entropy
    ) as engine:
        _pass_over(engine)  # groups connect, libraries load
        device, host = torch.cuda.memory_allocated() if on_gpu else 0, _restart_peak()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        largest, total, tensors = _pass_over(engine)
        return {
            "parameters": config.num_parameters,
            "tensors": tensors,
            "seconds": time.perf_counter() - begin,
            "total_bytes": total,
            "largest_bytes": largest,
            "limit_bytes": largest + _MORE,
            "device_bytes": torch.cuda.max_memory_allocated() - device if on_gpu else 0,
            "host_bytes": _peak() - host,
        }


def _pass_over(engine: Any) -> tuple[int, int, int]:
    """The largest, the sum and the number of the tensors."""
    sizes = [tensor.nbytes for _, tensor in engine.weights()]
    return max(sizes), sum(sizes), len(sizes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.whole_weights", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model on the CPU, to see that it runs")
    parser.add_argument("--out", type=Path, help="folder to write whole-weights.json into")
    options = parser.parse_args(arguments)
    settings = {} if options.small else {"backend": "nccl", "environment": environment}
    with Ranks(8, deadline=300.0, **settings) as ranks:  # type: ignore[arg-type]
        results = ranks.run(publish, SMALL if options.small else LARGE)
    worst = {name: max(result[name] for result in results) for name in results[0]}
    print(json.dumps(worst, indent=2))
    if options.out is not None:
        record = make_result("whole-weights", "python -m tests.gpu.whole_weights", {"plan": PLAN} | worst, ())
        options.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record.to_dict(), indent=2) + "\n"
        (options.out / "whole-weights.json").write_text(text, encoding="utf-8")
    return int(max(worst["device_bytes"], worst["host_bytes"]) > worst["limit_bytes"])


if __name__ == "__main__":
    sys.exit(main())
