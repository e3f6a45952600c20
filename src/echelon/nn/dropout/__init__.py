"""Dropout whose masks do not depend on the layout: a hash of each element's position in the training.

key_dropout(model, Wrapping())                     # once, on the whole model
with scope(seed=0, step=7, first_sample=16):       # around the forward pass of samples 16, 17, …
    output = model(inputs)
"""

from echelon.nn.dropout.ahead import draw_ahead
from echelon.nn.dropout.mask import keep_mask
from echelon.nn.dropout.modules import (
    GlobalIndices,
    KeyedDropout,
    draw_masks_again,
    drops_each_element,
    is_keyed,
    key_dropout,
    keyed_layer,
    keyed_modules,
    recurrent_dropout,
    set_global_indices,
    split_features,
    unkeyed_dropout,
)
from echelon.nn.dropout.noise import KeyedNoise, noises
from echelon.nn.dropout.training_position import (
    TrainingPosition,
    check_samples,
    counted_samples,
    current,
    next_use,
    restore,
    scope,
)

__all__ = [
    "GlobalIndices",
    "KeyedDropout",
    "KeyedNoise",
    "TrainingPosition",
    "check_samples",
    "counted_samples",
    "current",
    "draw_ahead",
    "draw_masks_again",
    "drops_each_element",
    "is_keyed",
    "keep_mask",
    "key_dropout",
    "keyed_layer",
    "keyed_modules",
    "next_use",
    "noises",
    "recurrent_dropout",
    "restore",
    "scope",
    "set_global_indices",
    "split_features",
    "unkeyed_dropout",
]
