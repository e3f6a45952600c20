"""Causal language models of transformers, seen as lists of layers.

A model is known by its class. What is listed are wrappers around the model's own modules (hf_layers.py): they
have no weights and buffers of their own, so that names stay what they are. transformers is imported only when
a model of it is at hand.
"""

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, NamedTuple

from torch import Tensor, nn

from echelon.layering.hf_layers import Embedding, Head, Layer, Setting
from echelon.wrapping import replaced_forward


class Family(NamedTuple):
    """What tells one architecture from another."""

    trunk: str  # the attribute that holds all but the head
    output: str  # the class that its forward returns
    slides: Callable[[Any, int], bool]  # whether a layer, by config and place, sees but a window of the past


def _slides_nowhere(config: Any, index: int) -> bool:  # noqa: ARG001
    return False


def _slides_by_layer(config: Any, index: int) -> bool:
    return bool(config.layer_types[index] == "sliding_attention")


def _slides_everywhere(config: Any, index: int) -> bool:  # noqa: ARG001
    return config.sliding_window is not None


FAMILIES = {
    "LlamaForCausalLM": Family("model", "CausalLMOutputWithPast", _slides_nowhere),
    "Qwen2ForCausalLM": Family("model", "CausalLMOutputWithPast", _slides_by_layer),
    "Qwen3ForCausalLM": Family("model", "CausalLMOutputWithPast", _slides_by_layer),
    "MistralForCausalLM": Family("model", "CausalLMOutputWithPast", _slides_everywhere),
    "MixtralForCausalLM": Family("model", "MoeCausalLMOutputWithPast", _slides_everywhere),
    "GPT2LMHeadModel": Family("transformer", "CausalLMOutputWithCrossAttentions", _slides_nowhere),
}

# What a model can be told to return of all its layers, which no single stage has.
_OF_ALL_LAYERS = ("output_router_logits", "output_hidden_states", "output_attentions")


def known_family(model: nn.Module) -> Family | None:
    """The family of a transformers model; none for a subclass with a forward of its own."""
    own: Any = type(model)
    for cls in own.__mro__:
        if cls.__module__.startswith("transformers.") and cls.__name__ in FAMILIES:
            return FAMILIES[cls.__name__] if own.forward is cls.forward else None
    return None


def _replaces_forward(module: nn.Module) -> bool:
    own: Any = type(module)
    original: Any = next((cls for cls in own.__mro__ if cls.__module__.startswith("transformers.")), None)
    if replaced_forward(module) is not None:
        return True
    return original is None or own.forward is not original.forward


def frequencies(model: nn.Module) -> list[Tensor]:
    """The frequencies of rotary positions in modules of transformers, which positions are multiplied with."""
    return [
        buffer
        for module in model.modules()
        if type(module).__module__.startswith("transformers.")
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]


def error_of(model: Any) -> str:
    """Why a model of a known family cannot be run layer by layer, and what to do; empty, if it can."""
    from transformers import __version__
    from transformers.masking_utils import create_causal_mask

    config, family = model.config, known_family(model)
    assert family is not None
    replaced = [
        f"{name}forward"
        for name, module in (("", model), (f"{family.trunk}.", getattr(model, family.trunk)))
        if _replaces_forward(module)
    ]
    if replaced:
        return (
            f"its {' and '.join(replaced)} is not that of transformers, and is never called where layers run "
            "in a row; leave it as it is, and change the layers instead"
        )
    wanted = [name for name in _OF_ALL_LAYERS if getattr(config, name, False)]
    if wanted:
        return (
            f"its config asks for {', '.join(wanted)}, which needs all layers in one place; set "
            f"{' and '.join(f'model.config.{name} = False' for name in wanted)}"
        )
    if not getattr(config, "is_causal", True):
        return "its config has is_causal=False, and only causal attention is known; set it to True"
    if not _can_make(create_causal_mask):
        return f"transformers {__version__} makes masks in another way; install transformers>=5.22"
    return ""


def _can_make(mask: Callable[..., Any]) -> bool:
    """Whether the function that makes masks takes what `Setting` gives."""
    takes = signature(mask).parameters
    needed = {name for name, its in takes.items() if its.default is Parameter.empty}
    given = {"config", "inputs_embeds", "attention_mask", "past_key_values"}
    return needed <= given <= takes.keys()


def layers_of(model: Any, family: Family) -> list[nn.Module]:
    """The embedding, every decoder layer, the head."""
    from transformers import modeling_outputs

    trunk, config = getattr(model, family.trunk), model.config
    positioned = hasattr(trunk, "wpe")  # GPT-2 learns its positions, all others turn by them
    blocks = trunk.h if positioned else trunk.layers[: config.num_hidden_layers]
    rotary = None if positioned else trunk.rotary_emb
    first = (
        Embedding(trunk.wte, trunk.wpe, trunk.drop)
        if positioned
        else Embedding(trunk.embed_tokens, None, None)
    )
    middle = [
        Layer(block, Setting(config, rotary, slides=family.slides(config, index)))
        for index, block in enumerate(blocks)
    ]
    norm = trunk.ln_f if positioned else trunk.norm
    return [first, *middle, Head(norm, model.lm_head, getattr(modeling_outputs, family.output))]
