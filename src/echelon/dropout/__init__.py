"""Dropout whose masks do not depend on the layout: a hash of where in the training an element stands.

key_dropout(model)                                 # once, on the whole model
with scope(seed=0, step=7, first_sample=16):       # around the forward pass of samples 16, 17, …
    output = model(inputs)
"""

from echelon.dropout.mask import keep_mask
from echelon.dropout.modules import (
    Places,
    drops_each_element,
    is_keyed,
    key_dropout,
    keyed_modules,
    place_dropout,
    split_features,
    unkeyed_dropout,
)
from echelon.dropout.place import Place, current, restore, scope

__all__ = [
    "Place",
    "Places",
    "current",
    "drops_each_element",
    "is_keyed",
    "keep_mask",
    "key_dropout",
    "keyed_modules",
    "place_dropout",
    "restore",
    "scope",
    "split_features",
    "unkeyed_dropout",
]
