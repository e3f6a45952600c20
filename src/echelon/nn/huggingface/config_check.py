"""Whether the config.json of a folder is that of a model: tensors of equal names and shapes do not show it.

Llama 2 and 3 differ in the base of their rotary positions: a model that is built with the wrong one takes all
tensors of the folder, runs, and is wrong.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from echelon.errors import UserError
from echelon.nn.huggingface.modules import is_pretrained
from echelon.state.weight_files import CONFIG, read_json

# What does not change the output: randomness in training, first values, tokens, caches, other outputs, ties
# and sizes that the tensors show, and windows, of which `layer_types` has the result.
_IRRELEVANT = re.compile(
    r"dropout|pdrop|layerdrop|jitter|_token_id$|aux_loss"
    r"|^(use_cache|tie_|init|output_|summary_|pretraining_tp|reorder_and_upcast_attn)"
    r"|^(head_dim|n_inner|n_positions|n_ctx|max_window_layers|use_sliding_window)$"
)
# Learned positions show it in their shape, and of rotary positions only these kinds depend on it.
_LENGTH = "max_position_embeddings"
_SCALED_BY_LENGTH = {"dynamic", "longrope", "yarn"}


def config_errors(folder: str | Path, model: nn.Module) -> list[str]:
    """Differences between the config of a folder, if it has one, and of a model, if it knows its own."""
    path = Path(folder) / CONFIG
    own: Any = getattr(model, "config_errors", None)
    if not path.is_file() or not (callable(own) or is_pretrained(model)):
        return []
    try:
        raw = read_json(path)
    except UserError as error:
        return [error.title]
    errors: list[str] = own(raw) if callable(own) else _errors_of_transformers(model.config, raw)
    return errors


def _errors_of_transformers(config: Any, raw: Mapping[str, Any]) -> list[str]:
    kind: Any = type(config)
    part = raw.get(kind.base_config_key, raw)  # of a model with several parts
    if part.get("model_type", kind.model_type) != kind.model_type:
        return [_difference("model_type", part["model_type"], kind.model_type)]
    try:
        stored = kind.from_dict(dict(part)).to_dict()
    except Exception as error:  # of any class: configs check their fields themselves
        return [f"{CONFIG}: {kind.__name__} cannot be made from it: {' '.join(str(error).split())}"]
    base = next(each for each in kind.__mro__ if each.__name__ == "PreTrainedConfig")
    common = base().to_dict().keys()  # labels, types and the like, which every model has
    theirs, ours = _relevant(stored, common), _relevant(config.to_dict(), common)
    # A name that only one of both has is unknown to the class, which has a value for each that it knows.
    return [
        _difference(name, theirs[name], value)
        for name, value in ours.items()
        if name in theirs and theirs[name] != value
    ]


def _relevant(config: Mapping[str, Any], common: Collection[str], prefix: str = "") -> dict[str, Any]:
    """The fields that change what a model computes; those of configs in it have dotted names."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        if name in common or _IRRELEVANT.search(name) or (name == _LENGTH and not _is_length_used(config)):
            continue
        if isinstance(value, dict) and "model_type" in value:
            fields |= _relevant(value, common, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields


def _is_length_used(config: Mapping[str, Any]) -> bool:
    """Whether rotary positions, of all layers or of one kind of them, are scaled by the longest sequence."""
    rope = config.get("rope_parameters") or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return any(each.get("rope_type") in _SCALED_BY_LENGTH for each in kinds)


def _difference(name: str, stored: object, own: object) -> str:
    return f"{CONFIG} says {name}={stored!r}, the model has {own!r}; build the model from the folder's config"
