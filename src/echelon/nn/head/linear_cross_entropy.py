"""The cross-entropy of hidden states times a matrix, and its gradients, in chunks of tokens.

    chunk      logits = h Wᵀ + b           the only logits that there are
               loss   = log Σ exp(l) − l[y]
               g      = softmax(l), less 1 at y, in place of the logits
               dh     = g W
               dW    += gᵀ h               in float32

Gradients are made in the forward pass, while logits are at hand, for a loss whose own gradient is 1. The
backward pass multiplies them by the true one, so what the loss is divided by may be known later.

Where ranks hold parts of the vocabulary, each has l of its part, and tells the others log Σ exp(l) of it and
l[y], or 0, in one message for each chunk. What it makes of that is its part of dh, and dW of its rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from echelon.nn.losses import VocabularyPart, check_targets, token_chunks
from echelon.nn.triton_support import has_triton

# Columns of logits: with 50,257 (GPT-2) cuBLAS takes kernels that read single elements.
_ALIGNMENT = 64


class Wanted(NamedTuple):
    """Which gradients are needed."""

    hidden: bool
    weight: bool
    bias: bool


class HeadGradients(NamedTuple):
    """Of a loss whose own gradient is 1; those of weight and bias in float32."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    ignored: int,
    wanted: Wanted,
    part: VocabularyPart | None = None,
    smoothing: float = 0.0,
) -> tuple[Tensor, HeadGradients]:
    """Return the sum of losses in float32 of hidden [tokens, width] against targets [tokens], and gradients.

    The weight is [vocabulary, width], all of it below float32, or those of its rows that this rank's `part`
    has. Tokens whose target is `ignored` have no loss. `smoothing` is of labels; there is none for parts.
    """
    assert part is None or smoothing == 0
    check_targets(targets, targets == ignored, len(weight) if part is None else part.vocabulary)
    losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
    columns = len(weight)
    words = columns - (0 if part is None else part.num_padded(columns))
    weight, bias = _aligned(weight), None if bias is None else _aligned(bias)
    gradients = HeadGradients(
        torch.empty_like(hidden) if wanted.hidden else None,
        torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if wanted.weight else None,
        torch.zeros(len(weight), dtype=torch.float32, device=weight.device) if wanted.bias else None,
    )
    chunks = token_chunks(len(hidden), len(weight), on_cpu=hidden.is_cpu)
    memory = weight.new_empty(max((chunk.stop - chunk.start for chunk in chunks), default=0), len(weight))
    for chunk in chunks:
        rows = hidden[chunk]
        logits = _product(rows, weight, bias, memory[: len(rows)])
        logits[:, words:] = -torch.inf  # whose power, and gradient, is 0
        _lose(
            logits, words, targets[chunk], ignored, losses[chunk], part, smoothing, with_gradient=any(wanted)
        )
        _add_gradients(gradients, chunk, logits, rows, weight)
    of_head = (each if each is None else each[:columns] for each in gradients[1:])
    return losses.sum(), HeadGradients(gradients.hidden, *of_head)


def _aligned(rows: Tensor) -> Tensor:
    """Append zeros up to a multiple of rows."""
    missing = -len(rows) % _ALIGNMENT
    return torch.cat([rows.detach(), rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def _lose(
    logits: Tensor,
    words: int,
    targets: Tensor,
    ignored: int,
    losses: Tensor,
    part: VocabularyPart | None,
    smoothing: float,
    *,
    with_gradient: bool,
) -> None:
    """Write the losses, and the gradient of their sum in place of the logits. The first columns are words."""
    if logits.is_cuda and has_triton():
        from echelon.nn.head.cross_entropy_kernel import lose

        lose(logits, words, targets, ignored, losses, part, smoothing, with_gradient=with_gradient)
        return
    counted = targets != ignored
    columns = targets if part is None else targets - part.begin
    is_here = counted & (columns >= 0) & (columns < words)
    columns = columns.masked_fill(~is_here, 0)[:, None]
    precise = logits.float()
    log_sums = precise.logsumexp(1)
    chosen = precise.gather(1, columns)[:, 0].masked_fill(~is_here, 0)
    if smoothing:
        chosen = (1 - smoothing) * chosen + smoothing * precise[:, :words].mean(1)
    if part is not None:
        log_sums, chosen = part.combine(torch.stack([log_sums, chosen]))
    losses.copy_((log_sums - chosen).masked_fill(~counted, 0))
    if with_gradient:
        softmax = precise.sub_(log_sums[:, None]).exp_()
        softmax.scatter_add_(1, columns, (smoothing - 1) * is_here.float()[:, None])
        if smoothing:
            softmax[:, :words].sub_(smoothing / words)
        logits.copy_(softmax.masked_fill_(~counted[:, None], 0))


def _add_gradients(
    gradients: HeadGradients, chunk: slice, logits_gradient: Tensor, rows: Tensor, weight: Tensor
) -> None:
    if gradients.hidden is not None:
        torch.mm(logits_gradient, weight, out=gradients.hidden[chunk])
    if gradients.weight is not None:
        if rows.is_cuda:
            total = gradients.weight
            torch.addmm(total, logits_gradient.T, rows, out_dtype=torch.float32, out=total)
        else:
            gradients.weight.addmm_(logits_gradient.T.float(), rows.float())
    if gradients.bias is not None:
        gradients.bias.add_(logits_gradient.sum(0, dtype=torch.float32))
