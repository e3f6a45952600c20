"""A table applied to a model: every parameter is what this rank holds of it, and split modules know their
way in and out."""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.collectives import Group
from echelon.errors import raise_faults
from echelon.tensor_parallel.modules import (
    Column,
    EnterFirst,
    Experts,
    Row,
    VocabularyEmbedding,
    is_matrix,
    is_transposed,
)
from echelon.tensor_parallel.regions import Region
from echelon.tensor_parallel.shards import Shard
from echelon.tensor_parallel.styles import OF_MODULES, Style, Styles, Table


class Sharded(NamedTuple):
    """What has become of a model's parameters, of which all but `shards` are whole on every rank.

    `partial`: every rank has a part of their gradient. `by_heads` are dropouts of the heads that are here.
    `splits_logits`: whether a projection to logits is split by vocabulary.
    """

    region: Region
    shards: dict[str, Shard]  # by the parameter's first name
    partial: dict[nn.Parameter, str]
    replicated: dict[nn.Parameter, str]
    by_heads: list[nn.Module]
    splits_logits: bool


def split_over(
    model: nn.Module,
    group: Group,
    table: Table | None,
    *,
    sequence: bool,
    whole_sequence: Sequence[nn.Module],
    join_logits: bool,
) -> Sharded:
    """Split `model` in place, starting from the weights of the first rank.

    `whole_sequence`: the modules that see all of it although hidden states are split along the `sequence`.
    `join_logits`: the loss takes all logits.
    """
    styles = Styles(model, table)
    found = {name: styles.of(name) for name, _ in model.named_modules()}
    raise_faults(
        f"tensor={group.size}",
        [
            *_unknown(model, found),
            *_mismatches(model, found, group.size),
            *_tie_faults(model, found),
            *_number_faults(model, styles, group.size),
        ],
    )
    _start_equal(model, group)
    _divide_numbers(model, styles, group.size)
    region = Region(group, sequence=sequence)
    sharded = Sharded(region, {}, {}, {}, [], _splits_logits(model, found))
    names = {parameter: name for name, parameter in model.named_parameters()}
    kept: dict[nn.Parameter, nn.Parameter] = {}  # what becomes of each that is split
    for name, module in model.named_modules():
        style = found[name]
        if style is None:
            continue
        split = dict(_shards(module, style, group))
        apart = style.word == "heads" or (sequence and module not in whole_sequence)
        for parameter in module.parameters(recurse=False):
            if parameter in split:
                sharded.shards[names[parameter]] = split[parameter]
                kept.setdefault(parameter, _part_of(parameter, split[parameter]))
            else:
                (sharded.partial if apart else sharded.replicated)[parameter] = names[parameter]
        if style.word == "heads" and isinstance(module, _DropoutNd):
            sharded.by_heads.append(module)
        _set_forward(module, style, region, join_logits)
    _replace(model, kept)
    return sharded


def _splits_logits(model: nn.Module, found: dict[str, Style | None]) -> bool:
    split = [name for name, style in found.items() if style is not None and style.word == "vocabulary"]
    return any(not isinstance(model.get_submodule(name), nn.Embedding) for name in split)


def _part_of(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """This rank's share of a parameter: a new one, since autograd remembers the shape of one it has seen."""
    part = nn.Parameter(shard.take(parameter.data), requires_grad=parameter.requires_grad)
    part.__dict__.update(parameter.__dict__)
    return part


def _replace(model: nn.Module, kept: dict[nn.Parameter, nn.Parameter]) -> None:
    """Wherever it stands: tied modules stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in kept:
                module._parameters[name] = kept[parameter]


def _shards(module: nn.Module, style: Style, group: Group) -> Iterator[tuple[nn.Parameter, Shard]]:
    """The parameters of a module that are split, and how."""
    for name, dim, parts in _dims(module, style):
        parameter = getattr(module, name)
        if parameter is not None:
            size = parameter.shape[dim] // parts
            yield parameter, Shard(dim, (size,) * parts, group.rank, group.size)


def _dims(module: nn.Module, style: Style) -> list[tuple[str, int, int]]:
    """(parameter, split dim, matrices in one) of a module."""
    outputs, inputs = (1, 0) if is_transposed(module) else (0, 1)
    if style.word == "experts":
        return [("gate_up_proj", 1, 2), ("down_proj", 2, 1)]
    if style.word == "vocabulary" and isinstance(module, nn.Embedding):
        return [("weight", 0, 1)]
    if style.word in ("column", "vocabulary"):
        return [("weight", outputs, style.parts), ("bias", 0, style.parts)]
    return [("weight", inputs, 1)] if style.word == "row" else []


def _set_forward(module: nn.Module, style: Style, region: Region, join_logits: bool) -> None:
    forward: Any = None
    if style.word == "column":
        forward = Column(module, region)
    elif style.word == "row":
        forward = Row(module, region)
    elif style.word == "experts":
        forward = Experts(module, region)
    elif style.word == "vocabulary" and isinstance(module, nn.Embedding):
        forward = VocabularyEmbedding(module, region)
    elif style.word == "region":
        module.register_forward_pre_hook(EnterFirst(region), with_kwargs=True)
    elif style.word == "vocabulary":
        forward = Column(module, region, joined=join_logits)
    if forward is not None:
        module.forward = forward


@torch.no_grad()
def _start_equal(model: nn.Module, group: Group) -> None:
    with group.ledger.about("parameters"):
        for tensor in [*model.parameters(), *model.buffers()]:
            packed = tensor.detach().contiguous()
            group.broadcast(packed, source=0)
            tensor.copy_(packed)


# What cannot be split.


def _unknown(model: nn.Module, found: dict[str, Style | None]) -> Iterator[str]:
    """A fault for every kind of module that keeps something and that no table knows."""
    for name, pattern, module in _kinds(model):
        if found[name] is None and _keeps_something(module):
            yield (
                f"{name or 'the model'} ({type(module).__name__}): no table knows it; add "
                f"'{pattern}': '{_guess(module)}' to the table that parallelize(table=…) takes "
                f"({', '.join(OF_MODULES)})"
            )


def _kinds(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Every module whose name differs from earlier ones by more than a number, with its name as a pattern."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        if pattern not in seen:
            seen.add(pattern)
            yield name, pattern, module


def _keeps_something(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) or (
        isinstance(module, _DropoutNd) and module.p > 0
    )


def _guess(module: nn.Module) -> str:
    return (
        "column" if is_matrix(module) else "vocabulary" if isinstance(module, nn.Embedding) else "replicated"
    )


def _mismatches(model: nn.Module, found: dict[str, Style | None], ranks: int) -> Iterator[str]:
    """A fault for every module that is not of the kind its style is for, or does not divide."""
    for name, _, module in _kinds(model):
        style = found[name]
        if style is None:
            continue
        if not _fits(module, style):
            yield f"{name} ({type(module).__name__}): cannot be '{style.word}'; make it 'replicated'"
            continue
        for parameter, dim, parts in _dims(module, style):
            value = getattr(module, parameter, None)
            if value is not None and value.shape[dim] % (parts * ranks):
                yield _indivisible(name, parameter, style, value.shape[dim], ranks * parts)


def _tie_faults(model: nn.Module, found: dict[str, Style | None]) -> Iterator[str]:
    """A fault for every tied parameter that one module would split and another not, or otherwise."""
    first: dict[nn.Parameter, tuple[str, int | None]] = {}
    for name, module in model.named_modules():
        style = found[name]
        dims = {getattr(module, p, None): dim for p, dim, _ in _dims(module, style)} if style else {}
        for parameter in module.parameters(recurse=False):
            other, dim = first.setdefault(parameter, (name, dims.get(parameter)))
            if dim != dims.get(parameter):
                yield f"{other} and {name} share a parameter, and their styles split it differently"


def _fits(module: nn.Module, style: Style) -> bool:
    if style.word in ("column", "row"):
        return is_matrix(module)
    if style.word == "vocabulary":
        return is_matrix(module) or isinstance(module, nn.Embedding)
    if style.word == "experts":
        return hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")
    return True


def _indivisible(name: str, parameter: str, style: Style, size: int, by: int) -> str:
    more = -(-size // by) * by
    what = "vocabulary" if style.word == "vocabulary" else f"dim that '{style.word}' splits"
    mend = f"pad the vocabulary to {more}" if style.word == "vocabulary" else f"make it {more}"
    return f"{name}.{parameter}: its {what} is {size}, which {by} does not divide; {mend}, or use fewer ranks"


def _number_faults(model: nn.Module, styles: Styles, ranks: int) -> Iterator[str]:
    for word in ("divided", "divisible"):
        for pattern in styles.numbers(word):
            for name, value in sorted(
                {name: getattr(*at) for name, at in _attributes(model, pattern)}.items()
            ):
                if value is not None and value % ranks:
                    yield (
                        f"{name}={value}: {ranks} ranks take an equal part each; use tensor="
                        f"{_divisor_below(value, ranks)}, or a model where it is a multiple of {ranks}"
                    )


def _divisor_below(value: int, ranks: int) -> int:
    return next(n for n in range(min(ranks, value), 0, -1) if value % n == 0)


def _divide_numbers(model: nn.Module, styles: Styles, ranks: int) -> None:
    for pattern in styles.numbers("divided"):
        for _, (owner, attribute) in _attributes(model, pattern):
            setattr(owner, attribute, getattr(owner, attribute) // ranks)


def _attributes(model: nn.Module, pattern: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    """The numbers that a pattern names: of modules, or of the model's config."""
    path, _, attribute = pattern.rpartition(".")
    if path == "config":
        config = getattr(model, "config", None)
        if hasattr(config, attribute):
            yield pattern, (config, attribute)
        return
    for name, module in model.named_modules():
        if fnmatchcase(name, path) and hasattr(module, attribute):
            yield f"{name}.{attribute}", (module, attribute)
