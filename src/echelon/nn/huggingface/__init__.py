"""Everything that echelon knows of the classes of transformers.

families        models as lists of layers, known by their class
encoders        those of them that are not causal
alibi           what decoder layers with biases by distance take
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

from echelon.nn.huggingface.encoders import ENCODERS
from echelon.nn.huggingface.families import (
    FAMILIES,
    find_encoder,
    find_family,
    frequencies,
    layers_of,
    reason_not_listed,
)
from echelon.nn.huggingface.inputs import layer_inputs
from echelon.nn.huggingface.layers import modules_outside
from echelon.nn.huggingface.modules import (
    casts_to_float32,
    draws_by_function,
    draws_by_head,
    embedding_scale,
    initializer,
    is_encoder_decoder,
    is_plain_matrix,
    is_pretrained,
    is_transposed,
    rms_epsilon,
)
from echelon.nn.huggingface.own_loss import (
    ReplacedLoss,
    adapted_model,
    causal_cross_entropy,
    causal_loss,
    counts_labels,
    gate_loss_coefficients,
    is_plain_causal_loss,
    is_plain_encoder_loss,
    label_cross_entropy,
    mean_as_total,
    shift,
    shifts_labels,
    unsplit_causal_cross_entropy,
)
from echelon.nn.huggingface.tensor_tables import CONFIG_LINES, TENSOR_TABLES
from echelon.nn.huggingface.weight_layouts import (
    config_json,
    open_weights,
    weight_layout,
    write_generation_config,
)

__all__ = [
    "CONFIG_LINES",
    "ENCODERS",
    "FAMILIES",
    "TENSOR_TABLES",
    "ReplacedLoss",
    "adapted_model",
    "casts_to_float32",
    "causal_cross_entropy",
    "causal_loss",
    "config_json",
    "counts_labels",
    "draws_by_function",
    "draws_by_head",
    "embedding_scale",
    "find_encoder",
    "find_family",
    "frequencies",
    "gate_loss_coefficients",
    "initializer",
    "is_encoder_decoder",
    "is_plain_causal_loss",
    "is_plain_encoder_loss",
    "is_plain_matrix",
    "is_pretrained",
    "is_transposed",
    "label_cross_entropy",
    "layer_inputs",
    "layers_of",
    "mean_as_total",
    "modules_outside",
    "open_weights",
    "reason_not_listed",
    "rms_epsilon",
    "shift",
    "shifts_labels",
    "unsplit_causal_cross_entropy",
    "weight_layout",
    "write_generation_config",
]
