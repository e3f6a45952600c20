"""Everything that echelon knows of the classes of transformers.

families        causal language models as lists of layers, known by their class
layers          the wrappers around a model's own modules that are listed
inputs          the arguments of a forward, for layers
attention       attention over a sequence that several ranks share
modules         properties of single modules: storage, randomness, precision
tensor_tables   how tensor parallelism splits each family
weight_layouts  folders with the weights of any model
own_loss        losses that models compute themselves
config_check    whether the config.json of a folder is that of a model

transformers itself is imported only where a model of it is at hand.
"""

from echelon.huggingface.families import FAMILIES, find_family, frequencies, layers_of, reason_not_listed
from echelon.huggingface.inputs import layer_inputs
from echelon.huggingface.layers import modules_outside
from echelon.huggingface.modules import (
    casts_to_float32,
    draws_by_function,
    draws_by_head,
    initializer,
    is_pretrained,
    is_transposed,
)
from echelon.huggingface.own_loss import (
    ReplacedLoss,
    causal_cross_entropy,
    causal_loss,
    counts_labels,
    is_plain_causal_loss,
    mean_as_total,
    shift,
    shifts_labels,
    unsplit_causal_cross_entropy,
)
from echelon.huggingface.tensor_tables import TENSOR_TABLES
from echelon.huggingface.weight_layouts import (
    config_json,
    open_weights,
    weight_layout,
    write_generation_config,
)

__all__ = [
    "FAMILIES",
    "TENSOR_TABLES",
    "ReplacedLoss",
    "casts_to_float32",
    "causal_cross_entropy",
    "causal_loss",
    "config_json",
    "counts_labels",
    "draws_by_function",
    "draws_by_head",
    "find_family",
    "frequencies",
    "initializer",
    "is_plain_causal_loss",
    "is_pretrained",
    "is_transposed",
    "layer_inputs",
    "layers_of",
    "mean_as_total",
    "modules_outside",
    "open_weights",
    "reason_not_listed",
    "shift",
    "shifts_labels",
    "unsplit_causal_cross_entropy",
    "weight_layout",
    "write_generation_config",
]
