"""The shape of a module that is a stack of transformer layers: by its config, or by a run on fake tensors.

A run on fake tensors computes nothing and needs no memory. It shows what sizes alone do not: the heads of
attention, how long a sequence is, and whether it is causal. The rest follows from the weights:

    layers     the largest list of modules that are alike
    hidden     the inputs of most of their linear maps
    attention  its heads and widths, from what the fused kernel was given
    ffn        what is left of a layer's matrices; gated if they are three

Parameters that fit nowhere are counted as such, so that their number is exact.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from echelon.errors import UserError
from echelon.models.config import ModelConfig
from echelon.planner.shape.huggingface import is_chain, shape_from_config
from echelon.planner.shape.presets import shape_of
from echelon.planner.shape.shape import ModelShape

_GATED_MATRICES = 3


class _Attention(NamedTuple):
    """What a fused kernel was given: heads of queries and of keys, the width of one, tokens, the mask."""

    heads: int
    kv_heads: int
    width: int
    sequence: int
    causal: bool


class _Recorder(TorchFunctionMode):
    """Remembers the calls of fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Attention] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            query, key = args[0], args[1]
            causal = (
                given.get("is_causal")
                or given.get("attn_mask", args[3] if len(args) > 3 else None) is not None
            )
            self.calls.append(
                _Attention(query.shape[-3], key.shape[-3], query.shape[-1], query.shape[-2], bool(causal))
            )
        elif func is nn.functional.multi_head_attention_forward:  # which calls the kernel out of sight
            (sequence, *_, width), heads = args[0].shape, args[4]
            causal = given.get("is_causal") or given.get("attn_mask") is not None
            self.calls.append(_Attention(heads, heads, width // heads, sequence, bool(causal)))
        return func(*args, **(kwargs or {}))


def shape_of_module(
    module: nn.Module, *inputs: Any, name: str = "module", named: Mapping[str, Any] | None = None
) -> ModelShape:
    """Return the shape of a module. `inputs` are those of one call: tensors of any device, also `meta`;
    `named` are those that have names.

    shape_of_module(model, torch.zeros(1, 2048, dtype=torch.long))
    """
    config = getattr(module, "config", None)
    if isinstance(config, ModelConfig):
        return shape_of(config, name)
    if callable(getattr(config, "to_dict", None)):
        with suppress(UserError):
            raw = config.to_dict()  # type: ignore[union-attr]
            shape = shape_from_config(raw, name)
            return replace(shape, plain=is_chain(raw, shape.norm_vectors))
    if not inputs and not named:
        raise UserError(f"'{name}' has no config: give the inputs of a call, whose values do not matter")
    return _from_trace(module, _trace(module, inputs, named or {}, name), name)


def _trace(
    module: nn.Module, inputs: tuple[Any, ...], named: Mapping[str, Any], name: str
) -> list[_Attention]:
    recorder = _Recorder()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad(), recorder:
            fakes: dict[str, Tensor] = {
                key: mode.from_tensor(value.to("meta")) for key, value in module.state_dict().items()
            }
            given = tree_map_only(
                Tensor, lambda each: mode.from_tensor(each.to("meta")), (inputs, dict(named))
            )
            torch.func.functional_call(module, fakes, *given)
    except Exception as error:
        raise UserError(f"'{name}' cannot be run on fake tensors: {type(error).__name__}: {error}") from error
    return recorder.calls


def _from_trace(module: nn.Module, calls: list[_Attention], name: str) -> ModelShape:
    layers = max(_stacks(module), key=len, default=[])
    linears = [each for each in layers[0].modules() if isinstance(each, nn.Linear)] if layers else []
    if len(layers) < 2 or not linears or not calls:
        raise UserError(
            f"'{name}' is no stack of transformer layers with fused attention: no list of modules that are "
            "alike has linear maps and calls scaled_dot_product_attention; write its ModelShape"
        )
    attention = calls[0]
    hidden = Counter(each.in_features for each in linears).most_common(1)[0][0]
    mixed = hidden * (2 * attention.heads + 2 * attention.kv_heads) * attention.width
    left = sum(each.weight.numel() for each in linears) - mixed
    embeddings = [each for each in module.modules() if isinstance(each, nn.Embedding)]
    tokens = max(embeddings, key=lambda each: each.num_embeddings, default=None)
    vocab = tokens.num_embeddings if tokens else 1
    heads = [each for each in module.modules() if isinstance(each, nn.Linear) and each.out_features == vocab]
    norms = [each for each in layers[0].modules() if type(each).__name__.endswith("Norm")]
    num_wide = sum(each.weight.numel() > hidden * attention.width for each in linears)
    gated = num_wide - _attention_linears(linears, attention, hidden) >= _GATED_MATRICES
    shape = ModelShape(
        name,
        len(layers),
        hidden,
        attention.heads,
        vocab,
        attention.sequence,
        kv_heads=attention.kv_heads,
        ffn=max(0, left // (hidden * (_GATED_MATRICES if gated else 2))),
        head_width=attention.width,
        gated=gated,
        tied=not heads or (tokens is not None and heads[-1].weight is tokens.weight),
        bias=any(each.bias is not None for each in linears),
        norm_vectors=2 if any(getattr(each, "bias", None) is not None for each in norms) else 1,
        bidirectional=not attention.causal,
    )
    missing = sum(parameter.numel() for parameter in module.parameters()) - shape.num_parameters
    return ModelShape(**{**_fields(shape), "other_parameters": missing})


def _attention_linears(linears: list[nn.Linear], attention: _Attention, hidden: int) -> int:
    """How many of a layer's linear maps attention has: they come first, and have its parameters together."""
    wanted = hidden * (2 * attention.heads + 2 * attention.kv_heads) * attention.width
    seen = 0
    for count, linear in enumerate(linears, start=1):
        seen += linear.weight.numel()
        if seen >= wanted:
            return count
    return len(linears)


def _stacks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Lists of children that are alike: of one class, with as many parameters."""
    for parent in module.modules():
        alike: dict[tuple[type, int], list[nn.Module]] = {}
        for child in parent.children():
            size = sum(parameter.numel() for parameter in child.parameters())
            if size:
                alike.setdefault((type(child), size), []).append(child)
        yield from alike.values()


def _fields(shape: ModelShape) -> dict[str, Any]:
    return {field: getattr(shape, field) for field in ModelShape.__dataclass_fields__}
