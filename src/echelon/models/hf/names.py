"""The tensors of GPT and Llama in Hugging Face files: one table, for reading and for writing.

It says which of our tensors make up each Hugging Face tensor: ours are joined along dim 0 and then, for
GPT-2, transposed: its Conv1D keeps weights as [inputs, outputs], and query, key and value in one matrix.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from echelon.models.config import ModelConfig
from echelon.models.hf.dialects import OWN_TYPE, dialect_of
from echelon.state.weight_files.layout import FileTensor, Piece, WeightLayout, whole_tensor


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
