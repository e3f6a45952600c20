"""Attention of a transformers model over a sequence that several ranks share: the layer's view attends.

transformers looks attention up by a name in the config, which all layers share. A layer sets our name while
it runs, and puts the previous one back. The view is passed with the arguments of the call.
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
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        errors.append(
            f"rope_type={kind} depends on the last position, which differs between ranks; use another "
            "rope_type, or context=1"
        )
    raise_errors(f"{type(block).__name__} with its sequence over {view.parts} ranks", errors)
