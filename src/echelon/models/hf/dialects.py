"""The model types of Hugging Face that we read and write: which keys of config.json have our fields, which of
our tensors make up each tensor in files. One table, for reading and for writing.

A model that none of them has (a GPT with experts, another gate than softmax, a capacity) is of our own type,
`echelon`: its config.json has our fields, and its files our names.

Our tensors are joined along dim 0 and then, for GPT-2, transposed: its Conv1D keeps weights as [inputs,
outputs], and query, key and value in one matrix.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from echelon.models.config import Family, ModelConfig
from echelon.state.weight_files.layout import FileTensor, Piece, WeightLayout, whole_tensor

OWN_TYPE = "echelon"


@dataclass(frozen=True)
class Dialect:
    family: Family
    architecture: str
    fits: Callable[[ModelConfig], bool]  # whether it can hold this config
    required: dict[str, str]  # our field -> their key
    optional: dict[str, tuple[str, Any]]  # our field -> their key, and its default
    demanded: dict[str, tuple[Any, ...]]  # their key -> the supported values; the first is the default
    experts: dict[str, tuple[str, Any]] = field(default_factory=dict)  # as `optional`, of ExpertsConfig
    rope_theta: float = 10000.0  # its default
    qk_norm: bool = False


def dialect_of(config: ModelConfig) -> str:
    return next((name for name, dialect in DIALECTS.items() if dialect.fits(config)), OWN_TYPE)


def _fits_dense(family: Family, qk_norm: bool) -> Callable[[ModelConfig], bool]:
    return lambda config: config.family == family and config.experts is None and config.qk_norm == qk_norm


def _has_softmax_gate(config: ModelConfig) -> bool:
    experts = config.experts
    if config.family != "llama" or experts is None or experts.shared_gate:
        return False
    return experts.gate == "softmax" and experts.capacity is None and not experts.jitter


def _fits_mixtral(config: ModelConfig) -> bool:
    experts = config.experts
    if experts is None or config.qk_norm or not _has_softmax_gate(config):
        return False
    return experts.normalize and not experts.shared and not experts.first_dense


def _fits_qwen3_moe(config: ModelConfig) -> bool:
    return _has_softmax_gate(config) and config.qk_norm and not (config.experts and config.experts.shared)


def _fits_deepseek(config: ModelConfig) -> bool:
    experts = config.experts
    if experts is None or config.qk_norm or config.head_width is not None:
        return False
    return _has_softmax_gate(config) and experts.shared % experts.hidden == 0


_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "sequence": "max_position_embeddings",
}
_OPTIONS = {
    "kv_heads": ("num_key_value_heads", None),
    "norm_epsilon": ("rms_norm_eps", 1e-6),
    "tied": ("tie_word_embeddings", False),
    "head_width": ("head_dim", None),
}
_DEMANDED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "quantization_config": (None,),
}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}
_NUM_CHOSEN = {"top_k": ("num_experts_per_tok", 2), "z_loss": ("router_z_loss_coef", 0.0)}

DIALECTS = {
    "gpt2": Dialect(
        family="gpt",
        architecture="GPT2LMHeadModel",
        fits=_fits_dense("gpt", qk_norm=False),
        required={
            "layers": "n_layer",
            "width": "n_embd",
            "heads": "n_head",
            "vocab": "vocab_size",
            "sequence": "n_positions",
        },
        optional={
            "ffn": ("n_inner", None),
            "norm_epsilon": ("layer_norm_epsilon", 1e-5),
            "tied": ("tie_word_embeddings", True),
        },
        demanded={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "quantization_config": (None,),
        },
    ),
    "llama": Dialect(
        family="llama",
        architecture="LlamaForCausalLM",
        fits=_fits_dense("llama", qk_norm=False),
        required=_SIZES | {"ffn": "intermediate_size"},
        optional=_OPTIONS,
        demanded=_DEMANDED | {"mlp_bias": (False,)},
    ),
    "qwen3": Dialect(
        family="llama",
        architecture="Qwen3ForCausalLM",
        fits=_fits_dense("llama", qk_norm=True),
        required=_SIZES | {"ffn": "intermediate_size"},
        optional=_OPTIONS | {"kv_heads": ("num_key_value_heads", 32), "head_width": ("head_dim", 128)},
        demanded=_DEMANDED | _NO_WINDOW,
        qk_norm=True,
    ),
    "mixtral": Dialect(
        family="llama",
        architecture="MixtralForCausalLM",
        fits=_fits_mixtral,
        required=_SIZES,
        optional=_OPTIONS | {"kv_heads": ("num_key_value_heads", 8), "norm_epsilon": ("rms_norm_eps", 1e-5)},
        demanded=_DEMANDED | {"sliding_window": (None,), "router_jitter_noise": (0.0,)},
        experts=_NUM_CHOSEN
        | {
            "num_experts": ("num_local_experts", 8),
            "hidden": ("intermediate_size", 14336),
            "balance": ("router_aux_loss_coef", 0.001),
        },
        rope_theta=1e6,
    ),
    "qwen3_moe": Dialect(
        family="llama",
        architecture="Qwen3MoeForCausalLM",
        fits=_fits_qwen3_moe,
        required=_SIZES | {"ffn": "intermediate_size"},
        optional=_OPTIONS | {"kv_heads": ("num_key_value_heads", 4)},
        demanded=_DEMANDED | _NO_WINDOW | {"decoder_sparse_step": (1,)},
        experts=_NUM_CHOSEN
        | {
            "top_k": ("num_experts_per_tok", 8),
            "num_experts": ("num_experts", 128),
            "hidden": ("moe_intermediate_size", 768),
            "normalize": ("norm_topk_prob", False),
            "balance": ("router_aux_loss_coef", 0.001),
        },
        qk_norm=True,
    ),
    "deepseek": Dialect(
        family="llama",
        architecture="DeepseekForCausalLM",
        fits=_fits_deepseek,
        required=_SIZES | {"ffn": "intermediate_size"},
        optional={name: key for name, key in _OPTIONS.items() if name != "head_width"},
        demanded=_DEMANDED | {"moe_layer_freq": (1,), "scoring_func": ("softmax",)},
        experts=_NUM_CHOSEN
        | {
            "num_experts": ("n_routed_experts", None),
            "hidden": ("moe_intermediate_size", 1407),
            "normalize": ("norm_topk_prob", False),
            "first_dense": ("first_k_dense_replace", 0),
            "balance": ("aux_loss_alpha", 0.001),
        },
    ),
}


class _Rule(NamedTuple):
    """The Hugging Face name of a module or tensor, and the names of ours that are joined in it."""

    hf_name: str
    names: tuple[str, ...]
    transposed: bool = False


class _Names(NamedTuple):
    base: str  # prefix of every name but the head's; files of the bare model do not have it
    embedding: str
    outside_blocks: dict[str, str]  # Hugging Face name -> our name, of tensors outside the blocks
    block: str
    parts: tuple[_Rule, ...]
    mlp: tuple[_Rule, ...]  # where it is dense


_NAMES = {
    "gpt": _Names(
        base="transformer.",
        embedding="transformer.wte.weight",
        outside_blocks={
            "transformer.wpe.weight": "embedding.positions.weight",
            "transformer.ln_f.weight": "head.norm.weight",
            "transformer.ln_f.bias": "head.norm.bias",
        },
        block="transformer.h.",
        parts=(
            _Rule("ln_1", ("attention_norm",)),
            _Rule("attn.c_attn", ("attention.query", "attention.key", "attention.value"), transposed=True),
            _Rule("attn.c_proj", ("attention.output",), transposed=True),
            _Rule("ln_2", ("mlp_norm",)),
        ),
        mlp=(
            _Rule("mlp.c_fc", ("mlp.up",), transposed=True),
            _Rule("mlp.c_proj", ("mlp.down",), transposed=True),
        ),
    ),
    "llama": _Names(
        base="model.",
        embedding="model.embed_tokens.weight",
        outside_blocks={"model.norm.weight": "head.norm.weight"},
        block="model.layers.",
        parts=(
            _Rule("input_layernorm", ("attention_norm",)),
            _Rule("self_attn.q_proj", ("attention.query",)),
            _Rule("self_attn.k_proj", ("attention.key",)),
            _Rule("self_attn.v_proj", ("attention.value",)),
            _Rule("self_attn.o_proj", ("attention.output",)),
            _Rule("post_attention_layernorm", ("mlp_norm",)),
        ),
        mlp=(
            _Rule("mlp.gate_proj", ("mlp.gate",)),
            _Rule("mlp.up_proj", ("mlp.up",)),
            _Rule("mlp.down_proj", ("mlp.down",)),
        ),
    ),
}

_QK_NORM = (
    _Rule("self_attn.q_norm", ("attention.query_norm",)),
    _Rule("self_attn.k_norm", ("attention.key_norm",)),
)

EMBEDDING, HEAD, _HF_HEAD = "embedding.tokens.weight", "head.projection.weight", "lm_head.weight"

# Constants in older files: causal masks and rotary frequencies.
_CONSTANT = re.compile(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$")


def hf_layout(config: ModelConfig, state: Mapping[str, Tensor], names: Collection[str] = ()) -> WeightLayout:
    """Return the layout of files with tensors of these names; without names, of those that we write.

    Files of the bare model lack the base name. A tied head is left out, as transformers does, or is a copy.
    `state` has the shapes of ours.
    """
    ties = {HEAD: EMBEDDING} if config.tied else {}
    if dialect_of(config) == OWN_TYPE:  # files with our names
        return WeightLayout(
            tensors={name: whole_tensor(name, state[name], name) for name in state if name not in ties},
            ties=ties,
            copies={name: first for name, first in ties.items() if name in names},
        )
    base = _NAMES[config.family].base
    constants = {name for name in names if _CONSTANT.search(name)}
    is_bare = bool(names) and not any(name.startswith(base) for name in names if name not in constants)
    tensors = {}
    for tensor in _tensors(config, state, names):
        stored = tensor.renamed(tensor.name.removeprefix(base)) if is_bare else tensor
        tensors[stored.name] = stored
    embedding = next(iter(tensors))
    return WeightLayout(
        tensors=tensors,
        ties=ties,
        copies={_HF_HEAD: embedding} if config.tied and _HF_HEAD in names else {},
        ignored=constants,
    )


def _tensors(
    config: ModelConfig, state: Mapping[str, Tensor], stored: Collection[str]
) -> Iterator[FileTensor]:
    """Yield every Hugging Face tensor; the embedding is the first."""
    # The names of mixtures in files with these tensors; without any, those that we write.
    if stored:
        is_mixtral = any(f".{_MIXTRAL.mixture}" in name for name in stored)
    else:
        is_mixtral = dialect_of(config) == "mixtral"
    names, experts = _NAMES[config.family], _MIXTRAL if is_mixtral else _QWEN
    yield _join(_Rule(names.embedding, (EMBEDDING,)), state)
    for hf_name, name in names.outside_blocks.items():
        yield _join(_Rule(hf_name, (name,)), state)
    for index in range(config.layers):
        parts = names.parts + (_QK_NORM if config.qk_norm else ())
        hf_block, block = f"{names.block}{index}.", f"blocks.{index}."
        for rule in _block_rules(config, hf_block, block, parts):
            yield _join(rule, state)
        if config.has_experts(index):
            yield from expert_tensors(experts, hf_block, f"{block}mlp.", state)
        else:
            for rule in _block_rules(config, hf_block, block, names.mlp):
                yield _join(rule, state)
    if not config.tied:
        yield _join(_Rule(_HF_HEAD, (HEAD,)), state)


def _block_rules(config: ModelConfig, hf_block: str, block: str, parts: Iterable[_Rule]) -> Iterator[_Rule]:
    for part in parts:
        for kind in ("weight", "bias") if config.bias else ("weight",):
            yield _Rule(
                f"{hf_block}{part.hf_name}.{kind}",
                tuple(f"{block}{name}.{kind}" for name in part.names),
                transposed=part.transposed and kind == "weight",
            )


def _join(rule: _Rule, state: Mapping[str, Tensor]) -> FileTensor:
    pieces, joined = [], 0
    for name in rule.names:
        shape = tuple(state[name].shape)
        begin = (joined, *(0 for _ in shape[1:]))
        pieces.append(
            Piece(
                name,
                offsets=(0,) * len(shape),
                sizes=shape,
                stored=rule.hf_name,
                stored_offsets=begin[::-1] if rule.transposed else begin,
                is_transposed=rule.transposed,
            )
        )
        joined += shape[0]
    first = state[rule.names[0]]
    shape = (joined, *first.shape[1:])
    return FileTensor(rule.hf_name, shape[::-1] if rule.transposed else shape, first.dtype, tuple(pieces))


# The tensors of mixtures of experts in Hugging Face files: one tensor for each matrix of each expert.


class MixtureNames(NamedTuple):
    mixture: str
    gate: str
    up: str
    down: str


_MIXTRAL = MixtureNames("block_sparse_moe.", "w1", "w3", "w2")
_QWEN = MixtureNames("mlp.", "gate_proj", "up_proj", "down_proj")
_SHARED = {
    "shared.gate.weight": "shared_experts.gate_proj.weight",
    "shared.up.weight": "shared_experts.up_proj.weight",
    "shared.down.weight": "shared_experts.down_proj.weight",
}


def expert_tensors(
    names: MixtureNames, hf_block: str, mlp: str, state: Mapping[str, Tensor]
) -> Iterator[FileTensor]:
    hf_mixture = f"{hf_block}{names.mixture}"
    yield whole_tensor(f"{mlp}gate.weight", state[f"{mlp}gate.weight"], f"{hf_mixture}gate.weight")
    first, down = f"{mlp}experts.gate_up_proj", f"{mlp}experts.down_proj"
    num_experts, width, hidden = state[down].shape
    for expert in range(num_experts):
        prefix = f"{hf_mixture}experts.{expert}."
        for name, row in ((names.gate, 0), (names.up, hidden)):
            yield _matrix(f"{prefix}{name}.weight", first, state[first], expert, row, (hidden, width))
        yield _matrix(f"{prefix}{names.down}.weight", down, state[down], expert, 0, (width, hidden))
    for name, hf_name in _SHARED.items():
        if f"{mlp}{name}" in state:
            yield whole_tensor(f"{mlp}{name}", state[f"{mlp}{name}"], f"{hf_mixture}{hf_name}")


def _matrix(
    stored: str, name: str, tensor: Tensor, expert: int, row: int, shape: tuple[int, int]
) -> FileTensor:
    piece = Piece(name, (expert, row, 0), (1, *shape), stored, stored_offsets=(0, 0))
    return FileTensor(stored, shape, tensor.dtype, (piece,))
