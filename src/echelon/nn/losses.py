"""Losses as the engine takes them, a total and a count; and the cross-entropy of logits, in chunks of tokens.

With l the logits of a token, m the largest of them and y its target,

    loss          log Σ exp(l − m) + m − l[y]
    gradient      exp(l − m) / Σ, less 1 at y

The forward pass keeps log Σ + m of each token, beside the logits themselves. The backward pass computes the
softmax of one chunk at a time, in float32 at least, and writes its gradient in the type of the logits: there
is no copy of all logits, and none of their softmax.

Logits may be a part of the vocabulary, of which other ranks hold the rest. Each then has log Σ exp(l) of its
part, and l[y] or 0; the first of the vocabulary is log Σ exp of those of all parts, the second their sum.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from echelon.errors import raise_errors
from echelon.nn.triton_support import has_triton

# The target that a loss leaves out: of padding, and of tokens that are not to be learned. torch and the
# models of transformers ignore the same number.
IGNORED_TARGET = -100


@final
@dataclass(frozen=True)
class Sum:
    """What a loss returns that is a sum over samples: `return echelon.Sum(total)`.

    A step then follows the gradient of the sum over the global batch, and `loss` is that sum. Whatever is
    returned otherwise, a mean or (total, count), makes it a mean.
    """

    total: Tensor


Loss = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor | int] | Sum]


def check_loss(result: Any) -> None:
    """Refuse what the loss returned, if it is neither a mean nor (total, count) nor a Sum."""
    if isinstance(result, Sum):
        raise_errors("what the loss returned", scalar_errors("the sum", result.total))
    elif isinstance(result, tuple):
        raise_errors("what the loss returned", _pair_errors(result))
    else:
        raise_errors("what the loss returned", scalar_errors("the loss", result))


def _pair_errors(result: tuple[Any, ...]) -> list[str]:
    if len(result) != 2:
        return [f"it is a tuple of {len(result)}: must be a mean, or the pair (total, count)"]
    total, count = result
    errors = scalar_errors("the total", total)
    is_number = isinstance(count, Real) and not isinstance(count, bool)
    if not is_number and not (isinstance(count, Tensor) and count.dim() == 0):
        errors.append(f"the count {_kind_of(count)}: must be one number; sum what is counted")
    return errors


def scalar_errors(name: str, value: Any) -> list[str]:
    """Say what a loss, a total or a sum is that no backward pass can begin from."""
    if not isinstance(value, Tensor) or value.dim() > 0:
        fix = "take its mean(), or return (total, count)" if isinstance(value, Tensor) else "return a tensor"
        return [f"{name} {_kind_of(value)}: must be a tensor of one number, without dims; {fix}"]
    if torch.is_grad_enabled() and not value.requires_grad:
        return [
            f"{name} does not depend on the parameters, so nothing would be trained: compute it from the "
            "model's output, without detach(), item() or torch.no_grad()"
        ]
    return []


def _kind_of(value: object) -> str:
    if isinstance(value, Tensor):
        return f"is a tensor of shape {tuple(value.shape)}"
    return f"is {'None' if value is None else 'a ' + type(value).__name__}"


def root_and_count(
    result: Any, samples: int, all_samples: Tensor | float | None = None
) -> tuple[Tensor, Tensor | float, Tensor | int]:
    """Return a loss of so many samples as (root, factor, count): its total is root · factor, where root is
    the tensor that the loss has returned. A plain mean is one over that many.

    Totals are added up, and divided by all counts, which are `all_samples`: so a Sum is multiplied by these.
    """
    if isinstance(result, Sum):
        return result.total, samples if all_samples is None else all_samples, samples
    if isinstance(result, tuple):
        return result[0], 1, result[1]
    return result, samples, samples


def total_and_count(
    result: Any, samples: int, all_samples: Tensor | float | None = None
) -> tuple[Tensor, Tensor | int]:
    """The same as (total, count). The total is float32 at least: a sum over samples, times a loss scale, is
    more than fp16 holds."""
    root, factor, count = root_and_count(result, samples, all_samples)
    return in_float32(root) * factor, count


def in_float32(total: Tensor) -> Tensor:
    return total.to(torch.promote_types(total.dtype, torch.float32))


# Elements of a chunk. On a CPU it fits a cache; on a GPU its kernels run longer than it takes to queue them.
_CPU_CHUNK, _GPU_CHUNK = 1 << 18, 1 << 24

# Of messages between ranks: elements of the logits that one is about, and tokens of the smallest.
_ELEMENTS, _LEAST_TOKENS = 1 << 29, 1024
_CPU_ELEMENTS, _CPU_LEAST_TOKENS = 1 << 22, 64


class VocabularyPart(NamedTuple):
    """Logits from column `begin` on, of `vocabulary` columns. `gather` returns what each of the ranks that
    hold the parts gives it, [ranks, …]."""

    begin: int
    vocabulary: int
    gather: Callable[[Tensor], Tensor]

    def num_padded(self, columns: int) -> int:
        """Return how many of the columns here are behind the vocabulary."""
        return min(columns, max(0, self.begin + columns - self.vocabulary))

    def combine(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Return log Σ exp(l) and l[y] of each token, of those of this rank's part, [2, tokens]."""
        gathered = self.gather(parts)
        return gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)


def token_chunks(tokens: int, columns: int, *, on_cpu: bool) -> list[slice]:
    """The tokens whose logits are there together, and which ranks tell each other of in one message."""
    elements, least = (_CPU_ELEMENTS, _CPU_LEAST_TOKENS) if on_cpu else (_ELEMENTS, _LEAST_TOKENS)
    # A power of two: products of such sizes are the fast ones. With fewer tokens they are slow.
    size = max(least, 1 << (max(1, elements // columns).bit_length() - 1))
    return [slice(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


def summed_cross_entropy(logits: Tensor, targets: Tensor, part: VocabularyPart | None = None) -> Tensor:
    """Sum the losses of logits [tokens, columns] against targets [tokens], in float32 at least. Tokens whose
    target is IGNORED_TARGET have no loss. Without `part` the columns are the vocabulary."""
    function: Any = _CrossEntropy.apply
    total: Tensor = function(logits, targets, part)
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, part: VocabularyPart | None) -> Tensor:
        counted = targets != IGNORED_TARGET
        check_targets(targets, ~counted, logits.shape[1] if part is None else part.vocabulary)
        columns = targets if part is None else targets - part.begin
        is_here = counted & (columns >= 0) & (columns < logits.shape[1])
        columns = columns.masked_fill(~is_here, 0)
        log_sums = _log_sums(logits)
        # The chosen logit is 0 on ranks that do not hold the target: the sum over ranks is its owner's.
        chosen = logits.gather(1, columns[:, None])[:, 0].to(log_sums.dtype).masked_fill(~is_here, 0)
        if part is not None:
            # In the messages of the fused loss (below): a rank whose logits something has read may be here
            # alone.
            for chunk in token_chunks(*logits.shape, on_cpu=logits.is_cpu):
                both = torch.stack([log_sums[chunk], chosen[chunk]])
                log_sums[chunk], chosen[chunk] = part.combine(both)
        ctx.save_for_backward(logits, log_sums, columns, is_here, counted)
        losses: Tensor = log_sums - chosen
        return losses.masked_fill(~counted, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, log_sums, columns, is_here, counted = ctx.saved_tensors
        scales = gradient * counted  # from the softmax to its part of the gradient
        at_targets = -gradient * is_here
        result = torch.empty_like(logits)
        for chunk in _chunks(logits):
            softmax = _powers(logits[chunk], log_sums[chunk]).mul_(scales[chunk, None])
            result[chunk] = softmax.scatter_add_(1, columns[chunk, None], at_targets[chunk, None])
        return result, None, None


def check_targets(targets: Tensor, ignored: Tensor, vocabulary: int) -> None:
    """Refuse targets outside of the vocabulary. On a GPU the check runs there: the host does not wait."""
    is_right = ((targets >= 0) & (targets < vocabulary) | ignored).all()
    message = f"a target is not in the vocabulary of {vocabulary}"
    if targets.device.type != "cpu":
        torch._assert_async(is_right, message)
    elif not bool(is_right):
        raise IndexError(message)


def _log_sums(logits: Tensor) -> Tensor:
    """Compute log Σ exp(l), in float32 at least; a part of which no column is in the vocabulary has −inf."""
    largest = logits.amax(1).to(torch.promote_types(logits.dtype, torch.float32))
    largest = largest.masked_fill(largest == -torch.inf, 0)
    sums = torch.empty_like(largest)
    for chunk in _chunks(logits):
        sums[chunk] = _powers(logits[chunk], largest[chunk]).sum(1)
    return largest + sums.log()


def _powers(logits: Tensor, shift: Tensor) -> Tensor:
    """Compute exp(l − shift), in the type of `shift` and in memory of its own."""
    return (logits - shift[:, None]).exp_()


def _chunks(logits: Tensor) -> Iterator[slice]:
    """Yield tokens 0 … n − 1, then n … 2n − 1, and so on."""
    elements = _CPU_CHUNK if logits.device.type == "cpu" else _GPU_CHUNK
    tokens = max(1, elements // max(1, logits.shape[1]))
    return (slice(begin, begin + tokens) for begin in range(0, len(logits), tokens))


# The cross-entropy of hidden states times a matrix, and its gradients, in chunks of tokens.
#
#   chunk      logits = h Wᵀ + b           the only logits that there are
#              loss   = log Σ exp(l) − l[y]
#              g      = softmax(l), less 1 at y, in place of the logits
#              dh     = g W
#              dW    += gᵀ h               in float32
#
# Gradients are made in the forward pass, while logits are at hand, for a loss whose own gradient is 1. The
# backward pass multiplies them by the true one, so what the loss is divided by may be known later.
#
# Where ranks hold parts of the vocabulary, each has l of its part, and tells the others log Σ exp(l) of it
# and l[y], or 0, in one message for each chunk. What it makes of that is its part of dh, and dW of its rows.


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
