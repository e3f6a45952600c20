"""torch's kernels: which one computes what, and that its arguments are those of this version of torch."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from echelon.parallel.context import flash
from echelon.parallel.context.flash import CPU_FLASH, find_kernel

FLASH, CUDNN = (
    flash._CUDA_KERNELS[x.value] for x in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
)


def on(device: str, dtype: torch.dtype, width: int, heads: int = 4) -> Any:
    """What of a tensor the choice looks at: there need not be such a device."""
    return SimpleNamespace(device=torch.device(device), dtype=dtype, shape=torch.Size([1, heads, 8, width]))


@pytest.mark.parametrize(
    ("device", "dtype", "width", "expected"),
    [
        ("cpu", torch.float64, 3, CPU_FLASH),
        ("cpu", torch.float32, 3, CPU_FLASH),
        ("cpu", torch.bfloat16, 64, None),  # its backward pass is slower and less precise than tiles
        ("cuda", torch.bfloat16, 64, FLASH),
        ("cuda", torch.float16, 128, FLASH),
        ("cuda", torch.float32, 64, None),
        ("cuda", torch.float64, 64, None),
        ("cuda", torch.bfloat16, 20, None),  # not a multiple of 8
        ("cuda", torch.bfloat16, 256, None),
        ("meta", torch.bfloat16, 64, None),
    ],
)
def test_device_and_type_choose_the_kernel(
    device: str, dtype: torch.dtype, width: int, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: SDPBackend.FLASH_ATTENTION.value)
    tensor = on(device, dtype, width)
    assert find_kernel(tensor, tensor, tensor, causal=True) is expected


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (SDPBackend.FLASH_ATTENTION, FLASH),
        (SDPBackend.CUDNN_ATTENTION, CUDNN),
        (SDPBackend.EFFICIENT_ATTENTION, None),
        (SDPBackend.MATH, None),
    ],
)
def test_a_gpu_uses_what_torch_would(
    backend: SDPBackend, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def choose(*_: Any, **options: Any) -> int:
        asked.append(options)
        return backend.value

    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    query, key = on("cuda", torch.bfloat16, 64), on("cuda", torch.bfloat16, 64, heads=2)
    assert find_kernel(query, key, key, causal=False) is expected
    assert asked == [{"is_causal": False, "enable_gqa": True}]


@pytest.mark.parametrize("kernel", [FLASH, CUDNN], ids=["flash", "cudnn"])
@pytest.mark.parametrize("causal", [True, False])
def test_gpu_kernels_take_these_arguments(kernel: Any, causal: bool) -> None:
    """On the meta device, where operations check their arguments and compute nothing but shapes."""
    query = torch.empty(2, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 4, 16 if causal else 8, 64, dtype=torch.bfloat16, device="meta")
    out, sums = kernel.forward(query, key, key, causal, 0.3)
    assert (out.shape, sums.shape) == (query.shape, query.shape[:3])
    gradients = kernel.backward(out, query, key, key, out, sums, causal, 0.3)
    assert [x.shape for x in gradients] == [query.shape, key.shape, key.shape]
