"""State dicts <-> Hugging Face tensor names and layouts: two pure functions, no files.

One table says which of our tensors make up each Hugging Face tensor: ours are joined along dim 0 and then,
for GPT-2, transposed: its Conv1D keeps weights as [inputs, outputs], and query, key and value in one matrix.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.errors import raise_errors
from echelon.models.config import ModelConfig
from echelon.models.families import build

State = Mapping[str, Tensor]


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

_EMBEDDING, _HEAD, _HF_HEAD = "embedding.tokens.weight", "head.projection.weight", "lm_head.weight"

# Constants in older files: causal masks and rotary frequencies.
_CONSTANT = re.compile(r"\.attn\.(bias|masked_bias)$|rotary_emb\.inv_freq$")


def to_hf_state(config: ModelConfig, state: State) -> dict[str, Tensor]:
    """Our state dict under Hugging Face names and layouts. A tied head is left out, as transformers does."""
    errors: list[str] = []
    if config.tied:
        state = _without_tied(state, _HEAD, _EMBEDDING, errors)
    errors += _state_errors(state, _shapes(config))
    raise_errors("model state", errors)
    return _join(config, state)


def from_hf_state(config: ModelConfig, state: State) -> dict[str, Tensor]:
    """A Hugging Face state dict under our names and layouts, ready for `load_state_dict(strict=True)`."""
    errors: list[str] = []
    state = _canonical(_NAMES[config.family].base, state)
    if config.tied:
        state = _without_tied(state, _HF_HEAD, _NAMES[config.family].embedding, errors)
    meta = {name: torch.empty(shape, device="meta") for name, shape in _shapes(config).items()}
    errors += _state_errors(state, {name: tensor.shape for name, tensor in _join(config, meta).items()})
    raise_errors("Hugging Face weights", errors)
    return _split(config, state)


def _rules(config: ModelConfig) -> Iterator[_Rule]:
    """One rule per Hugging Face tensor."""
    names = _NAMES[config.family]
    yield _Rule(names.embedding, (_EMBEDDING,))
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
        yield _Rule(_HF_HEAD, (_HEAD,))


def _join(config: ModelConfig, state: State) -> dict[str, Tensor]:
    joined = {}
    for rule in _rules(config):
        tensors = [state[name] for name in rule.names]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        joined[rule.hf_name] = (tensor.T if rule.transposed else tensor).contiguous()
    return joined


def _split(config: ModelConfig, state: State) -> dict[str, Tensor]:
    split: dict[str, Tensor] = {}
    for rule in _rules(config):
        tensor = state[rule.hf_name].T if rule.transposed else state[rule.hf_name]
        parts = tensor.chunk(len(rule.names))
        if len(parts) > 1 or rule.transposed:  # a parameter is contiguous, and not a view of another's memory
            parts = tuple(part.clone(memory_format=torch.contiguous_format) for part in parts)
        split.update(zip(rule.names, parts, strict=True))
    if config.tied:
        split[_HEAD] = split[_EMBEDDING]
    return split


def _shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Names and shapes of our state dict, less a tied head."""
    with torch.device("meta"):
        state = build(config).state_dict()
    return {name: t.shape for name, t in state.items() if not (config.tied and name == _HEAD)}


def _canonical(base: str, state: State) -> dict[str, Tensor]:
    """Drop constants, and add the base name that files of the bare model leave out."""
    state = {name: tensor for name, tensor in state.items() if not _CONSTANT.search(name)}
    if any(name.startswith(base) for name in state):
        return state
    return {name if name == _HF_HEAD else base + name: tensor for name, tensor in state.items()}


def _without_tied(state: State, head: str, embedding: str, errors: list[str]) -> dict[str, Tensor]:
    """Drop the head of a tied model, which must equal the embedding if both are present."""
    if head in state and embedding in state and not _same(state[head], state[embedding]):
        errors.append(f"{head}: differs from {embedding}, but the config says that they are tied")
    return {name: tensor for name, tensor in state.items() if name != head}


def _same(left: Tensor, right: Tensor) -> bool:
    # A tensor on the meta device has no values that could differ.
    return left.dtype == right.dtype and (left.is_meta or torch.equal(left, right))


def _state_errors(state: State, expected: Mapping[str, torch.Size]) -> list[str]:
    errors = [f"{name}: is missing" for name in expected if name not in state]
    errors += [f"{name}: is not a tensor of this model" for name in state if name not in expected]
    for name in expected:
        if name not in state:
            continue
        tensor, shape = state[name], expected[name]
        if tensor.shape != shape:
            errors.append(f"{name}: has shape {list(tensor.shape)}, must be {list(shape)}")
        if not tensor.is_floating_point():
            errors.append(
                f"{name}: is {tensor.dtype}, must be floating point (quantised weights are not read)"
            )
    return errors
