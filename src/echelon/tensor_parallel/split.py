"""A table applied to a model: every parameter is what this rank holds of it, and split modules know their
way in and out."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.collectives import Group
from echelon.dropout import split_features
from echelon.errors import raise_errors
from echelon.tensor_parallel.checks import find_errors
from echelon.tensor_parallel.modules import (
    Column,
    EnterFirst,
    Experts,
    Row,
    SplitModule,
    VocabularyEmbedding,
)
from echelon.tensor_parallel.regions import Region
from echelon.tensor_parallel.shards import Shard, cuts
from echelon.tensor_parallel.styles import Style, Styles, Table
from echelon.wrapping import Wrapping

_INSIDE = ("heads", "inner")  # whole modules of which every rank sees its own part of the work


class Sharded(NamedTuple):
    """What has become of a model's parameters, of which all but `shards` are whole on every rank.

    `partial`: every rank has a part of their gradient. `by_heads` are dropouts of the heads that are here,
    `inner` those of features, which see whatever part of the sequence columns do.
    `splits_logits`: whether a projection to logits is split by vocabulary.
    """

    region: Region
    shards: dict[str, Shard]  # by the parameter's first name
    partial: list[nn.Parameter]
    replicated: list[nn.Parameter]
    by_heads: list[nn.Module]
    inner: list[nn.Module]
    splits_logits: bool


def split_over(
    model: nn.Module,
    group: Group,
    table: Table | None,
    wrapping: Wrapping,
    *,
    sequence: bool,
    whole_sequence: Sequence[nn.Module],
    join_logits: bool,
) -> Sharded:
    """Split `model` in place. All ranks start from the same weights.

    `whole_sequence`: the modules that see all of it although hidden states are split along the `sequence`.
    `join_logits`: the loss takes all logits.
    """
    styles = Styles(model, table)
    found = _found(model, styles)
    whole = set(whole_sequence) if sequence else set(model.modules())
    partial = {m for m in model.modules() if m not in whole or (m in found and found[m].word in _INSIDE)}
    errors = find_errors(
        model, styles, found, group.size, partial=partial, whole_sequence=whole if sequence else None
    )
    raise_errors(f"tensor={group.size}", errors)
    _divide_numbers(styles, group.size, wrapping)
    region = Region(group, sequence=sequence)
    first = Region(group, sequence=False) if sequence else region
    shards: dict[str, Shard] = {}
    unsplit: dict[nn.Parameter, bool] = {}  # whether a rank has a part of the gradient
    kept: dict[nn.Parameter, nn.Parameter] = {}  # what becomes of each that is split
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in model.modules():
        style = found.get(module, Style("replicated"))
        split = dict(_shards(module, style, group))
        for parameter in module.parameters(recurse=False):
            if parameter in split:
                shards[names[parameter]] = split[parameter]
                kept.setdefault(parameter, _part_of(parameter, split[parameter]))
            else:
                unsplit[parameter] = module in partial
        if style.word == "inner":
            split_features(module, group.rank, group.size)
        _wrap(module, style, first if module in whole else region, join_logits, wrapping)
    _leave_fused_paths(model, found, wrapping)
    _replace(model, kept)
    return Sharded(
        region,
        shards,
        partial=[parameter for parameter, in_parts in unsplit.items() if in_parts],
        replicated=[parameter for parameter, in_parts in unsplit.items() if not in_parts],
        by_heads=[m for m, style in found.items() if style.word == "heads" and isinstance(m, _DropoutNd)],
        inner=[m for m, style in found.items() if style.word == "inner" and isinstance(m, _DropoutNd)],
        splits_logits=_splits_logits(found),
    )


def _found(model: nn.Module, styles: Styles) -> dict[nn.Module, Style]:
    """The style of every module that has one, by any of its names."""
    found: dict[nn.Module, Style] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        style = styles.of(name)
        if style is not None:
            found.setdefault(module, style)
    return found


def _splits_logits(found: dict[nn.Module, Style]) -> bool:
    split = [module for module, style in found.items() if style.word == "vocabulary"]
    return any(not isinstance(module, nn.Embedding) for module in split)


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
    for name, dim, parts in cuts(module, style):
        parameter = getattr(module, name)
        if parameter is not None:
            size = parameter.shape[dim] // parts
            yield parameter, Shard(dim, (size,) * parts, group.rank, group.size)


def _wrap(module: nn.Module, style: Style, region: Region, join_logits: bool, wrapping: Wrapping) -> None:
    """Make the module compute with its part of the weights."""
    wrapper: SplitModule | None = None
    if style.word == "column":
        wrapper = Column(module, region)
    elif style.word == "row":
        wrapper = Row(module, region)
    elif style.word == "experts":
        wrapper = Experts(module, region)
    elif style.word == "vocabulary" and isinstance(module, nn.Embedding):
        wrapper = VocabularyEmbedding(module, region)
    elif style.word == "vocabulary":
        wrapper = Column(module, region, joined=join_logits)
    elif style.word == "region":
        wrapping.before("tensor", module, EnterFirst(region), with_kwargs=True)
    if wrapper is not None:
        wrapping.wrap(wrapper)


def _leave_fused_paths(model: nn.Module, found: dict[nn.Module, Style], wrapping: Wrapping) -> None:
    """In evaluation torch's encoder layer passes its weights to one fused kernel, unless it has a hook."""
    split = {module for module, style in found.items() if cuts(module, style)}
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and not split.isdisjoint(layer.modules()):
            wrapping.before("tensor", layer, _nothing)


def _nothing(_: nn.Module, __: Any) -> None:
    pass


def _divide_numbers(styles: Styles, ranks: int, wrapping: Wrapping) -> None:
    for _, owner, attribute in styles.numbers("divided"):
        value = getattr(owner, attribute)
        if value is not None:
            wrapping.assign(owner, attribute, value // ranks)
