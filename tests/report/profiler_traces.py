"""Traces of a GPU as torch.profiler writes them, made by a seed: kernels and copies on streams."""

import json
import random
from pathlib import Path
from typing import Any

COMPUTE, COMMUNICATION, COPIES = 7, 20, 24  # streams
_NAMES = {
    COMPUTE: (
        "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int, float)",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "flash_fwd_kernel",
    ),
    COMMUNICATION: (
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    ),
    COPIES: ("Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)", "Memset (Device)"),
}


def write_trace(path: Path, rank: int, draw: random.Random, kernels: int = 300) -> Path:
    """Random activities of three streams: some queued in time, some launched late, some back to back."""
    events: list[dict[str, Any]] = []
    begin = 1_700_000_000_000.0 + draw.random()
    for stream, number in ((COMPUTE, kernels), (COMMUNICATION, kernels // 6), (COPIES, kernels // 8)):
        now = begin + draw.uniform(0, 200)
        for _ in range(number):
            scale = 1 if stream == COMPUTE else 4
            gap = draw.choice((0.5, 2.0, draw.uniform(0, 20), draw.uniform(20, 300) * scale))
            launched = now + draw.uniform(0, gap) if draw.random() < 0.4 else now - draw.uniform(1, 500)
            seconds = round(draw.uniform(2, 120 * scale), 3)
            name = draw.choice(_NAMES[stream])
            category = name[:6].lower() if stream == COPIES else ""
            events += _launched(
                launched,
                len(events) + 1,
                name,
                f"gpu_{category}" if category else "kernel",
                stream,
                now + gap,
                seconds,
            )
            now += gap + seconds
    trace = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": events,
    }
    path.write_text(json.dumps(trace))
    return path


def _launched(
    launched: float, number: int, name: str, category: str, stream: int, start: float, seconds: float
) -> list[dict[str, Any]]:
    call = "cudaLaunchKernel" if category == "kernel" else "cudaMemcpyAsync"
    on_host = {"External id": number, "cbid": 211, "correlation": number}
    on_device = {"External id": number, "device": 0, "context": 1, "stream": stream, "correlation": number}
    return [
        event("cuda_runtime", call, 100, 100, launched, 0.4, on_host),
        event(category, name, 0, stream, start, seconds, on_device),
    ]


def event(
    category: str, name: str, pid: int, tid: int, start: float, length: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": round(start, 3),
        "dur": length,
        "args": args,
    }
