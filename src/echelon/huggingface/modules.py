"""Properties of single modules of transformers that their class or their attributes show."""

from collections.abc import Callable
from typing import Any

from torch import nn


def is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def is_pretrained(model: nn.Module) -> bool:
    """Whether it is a model of transformers, or a subclass of one."""
    bases = type(model).__mro__
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in bases)


def initializer(module: nn.Module) -> Callable[[], object] | None:
    """What gives all of a model of transformers its initial values; None for any other module."""
    return getattr(module, "initialize_weights", None) if is_pretrained(module) else None


def is_transposed(module: nn.Module) -> bool:
    """Whether it is a matrix that is stored as [inputs, outputs]: GPT-2's Conv1D."""
    return is_of_transformers(module) and type(module).__name__ == "Conv1D"


def draws_by_function(module: Any) -> bool:
    """Whether it draws random numbers in its own forward, not in dropout modules inside it.

    Such modules keep their rates as numbers (attention_dropout). GPT-2's attention has a dropout module but
    reads only its rate, unless it computes in the order of Megatron.
    """
    if not is_of_transformers(module):
        return False
    rates = [value for name, value in vars(module).items() if "dropout" in name or name == "jitter_noise"]
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        return True
    dropout = getattr(module, "attn_dropout", None)
    return isinstance(dropout, nn.Dropout) and dropout.p > 0 and not _calls_dropout_module(module)


def _calls_dropout_module(attention: Any) -> bool:
    reordered = getattr(attention, "reorder_and_upcast_attn", False)
    return bool(reordered) and attention.config._attn_implementation == "eager"


def draws_by_head(module: nn.Module) -> bool:
    """Whether what it draws is for single attention heads only. Ranks that split heads may draw separately.

    Of the modules that draw by a function, only routers (jitter_noise) draw for all ranks.
    """
    return is_of_transformers(module) and not getattr(module, "jitter_noise", 0.0)


def casts_to_float32(module: nn.Module) -> bool:
    """Whether it computes in float32 whatever the type of its input: norms, routers, "eager" attention."""
    if not is_of_transformers(module):
        return False
    return type(module).__name__.endswith(("RMSNorm", "Router")) or hasattr(module, "num_key_value_groups")
