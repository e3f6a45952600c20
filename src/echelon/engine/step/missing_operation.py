"""Operations that torch does not have for a plan, in words that say what to change.

An operation that it does not have for numbers below float32: torch.cdist has no kernel for fp16 on a CPU,
"cdist" not implemented for 'Half'. Operations on two types: a model with parts that stay in float32, under
another. torch.func in a forward, where a plan does something with what autograd saves. A backward pass that
needs weights which are freed. A forward that computes with whole widths where tensor ranks have parts.
"""

import re

import torch

from echelon.errors import UserError
from echelon.parallel.data.zero.weight_views import Placement
from echelon.plan import Plan

_TYPE = r"'?(?:Half|BFloat16)'?"
_FORMS = (
    re.compile(rf"\"([^\"]+)\" not implemented for {_TYPE}"),
    re.compile(rf"([\w.]+): Low precision dtypes not supported\. Got {_TYPE}"),
    re.compile(rf"Unsupported dtype()\s{_TYPE}"),
)


# torch's words for operands of two types.
_TWO_TYPES = re.compile(
    r"(have the same dtype|expected scalar type|to have scalar type|type \(\S+\) should be the same)"
    r"(?=.*(float|double))|(float|double).*should be the same",
    re.IGNORECASE,
)
# torch's words for sizes that do not fit.
_SIZES = re.compile(
    r"is invalid for input of size|split_with_sizes|shapes cannot be multiplied|"
    r"must match the size of tensor|Given normalized_shape"
)
# Of a saved tensor with another version: torch's words, and those of hooks on saved tensors.
_CHANGED = ("modified by an inplace operation", "changed in place after the forward pass had saved it")
# torch.func.grad and its like: inside of hooks, around functions that replace a module's, and around a module
# whose weights arrive when it is called.
_TORCH_FUNC = (
    "don't yet support saved tensor hooks",
    "with functorch transforms",
    "During a grad (vjp, jvp, grad, etc) transform",
    "Cannot access storage of TensorWrapper",
)


def missing_operation(message: str, plan: Plan, device: torch.device) -> UserError | None:
    """Return the error to raise for this message of torch, if an operation is missing for the plan."""
    first_line = message.partition("\n")[0]
    if any(words in message for words in _TORCH_FUNC):
        return _torch_func_error(first_line, plan)
    if "does not support sparse gradients" in message:
        return UserError(
            f"{first_line}: set sparse=False in the embedding, or give its weight to an optimizer "
            "that takes sparse gradients (SparseAdam, SGD, Adagrad)"
        )
    if plan.tensor > 1 and _SIZES.search(message):
        return UserError(
            f"plan '{plan}': {first_line}. Between a column and a row of the tensor table a "
            f"forward has 1/{plan.tensor} of the features, and this one may compute with whole widths there: "
            "take sizes from the tensors (q.view(batch, length, -1, head_width), y.flatten(2)), list numbers "
            "that it reads as 'divided' in tensor_table (docs/tensor.md), or its matrices as 'replicated'"
        )
    if plan.frees_weights and any(words in message for words in _CHANGED):
        placement = Placement(plan.zero == 3, "parameters" in plan.offload)
        return UserError(
            f"plan '{plan}': the backward pass needs a weight that {placement} has freed, or a tensor that "
            "was changed in place. A module's weights come back for its backward pass if its output can be "
            "seen: return tensors, or tuples, lists and dicts of them, and no function or generator that "
            "holds them; a loss that calls backward(), or autograd.grad in a hook, reads weights at other "
            f"times; replace in-place operations, or {placement.fix}"
        )
    if plan.precision != "fp32" and _TWO_TYPES.search(message):
        return UserError(
            f"precision={plan.precision}: an operation of the model is given two types ({first_line})"
            "; its forward makes a tensor in float32, or casts to it: make it in the type of the input or of "
            "a weight (dtype=x.dtype), keep constants in buffers, or use precision=fp32"
        )
    if plan.precision in ("fp32", "fp64"):
        return None
    names = [match.group(1) for form in _FORMS if (match := form.search(message)) is not None]
    if not names:
        return None
    where = "on a CPU" if device.type == "cpu" else f"on {device.type}"
    operation = f"the operation {names[0]}" if names[0] else "an operation"
    others = ["precision=bf16"] if plan.precision == "fp16" else []
    others += ["a GPU"] if device.type == "cpu" else []
    return UserError(
        f"precision={plan.precision}: torch does not have {operation} for it {where} ({first_line}); use "
        f"{', or '.join([*others, 'precision=fp32'])}, or convert what the operation is given to float32"
    )


def _torch_func_error(first_line: str, plan: Plan) -> UserError:
    words = [f"recompute={plan.recompute}"] if plan.recompute != "none" else []
    words += [f"compress={plan.compress}"] if plan.compress != "none" else []
    words += ["zero=3"] if plan.zero == 3 else []
    words += [f"offload={','.join(plan.offload)}"] if plan.offload else []
    advice = f"drop {', '.join(words)}, or use" if words else "use"
    return UserError(
        f"plan '{plan}' with a forward that calls torch.func ({first_line}): {advice} "
        "torch.autograd.grad(…, create_graph=True) in the forward"
    )
