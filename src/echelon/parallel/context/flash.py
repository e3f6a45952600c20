"""Attention of some queries to some keys by torch's own kernels, and its gradients.

Every kernel returns the log-sums of its queries. Its backward pass computes the probabilities from log-sums
that it is given. If these, and the result, are those over *all* keys, its gradients are exactly the share of
its own keys: the shares of several blocks add up.

    query, out [batch, heads, s, width]    key, value [batch, kv_heads, t, width]    sums [batch, heads, s]

No kernel needs repeated keys where several heads share a key/value head.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

_aten = torch.ops.aten
_MAX_WIDTH = 128  # of a head: the most that every kernel has a backward pass for
_WIDTH_MULTIPLE = 8


class Kernel(NamedTuple):
    """One of torch's fused attentions; (query, key, value, causal, scale) are its arguments.

    The backward pass is also given the gradient of the result, before them, and the result and the log-sums
    over all keys, after them.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def find_kernel(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Kernel | None:
    """The kernel for these tensors, or None where plain torch operations are faster or more precise.

    On a GPU, the one that `scaled_dot_product_attention` would choose.
    """
    if query.device.type == "cpu":
        is_exact = query.dtype in (torch.float32, torch.float64)
        return CPU_FLASH if is_exact else None
    is_narrow, width = query.dtype in (torch.bfloat16, torch.float16), query.shape[-1]
    if query.device.type != "cuda" or not is_narrow or width % _WIDTH_MULTIPLE or width > _MAX_WIDTH:
        return None
    is_grouped = query.shape[1] != key.shape[1]
    choice = torch._fused_sdp_choice(query, key, value, is_causal=causal, enable_gqa=is_grouped)
    return _CUDA_KERNELS.get(choice)


# On the CPU.


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    out, sums = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out, sums


def _cpu_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    backward: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    for_query, for_key, for_value = backward(gradient, query, key, value, out, sums, 0.0, causal, scale=scale)
    return for_query, for_key, for_value


# On a GPU. All arguments are contiguous; nothing is dropped, so that no random state is read.


def _flash_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    results = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)
    return results[0], results[1]


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(2, dtype=torch.uint64, device=query.device)
    for_query, for_key, for_value = _aten._scaled_dot_product_flash_attention_backward(
        *(gradient, query, key, value, out, sums),
        *(None, None, query.shape[2], key.shape[2], 0.0, causal, unused, unused),
        scale=scale,
    )
    return for_query, for_key, for_value


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    results = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, causal, scale=scale
    )
    out: Tensor = results[0]
    return out, results[1].view(out.shape[:-1])


def _cudnn_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    column = sums[..., None] if _cudnn_sums_have_width(query.device) else sums
    for_query, for_key, for_value = _aten._scaled_dot_product_cudnn_attention_backward(
        *(gradient, query, key, value, out, column),
        *(unused, unused, None, None, None, query.shape[2], key.shape[2], 0.0, causal),
        scale=scale,
    )
    return for_query, for_key, for_value


@functools.cache
def _cudnn_sums_have_width(device: torch.device) -> bool:
    """Whether log-sums are [batch, heads, s, 1]: that depends on the version of torch."""
    probe = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    sums: Tensor = _aten._scaled_dot_product_cudnn_attention(probe, probe, probe, None, True)[1]
    return sums.ndim == probe.ndim


CPU_FLASH = Kernel(_cpu_forward, _cpu_backward)
_CUDA_KERNELS = {
    SDPBackend.FLASH_ATTENTION.value: Kernel(_flash_forward, _flash_backward),
    SDPBackend.CUDNN_ATTENTION.value: Kernel(_cudnn_forward, _cudnn_backward),
}
