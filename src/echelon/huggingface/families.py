"""Causal language models of transformers as lists of layers.

A model is known by its class. The listed layers are wrappers around the model's own modules (layers.py). They
have no weights or buffers of their own, so that names stay as they are.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from echelon.huggingface.layers import DecoderLayer, Embedding, Head, LayerInputs
from echelon.huggingface.modules import is_of_transformers
from echelon.wrapping import replaced_forward


class Family(NamedTuple):
    """How one architecture differs from another."""

    trunk: str  # the attribute that holds everything but the head
    output: str  # the class that its forward returns
    has_window: Callable[[Any, int], bool]  # whether a layer, by config and number, has a sliding window


def _never(config: Any, index: int) -> bool:  # noqa: ARG001
    return False


def _by_layer(config: Any, index: int) -> bool:
    return bool(config.layer_types[index] == "sliding_attention")


def _by_config(config: Any, index: int) -> bool:  # noqa: ARG001
    return config.sliding_window is not None


FAMILIES = {
    "LlamaForCausalLM": Family("model", "CausalLMOutputWithPast", _never),
    "Qwen2ForCausalLM": Family("model", "CausalLMOutputWithPast", _by_layer),
    "Qwen3ForCausalLM": Family("model", "CausalLMOutputWithPast", _by_layer),
    "MistralForCausalLM": Family("model", "CausalLMOutputWithPast", _by_config),
    "MixtralForCausalLM": Family("model", "MoeCausalLMOutputWithPast", _by_config),
    "GPT2LMHeadModel": Family("transformer", "CausalLMOutputWithCrossAttentions", _never),
}

# Options that return something of every layer, which no single stage has.
_OUTPUTS_OF_ALL_LAYERS = ("output_router_logits", "output_hidden_states", "output_attentions")


def find_family(model: nn.Module) -> Family | None:
    """The family of a transformers model; None for a subclass with a forward of its own."""
    own: Any = type(model)
    for cls in own.__mro__:
        if cls.__module__.startswith("transformers.") and cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__] if own.forward is cls.forward else None
    return None


def _has_other_forward(module: nn.Module) -> bool:
    """Whether its forward is not the one that transformers wrote."""
    own: Any = type(module)
    original: Any = next((cls for cls in own.__mro__ if cls.__module__.startswith("transformers.")), None)
    if replaced_forward(module) is not None:
        return True
    return original is None or own.forward is not original.forward


def frequencies(model: nn.Module) -> list[Tensor]:
    """The frequencies of rotary positions in modules of transformers."""
    return [
        buffer
        for module in model.modules()
        if is_of_transformers(module)
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]


def reason_not_listed(model: Any) -> str:
    """Why a model of a known family cannot run layer by layer, and the fix; empty if it can."""
    from transformers import __version__
    from transformers.masking_utils import create_causal_mask

    config, family = model.config, find_family(model)
    assert family is not None
    modules = {"": model, f"{family.trunk}.": getattr(model, family.trunk)}
    replaced = [f"{name}forward" for name, module in modules.items() if _has_other_forward(module)]
    if replaced:
        return (
            f"its {' and '.join(replaced)} is not that of transformers, and would never be called, because "
            "only the layers run; leave it as it is, and change the layers instead"
        )
    wanted = [name for name in _OUTPUTS_OF_ALL_LAYERS if getattr(config, name, False)]
    if wanted:
        return (
            f"its config asks for {', '.join(wanted)}, which needs all layers in one place; set "
            f"{' and '.join(f'model.config.{name} = False' for name in wanted)}"
        )
    if not getattr(config, "is_causal", True):
        return "its config has is_causal=False, and only causal attention is supported; set it to True"
    if not _takes_our_arguments(create_causal_mask):
        return f"transformers {__version__} makes masks in another way; install transformers>=5.22"
    return ""


def _takes_our_arguments(make_mask: Callable[..., Any]) -> bool:
    """Whether the function that makes masks takes what `LayerInputs` passes."""
    parameters = signature(make_mask).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is Parameter.empty}
    passed = {"config", "inputs_embeds", "attention_mask", "past_key_values"}
    return required <= passed <= parameters.keys()


def layers_of(model: Any, family: Family) -> list[nn.Module]:
    """The embedding, every decoder layer, the head."""
    from transformers import modeling_outputs

    trunk, config = getattr(model, family.trunk), model.config
    learns_positions = hasattr(trunk, "wpe")  # GPT-2; all others have rotary positions
    if learns_positions:
        first = Embedding(trunk.wte, trunk.wpe, trunk.drop)
        blocks, rotary, norm = trunk.h, None, trunk.ln_f
    else:
        first = Embedding(trunk.embed_tokens, None, None)
        blocks, rotary, norm = trunk.layers[: config.num_hidden_layers], trunk.rotary_emb, trunk.norm
    middle = [
        DecoderLayer(block, LayerInputs(config, rotary, has_window=family.has_window(config, index)))
        for index, block in enumerate(blocks)
    ]
    return [first, *middle, Head(norm, model.lm_head, getattr(modeling_outputs, family.output))]
