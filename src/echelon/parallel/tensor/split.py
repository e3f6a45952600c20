"""Applies a table to a model: parameters become this rank's parts, and split modules communicate."""

from collections.abc import Collection, Iterator, Sequence
from inspect import signature
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.collectives import Group
from echelon.errors import UserError, raise_errors
from echelon.nn.dropout.modules import split_features
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor import modules
from echelon.parallel.tensor.checks import find_errors
from echelon.parallel.tensor.regions import Region
from echelon.parallel.tensor.styles import Style, Styles, Table, cuts
from echelon.state.ownership import Shard, part_of, replace_parameters

_INSIDE = ("heads", "inner", "entered")  # whole on every rank, and used for this rank's part of the work


_WRAPPERS: dict[str, type[modules.SplitModule]] = {
    "norm": modules.SplitNorm,
    "row": modules.Row,
    "experts": modules.Experts,
}


def _is_inside(style: Style) -> bool:
    """Return whether its weights are whole on every rank, and used for this rank's part of the work."""
    return style.word in _INSIDE or bool(style.whole)


class Sharded(NamedTuple):
    """The split of a model. The parameters that are not in `shards` are whole on every rank.

    `partial`: every rank has a part of their gradient. `by_heads`: dropouts of this rank's heads. `inner`:
    dropouts between columns and rows, which see the same part of the sequence as columns.
    `vocabulary`: the size of that of logits, if a projection to logits is split by vocabulary.
    """

    region: Region
    shards: dict[str, Shard]  # by the parameter's first name
    partial: list[nn.Parameter]
    replicated: list[nn.Parameter]
    by_heads: list[nn.Module]
    inner: list[nn.Module]
    vocabulary: int | None


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
    """Split `model` in place. All ranks start from the same weights. `whole_sequence`: modules that get all
    of a split `sequence`. `join_logits`: the loss takes all logits."""
    styles = Styles(model, table)
    style_of = _styles_by_module(model, styles)
    whole = set(whole_sequence) if sequence else set(model.modules())
    inside = {module for module, style in style_of.items() if _is_inside(style)}
    partial = {module for module in model.modules() if module not in whole or module in inside}
    errors = find_errors(
        model, styles, style_of, group.size, partial=partial, whole_sequence=whole if sequence else None
    )
    raise_errors(f"tensor={group.size}", errors)
    for number in styles.numbers("divided"):
        number.divide(group.size, wrapping)
    region = Region(group, sequence=sequence)
    first = Region(group, sequence=False) if sequence else region
    logits = [m for m, style in style_of.items() if style.word == "vocabulary" and modules.is_matrix(m)]
    vocabulary = max(map(modules.num_outputs, logits), default=None)  # of the largest, before it is split
    names = {parameter: name for name, parameter in model.named_parameters()}
    shards, is_partial = _assign_parameters(model, style_of, partial, group)
    enclosed = _enclosed(style_of)
    for module in model.modules():
        style = style_of.get(module, Style("replicated"))
        if style.word == "inner":
            split_features(module, group.rank, group.size)
        entered = first if module in whole else region
        _wrap(module, style, entered, join_logits, wrapping, enters=module not in enclosed)
    for module, argument, heads in styles.arguments():
        take = TakeHeads(module, argument, heads, group.rank, group.size)
        wrapping.before("tensor", module, take, with_kwargs=True)
    _leave_fused_paths(model, style_of, wrapping)
    replace_parameters(model, {parameter: part_of(parameter, shard) for parameter, shard in shards.items()})
    return Sharded(
        region,
        {names[parameter]: shard for parameter, shard in shards.items()},
        partial=[parameter for parameter, in_parts in is_partial.items() if in_parts],
        replicated=[parameter for parameter, in_parts in is_partial.items() if not in_parts],
        by_heads=_dropouts(style_of, "heads"),
        inner=_dropouts(style_of, "inner", "entered"),
        vocabulary=vocabulary,
    )


def _styles_by_module(model: nn.Module, styles: Styles) -> dict[nn.Module, Style]:
    """The style of every module that has one, by any of its names. nn.Identity stands for a module that the
    model was made without, and needs none; nor does a dict, of the same adapters in several versions."""
    style_of: dict[nn.Module, Style] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        style = styles.of(name)
        if style is not None and type(module) not in (nn.Identity, nn.ModuleDict):
            style_of.setdefault(module, style)
    return style_of


def _assign_parameters(
    model: nn.Module, style_of: dict[nn.Module, Style], partial: Collection[nn.Module], group: Group
) -> tuple[dict[nn.Parameter, Shard], dict[nn.Parameter, bool]]:
    """Return the parameters that are split; and of those that are whole, whether a rank has a part of their
    gradient."""
    split: dict[nn.Parameter, Shard] = {}
    is_partial: dict[nn.Parameter, bool] = {}
    for module in model.modules():
        style = style_of.get(module, Style("replicated"))
        shards = dict(_shards(module, style, group))
        split |= shards
        for parameter in module.parameters(recurse=False):
            if parameter not in shards and style.word != "tied":
                is_partial[parameter] = module in partial
    return split, is_partial


def _dropouts(style_of: dict[nn.Module, Style], *words: str) -> list[nn.Module]:
    inside = (module for module, style in style_of.items() if style.word in words)
    return [module for module in inside if isinstance(module, _DropoutNd)]


def _shards(module: nn.Module, style: Style, group: Group) -> Iterator[tuple[nn.Parameter, Shard]]:
    for cut in cuts(module, style):
        parameter = getattr(module, cut.name)
        if parameter is not None:
            yield parameter, Shard(cut.dim, cut.sizes(parameter), group.rank, group.size)


def _enclosed(style_of: dict[nn.Module, Style]) -> set[nn.Module]:
    """The modules inside of those whose input enters for all of them."""
    around = [module for module, style in style_of.items() if style.word == "enclosed"]
    return {inside for module in around for inside in module.modules() if inside is not module}


def _wrap(
    module: nn.Module,
    style: Style,
    region: Region,
    join_logits: bool,
    wrapping: Wrapping,
    *,
    enters: bool,
) -> None:
    """Make the module compute with its part of the weights."""
    wrapper: modules.SplitModule | None = None
    if style.word == "column" and isinstance(module, nn.Embedding):
        return  # it looks up its features of a row, as it is
    if style.whole:
        wrapper = modules.PartlyWhole(module, region, style, enters=enters)
    elif style.word == "column":
        wrapper = modules.Column(module, region, enters=enters)
    elif style.word in _WRAPPERS:
        wrapper = _WRAPPERS[style.word](module, region)
    elif style.word == "vocabulary" and isinstance(module, nn.Embedding):
        wrapper = modules.VocabularyEmbedding(module, region)
    elif style.word == "vocabulary":
        wrapper = modules.Column(module, region, joined=join_logits, vocabulary=modules.num_outputs(module))
    elif style.word in ("region", "enclosed") and enters:
        enter = modules.EnterFirst(region, encloses=style.word == "enclosed")
        wrapping.before("tensor", module, enter, with_kwargs=True)
        wrapping.after("tensor", module, enter.after)
    if wrapper is not None:
        wrapping.wrap(wrapper)


def _leave_fused_paths(model: nn.Module, style_of: dict[nn.Module, Style], wrapping: Wrapping) -> None:
    """In evaluation torch's encoder layer passes its weights to one fused kernel, unless it has a hook."""
    split = {module for module, style in style_of.items() if cuts(module, style)}
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and not split.isdisjoint(layer.modules()):
            wrapping.before("tensor", layer, _nothing)


def _nothing(_: nn.Module, __: Any) -> None:
    pass


# Arguments of attention that have a part for each head (biases by distance, masks): a rank takes its own.


@final
class TakeHeads:
    """A forward pre-hook: of one argument, the part for this rank's heads."""

    def __init__(self, module: nn.Module, argument: str, heads: int, rank: int, ranks: int) -> None:
        self.argument, self.heads, self.rank, self.ranks = argument, heads, rank, ranks
        self.place = list(signature(type(module).forward).parameters).index(argument) - 1  # without self

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.argument in kwargs:
            return args, {**kwargs, self.argument: self._take(kwargs[self.argument])}
        if self.place < len(args):
            return (*args[: self.place], self._take(args[self.place]), *args[self.place + 1 :]), kwargs
        return args, kwargs

    def _take(self, value: Any) -> Any:
        """[batch, heads, …], or [batch · heads, …] of three dims. One part for all heads stays as it is."""
        if not isinstance(value, Tensor) or (value.ndim != 3 and value.shape[1] == 1):
            return value
        by_heads = value.unflatten(0, (-1, self.heads)) if value.ndim == 3 else value
        if by_heads.shape[1] != self.heads:
            raise UserError(
                f"tensor={self.ranks}: the argument {self.argument} of shape {list(value.shape)} must have a "
                f"part for each of {self.heads} heads along dim 1 (or batch · heads along dim 0 of three); "
                "fix the number in the table"
            )
        part = by_heads.chunk(self.ranks, 1)[self.rank]
        return part.flatten(0, 1) if value.ndim == 3 else part
