"""Attention of a transformers model over a sequence that several ranks share: the layer's view attends.

transformers looks attention up by a name in the config, which all layers share. A layer sets our name while
it runs, and puts the previous one back. The view is passed with the arguments of the call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError, raise_errors
from echelon.nn.sequence import View

NAME = "echelon"


def attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    view: View,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [batch, heads, …] in, [batch, sequence, heads, width] out.

    Values may have another width than queries and keys (DeepSeek): zeros fill up the narrower ones.
    """
    if softcap is not None:
        raise UserError(
            f"attention whose scores are capped (attn_logit_softcapping={softcap}) cannot share its sequence "
            f"over {view.parts} ranks; set attn_logit_softcapping to None, or use context=1"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    width = max(query.shape[-1], value.shape[-1])
    output = view.attend(_fill(query, width), _fill(key, width), _fill(value, width), scale)
    output = output[..., : value.shape[-1]]
    return output.transpose(1, 2).contiguous(), None


def _fill(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


@contextmanager
def attention_by_view(config: Any) -> Iterator[None]:
    """Inside, the layers of a model with this config attend through the view that they are passed."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def check_shared_sequence(block: Any, config: Any, window: int | None, length: int, view: View) -> None:
    """Refuse what attention over several ranks cannot do. `length`: of the hidden states on this rank."""
    errors = []
    total = view.whole_length(length * view.stretch)
    if window is not None and window < total:
        errors.append(
            f"sliding_window={window} with sequences of {total} tokens: ranks that share a sequence have no "
            f"window; use sequences of at most {window} tokens, or context=1"
        )
    rate = getattr(config, "attention_dropout", getattr(config, "attn_pdrop", 0.0))
    if block.training and rate > 0:
        errors.append(f"dropout of {rate} on attention's weights: no rank holds them; set it to 0")
    if block.training and getattr(block, "gradient_checkpointing", False):
        errors.append(
            "gradient_checkpointing of transformers runs a layer again without its view; call "
            "model.gradient_checkpointing_disable()"
        )
    errors += [
        f"rope_type={kind} depends on the last position, which differs between ranks; use another rope_type, "
        "or context=1"
        for kind in _rope_types(config)
        if kind in ("dynamic", "longrope")
    ]
    raise_errors(f"{type(block).__name__} with its sequence over {view.parts} ranks", errors)


def _rope_types(config: Any) -> set[str]:
    """The kinds of rotary positions, of all layers or of each kind of them."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return {each["rope_type"] for each in kinds if "rope_type" in each}
