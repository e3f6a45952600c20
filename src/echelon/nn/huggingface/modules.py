"""Properties of single modules of transformers that their class or their attributes show."""

from collections.abc import Callable, Iterable, Mapping
from inspect import getsource, signature
from typing import Any

from torch import Tensor, nn

_JITTER = "jitter_noise"


def is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def is_pretrained(model: nn.Module) -> bool:
    """Return True for a model of transformers, or a subclass of one."""
    bases = type(model).__mro__
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in bases)


def is_encoder_decoder(model: Any) -> bool:
    return is_pretrained(model) and bool(model.config.is_encoder_decoder)


def initializer(module: nn.Module) -> Callable[[], object] | None:
    """Return the function that initialises a whole model of transformers; None for any other module."""
    return getattr(module, "initialize_weights", None) if is_pretrained(module) else None


def is_transposed(module: nn.Module) -> bool:
    """Return True for a matrix that is stored as [inputs, outputs]: GPT-2's Conv1D."""
    return is_of_transformers(module) and type(module).__name__ == "Conv1D"


def is_plain_matrix(module: nn.Module) -> bool:
    """Return True for a module that computes nn.Linear, although it has a forward of its own."""
    return is_of_transformers(module) and type(module).__name__ == "FalconLinear"


def embedding_scale(module: Any) -> Tensor | float | None:
    """Return the factor of the rows of an embedding of transformers; None for all others."""
    if not is_of_transformers(module) or not type(module).__name__.endswith("ScaledWordEmbedding"):
        return None
    scale: Tensor | float = module.embed_scale
    return scale.to(module.weight.dtype) if isinstance(scale, Tensor) else scale


def rms_epsilon(module: Any) -> float | None:
    """Return the ε of a root-mean-square norm that multiplies by its weight alone; None for all others."""
    is_known = is_of_transformers(module) and type(module).__name__ in _PLAIN_RMS_NORMS
    return float(module.variance_epsilon) if is_known else None


# Gemma's multiply by 1 + weight.
_PLAIN_RMS_NORMS = {f"{name}RMSNorm" for name in ("Llama", "Mistral", "Olmo2", "Olmo3", "Olmoe", "Qwen3")}


def draws_by_function(module: Any) -> bool:
    """Return True if a module draws random numbers in its own forward, not in dropout modules inside it.

    Such modules keep their rates as numbers (attention_dropout), or have a dropout module and read only its
    rate.
    """
    if not is_of_transformers(module):
        return False
    return any(rate > 0 for rate in _rates(module).values()) or any(
        isinstance(dropout, nn.Dropout) and dropout.p > 0 and _reads_only_rate(module, name)
        for name, dropout in module.named_children()
    )


def _rates(module: Any) -> dict[str, float]:
    """Return the rates that a module keeps as numbers."""
    rates = {name: value for name, value in vars(module).items() if "dropout" in name or name == _JITTER}
    if type(module).__name__ == "FalconDecoderLayer" and not module.config.parallel_attn:
        rates["hidden_dropout in the residual"] = module.config.attention_dropout
    return {name: rate for name, rate in rates.items() if isinstance(rate, float)}


def _reads_only_rate(attention: Any, name: str) -> bool:
    """Return True if attention reads the rate of its dropout module, and does not call the module. GPT-2's
    does, unless it computes in the order of Megatron; Falcon's, unless it is "eager" or has no alibi."""
    if name == "attn_dropout":
        is_reordered = bool(getattr(attention, "reorder_and_upcast_attn", False))
        return not (is_reordered and attention.config._attn_implementation == "eager")
    if type(attention).__name__.startswith("Falcon"):
        return bool(attention.config.alibi) and attention.config._attn_implementation != "eager"
    try:
        return f"self.{name}.p" in getsource(type(attention).forward)
    except (OSError, TypeError):  # made at run time
        return False


def draws_by_head(module: nn.Module) -> bool:
    """Return True if a module draws for single attention heads only: ranks that split heads may draw alone.

    Of the modules that draw by a function, routers (jitter_noise) and those that drop hidden states draw for
    all ranks.
    """
    if not is_of_transformers(module):
        return False
    return not any(
        rate > 0 and (name == _JITTER or "hidden" in name) for name, rate in _rates(module).items()
    )


def casts_to_float32(module: nn.Module) -> bool:
    """Return True if a module computes in float32 whatever its input: norms, routers, "eager" attention,
    scans (Mamba)."""
    names = ("RMSNorm", "LayerNorm", "Router", "Attention", "Mixer")
    return is_of_transformers(module) and type(module).__name__.endswith(names)


def blocks_in(model: nn.Module) -> list[nn.Module]:
    """Return the layers of models of transformers in `model`, of any architecture: what these checkpoint."""
    blocks = [module for module in model.modules() if _is_block(module)]
    inside = {each for block in blocks for each in block.modules() if each is not block}
    return [block for block in blocks if block not in inside]


def _is_block(module: nn.Module) -> bool:
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.startswith("transformers.")]
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in kinds)


def makes_cache(module: Any) -> bool:
    """Return True if a call of a module makes a cache for generation, unless the caller says otherwise."""
    if not is_pretrained(module) or not getattr(module.config, "use_cache", False):
        return False
    return "use_cache" in signature(type(module).forward).parameters


def without_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook before the forward of a module that `makes_cache`: none is made unless the caller asks."""
    by_position = list(signature(type(module).forward).parameters)[1 : len(args) + 1]
    if kwargs.get("use_cache") is not None or "use_cache" in by_position:
        return None
    return args, kwargs | {"use_cache": False}


def has_cache(arguments: Iterable[Any]) -> bool:
    """Return True if one of the arguments of a layer is a cache."""
    return any(type(each).__module__ == "transformers.cache_utils" for each in arguments)


def rope_types(parameters: Mapping[str, Any] | None) -> set[str]:
    """Return the kinds of rotary positions in `rope_parameters`: of all layers, or of each kind of them."""
    rope = parameters or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return {each["rope_type"] for each in kinds if "rope_type" in each}
