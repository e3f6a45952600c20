"""The view of a layer on the sequence. Layers ask their `view`, so that several ranks can share a sequence.

A layer that needs positions, or mixes them (attention), has an attribute `view`. It is `WHOLE` until context
parallelism assigns another one.

A row of tokens may hold several documents, one behind the other (packed). Their positions start again:

    tokens       the cat sat . a dog .         attention   ■ · · · · · ·      ■ attends
    positions     0   1   2  3 0  1  2                     ■ ■ · · · · ·
                                                           ■ ■ ■ · · · ·
    So no position attends to another document:            ■ ■ ■ ■ · · ·
                                                           · · · · ■ · ·
                                                           · · · · ■ ■ ·
                                                           · · · · ■ ■ ■
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.nn.wrapping import Wrapping


class View:
    """All positions are on this rank, in order. Subclasses know other layouts (`context_parallel`)."""

    parts = 1  # ranks that share the sequence, each with an equal number of positions
    stretch = 1  # positions inside attention per position of the hidden states between layers
    true_length: int | None = None  # of the whole sequence, where it is padded: later positions are padding
    shared: Mapping[str, Any] = MappingProxyType({})  # of a batch, what every layer may ask for

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions in the whole sequence of the `length` tokens on this rank, [length]. Padding
        has the last position of the sequence: a model may have learned no later one."""
        return self._in_sequence(torch.arange(length, device=device))

    def whole_length(self, length: int) -> int:
        """Count the positions of the whole sequence, without padding, where `length` are on this rank."""
        padded = length * self.parts
        return padded if self.true_length is None else min(padded, self.true_length)

    @contextmanager
    def seeing(self, true_length: int | None, shared: Mapping[str, Any]) -> Iterator[None]:
        """Inside, it is the view on a sequence of this length, with what every layer may ask for."""
        before = self.true_length, self.shared
        self.true_length, self.shared = true_length, shared
        try:
            yield
        finally:
            self.true_length, self.shared = before

    def _in_sequence(self, positions: Tensor) -> Tensor:
        return positions if self.true_length is None else positions.clamp(max=self.true_length - 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
        """Causal attention of the queries on this rank over the whole sequence. [batch, heads, sequence,
        head_width] each; keys and values may have fewer heads."""
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
        )

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, position_ids: Tensor) -> Tensor:
        """The same within documents, which positions [batch, sequence] tell apart."""
        assert self.parts == 1, "ranks that share a sequence take no positions"
        is_grouped, mask = query.shape[1] != key.shape[1], document_mask(position_ids)
        return F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=is_grouped)

    def packed_positions(self, length: int) -> Tensor | None:
        """Return the positions [batch, length] of packed documents, if every layer was given some."""
        given = self.shared.get(POSITIONS)
        return None if given is None else repeat_last(given, length)


POSITIONS = "position_ids"  # the argument of a model, as transformers calls it
WHOLE = View()


def document_mask(position_ids: Tensor) -> Tensor:
    """Return which positions attend to which, bool [batch, 1, sequence, sequence]: see the picture above."""
    starts = position_ids[:, 1:] != position_ids[:, :-1] + 1
    documents = F.pad(starts.cumsum(-1), (1, 0))
    return (documents[:, :, None] == documents[:, None, :]).tril()[:, None]


def repeat_last(values: Tensor, length: int) -> Tensor:
    """[samples, positions] with the last position repeated, as padded hidden states are."""
    missing = length - values.shape[1]
    return values if missing == 0 else torch.cat([values, values[:, -1:].expand(-1, missing)], 1)


def assign(model: nn.Module, view: View, wrapping: Wrapping) -> int:
    """Give this view to every layer of `model` that has one; returns how many do."""
    layers = [module for module in model.modules() if isinstance(getattr(module, "view", None), View)]
    for layer in layers:
        wrapping.assign(layer, "view", view)
    return len(layers)
