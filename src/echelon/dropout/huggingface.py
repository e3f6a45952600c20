"""Dropout in modules of transformers that is done by a function, so that no module can be keyed for it."""

from typing import Any

from torch import nn


def drops_by_function(module: Any) -> bool:
    """Whether a transformers module draws at random in its forward otherwise than by modules inside it.

    Such modules keep their rates as numbers (attention_dropout). GPT-2's attention has a module, but reads
    only its rate, unless it computes in the order of Megatron.
    """
    if not type(module).__module__.startswith("transformers."):
        return False
    rates = [its for name, its in vars(module).items() if "dropout" in name or name == "jitter_noise"]
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        return True
    inside = getattr(module, "attn_dropout", None)
    return isinstance(inside, nn.Dropout) and inside.p > 0 and not _calls_its_dropout(module)


def _calls_its_dropout(attention: Any) -> bool:
    ordered = getattr(attention, "reorder_and_upcast_attn", False)
    return bool(ordered) and attention.config._attn_implementation == "eager"
