"""The layers of a plan: what they compute with, and what they keep for the backward pass."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.plan.field import Rule, choice, described, plain_digits, switch
from echelon.quantities import read_bytes

if TYPE_CHECKING:
    from echelon.plan.plan import Plan

_RECOMPUTES = ("none", "full", "selective", "sqrt")
_LARGEST_BUDGET = 2.0**63  # bytes: more than any memory


def _read_recompute(value: Any) -> str:
    text = str(value)
    if text in _RECOMPUTES:
        return text
    name, _, size_text = text.partition(":")
    if name != "budget":
        raise ValueError
    size = read_bytes(plain_digits(size_text))
    if not 1 <= size < _LARGEST_BUDGET:
        raise ValueError
    return f"budget:{round(size)}"


def _keeps_layers(plan: "Plan") -> bool:
    """No layer is recomputed whole from its saved input."""
    return plan.recompute in ("none", "selective")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Types and kernels of layers, and the activations that they keep."""

    sequence: bool = switch(
        False,
        "sequence parallelism beside `tensor`",
        Rule(
            "`sequence=true` with `tensor=1`",
            ("sequence", "tensor"),
            lambda plan: plan.sequence and plan.tensor == 1,
            "sequence parallelism splits what tensor ranks would all keep",
            "set tensor=2 or more, or drop sequence (context splits sequences by itself)",
        ),
        axis="tensor",
    )
    compile: bool = switch(
        False,
        "compile each layer with `torch.compile`; needs a C++ compiler",
        Rule(
            "`compile=true` with `schedule=zero-bubble`",
            ("compile", "schedule"),
            lambda plan: plan.compile and plan.schedule == "zero-bubble",
            "a compiled layer's backward pass is one piece, for inputs and weights together, so each half "
            "would do the work of both",
            "use schedule=1f1b, or drop compile",
        ),
    )
    precision: str = choice(
        "fp32",
        ("fp64", "fp32", "bf16", "fp16", "fp8"),
        "type of weights, inputs and activations; below float32 the optimizer has float32 masters, "
        "`fp16` [scales losses](precision.md#loss-scaling), and `fp8` is `bf16` with "
        "[products of wide matrices in 8 bits](precision.md#fp8)",
        Rule(
            "`precision=fp8` with `schedule=zero-bubble`",
            ("precision", "schedule"),
            lambda plan: plan.precision == "fp8" and plan.schedule == "zero-bubble",
            "the backward pass of a product in 8 bits is one piece, for inputs and weights together, so each "
            "half would do the work of both",
            "use schedule=1f1b, or precision=bf16",
        ),
    )
    gradients: str = choice(
        "fp32",
        ("fp32", "same"),
        "below `fp32`: gradients are summed in float32, over microbatches and ranks; or in the "
        "type of the weights, which saves 2 bytes per parameter and half of the bytes that move",
        Rule(
            "`gradients=same` with `precision=fp32` or `fp64`",
            ("gradients", "precision"),
            lambda plan: plan.gradients == "same" and plan.precision in ("fp32", "fp64"),
            "only gradients of weights below float32 are summed in another type than the weights'",
            "drop gradients, or use precision=bf16",
        ),
    )
    recompute: str = described(
        "none",
        f"one of {', '.join(_RECOMPUTES)}, or budget:BYTES, like budget:2GiB",
        _read_recompute,
        "which activations are recomputed: those of [every layer, of √L layers at a time, as many as a "
        "budget asks](recompute.md), or [what is large and cheap](selective-recompute.md)",
        options=_RECOMPUTES,
    )
    checkpoints: str = choice(
        "whole",
        ("whole", "split"),
        "what each tensor rank keeps of the input of layers that are recomputed: all of it, or its part "
        "([ZeRO-R](zero-r.md) Pa)",
        Rule(
            "`checkpoints=split` with `recompute=none` or `selective`",
            ("checkpoints", "recompute"),
            lambda plan: plan.checkpoints == "split" and _keeps_layers(plan),
            "a checkpoint is the input of layers that are recomputed whole",
            "use recompute=full, sqrt or budget:BYTES, or drop checkpoints",
        ),
        Rule(
            "`checkpoints=split` with `tensor=1` or `sequence=true`",
            ("checkpoints", "tensor", "sequence"),
            lambda plan: plan.checkpoints == "split" and (plan.tensor == 1 or plan.sequence),
            "what all tensor ranks keep alike is divided among them, and with sequence=true each has only "
            "its part",
            "set tensor=2 or more without sequence, or drop checkpoints",
        ),
        axis="tensor",
    )
    contiguous: bool = switch(
        False,
        "checkpoints and gradients in memory that is allocated once ([ZeRO-R](zero-r.md) MD)",
        Rule(
            "`contiguous=true` with `zero` below 2 and `recompute=none` or `selective`",
            ("contiguous", "recompute", "zero"),
            lambda plan: plan.contiguous and _keeps_layers(plan) and plan.zero < 2,
            "there are no inputs of recomputed layers and no gradients on their way to lie in one memory",
            "use recompute=full, sqrt or budget:BYTES, or zero=2 or 3, or drop contiguous",
        ),
    )
