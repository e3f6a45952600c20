"""Attention of a transformers model over a sequence that is spread over ranks: by the layer's view.

transformers looks attention up by a name in the config, which all layers share. The name is ours while a
layer runs, and what it was before and after. The view travels with the arguments of the call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from echelon.errors import raise_errors
from echelon.sequence import View

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
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [batch, heads, …] in, [batch, sequence, heads, width] out."""
    return view.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


@contextmanager
def attending(config: Any) -> Iterator[None]:
    """Inside, the layers of a model with this config attend through the view that they are given."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def check_spread(block: Any, config: Any, window: int | None, length: int, view: View) -> None:
    """Refuse what attention over several ranks cannot do."""
    errors = []
    whole = length * view.stretch * view.parts
    if window is not None and window < whole:
        errors.append(
            f"sliding_window={window} with sequences of {whole} tokens: ranks pass all keys on, and see the "
            f"whole sequence; use sequences of at most {window} tokens, or context=1"
        )
    rate = getattr(config, "attention_dropout", getattr(config, "attn_pdrop", 0.0))
    if block.training and rate > 0:
        errors.append(f"dropout of {rate} on attention's weights, which no rank holds whole; set it to 0")
    if block.training and getattr(block, "gradient_checkpointing", False):
        errors.append(
            "gradient_checkpointing of transformers runs a layer again without its view; call "
            "model.gradient_checkpointing_disable()"
        )
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        errors.append(f"rope_type={kind} depends on the longest position, and ranks see different ones")
    raise_errors(f"{type(block).__name__} with its sequence over {view.parts} ranks", errors)
