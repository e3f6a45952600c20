"""The forward passes of split modules, as wrappers: class, names and hooks of a module stay as they are.

At the end stands the loss of split logits.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.collectives import Group
from echelon.errors import UserError
from echelon.nn.float8 import Float8Linear
from echelon.nn.head.deferred import fused_cross_entropy
from echelon.nn.huggingface.modules import embedding_scale, is_transposed, rms_epsilon
from echelon.nn.losses import IGNORED_TARGET, VocabularyPart, summed_cross_entropy
from echelon.nn.wrapping import Wrapper, find_wrapper
from echelon.parallel.tensor.entries import check_tokens, checked_tokens, gathered, vocabulary_part
from echelon.parallel.tensor.regions import Matrix, Region, can_share
from echelon.parallel.tensor.styles import Style, rows_of_rank
from echelon.state.ownership import share_of


def is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def num_outputs(module: nn.Module) -> int:
    """Return the outputs of a matrix that is whole."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1 if is_transposed(module) else 0]


class SplitModule(Wrapper):
    """A module of which every rank holds a part."""

    entry: ClassVar[str] = "tensor"

    def __init__(self, module: nn.Module, region: Region) -> None:
        super().__init__(module)
        self.region = region
        self._float8 = find_wrapper(module, Float8Linear)

    @property
    def weight(self) -> Tensor:
        """The weight of a matrix, as [outputs, inputs]."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        return weight.T if is_transposed(self.module) else weight

    def multiply(self, x: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The product with all rows of the weight, or some."""
        return F.linear(x, rows, bias) if self._float8 is None else self._float8.multiply(x, rows, bias)


@final
class Column(SplitModule):
    """A matrix with its outputs split. `joined`: the outputs of all ranks are gathered at once.

    `vocabulary`: the outputs are logits, so many over all ranks. Those behind them are padding: −inf in this
    rank's part, and not among all. Without `enters`, a module around it has entered already.
    """

    def __init__(
        self,
        module: nn.Module,
        region: Region,
        *,
        joined: bool = False,
        vocabulary: int | None = None,
        enters: bool = True,
    ) -> None:
        super().__init__(module, region)
        self.joined, self.vocabulary, self.enters = joined, vocabulary, enters
        group, share = region.group, share_of(vocabulary or 0, region.group.size)
        self.is_padded = vocabulary is not None and share * group.size > vocabulary
        self.num_padded = min(share, max(0, share * (group.rank + 1) - (vocabulary or 0)))  # of this rank
        self.matrix, self.layer = Matrix(module, is_transposed(module)), 0

    def __call__(self, x: Tensor) -> Tensor:
        if not self.enters:
            return self.multiply(x, self.weight, getattr(self.module, "bias", None))
        output = self._with_others(x)
        if output is None:
            bias: Any = self.module.bias
            output = self.multiply(self.region.enter(x, to_matrices=True), self.weight, bias)
        if self.joined:
            return self.join(output)
        return _mask_last(output, self.num_padded) if self.num_padded else output

    def join(self, output: Tensor) -> Tensor:
        """All logits, of which `output` is this rank's part."""
        joined = self.region.join_logits(output)
        return joined[..., : self.vocabulary].contiguous() if self.is_padded else joined

    def enter(self, x: Tensor) -> Tensor:
        """The hidden states that this rank's part of the logits is made of."""
        return self.region.enter(x, to_matrices=True)

    def part(self) -> VocabularyPart | None:
        """This rank's part of the logits; None of other columns, and where all of them are gathered."""
        if self.vocabulary is None or self.joined or not self.enters:
            return None
        group = self.region.group
        return vocabulary_part(share_of(self.vocabulary, group.size), group, self.vocabulary)

    def _with_others(self, x: Tensor) -> Tensor | None:
        """The output, computed together with all columns of input `x`; None where that is not possible."""
        region = self.region
        if not region.overlaps or x is region.entered or not can_share(x):
            return None
        return region.shared_input.multiply(self, x, region.group, sequence=region.sequence)


@final
class PartlyWhole(SplitModule):
    """A column of several matrices, of which every rank uses some whole: one key and value for all heads.
    Every rank holds all of it, computes with the rows that it needs, and has a part of the gradient."""

    def __init__(self, module: nn.Module, region: Region, style: Style, *, enters: bool = True) -> None:
        super().__init__(module, region)
        group, self.enters = region.group, enters
        self.spans = rows_of_rank(style, num_outputs(module), group.rank, group.size)
        if self._float8 is not None:
            self._float8.part = (sum(end - begin for begin, end in self.spans), self.weight.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        bias = getattr(self.module, "bias", None)
        entered = self.region.enter(x, to_matrices=True) if self.enters else x
        return self.multiply(entered, self._taken(self.weight), None if bias is None else self._taken(bias))

    def _taken(self, whole: Tensor) -> Tensor:
        return torch.cat([whole[begin:end] for begin, end in self.spans])


def prepare_compiling(model: nn.Module) -> None:
    """Let torch.compile record the collectives of split modules, where it would stop."""
    for module in model.modules():
        split = find_wrapper(module, SplitModule)
        if split is not None:
            split.region.prepare_compiling()


def number_layers(layers: Sequence[nn.Module]) -> None:
    """Tell columns their layer: only those of one layer are computed together, because zero=3 does not hold
    the weights of two layers at the same time."""
    for number, layer in enumerate(layers):
        for module in layer.modules():
            column = find_wrapper(module, Column)
            if column is not None:
                column.layer = number


@final
class Row(SplitModule):
    """A matrix with its inputs split. The bias is added once, to the sum over ranks."""

    def __call__(self, x: Tensor) -> Tensor:
        bias: Any = self.module.bias
        output = self.region.leave(self.multiply(x, self.weight, None))
        return output if bias is None else output.add_(bias)  # the sum is in memory of its own


@final
class VocabularyEmbedding(SplitModule):
    """Each rank looks up the tokens whose rows it holds, and the sum over ranks has all of them."""

    def __init__(self, module: nn.Embedding, region: Region) -> None:
        """`module` still holds all rows."""
        if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            raise UserError(
                "tensor: an embedding split by vocabulary cannot have max_norm, scale_grad_by_freq or "
                "sparse; leave them out, or make it 'replicated'"
            )
        super().__init__(module, region)
        self.vocab, self.is_scaled = module.weight.shape[0], embedding_scale(module) is not None
        self.rows = share_of(self.vocab, region.group.size)  # the last of them may be padding
        self.begin = self.rows * region.group.rank
        padding = -1 if module.padding_idx is None else module.padding_idx - self.begin
        self.padding = padding if 0 <= padding < self.rows else None

    def __call__(self, tokens: Tensor) -> Tensor:
        # As torch checks on a CPU. On a GPU the check would wait for the device.
        if tokens.device.type == "cpu" and tokens.numel():
            tokens = self._checked(tokens)
        rows = tokens - self.begin
        elsewhere = (rows < 0) | (rows >= self.rows)
        weight: Any = self.module.weight
        embedded = F.embedding(rows.masked_fill(elsewhere, 0), weight, self.padding)
        whole = self.region.leave(embedded.masked_fill(elsewhere[..., None], 0), dim=None)
        scale = embedding_scale(self.module) if self.is_scaled else None
        return whole if scale is None else whole * scale

    def _checked(self, tokens: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            recorded: Tensor = checked_tokens(tokens, self.vocab)
            return recorded
        check_tokens(tokens, self.vocab)
        return tokens


def _mask_last(logits: Tensor, columns: int) -> Tensor:
    """The last columns become −inf, in the memory of `logits`. They have no gradient."""
    if torch.compiler.is_compiling():  # which decides about memory itself
        whole = torch.arange(logits.shape[-1], device=logits.device) < logits.shape[-1] - columns
        return logits.where(whole, -torch.inf)
    function: Any = _MaskLast.apply
    masked: Tensor = function(logits, columns)
    return masked


def is_masked(logits: Tensor) -> bool:
    """Return whether they are what a head has returned, with its padding at −inf."""
    return type(logits.grad_fn).__name__ == f"{_MaskLast.__name__}Backward"


class _MaskLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: int) -> Tensor:
        ctx.columns = columns
        ctx.set_materialize_grads(False)
        masked = logits.detach()  # matrices do not save their output
        masked[..., -columns:] = -torch.inf
        return masked

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None
        masked = gradient.clone()  # others may have the same gradient
        masked[..., -ctx.columns :] = 0
        return masked, None


@final
class Experts(SplitModule):
    """Every rank holds a part of each expert: tokens and their experts' weights enter, a sum leaves."""

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        region = self.region
        # The tokens of all ranks, in the same order on the way in and out.
        index = gathered(top_k_index, region.group, 0) if region.sequence else top_k_index
        output = self.inner(region.enter(hidden_states, dim=0), index, region.enter(top_k_weights, dim=0))
        return region.leave(output, dim=0)


@final
class EnterFirst:
    """A forward pre-hook: the hidden states enter the split part before the module sees them. `encloses`:
    nothing inside enters again, and they may be used by more than matrices."""

    def __init__(self, region: Region, *, encloses: bool = False) -> None:
        self.region, self.encloses = region, encloses
        self._outer: Tensor | None = None

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._outer = self.region.entered
        if self.region.overlaps and not self.region.sequence and not self.encloses:
            return args, kwargs  # entering changes no shape here: the columns inside enter together
        if args:
            return (self._enter(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: self._enter(kwargs[first])}

    def _enter(self, x: Tensor) -> Tensor:
        self.region.entered = self.region.enter(x, to_matrices=not self.encloses)
        return self.region.entered

    def after(self, *_: Any) -> None:
        self.region.entered, self._outer = self._outer, None


# Norms over features that are split: ranks add up the sums that a norm needs, one number per position.
#
# root mean square    y = w · x / √(Σx²/n + ε)
# layer               y = w · (x − m) / √(Σ(x − m)²/n + ε) + b,  m = Σx/n


def is_norm(module: nn.Module) -> bool:
    """Return whether it is a norm of the last dim, of a kind that is known here."""
    if type(module).forward in (nn.LayerNorm.forward, nn.RMSNorm.forward):
        shape: Any = module.normalized_shape
        return len(shape) == 1
    return rms_epsilon(module) is not None


@final
class SplitNorm(SplitModule):
    """A norm over the features of all ranks, of which each has an equal part."""

    def __init__(self, module: Any, region: Region) -> None:
        super().__init__(module, region)
        self.subtracts_mean = isinstance(module, nn.LayerNorm)
        self.epsilon: float | None = rms_epsilon(module) or getattr(module, "eps", None)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        epsilon = torch.finfo(x.dtype).eps if self.epsilon is None else self.epsilon
        if self.subtracts_mean:
            wide = wide - self._mean(wide)
        normal = wide * torch.rsqrt(self._mean(wide * wide) + epsilon)
        weight, bias = getattr(self.module, "weight", None), getattr(self.module, "bias", None)
        normal = normal if weight is None else normal * weight
        return (normal if bias is None else normal + bias).to(x.dtype)

    def _mean(self, values: Tensor) -> Tensor:
        features = values.shape[-1] * self.region.group.size
        return self.region.total(values.sum(-1, keepdim=True)) / features


# Cross-entropy of logits that are split by vocabulary: they are never gathered.
#
# Ranks exchange two numbers per token: log Σ exp(l) of their part, and the target's logit. Logits that wait
# (nn/head) are computed with the head's matrix: no rank has even its part of them whole.


# (output, targets, group, vocabulary): each rank has n columns, the vocabulary by ranks, rounded up. Those of
# rank r begin at r · n, and those behind the vocabulary are −inf.
SplitLoss = Callable[[Any, Any, Group, int], tuple[Tensor, Tensor | int]]


def vocabulary_cross_entropy(
    output: Any, targets: Tensor, group: Group, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """echelon.models.cross_entropy for this rank's part of the logits, [..., vocabulary / ranks]."""
    logits: Tensor = getattr(output, "logits", output)
    if logits.shape[:-1] != targets.shape:
        raise UserError(
            f"cross_entropy: targets must have the shape of the logits without the last dim, "
            f"{list(logits.shape[:-1])}, and have {list(targets.shape)}; reshape them"
        )
    total = fused_cross_entropy(logits, targets, of_part=True)
    if total is None:
        part = vocabulary_part(logits.shape[-1], group, vocabulary)
        logits = _without_padding(logits, part)
        total = summed_cross_entropy(logits.flatten(0, -2), targets.flatten(), part)
    return total, (targets != IGNORED_TARGET).sum()


def _without_padding(logits: Tensor, part: VocabularyPart) -> Tensor:
    """Make logits of padding −inf again, in a copy, if the model changed them since (Gemma's cap)."""
    columns = logits.shape[-1]
    num_padded = part.num_padded(columns)
    if num_padded == 0 or is_masked(logits):
        return logits
    is_padding = torch.arange(columns, device=logits.device) >= columns - num_padded
    return logits.masked_fill(is_padding, -torch.inf)


# Losses over split logits, by the full name of the loss over whole logits that they replace.
SPLIT_LOSSES: dict[str, SplitLoss] = {
    "echelon.models.transformer.cross_entropy": vocabulary_cross_entropy,
    "echelon.nn.huggingface.own_loss.causal_cross_entropy": vocabulary_cross_entropy,
}


def split_loss(loss: Callable[..., Any]) -> SplitLoss | None:
    """The version of `loss` that takes split logits; None if there is none."""
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', '')}"
    return SPLIT_LOSSES.get(name)
