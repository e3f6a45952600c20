"""Everything that echelon knows of the classes of transformers; it imports them only for a model of them.

families        models as lists of layers, known by their class
layers          the wrappers around a model's own modules that are listed
inputs          the arguments of a forward, for layers
modules         properties of single modules: storage, randomness, precision
adapters        models inside of adapters of peft; adapters in files, and merged
tensor_tables   how tensor parallelism splits each family
weight_layouts  folders with the weights of any model
own_loss        losses that models compute themselves
"""

from echelon.nn.huggingface.weight_layouts import config_json, open_weights, weight_layout

__all__ = ["config_json", "open_weights", "weight_layout"]
