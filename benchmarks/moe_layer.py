"""The bench `moe-layer`: a mixture of experts beside dense feed-forward parts of equal active FLOPs, and
beside transformers' Mixtral block.

A sample is a forward and a backward pass, with gradients of the input and of all weights, in bfloat16.
`dense` is the feed-forward part of echelon's Llama; `dense, fused` has the kernels of the experts for its
activation, so that what is left of the difference is what routing costs. Before anything is timed, experts
must give what they give one after the other in float32.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.compare import Row, compare
from benchmarks.harness import Contender, alternate
from echelon.experts import Experts, MixtureOfExperts, SoftmaxGate
from echelon.models import ModelConfig
from echelon.models.transformer import SwiGLU
from echelon.nn.experts.compute import activate, activation_gradients

_DENSE, _FUSED, _ECHELON = "dense", "dense, fused", "echelon"
_MIXTRAL = {"transformers Mixtral": "eager", "transformers Mixtral, grouped_mm": "grouped_mm"}
_TOLERANCE = 0.03  # of the output in bfloat16
_LISTED = 16  # kernels of a breakdown


class _Size(NamedTuple):
    tokens: int
    width: int
    hidden: int  # of an expert
    experts: int
    top_k: int

    @property
    def flops(self) -> int:
        """Of the products of a forward and a backward pass."""
        return 3 * 2 * self.tokens * self.top_k * 3 * self.width * self.hidden

    @property
    def dispatched_bytes(self) -> int:
        """Of the rows of all slots, once."""
        return self.tokens * self.top_k * self.width * 2


_FULL = _Size(tokens=65_536, width=2048, hidden=1408, experts=64, top_k=6)
_QUICK = _Size(tokens=64, width=32, hidden=24, experts=8, top_k=2)


def bench(quick: bool) -> tuple[dict[str, Any], list[Row]]:
    """A mixture of experts, forward and backward, against dense layers and transformers' Mixtral block."""
    size, rounds, repeats = (_QUICK, 2, 1) if quick else (_FULL, 10, 3)
    torch.manual_seed(0)
    x = torch.randn(1, size.tokens, size.width, device=_device()).to(torch.bfloat16).requires_grad_()
    modules = _modules(size)
    check_experts(size, modules[_ECHELON], x)
    passes = {name: _Pass(module, x) for name, module in modules.items()}
    left_out = {name: reason for name in _MIXTRAL if name in passes and (reason := _failure(passes[name]))}
    passes = {name: each for name, each in passes.items() if name not in left_out}
    contenders: dict[str, Contender] = {
        name: partial(_seconds, each, repeats) for name, each in passes.items()
    }
    samples = alternate(contenders, rounds, warmup=2)
    peaks = {name: _peak_bytes(each) for name, each in passes.items()}
    rows = [
        dataclasses.replace(row, extras=_extras(size, row, peaks))
        for row in compare(_case(size), samples, _DENSE)
    ]
    settings = {
        **size._asdict(),
        "rounds": rounds,
        "repeats_per_round": repeats,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "left_out": left_out,
        "dispatched_bytes": size.dispatched_bytes,
        "microseconds_of_kernels": {name: breakdown(passes[name]) for name in (_FUSED, _ECHELON)},
    }
    return settings, rows


def _case(size: _Size) -> str:
    return f"{size.tokens:,} tokens, {size.width} wide, top-{size.top_k} of {size.experts} x {size.hidden}"


def _modules(size: _Size) -> dict[str, nn.Module]:
    hidden = size.top_k * size.hidden
    modules: dict[str, nn.Module] = {
        _DENSE: SwiGLU(ModelConfig("llama", 1, size.width, 1, vocab=8, sequence=8), hidden),
        _FUSED: FusedSwiGLU(size.width, hidden),
        _ECHELON: MixtureOfExperts(
            SoftmaxGate(size.width, size.experts, size.top_k), Experts(size.experts, size.width, size.hidden)
        ),
    }
    modules |= {name: block for name, way in _MIXTRAL.items() if (block := _mixtral(size, way)) is not None}
    return {name: module.to(_device(), torch.bfloat16) for name, module in modules.items()}


def _mixtral(size: _Size, implementation: str) -> nn.Module | None:
    """transformers' block, of a version that computes experts in this way; None if there is none."""
    try:
        from transformers import MixtralConfig  # type: ignore[attr-defined, unused-ignore]
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError:
        return None
    config: Any = MixtralConfig(
        hidden_size=size.width,
        intermediate_size=size.hidden,
        num_local_experts=size.experts,
        num_experts_per_tok=size.top_k,
    )
    has_choice = hasattr(type(config), "_experts_implementation")
    if implementation != "eager" and not (has_choice and torch.cuda.is_available()):
        return None
    if has_choice:
        config._experts_implementation = implementation
    block: nn.Module = MixtralSparseMoeBlock(config)  # type: ignore[no-untyped-call, unused-ignore]
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    return block


class FusedSwiGLU(nn.Module):
    """As `SwiGLU`, with one matrix for gate and up, and the kernels of experts between its two products."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        function: Any = _Fused.apply
        hidden: Tensor = function(self.gate_up(x.flatten(0, -2)))
        output: Tensor = self.down(hidden)
        return output.view_as(x)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return activate(rows, None, "swiglu")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return activation_gradients(gradient, rows, None, "swiglu", with_hidden=False).rows


@torch.no_grad()
def check_experts(size: _Size, layer: nn.Module, x: Tensor) -> None:
    """Raise if some tokens get another output than from their experts one after the other."""
    assert isinstance(layer, MixtureOfExperts)
    tokens, experts = x[:, :16], layer.experts
    indices, weights = layer.gate(tokens)
    expected = torch.zeros(tokens.shape[1], size.width, device=x.device)
    for slot in range(size.top_k):
        for token, expert in enumerate(indices[:, slot].tolist()):
            gate, up = (experts.first[expert].float() @ tokens[0, token].float()).chunk(2)
            hidden = F.silu(gate) * up * weights[token, slot].float()
            expected[token] += experts.down_proj[expert].float() @ hidden
    difference = (layer(x)[0, :16].float() - expected).norm() / expected.norm()
    if not difference < _TOLERANCE:
        raise RuntimeError(f"experts differ by {float(difference):.3g} from those computed one by one")


class _Pass:
    """A forward and a backward pass."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        self._module, self._leaves = module, [x, *module.parameters()]
        self._gradient = torch.randn_like(x)

    def __call__(self) -> None:
        torch.autograd.grad(self._module(self._leaves[0]), self._leaves, self._gradient)


def _failure(work: Callable[[], None]) -> str:
    """Why a pass of somebody else's code does not run here; empty if it does."""
    try:
        work()
    except (RuntimeError, NotImplementedError, ImportError) as error:
        return str(error).partition("\n")[0]
    return ""


def _seconds(work: Callable[[], None], repeats: int) -> float:
    """Of one pass, on the device."""
    if _device().type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        work()
    end.record()
    torch.cuda.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / repeats


def _peak_bytes(work: Callable[[], None]) -> int:
    """What a pass takes beside weights and input; 0 on a CPU."""
    if _device().type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _extras(size: _Size, row: Row, peaks: dict[str, int]) -> dict[str, float]:
    """`dispatch_bytes`: what a pass takes more than the fused dense one. Part of it are the gradients of
    weights, of which a mixture has more."""
    figures = {
        "share_of_dense": 1 / row.ratio.median,
        "compute_flops_per_second": size.flops / row.seconds.median,
    }
    peak = peaks[row.contender]
    return figures | ({"peak_bytes": peak, "dispatch_bytes": peak - peaks[_FUSED]} if peak else {})


def breakdown(work: Callable[[], None]) -> dict[str, float]:
    """The kernels of one pass (operations, on a CPU) that take longest, with their microseconds."""
    on_gpu = _device().type == "cuda"
    activities = torch.profiler.ProfilerActivity
    kinds = [activities.CUDA if on_gpu else activities.CPU]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profile:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    totals: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        time_of = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        totals[_short_name(event.key)] += time_of
    longest = sorted(totals.items(), key=lambda item: -item[1])[:_LISTED]
    return {name: round(microseconds, 1) for name, microseconds in longest if microseconds}


def _short_name(kernel: str) -> str:
    """Without template arguments of CUTLASS, which fill a page."""
    return kernel if len(kernel) <= 80 else f"{kernel[:50]} … {kernel[-26:]}"


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
