"""The layers of a transformers model: its forward, divided where one decoder layer follows another.

Layers are made for training: no cache. A model's forward computes some things once for all layers (positions,
their cosines and sines, the mask). Here every layer computes them from the shape of its input, and from the
padding mask and the positions of the batch, if it has any (inputs.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.errors import UserError, raise_errors
from echelon.nn.huggingface.inputs import MASK
from echelon.nn.huggingface.modules import rope_types
from echelon.nn.sequence import POSITIONS, WHOLE, View, repeat_last


class LayerInputs:
    """The arguments of a decoder layer beside its hidden states. It is no module, so that no stage owns the
    rotary frequencies: all ranks keep these constants."""

    masks_take_positions = True  # positions that start again separate sequences in a row

    def __init__(self, config: Any, rotary: Any, *, has_window: bool, layer_type: str | None = None) -> None:
        """`layer_type`: the kind of layer that rotary positions ask for (Gemma 3)."""
        self.config, self.rotary, self.has_window, self.layer_type = config, rotary, has_window, layer_type

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        positions = positions_of(view, x.shape[1] * view.stretch, x.device)
        arguments: dict[str, Any] = {"position_ids": positions, "past_key_values": None, "use_cache": False}
        if self.rotary is not None:
            kind = {} if self.layer_type is None else {"layer_type": self.layer_type}
            arguments["position_embeddings"] = self.rotary(x, position_ids=positions, **kind)
        if view.parts > 1:
            return arguments | {"view": view}
        return arguments | {"attention_mask": self._mask(x, view)}

    @property
    def window(self) -> int | None:
        return self.config.sliding_window if self.has_window else None

    def _mask(self, x: Tensor, view: View, **options: bool) -> Any:
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        make: Any = create_sliding_window_causal_mask if self.has_window else create_causal_mask
        # Only the shape of `inputs_embeds` counts.
        shaped = x[:, :, :1].repeat(1, view.stretch, 1) if view.stretch > 1 else x
        given: dict[str, Any] = dict(options)
        if POSITIONS in view.shared and self.masks_take_positions:  # which tell sequences in a row apart
            given["position_ids"] = repeat_last(view.shared[POSITIONS], shaped.shape[1])
        if MASK in view.shared:  # and there is padding: to look for some would stop the host
            given["allow_is_causal_skip"] = False
        mask = repeat_last(view.shared[MASK], shaped.shape[1]) if MASK in view.shared else None
        return make(
            config=self.config, inputs_embeds=shaped, attention_mask=mask, past_key_values=None, **given
        )


def positions_of(view: View, length: int, device: torch.device) -> Tensor:
    """Return the positions of the batch, or those of the sequence, [1, length]."""
    if POSITIONS in view.shared:
        return repeat_last(view.shared[POSITIONS], length)
    return view.positions(length, device)[None]


class Embedding(nn.Module):
    """Tokens to hidden states: [batch, sequence] to [batch, sequence, width]. `after`: dropout or norm."""

    def __init__(self, tokens: nn.Module, positions: nn.Embedding | None, after: nn.Module | None) -> None:
        super().__init__()
        self.tokens, self.positions, self.after = tokens, positions, after
        self.view = WHOLE

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self._positions(tokens, self.positions)
        return x if self.after is None else self.after(x)

    def _positions(self, tokens: Tensor, table: nn.Embedding) -> Tensor:
        length, longest = self.view.whole_length(tokens.shape[1]), table.num_embeddings
        if length > longest:
            raise UserError(
                f"a sequence of {length} tokens: this model has learned {longest} positions; use sequences "
                f"of at most {longest} tokens"
            )
        learned: Tensor = table(positions_of(self.view, tokens.shape[1], tokens.device))
        return learned


class DecoderLayer(nn.Module):
    """One decoder layer: hidden states to hidden states."""

    def __init__(self, block: nn.Module, inputs: LayerInputs) -> None:
        super().__init__()
        self.block, self.inputs = block, inputs
        self.view = WHOLE

    def forward(self, x: Tensor) -> Tensor:
        config, is_shared = self.inputs.config, self.view.parts > 1
        if is_shared:
            check_shared_sequence(self.block, config, self.inputs.window, x.shape[1], self.view)
        with attention_by_view(config) if is_shared else nullcontext():
            output = self.block(x, **self.inputs.arguments(x, self.view))
        hidden: Tensor = output[0] if isinstance(output, tuple) else output  # without attention's weights
        return hidden


class Head(nn.Module):
    """Hidden states to what the model returns. `cap`: logits are squeezed into (−cap, cap) by tanh."""

    def __init__(
        self, norm: nn.Module, head: nn.Module, output: Callable[..., Any], cap: float | None = None
    ) -> None:
        super().__init__()
        self.norm, self.head, self.output, self.cap = norm, head, output, cap

    def forward(self, x: Tensor) -> Any:
        logits: Tensor = self.head(self.norm(x))
        return self.output(logits=logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap)


def modules_outside(layer: nn.Module) -> set[nn.Module]:
    """Return the modules that a layer calls and does not hold: those of rotary positions."""
    rotary = layer.inputs.rotary if isinstance(layer, DecoderLayer) else None
    return set() if rotary is None else set(rotary.modules())


# Decoder layers whose attention has biases by distance (Bloom, Falcon).


_NO_CACHE: dict[str, Any] = {"layer_past": None, "use_cache": False}


class BloomInputs(LayerInputs):
    """Biases and a mask; no positions."""

    masks_take_positions = False

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        refuse_shared(self.config, view)
        biases = _biases("bloom", x, self.config.n_head, view)
        return _NO_CACHE | {"alibi": biases, "attention_mask": self._mask(x, view)}


class FalconInputs(LayerInputs):
    """Biases that are a part of the mask, or rotary positions."""

    masks_take_positions = False

    def arguments(self, x: Tensor, view: View) -> dict[str, Any]:
        refuse_shared(self.config, view)
        if self.config.alibi:
            biases = _biases("falcon", x, self.config.num_attention_heads, view)
            biases = biases.reshape(x.shape[0], -1, *biases.shape[1:])
            return _NO_CACHE | {"alibi": biases, "attention_mask": self._biased_mask(x, view, biases)}
        positions = positions_of(view, x.shape[1] * view.stretch, x.device)
        rotated = self.rotary(x, position_ids=positions)
        mask = self._mask(x, view, allow_is_causal_skip=False)
        return _NO_CACHE | {"alibi": None, "attention_mask": mask, "position_embeddings": rotated}

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
        keys = repeat_last(view.shared[MASK], length)
    biases: Tensor = modeling.build_alibi_tensor(keys, heads, dtype=x.dtype)
    return biases


# Encoders: every position attends to all others. No layer has a view, so that plans that split a sequence
# over ranks refuse these models.

Hidden = Tensor | tuple[Tensor, Tensor]  # hidden states, or these and the padding mask


class TextEmbedding(nn.Module):
    """Tokens to hidden states. A padding mask goes on with them, from layer to layer."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Hidden:
        hidden: Tensor = self.embeddings(input_ids, token_type_ids=token_type_ids, position_ids=position_ids)
        return hidden if attention_mask is None else (hidden, attention_mask)


class ImageEmbedding(nn.Module):
    """Images to hidden states, in the type of the weights."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden: Tensor = self.embeddings(pixel_values.to(next(self.embeddings.parameters()).dtype))
        return hidden


class EncoderLayer(nn.Module):
    """One encoder layer: hidden states to hidden states."""

    def __init__(self, block: nn.Module, config: Any) -> None:
        super().__init__()
        self.block, self.config = block, config

    def forward(self, value: Hidden) -> Hidden:
        if isinstance(value, Tensor):
            output: Tensor = self.block(value, attention_mask=None)
            return output
        from transformers.masking_utils import create_bidirectional_mask

        x, padding = value
        # To look whether there is padding would stop the host.
        mask = create_bidirectional_mask(self.config, x, padding, allow_is_bidirectional_skip=False)
        return self.block(x, attention_mask=mask), padding


class EncoderHead(nn.Module):
    """Hidden states to what the model returns."""

    def __init__(
        self, modules: Sequence[nn.Module], output: Callable[..., Any], *, takes_first: bool
    ) -> None:
        super().__init__()
        self.chain, self.output, self.takes_first = nn.ModuleList(modules), output, takes_first

    def forward(self, value: Hidden) -> Any:
        first, *others = self.chain
        x = first(value if isinstance(value, Tensor) else value[0])
        x = x[:, 0] if self.takes_first else x
        for module in others:
            x = module(x)
        return self.output(logits=x)


# Attention of a transformers model over a sequence that several ranks share: the layer's view attends.

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
    """Attention as transformers calls it: [batch, heads, …] in, [batch, sequence, heads, width] out. Values
    may have another width than queries and keys (DeepSeek): zeros fill up the narrower ones."""
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
    """Let the layers of a model with this config attend through the view that they are passed."""
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
        for kind in rope_types(getattr(config, "rope_parameters", None))
        if kind in ("dynamic", "longrope")
    ]
    raise_errors(f"{type(block).__name__} with its sequence over {view.parts} ranks", errors)
