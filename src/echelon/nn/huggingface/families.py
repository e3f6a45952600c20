"""Models of transformers as lists of layers.

A model is known by its class. The listed layers are wrappers around the model's own modules (layers.py). They
have no weights or buffers of their own, so that names stay as they are.
"""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn

from echelon.nn.huggingface import layers
from echelon.nn.huggingface.layers import LayerInputs
from echelon.nn.huggingface.modules import is_of_transformers
from echelon.nn.wrapping import replaced_forward

Known = TypeVar("Known")


class Names(NamedTuple):
    """The names of the modules of a trunk."""

    tokens: str = "embed_tokens"
    positions: str = ""  # learned ones, if there are
    after: str = ""  # what follows the embedding: a dropout, a norm
    blocks: str = "layers"
    norm: str = "norm"


class Family(NamedTuple):
    """The differences between causal architectures."""

    trunk: str  # the attribute that holds everything but the head
    output: str  # the class that its forward returns
    window: str = ""  # the field of the config that says which layers have a sliding window
    names: Names = Names()
    inputs: type[LayerInputs] = LayerInputs  # what decoder layers take beside hidden states


_PAST, _MOE = "CausalLMOutputWithPast", "MoeCausalLMOutputWithPast"
_CROSS = "CausalLMOutputWithCrossAttentions"
_GPT2 = Names("wte", "wpe", "drop", "h", "ln_f")
_NEOX = Names("embed_in", after="emb_dropout", norm="final_layer_norm")
_FALCON = Names("word_embeddings", blocks="h", norm="ln_f")
_BLOOM = _FALCON._replace(after="word_embeddings_layernorm")

FAMILIES = {
    "LlamaForCausalLM": Family("model", _PAST),
    "Qwen2ForCausalLM": Family("model", _PAST, "layer_types"),
    "Qwen3ForCausalLM": Family("model", _PAST, "layer_types"),
    "MistralForCausalLM": Family("model", _PAST, "sliding_window"),
    "MixtralForCausalLM": Family("model", _MOE, "sliding_window"),
    "GPT2LMHeadModel": Family("transformer", _CROSS, "", _GPT2),
    "GemmaForCausalLM": Family("model", _PAST),
    "Gemma2ForCausalLM": Family("model", _PAST, "layer_types"),
    "Gemma3ForCausalLM": Family("model", _PAST, "layer_types"),
    "Phi3ForCausalLM": Family("model", _PAST, "sliding_window"),
    "OlmoForCausalLM": Family("model", _PAST),
    "Olmo2ForCausalLM": Family("model", _PAST),
    "GPTNeoXForCausalLM": Family("gpt_neox", _PAST, "", _NEOX),
    "FalconForCausalLM": Family("transformer", _CROSS, "", _FALCON, layers.FalconInputs),
    "BloomForCausalLM": Family("transformer", _CROSS, "", _BLOOM, layers.BloomInputs),
    "DeepseekV2ForCausalLM": Family("model", _MOE),
    "DeepseekV3ForCausalLM": Family("model", _MOE),
}


class Encoder(NamedTuple):
    """The differences between encoders: names of modules."""

    trunk: str  # the attribute that holds everything but the head
    blocks: str  # of the trunk
    head: tuple[str, ...]  # of the model: modules that are called one after the other
    output: str  # the class that its forward returns
    takes_first: bool = False  # behind the first module of the head only the first position is used


ENCODERS = {
    "BertForMaskedLM": Encoder("bert", "encoder.layer", ("cls",), "MaskedLMOutput"),
    "BertForSequenceClassification": Encoder(
        "bert", "encoder.layer", ("bert.pooler", "dropout", "classifier"), "SequenceClassifierOutput"
    ),
    "BertForTokenClassification": Encoder(
        "bert", "encoder.layer", ("dropout", "classifier"), "TokenClassifierOutput"
    ),
    "ViTForImageClassification": Encoder(
        "vit", "layers", ("vit.layernorm", "classifier"), "ImageClassifierOutput", takes_first=True
    ),
}

# Options that return something of every layer, which no single stage has.
_OUTPUTS_OF_ALL_LAYERS = ("output_router_logits", "output_hidden_states", "output_attentions")


def find_family(model: nn.Module) -> Family | None:
    """Return the family of a transformers model; None for a subclass with a forward of its own."""
    return _find(model, FAMILIES)


def find_encoder(model: nn.Module) -> Encoder | None:
    """Return the kind of an encoder, which is not causal; None for a subclass with a forward of its own."""
    return _find(model, ENCODERS)


def find_known(model: nn.Module) -> Family | Encoder | None:
    return find_family(model) or find_encoder(model)


def _find(model: nn.Module, known: Mapping[str, Known]) -> Known | None:
    own: Any = type(model)
    for cls in own.__mro__:
        if cls.__module__.startswith("transformers.") and cls.__name__ in known:
            return known[cls.__name__] if own.forward is cls.forward else None
    return None


def _has_other_forward(module: nn.Module) -> bool:
    """Return True if the forward of a module is not the one that transformers wrote."""
    own: Any = type(module)
    original: Any = next((cls for cls in own.__mro__ if cls.__module__.startswith("transformers.")), None)
    if replaced_forward(module) is not None:
        return True
    return original is None or own.forward is not original.forward


def frequencies(model: nn.Module) -> list[Tensor]:
    """List the frequencies of rotary positions in modules of transformers."""
    return [
        buffer
        for module in model.modules()
        if is_of_transformers(module)
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]


def reason_not_listed(model: Any) -> str:
    """Say why a model of a known family cannot run layer by layer, and the fix; empty if it can."""
    from transformers import __version__
    from transformers.masking_utils import create_causal_mask

    config, family = model.config, find_known(model)
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
        if getattr(config, "is_decoder", False):
            return "its config has is_decoder=True, and is that of an encoder here; set it to False"
        return ""
    if not getattr(config, "is_causal", True):
        return "its config has is_causal=False, and only causal attention is supported; set it to True"
    if getattr(config, "use_bidirectional_attention", False):
        return "its config has use_bidirectional_attention=True, and only causal attention is supported"
    if not _takes_our_arguments(create_causal_mask):
        return f"transformers {__version__} makes masks in another way; install transformers>=5.22"
    return ""


def _takes_our_arguments(make_mask: Callable[..., Any]) -> bool:
    """Return True if the function that makes masks takes what `LayerInputs` passes."""
    parameters = signature(make_mask).parameters
    required = {name for name, parameter in parameters.items() if parameter.default is Parameter.empty}
    passed = {"config", "inputs_embeds", "attention_mask", "past_key_values"}
    return required <= passed <= parameters.keys()


def block_list(model: Any, family: Family | Encoder) -> tuple[str, list[nn.Module]]:
    """Return the name of the list of blocks that the model's own forward calls, and the blocks."""
    blocks = family.blocks if isinstance(family, Encoder) else family.names.blocks
    path = f"{family.trunk}.{blocks}"
    return path, list(attrgetter(path)(model))


def layers_of(model: Any, family: Family | Encoder) -> list[nn.Module]:
    """List the embedding, every layer, the head."""
    from transformers import modeling_outputs

    trunk, config = getattr(model, family.trunk), model.config
    output = getattr(modeling_outputs, family.output)
    if isinstance(family, Encoder):
        embedding = layers.ImageEmbedding if model.main_input_name == "pixel_values" else layers.TextEmbedding
        blocks = attrgetter(family.blocks)(trunk)
        head = [attrgetter(name)(model) for name in family.head]
        return [
            embedding(trunk.embeddings),
            *(layers.EncoderLayer(block, config) for block in blocks),
            layers.EncoderHead(head, output, takes_first=family.takes_first),
        ]
    parts: list[Any] = [getattr(trunk, name) if name else None for name in family.names]
    first, positions, after, blocks, norm = parts
    if family.trunk == "model":
        blocks = blocks[: config.num_hidden_layers]
    middle = [layers.DecoderLayer(each, _inputs(trunk, config, family, i)) for i, each in enumerate(blocks)]
    cap = getattr(config, "final_logit_softcapping", None)
    return [layers.Embedding(first, positions, after), *middle, layers.Head(norm, model.lm_head, output, cap)]


def _inputs(trunk: Any, config: Any, family: Family, index: int) -> LayerInputs:
    rotary, types = getattr(trunk, "rotary_emb", None), getattr(config, "layer_types", ())
    has_window = family.window == "sliding_window" and config.sliding_window is not None
    if family.window == "layer_types":
        has_window = types[index] == "sliding_attention"
    asks_type = rotary is not None and "layer_type" in signature(rotary.forward).parameters
    layer_type = types[index] if asks_type else None
    return family.inputs(config, rotary, has_window=has_window, layer_type=layer_type)
