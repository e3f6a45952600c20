"""An operation that torch does not have for numbers below float32, in words that say what to change.

torch.cdist has no kernel for fp16 on a CPU: "cdist" not implemented for 'Half'.
"""

import re

import torch

from echelon.errors import UserError
from echelon.plan import Plan

_TYPE = r"'?(?:Half|BFloat16)'?"
_FORMS = (
    re.compile(rf"\"([^\"]+)\" not implemented for {_TYPE}"),
    re.compile(rf"([\w.]+): Low precision dtypes not supported\. Got {_TYPE}"),
    re.compile(rf"Unsupported dtype()\s{_TYPE}"),
)


def missing_operation(message: str, plan: Plan, device: torch.device) -> UserError | None:
    """The error to raise for this message of torch, if an operation is missing for the plan's precision."""
    if plan.precision not in ("bf16", "fp16"):
        return None
    names = [match.group(1) for form in _FORMS if (match := form.search(message)) is not None]
    if not names:
        return None
    where = "on a CPU" if device.type == "cpu" else f"on {device.type}"
    others = ["precision=bf16"] if plan.precision == "fp16" else []
    others += ["a GPU"] if device.type == "cpu" else []
    return UserError(
        f"precision={plan.precision}: torch does not have {_the_operation(names[0])} for it {where} "
        f"({message.splitlines()[0]}); use {', or '.join([*others, 'precision=fp32'])}, or convert what the "
        "operation is given to float32"
    )


def _the_operation(name: str) -> str:
    return f"the operation {name}" if name else "an operation"
