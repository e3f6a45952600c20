"""precision=fp8: the products of wide matrices in 8 bits, by torchao. All else is as in bf16.

    input, weight         e4m3: 4 bits of exponent, 3 of mantissa
    gradient of output    e5m2: 5 and 2
    output, gradients of input and weight      rounded to bf16 from the sums of the device's units

A tensor has one scale, taken from its largest number in this very call, and rounded down to a power of two:
so a number is rounded to the same one beside whatever other numbers, unless it is 2¹⁴ times smaller than
these. Microbatches and ranks, which see parts of tensors, then compute what one device computes.

Modules keep their class, weights and names (torchao would replace them): an entry of the stack multiplies.
"""

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError, raise_errors
from echelon.nn.experts import gates_of
from echelon.nn.huggingface.modules import is_transposed
from echelon.nn.wrapping import Wrapper, Wrapping, find_wrapper, replaced_forward, unwrap
from echelon.plan import Plan

# To cast an input takes time in proportion to rows × inputs, and its product in 8 bits saves some in
# proportion to rows × inputs × outputs; so up to so many inputs or outputs, matrices are left in bf16.
NARROW = 1024
_MULTIPLE = 16  # of rows and columns, as cuBLAS needs them
_CAPABILITY = (8, 9)  # the first with products of 8 bits
EMULATES = False  # for tests: the same numbers, computed in float32 on any device


class _Products(NamedTuple):
    """torchao's function, and what it is called with."""

    function: Any
    matrices: Any
    config: Any


def check_float8(plan: Plan, device: torch.device) -> None:
    """Refuse precision=fp8 where torchao is not installed, or the device has no such products."""
    if plan.precision != "fp8":
        return
    _products(emulates=EMULATES)
    is_cuda = device.type == "cuda"
    if not EMULATES and not (is_cuda and torch.cuda.get_device_capability(device) >= _CAPABILITY):
        name = torch.cuda.get_device_name(device) if is_cuda else f"the device {device}"
        raise UserError(
            f"precision=fp8: {name} has no products of 8 bits, which GPUs have from compute capability 8.9 "
            "on (Ada, Hopper, Blackwell); use precision=bf16"
        )


def multiply_in_float8(model: nn.Module, plan: Plan, wrapping: Wrapping) -> None:
    """If the plan says so, wrap the matrices whose products gain: those that are wide and learn, but for
    heads, gates and embeddings. `model` is whole, so that the same ones are chosen under every plan."""
    for module in model.modules():
        previous = find_wrapper(module, Float8Linear)  # of an engine that was not closed
        if previous is not None:
            unwrap(previous)
    if plan.precision != "fp8":
        return
    matrices = list(_wide_matrices(model))
    if not matrices:
        raise UserError(
            f"precision=fp8: no matrix of the model but heads and gates has more than {NARROW} inputs and "
            f"more than {NARROW} outputs, both multiples of {_MULTIPLE}, so nothing would be computed in 8 "
            "bits, where wide products gain; use precision=bf16"
        )
    for module in matrices:
        wrapping.wrap(Float8Linear(module, _products(emulates=EMULATES)))


def check_parts(model: nn.Module, plan: Plan) -> None:
    """Refuse parts of matrices, as tensor ranks hold them, that cannot be multiplied in 8 bits."""
    errors = []
    for name, module in model.named_modules():
        wrapper = find_wrapper(module, Float8Linear)
        if wrapper is not None:
            sizes = wrapper.part or _weight(module).shape
            if any(size % _MULTIPLE for size in sizes):
                errors.append(
                    f"{name}: the part of a rank is {' × '.join(map(str, sizes))}, and products of 8 bits "
                    f"take multiples of {_MULTIPLE}; use another number of tensor ranks, or precision=bf16"
                )
    raise_errors(f"precision=fp8 tensor={plan.tensor}", errors)


@final
class Float8Linear(Wrapper):
    """A matrix whose products are in 8 bits."""

    entry = "float8"

    def __init__(self, module: nn.Module, products: _Products) -> None:
        super().__init__(module)
        self._products, self._is_transposed = products, is_transposed(module)
        self.part: tuple[int, ...] = ()  # sizes of what is multiplied, where that is not all of the weight

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = _weight(self.module), getattr(self.module, "bias", None)
        return self.multiply(input, weight.T if self._is_transposed else weight, bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As F.linear."""
        if x.numel() == 0 or x.dtype != weight.dtype:  # nothing has no largest number; errors are torch's
            return F.linear(x, weight, bias)
        flat = x.reshape(-1, x.shape[-1])
        rows = flat.shape[0]
        missing = -rows % _MULTIPLE  # rows are the sum of the weight's gradient, to which zeros add nothing
        if missing:
            flat = F.pad(flat, (0, 0, 0, missing))
        function, matrices, config = self._products
        product: Tensor = function.apply(flat, weight.t(), matrices, config)
        if missing:
            product = product[:rows]
        # As torch.matmul: no view of torchao's output, so that a sum over ranks may overwrite it.
        product = torch.ops.aten._unsafe_view(product, [*x.shape[:-1], weight.shape[0]])
        return product if bias is None else product + bias


@cache
def _products(*, emulates: bool) -> _Products:
    try:
        float8 = import_module("torchao.float8")
        function = import_module("torchao.float8.float8_linear").matmul_with_hp_or_float8_args
    except ImportError as error:
        raise UserError(
            f"precision=fp8: the products are those of torchao, which cannot be imported ({error}); "
            "pip install 'echelon[fp8]', or use precision=bf16"
        ) from None
    config = float8.Float8LinearConfig(emulate=emulates, round_scales_to_power_of_2=True)
    # Beside what a module needs, this makes right what torch's compiler does wrong with 8 bits.
    template = float8.convert_to_float8_training(nn.Linear(16, 16, device="meta"), config=config)
    return _Products(function, template.linear_mm_config, config)


def _wide_matrices(model: nn.Module) -> Iterator[nn.Module]:
    # torch's attention reads the weights of its matrices, and does not call these.
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    others = {module for outer in (*gates_of(model), *attentions) for module in outer.modules()}
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    words = max((embedding.num_embeddings for embedding in embeddings), default=0)
    for module in model.modules():
        is_linear = type(module).forward is nn.Linear.forward or is_transposed(module)
        weight = module._parameters.get("weight")
        if not is_linear or weight is None or not weight.requires_grad or module in others:
            continue
        outputs = weight.shape[1 if is_transposed(module) else 0]
        is_wide = all(size > NARROW and size % _MULTIPLE == 0 for size in weight.shape)
        if is_wide and outputs != words and replaced_forward(module) is None:
            yield module


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight
