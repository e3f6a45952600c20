"""The tensors of GPT and Llama in Hugging Face files: one table, for reading and for writing.

It says which of our tensors make up each Hugging Face tensor: ours are joined along dim 0 and then, for
GPT-2, transposed: its Conv1D keeps weights as [inputs, outputs], and query, key and value in one matrix.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from echelon.models.config import ModelConfig
from echelon.weight_files import FileTensor, Piece, WeightLayout


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
            _Rule("mlp.gate_proj", ("mlp.gate",)),
            _Rule("mlp.up_proj", ("mlp.up",)),
            _Rule("mlp.down_proj", ("mlp.down",)),
        ),
    ),
}

EMBEDDING, HEAD, _HF_HEAD = "embedding.tokens.weight", "head.projection.weight", "lm_head.weight"

# Constants in older files: causal masks and rotary frequencies.
_CONSTANT = re.compile(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$")


def hf_layout(config: ModelConfig, state: Mapping[str, Tensor], names: Collection[str] = ()) -> WeightLayout:
    """The layout of files with tensors of these names; without names, of those that we write.

    Files of the bare model lack the base name. A tied head is left out, as transformers does, or is a copy.
    `state` has the shapes of ours.
    """
    base = _NAMES[config.family].base
    constants = {name for name in names if _CONSTANT.search(name)}
    is_bare = bool(names) and not any(name.startswith(base) for name in names if name not in constants)
    tensors = {}
    for rule in _rules(config):
        stored = rule.hf_name.removeprefix(base) if is_bare else rule.hf_name
        tensors[stored] = _join(rule._replace(hf_name=stored), state)
    embedding = next(iter(tensors))
    return WeightLayout(
        tensors=tensors,
        ties={HEAD: EMBEDDING} if config.tied else {},
        copies={_HF_HEAD: embedding} if config.tied and _HF_HEAD in names else {},
        ignored=constants,
    )


def _rules(config: ModelConfig) -> Iterator[_Rule]:
    """One rule per Hugging Face tensor; the embedding's is the first."""
    names = _NAMES[config.family]
    yield _Rule(names.embedding, (EMBEDDING,))
    for hf_name, name in names.outside_blocks.items():
        yield _Rule(hf_name, (name,))
    for index in range(config.layers):
        for part in names.parts:
            for kind in ("weight", "bias") if config.bias else ("weight",):
                yield _Rule(
                    f"{names.block}{index}.{part.hf_name}.{kind}",
                    tuple(f"blocks.{index}.{name}.{kind}" for name in part.names),
                    transposed=part.transposed and kind == "weight",
                )
    if not config.tied:
        yield _Rule(_HF_HEAD, (HEAD,))


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
