"""torch's functions that draw, made of uniform numbers.

Each takes the arguments of its function, and returns NotImplemented where these draw nothing.
Numbers are made in float64 and rounded, so that they are the same in every precision but for that.
"""

import math
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from echelon.nn.draws.sample_dim import Source
from echelon.nn.dropout.modules import saturate, zero

Drawing = Callable[..., Any]  # (source, *arguments)
Transform = Callable[..., Tensor]  # from uniform numbers


def _between(u: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return u.mul_(high - low).add_(low)


def _normal(u: Tensor, mean: Any = 0.0, std: Any = 1.0) -> Tensor:
    return u.mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2)).mul(std).add(mean)


def _exponential(u: Tensor, rate: float = 1.0) -> Tensor:
    return u.log_().div_(-rate)


def _cauchy(u: Tensor, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return u.sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def _log_normal(u: Tensor, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _normal(u, mean, std).exp_()


def _geometric(u: Tensor, p: float) -> Tensor:
    return u.log_().div_(math.log1p(-p)).ceil_().clamp_min_(1)


def _integers(u: Tensor, low: int, high: int) -> Tensor:
    return u.mul_(high - low).floor_().add_(low)


def _below(u: Tensor, p: Any) -> Tensor:
    below: Tensor = u < p
    return below


@torch.no_grad()
def _values(
    source: Source, target: Tensor, like: Tensor | None, transform: Transform, *settings: Any
) -> Tensor:
    """Draw the values of a tensor. Uniform ones stay below 1, where its type would round to it."""
    shape = (*target.shape, 2) if target.is_complex() else target.shape
    u = source.uniform(shape, target.device, like)
    if transform is _between:
        u.clamp_max_(1 - torch.finfo(target.dtype).eps / 2)
    values = transform(u, *settings)
    if not target.is_complex():
        return values
    return torch.view_as_complex(values * math.sqrt(0.5) if transform is _normal else values)


def _fill(result: Tensor, values: Tensor) -> Tensor:
    with torch.no_grad():
        return result.copy_(values)


def _factory(transform: Transform) -> Drawing:
    def draw(source: Source, *size: Any, **options: Any) -> Tensor:
        result = torch.empty(*size, **options)
        return _fill(result, _values(source, result, None, transform))

    return draw


def _like(transform: Transform) -> Drawing:
    def draw(source: Source, input: Tensor, **options: Any) -> Tensor:
        result = torch.empty_like(input, **options)
        return _fill(result, _values(source, result, input, transform))

    return draw


def _in_place(transform: Transform, **defaults: Any) -> Drawing:
    """Make a method that writes its tensor. Gradients end there, as with torch's own."""

    def draw(source: Source, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        settings = defaults | dict(zip(defaults, args, strict=False)) | kwargs
        return self.copy_(_values(source, self, self, transform, *settings.values()))

    return draw


def _randint(source: Source, *args: Any, **options: Any) -> Tensor:
    """Draw for torch.randint: (high, size) or (low, high, size)."""
    numbers = [*args]
    size = options.pop("size", None) or numbers.pop()
    high = options.pop("high", None)
    high = numbers.pop() if high is None else high
    low = options.pop("low", None) or (numbers.pop() if numbers else 0)
    result = torch.empty(size, **{"dtype": torch.int64} | options)
    return _fill(result, _values(source, result, None, _integers, int(low), int(high)))


def _randint_like(source: Source, input: Tensor, *args: Any, **options: Any) -> Tensor:
    bounds = [options.pop(name) for name in ("low", "high") if name in options]
    *low, high = [*args, *bounds]
    result = torch.empty_like(input, **options)
    return _fill(result, _values(source, result, input, _integers, *map(int, low or [0]), int(high)))


def _random_(source: Source, self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Draw for Tensor.random_: (), (to) or (from, to)."""
    bounds = [*args, *(kwargs[name] for name in ("from", "to") if kwargs.get(name) is not None)]
    if not bounds:
        is_real = self.is_floating_point()
        digits = -int(math.log2(torch.finfo(self.dtype).eps)) + 1 if is_real else 0
        bounds = [2**digits if is_real else torch.iinfo(self.dtype).max]
    *low, high = bounds
    return self.copy_(_values(source, self, self, _integers, *(low or [0]), high))


def _normals(source: Source, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    """Draw for torch.normal: of numbers and a size, or of tensors."""
    if size is not None:
        result = torch.empty(size, **options)
        return _fill(result, _values(source, result, None, _normal, mean, std))
    tensors = [each for each in (mean, std) if isinstance(each, Tensor)]
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))
    result = options["out"] if options.get("out") is not None else tensors[0].new_empty(shape)
    return _fill(result, _values(source, result, tensors[0].expand(shape), _normal, mean, std))


def _bernoulli(source: Source, input: Tensor, p: Any = None, *, out: Tensor | None = None) -> Tensor:
    result = torch.empty_like(input) if out is None else out.resize_(input.shape)
    return _fill(result, _values(source, result, input, _below, input if p is None else p))


@torch.no_grad()
def _multinomial(
    source: Source, input: Tensor, num_samples: int, replacement: bool = False, *, out: Tensor | None = None
) -> Tensor:
    """Draw classes; rows are distributions. Without replacement: the largest of p / Exp(1), as in torch."""
    weights = input.double()
    if replacement:
        u = source.uniform((*input.shape[:-1], num_samples), input.device, input)
        summed = weights.cumsum(-1)
        # The last class that can be drawn is the last one whose sum still grows.
        last = (weights > 0).cumsum(-1).argmax(-1, keepdim=True)
        drawn = torch.searchsorted(summed, u * summed[..., -1:], right=True).minimum(last)
    else:
        exponential = _exponential(source.uniform(tuple(input.shape), input.device, input))
        drawn = (weights / exponential).topk(num_samples, -1).indices
    return drawn if out is None else out.resize_(drawn.shape).copy_(drawn)


def _randperm(source: Source, n: int, **options: Any) -> Tensor:
    """Draw an order, the same for all samples: it mixes what it orders."""
    result = torch.empty(n, **{"dtype": torch.int64} | options)
    return _fill(result, source.uniform((n,), result.device, None, shared=True).argsort())


@torch.no_grad()
def _mask(source: Source, shape: Sequence[int], input: Tensor, p: float) -> Tensor:
    """Draw a mask: True where an element is kept."""
    return _below(source.uniform(shape, input.device, input), 1 - p)


def _masked(apply: Callable[..., Tensor], *, of_channels: bool = False, inplace: bool = False) -> Drawing:
    """Make a function of torch.dropout's family."""

    def draw(source: Source, input: Tensor, p: float, train: bool) -> Any:
        if not train or p == 0:
            return NotImplemented
        shape = (*input.shape[:2], *[1] * (input.ndim - 2)) if of_channels else input.shape
        return apply(input, _mask(source, shape, input, p), p, inplace)

    return draw


def _rrelu(
    source: Source, input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False
) -> Any:
    if not training:
        return NotImplemented
    slope = _between(source.uniform(tuple(input.shape), input.device, input), lower, upper)
    return torch.where(input <= 0, input * slope.to(input.dtype), input)


def _rrelu_(source: Source, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    drawn = _rrelu(source, input.clone(), *args, **kwargs)
    return NotImplemented if drawn is NotImplemented else input.copy_(drawn)


def _attention(
    source: Source,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Attend by plain operations: a kernel draws its masks inside."""
    if dropout_p == 0:
        return NotImplemented
    if enable_gqa:
        key, value = (each.repeat_interleave(query.size(-3) // each.size(-3), -3) for each in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
    weights = scores.softmax(-1)
    keep = _mask(source, weights.shape, weights, dropout_p)
    return zero(weights, keep, dropout_p, False) @ value


def _by_generator(function: Callable[..., Tensor]) -> Drawing:
    """Draw for functions that reject some of their numbers: how many they need is not known before."""
    return lambda source, *args: source.by_generator(function, *args)


DRAWINGS: dict[Callable[..., Any], Drawing] = {
    torch.rand: _factory(_between),
    torch.randn: _factory(_normal),
    torch.rand_like: _like(_between),
    torch.randn_like: _like(_normal),
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _normals,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
    Tensor.normal_: _in_place(_normal, mean=0.0, std=1.0),
    Tensor.uniform_: _in_place(_between, **{"from": 0.0, "to": 1.0}),
    Tensor.bernoulli_: _in_place(_below, p=0.5),
    Tensor.exponential_: _in_place(_exponential, lambd=1.0),
    Tensor.cauchy_: _in_place(_cauchy, median=0.0, sigma=1.0),
    Tensor.log_normal_: _in_place(_log_normal, mean=1.0, std=2.0),
    Tensor.geometric_: _in_place(_geometric, p=None),
    Tensor.random_: _random_,
    torch.dropout: _masked(zero),
    torch.dropout_: _masked(zero, inplace=True),
    torch.feature_dropout: _masked(zero, of_channels=True),
    torch.feature_dropout_: _masked(zero, of_channels=True, inplace=True),
    torch.alpha_dropout: _masked(saturate),
    torch.alpha_dropout_: _masked(saturate, inplace=True),
    torch.feature_alpha_dropout: _masked(saturate, of_channels=True),
    torch.feature_alpha_dropout_: _masked(saturate, of_channels=True, inplace=True),
    torch.rrelu: _rrelu,
    torch.rrelu_: _rrelu_,
    torch.poisson: _by_generator(torch.poisson),
    torch.binomial: _by_generator(torch.binomial),
    torch._standard_gamma: _by_generator(torch._standard_gamma),
    torch._sample_dirichlet: _by_generator(torch._sample_dirichlet),
    F.scaled_dot_product_attention: _attention,
}


# Functions of torch.nn.functional that are written in Python, and draw inside. A mode sees the call of such a
# function, and nothing inside of it: it is off while it handles a call. Here is the same code without the
# question for modes, so that it can be run with the mode on.


_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _without_question(function: Any) -> Callable[..., Any]:
    names = function.__globals__ | dict.fromkeys(_QUESTIONS, lambda *_: False)
    copied = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_functional: Any = F  # also its private functions
BODIES: dict[Callable[..., Any], Callable[..., Any]] = {
    function: _without_question(function)
    for function in (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
        *(F.gumbel_softmax, F.rrelu, F.multi_head_attention_forward),
        *(F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices),
    )
} | {
    F.fractional_max_pool2d: _without_question(_functional._fractional_max_pool2d),
    F.fractional_max_pool3d: _without_question(_functional._fractional_max_pool3d),
}
