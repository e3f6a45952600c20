"""Rules of what a step computes with and keeps: compile, compress, types, checkpoints."""

from typing import TYPE_CHECKING

from echelon.plan.rule import Rule

if TYPE_CHECKING:
    from echelon.plan.plan import Plan


def _compile_needs_whole_backwards(plan: "Plan") -> str | None:
    if not plan.compile or plan.schedule != "zero-bubble":
        return None
    return (
        "compile=true schedule=zero-bubble: a compiled layer's backward pass is one piece, for inputs and "
        "weights together, so each half would do the work of both; use schedule=1f1b, or drop compile"
    )


def _compress_needs_uncompiled_layers(plan: "Plan") -> str | None:
    if not plan.compile or plan.compress == "none":
        return None
    return (
        f"compile=true compress={plan.compress}: a compiled layer fuses operations and chooses itself what "
        "it keeps for the backward pass, so its ReLU and pools are not seen; drop compile, or use "
        "compress=none"
    )


def _same_gradients_need_low_precision(plan: "Plan") -> str | None:
    if plan.gradients == "fp32" or plan.precision in ("bf16", "fp16"):
        return None
    return (
        f"gradients={plan.gradients} precision={plan.precision}: only gradients of weights below float32 are "
        "summed in another type than the weights'; drop gradients, or use precision=bf16"
    )


def _split_checkpoints_need_whole_layers(plan: "Plan") -> str | None:
    if plan.checkpoints == "whole" or plan.recompute not in ("none", "selective"):
        return None
    return (
        f"checkpoints={plan.checkpoints} recompute={plan.recompute}: a checkpoint is the input of layers "
        "that are recomputed whole; use recompute=full, sqrt or budget:BYTES, or drop checkpoints"
    )


def _split_checkpoints_need_tensor(plan: "Plan") -> str | None:
    if plan.checkpoints == "whole" or (plan.tensor > 1 and not plan.sequence):
        return None
    return (
        f"checkpoints={plan.checkpoints} tensor={plan.tensor} sequence={str(plan.sequence).lower()}: what "
        "all tensor ranks keep alike is divided among them, and with sequence=true each has only its part; "
        "set tensor=2 or more without sequence, or drop checkpoints"
    )


def _contiguous_needs_checkpoints_or_gradients(plan: "Plan") -> str | None:
    if not plan.contiguous or plan.recompute not in ("none", "selective") or plan.zero >= 2:
        return None
    return (
        f"contiguous=true recompute={plan.recompute} zero={plan.zero}: there are no inputs of recomputed "
        "layers and no gradients on their way to lie in one memory; use recompute=full, sqrt or "
        "budget:BYTES, or zero=2 or 3, or drop contiguous"
    )


MEMORY_RULES = (
    Rule(_compile_needs_whole_backwards, ("compile", "schedule")),
    Rule(_compress_needs_uncompiled_layers, ("compile", "compress")),
    Rule(_same_gradients_need_low_precision, ("gradients", "precision")),
    Rule(_split_checkpoints_need_whole_layers, ("checkpoints", "recompute")),
    Rule(_split_checkpoints_need_tensor, ("checkpoints", "tensor", "sequence")),
    Rule(_contiguous_needs_checkpoints_or_gradients, ("contiguous", "recompute", "zero")),
)
