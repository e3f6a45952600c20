"""Models of transformers as lists of layers.

A model is known by its class. The listed layers are wrappers around the model's own modules (layers.py). They
have no weights or buffers of their own, so that names stay as they are.
"""

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.huggingface.encoders import ENCODERS, Encoder, encoder_layers
from echelon.nn.huggingface.inputs import MASK
from echelon.nn.huggingface.layers import DecoderLayer, Embedding, Head, LayerInputs, padded, positions_of
from echelon.nn.huggingface.modules import is_of_transformers
from echelon.nn.sequence import View
from echelon.nn.wrapping import replaced_forward

# The arguments of decoder layers whose attention has biases by distance (Bloom, Falcon).


class BloomInputs(LayerInputs):
    """Biases and a mask; no positions."""

    masks_take_positions = False

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        refuse_shared(self.config, view)
        biases = _biases("bloom", x, self.config.n_head, view)
        return {
            "alibi": biases,
            "attention_mask": self._mask(x, view),
            "layer_past": None,
            "use_cache": False,
        }


class FalconInputs(LayerInputs):
    """Biases that are a part of the mask, or rotary positions."""

    masks_take_positions = False

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        refuse_shared(self.config, view)
        common = {"layer_past": None, "use_cache": False}
        if self.config.alibi:
            biases = _biases("falcon", x, self.config.num_attention_heads, view)
            biases = biases.reshape(x.shape[0], -1, *biases.shape[1:])
            return common | {"alibi": biases, "attention_mask": self._biased_mask(x, view, biases)}
        positions = positions_of(view, x.shape[1] * view.stretch, x.device)
        rotated = self.rotary(x, position_ids=positions)
        mask = self._mask(x, view, allow_is_causal_skip=False)
        return common | {"alibi": None, "attention_mask": mask, "position_embeddings": rotated}

    def _biased_mask(self, x: Tensor, view: View, biases: Tensor) -> Tensor:
        mask, lowest = self._mask(x, view, allow_is_causal_skip=False), torch.finfo(x.dtype).min
        is_hidden = ~mask if mask.dtype == torch.bool else mask < -1
        width = self.config.hidden_size // self.config.num_attention_heads
        return torch.masked_fill(biases / math.sqrt(width), is_hidden, lowest)


def refuse_shared(config: Any, view: View) -> None:
    if view.parts > 1:
        raise UserError(
            f"{type(config).__name__} with its sequence over {view.parts} ranks: its attention computes all "
            "scores itself, and cannot ask other ranks for keys; use context=1"
        )


def _biases(family: str, x: Tensor, heads: int, view: View) -> Tensor:
    """[batch · heads, 1, keys], as transformers computes them."""
    modeling = import_module(f"transformers.models.{family}.modeling_{family}")
    length = x.shape[1] * view.stretch
    keys = torch.ones(x.shape[0], length, dtype=torch.int64, device=x.device)
    if MASK in view.shared:  # padding is at no distance
        keys = padded(view.shared[MASK], length)
    biases: Tensor = modeling.build_alibi_tensor(keys, heads, dtype=x.dtype)
    return biases


Known = TypeVar("Known")


class Names(NamedTuple):
    """What the modules of a trunk are called."""

    tokens: str = "embed_tokens"
    positions: str = ""  # learned ones, if there are
    after: str = ""  # what follows the embedding: a dropout, a norm
    blocks: str = "layers"
    norm: str = "norm"


class Family(NamedTuple):
    """How one architecture differs from another."""

    trunk: str  # the attribute that holds everything but the head
    output: str  # the class that its forward returns
    has_window: Callable[[Any, int], bool]  # whether a layer, by config and number, has a sliding window
    names: Names = Names()
    inputs: type[LayerInputs] = LayerInputs  # what decoder layers take beside hidden states


def _never(config: Any, index: int) -> bool:  # noqa: ARG001
    return False


def _by_layer(config: Any, index: int) -> bool:
    return bool(config.layer_types[index] == "sliding_attention")


def _by_config(config: Any, index: int) -> bool:  # noqa: ARG001
    return config.sliding_window is not None


_PAST, _MOE, _CROSS = (
    "CausalLMOutputWithPast",
    "MoeCausalLMOutputWithPast",
    "CausalLMOutputWithCrossAttentions",
)
_GPT2 = Names("wte", "wpe", "drop", "h", "ln_f")
_NEOX = Names("embed_in", after="emb_dropout", norm="final_layer_norm")
_FALCON = Names("word_embeddings", blocks="h", norm="ln_f")
_BLOOM = _FALCON._replace(after="word_embeddings_layernorm")

FAMILIES = {
    "LlamaForCausalLM": Family("model", _PAST, _never),
    "Qwen2ForCausalLM": Family("model", _PAST, _by_layer),
    "Qwen3ForCausalLM": Family("model", _PAST, _by_layer),
    "MistralForCausalLM": Family("model", _PAST, _by_config),
    "MixtralForCausalLM": Family("model", _MOE, _by_config),
    "GPT2LMHeadModel": Family("transformer", _CROSS, _never, _GPT2),
    "GemmaForCausalLM": Family("model", _PAST, _never),
    "Gemma2ForCausalLM": Family("model", _PAST, _by_layer),
    "Gemma3ForCausalLM": Family("model", _PAST, _by_layer),
    "Phi3ForCausalLM": Family("model", _PAST, _by_config),
    "OlmoForCausalLM": Family("model", _PAST, _never),
    "Olmo2ForCausalLM": Family("model", _PAST, _never),
    "GPTNeoXForCausalLM": Family("gpt_neox", _PAST, _never, _NEOX),
    "FalconForCausalLM": Family("transformer", _CROSS, _never, _FALCON, FalconInputs),
    "BloomForCausalLM": Family("transformer", _CROSS, _never, _BLOOM, BloomInputs),
    "DeepseekV2ForCausalLM": Family("model", _MOE, _never),
    "DeepseekV3ForCausalLM": Family("model", _MOE, _never),
}

# Options that return something of every layer, which no single stage has.
_OUTPUTS_OF_ALL_LAYERS = ("output_router_logits", "output_hidden_states", "output_attentions")


def find_family(model: nn.Module) -> Family | None:
    """The family of a transformers model; None for a subclass with a forward of its own."""
    return _find(model, FAMILIES)


def find_encoder(model: nn.Module) -> Encoder | None:
    """The same for encoders, which are not causal."""
    return _find(model, ENCODERS)


def _find(model: nn.Module, known: Mapping[str, Known]) -> Known | None:
    own: Any = type(model)
    for cls in own.__mro__:
        if cls.__module__.startswith("transformers.") and cls.__name__ in known:
            return known[cls.__name__] if own.forward is cls.forward else None
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

    config, family = model.config, find_family(model) or find_encoder(model)
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
    if isinstance(family, Encoder):
        is_decoder = getattr(config, "is_decoder", False)
        return (
            "its config has is_decoder=True, and is that of an encoder here; set it to False"
            if is_decoder
            else ""
        )
    if not getattr(config, "is_causal", True):
        return "its config has is_causal=False, and only causal attention is supported; set it to True"
    if getattr(config, "use_bidirectional_attention", False):
        return "its config has use_bidirectional_attention=True, and only causal attention is supported"
    if not _takes_our_arguments(create_causal_mask):
        return f"transformers {__version__} makes masks in another way; install transformers>=5.22"
    return ""


def _takes_our_arguments(make_mask: Callable[..., Any]) -> bool:
    """Whether the function that makes masks takes what `LayerInputs` passes."""
    parameters = signature(make_mask).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is Parameter.empty}
    passed = {"config", "inputs_embeds", "attention_mask", "past_key_values"}
    return required <= passed <= parameters.keys()


def layers_of(model: Any, family: Family | Encoder) -> list[nn.Module]:
    """The embedding, every layer, the head."""
    if isinstance(family, Encoder):
        return encoder_layers(model, family)
    from transformers import modeling_outputs

    trunk, config, names = getattr(model, family.trunk), model.config, family.names
    parts: list[Any] = [getattr(trunk, name) if name else None for name in names]
    first, positions, after, blocks, norm = parts
    if family.trunk == "model":
        blocks = blocks[: config.num_hidden_layers]
    middle = [
        DecoderLayer(block, _inputs(trunk, config, family, index)) for index, block in enumerate(blocks)
    ]
    output = getattr(modeling_outputs, family.output)
    cap = getattr(config, "final_logit_softcapping", None)
    return [Embedding(first, positions, after), *middle, Head(norm, model.lm_head, output, cap)]


def _inputs(trunk: Any, config: Any, family: Family, index: int) -> LayerInputs:
    rotary, has_window = getattr(trunk, "rotary_emb", None), family.has_window(config, index)
    asks_type = rotary is not None and "layer_type" in signature(rotary.forward).parameters
    layer_type = config.layer_types[index] if asks_type else None
    return family.inputs(config, rotary, has_window=has_window, layer_type=layer_type)
