"""Hugging Face folders for any model: which tensor in the files is which of the model's.

    weights = open_weights("Mixtral-8x7B", model)
    weights.check()
    (rows,) = weights.read("lm_head.weight", [box])

Files of transformers may have older names than the model, other prefixes, and tensors that become one in the
model. transformers itself says what becomes what. Tensors that it stacks (one for each expert) are read where
they lie, and written so; files that it converts in another way are refused.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.nn.huggingface.modules import is_pretrained, rope_types
from echelon.state.weight_files.layout import (
    FileTensor,
    Piece,
    WeightLayout,
    find_ties,
    plain_layout,
    state_tensors,
    whole_tensor,
)
from echelon.state.weight_files.weight_folder import CONFIG, WeightFolder, read_json

# What transformers does to make one tensor of several, with the dims: (experts, rows, …) from (rows, …).
_STACKING = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])


def open_weights(folder: str | Path, model: nn.Module) -> WeightFolder:
    """Open the weights for a model in a folder. The model gives shapes, and may be on the meta device."""
    return WeightFolder(folder, partial(weight_layout, model), config_errors(folder, model))


def weight_layout(
    model: nn.Module, names: Collection[str] = (), state: Mapping[str, object] | None = None
) -> WeightLayout:
    """Return how files with tensors of these names hold a model; without names, how to write them.

    A model of echelon knows, transformers knows its own; any other has the names of its state dict. `state`
    is that dict, if the model itself has only parts of it.
    """
    own: Any = getattr(model, "weight_layout", None)
    if callable(own):
        layout: WeightLayout = own(names, state)
        return layout
    layout_of = _layout_of_transformers if is_pretrained(model) else plain_layout
    return layout_of(model, names, state)


def config_json(model: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a model with weights of this type; of one without a config, its class."""
    raw: dict[str, Any] = {"architectures": [type(model).__name__]}
    if callable(getattr(model, "config_json", None)):
        raw = model.config_json(dtype)
    elif is_pretrained(model):
        config = deepcopy(model.config)
        config.architectures, config.dtype = raw["architectures"], dtype
        raw = json.loads(config.to_json_string())
    return raw


def write_generation_config(model: Any, folder: str | Path) -> None:
    """Write how a model of transformers generates text, if it does."""
    if is_pretrained(model) and model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


class _Matches(NamedTuple):
    """The names in files, as transformers matches them with a model."""

    stored: dict[str, str]  # the model's name → the file's
    stacked: dict[str, list[list[str]]]  # the model's name → the files', for each part of every expert
    converted: dict[str, Any]  # the model's name → how it is made, where that is not supported
    refused: list[str]  # the files' names that it is made of
    unknown: list[str]


def _layout_of_transformers(
    model: Any, names: Collection[str], given: Mapping[str, object] | None
) -> WeightLayout:
    if not names and not all(map(_is_stacking, _transforms(model)[1])):
        return plain_layout(model, (), given)  # transformers reads the model's own names too
    state, problems = state_tensors(model, given)
    matches = _match(model, names or _names_to_write(model, state), state)
    ties = _find_ties(model, state, {*matches.stored, *matches.stacked})
    tensors: dict[str, FileTensor] = {}
    for name, tensor in state.items():
        if name in matches.stacked:
            tensors |= _split_stack(name, tensor, matches.stacked[name])
        elif name not in ties and name not in matches.converted:
            stored = matches.stored.get(name, name)
            tensors[stored] = whole_tensor(name, tensor, stored)
    return WeightLayout(
        tensors,
        ties,
        copies={
            matches.stored[name]: matches.stored[first]
            for name, first in ties.items()
            if name in matches.stored and first in matches.stored
        },
        ignored={*matches.refused, *_constants(model, matches.unknown)},
        problems=[*problems, *_stack_errors(state, matches.stacked), *_conversion_errors(matches.converted)],
    )


def _match(model: Any, names: Collection[str], state: dict[str, Tensor]) -> _Matches:
    loading, (renamings, converters) = _loading(), _transforms(model)
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    matches = _Matches({}, {}, {}, [], [])
    # Experts in the order of their numbers, and names in the order that renamings expect.
    for stored in sorted(names, key=loading.dot_natural_key):
        prefix = model.base_model_prefix
        name, pattern = loading.rename_source_key(stored, renamings, converters, prefix, state)
        if name not in state and stored in state:
            name, pattern = loading.rename_source_key(stored, [], [], prefix, state)
        if name not in state or name in matches.stored:
            matches.unknown.append(stored)
        elif pattern is None:
            matches.stored[name] = stored
        elif _is_stacking(by_pattern[pattern]):
            patterns = by_pattern[pattern].source_patterns
            matches.stacked.setdefault(name, [[] for _ in patterns])[patterns.index(pattern)].append(stored)
        else:
            first, *others = by_pattern[pattern].target_patterns
            made = [name, *(name.replace(first, other) for other in others)]
            matches.converted.update(dict.fromkeys(made, by_pattern[pattern]))
            matches.refused.append(stored)
    return matches


def _transforms(model: Any) -> tuple[list[Any], list[Any]]:
    """Return what transformers does to files of a model: renamings, and conversions of tensors."""
    loading = _loading()
    transforms = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    return renamings, [each for each in transforms if isinstance(each, loading.WeightConverter)]


def _loading() -> Any:
    """Import the module with which transformers loads files."""
    try:
        return import_module("transformers.core_model_loading")
    except ImportError as error:
        raise UserError(
            "this version of transformers loads files in another way; install transformers>=5.22"
        ) from error


def _is_stacking(converter: Any) -> bool:
    operations = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    return operations in _STACKING and len(converter.target_patterns) == 1


def _names_to_write(model: Any, state: Mapping[str, Tensor]) -> list[str]:
    """List the names that transformers would write."""
    ties = find_ties(state, ())
    shapes = {name: torch.empty_like(t, device="meta") for name, t in state.items() if name not in ties}
    return list(_loading().revert_weight_conversion(model, shapes))


def _find_ties(model: Any, state: Mapping[str, Tensor], names: Collection[str]) -> dict[str, str]:
    """Tied in the model; or by its config, where the files hold one of the two only."""
    ties = find_ties(state, names)
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        if name not in names and name not in ties and source in names:
            ties[name] = source
    return ties


def _split_stack(name: str, tensor: Tensor, parts: Sequence[Sequence[str]]) -> dict[str, FileTensor]:
    """Split a stacked tensor into those of single experts: of each, its rows of every part."""
    num_rows, *rest = tensor.shape[1:]
    shape = (num_rows // len(parts), *rest)
    origin = (0,) * len(shape)
    tensors = {}
    for part, stored_names in enumerate(parts):
        for expert, stored in enumerate(stored_names):
            offsets = (expert, part * shape[0], *origin[1:])
            piece = Piece(name, offsets, (1, *shape), stored, origin)
            tensors[stored] = FileTensor(stored, shape, tensor.dtype, (piece,))
    return tensors


def _stack_errors(state: Mapping[str, Tensor], stacked: Mapping[str, Sequence[Sequence[str]]]) -> list[str]:
    return [
        f"{name}: {len(stored)} tensors of the files ({', '.join(stored[:1])}, …) are stacked in it, must be "
        f"{len(state[name])}"
        for name, parts in stacked.items()
        for stored in parts
        if len(stored) != len(state[name])
    ]


def _conversion_errors(converted: Mapping[str, Any]) -> list[str]:
    """List one error for all tensors that are made alike."""
    names_of: dict[str, list[str]] = {}
    for name, converter in converted.items():
        operations = ", ".join(type(each).__name__ for each in converter.operations)
        names_of.setdefault(operations, []).append(name)
    return [
        f"{len(names)} tensors ({names[0]}, …): transformers makes them by {operations}, which is not "
        "supported here; load the model with from_pretrained"
        for operations, names in names_of.items()
    ]


def _constants(model: Any, names: Collection[str]) -> set[str]:
    """Constants of older files that transformers does not read either."""
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"}
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


# Whether the config.json of a folder is that of a model: tensors of equal names and shapes do not show it.

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
    differing = [name for name in ours if name in theirs and theirs[name] != ours[name]]
    return [_difference(name, theirs[name], ours[name]) for name in differing]


def _relevant(config: Mapping[str, Any], common: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Return the fields that change what a model computes; those of configs in it have dotted names."""
    fields: dict[str, Any] = {}
    for name, value in config.items():
        is_scaled = not _SCALED_BY_LENGTH.isdisjoint(rope_types(config.get("rope_parameters")))
        if name in common or _IRRELEVANT.search(name) or (name == _LENGTH and not is_scaled):
            continue
        if isinstance(value, dict) and "model_type" in value:
            fields |= _relevant(value, common, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields


def _difference(name: str, stored: object, own: object) -> str:
    return f"{CONFIG} says {name}={stored!r}, the model has {own!r}; build the model from the folder's config"
