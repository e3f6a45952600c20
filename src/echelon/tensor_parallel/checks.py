"""What cannot be split: every reason why a table would not train a model as one device does."""

import difflib
import re
from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from echelon.dropout import drops_each_element
from echelon.huggingface import is_transposed
from echelon.layering import listed_layers
from echelon.tensor_parallel.modules import SplitModule, is_matrix
from echelon.tensor_parallel.shards import cuts
from echelon.tensor_parallel.styles import OF_MODULES, OF_NUMBERS, Style, Styles
from echelon.wrapping import find_wrapper, replaced_forward

Found = Mapping[nn.Module, Style]  # of all modules that have one

_SPLIT = ("column", "row", "vocabulary", "experts")
_OVER_FEATURES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_OVER_POSITIONS = (nn.MultiheadAttention, nn.RNNBase, _ConvNd, nn.GroupNorm, _NormBase)
_HAVE_BETWEEN = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # linear1 · dropout · linear2
_WHOLE = Style("replicated")
_REPLICATED = "'replicated' (or 'inner', if it stands between a column and a row, on a part of the features)"


def find_errors(
    model: nn.Module,
    styles: Styles,
    found: Found,
    ranks: int,
    *,
    partial: Collection[nn.Module],
    whole_sequence: Collection[nn.Module] | None,
) -> list[str]:
    """All of them at once, each kind of module once.

    `partial`: modules of whose unsplit parameters a rank has a part of the gradient. `whole_sequence`: those
    that see all of it, if others see a part.
    """
    errors = [
        *_idle(model, styles),
        *_unknown(model, found),
        *_misfits(model, found, ranks),
        *_between(model, found),
        *_ties(model, styles, found, partial),
        *(() if whole_sequence is None else _of_sequences(model, found, whole_sequence)),
        *_indivisible_numbers(styles, ranks),
    ]
    return list(dict.fromkeys(errors))


# Names.


def _idle(model: nn.Module, styles: Styles) -> Iterator[str]:
    """A error for every line of the user's table that fits nothing."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern, style in styles.idle():
        number = style.word in OF_NUMBERS
        known = _numbers(model) if number else names
        near = difflib.get_close_matches(pattern, dict.fromkeys([*map(_pattern, known), *known]), 3, 0.5)
        yield (
            f"'{pattern}': '{style}' in the table fits no {'number' if number else 'module'} of the model; "
            f"drop it, or mend the name{' (near: ' + ', '.join(near) + ')' if near else ''}"
        )


def _numbers(model: nn.Module) -> list[str]:
    owners = {**dict(model.named_modules()), "config": getattr(model, "config", None)}
    return [
        f"{name}.{attribute}"
        for name, owner in owners.items()
        for attribute, value in getattr(owner, "__dict__", {}).items()
        if type(value) is int
    ]


def _unknown(model: nn.Module, found: Found) -> Iterator[str]:
    """A error for every kind of module that keeps something and that no table knows."""
    told: set[tuple[object, ...]] = set()
    for name, module in model.named_modules():
        if module in found or not _keeps_something(module):
            continue
        pattern = _pattern(name)
        fitting = [its for other, its in model.named_modules() if fnmatchcase(other, pattern)]
        if any(its in found or _guess(its) != _guess(module) for its in fitting):
            pattern = name  # others with such a name are of another kind
        kind = (pattern, *_kind(module))
        if kind not in told:
            told.add(kind)
            yield (
                f"{name or 'the model'} ({type(module).__name__}): no table knows it; add "
                f"'{pattern}': {_guess(module)} to the table that parallelize(table=…) takes "
                f"({', '.join(OF_MODULES)})"
            )


def _keeps_something(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) or _drops(module)


def _drops(module: Any) -> bool:
    return isinstance(module, _DropoutNd) and module.p > 0


def _guess(module: nn.Module) -> str:
    if is_matrix(module):
        return "'column' (with a 'row' behind it) or 'replicated'"
    return "'vocabulary'" if isinstance(module, nn.Embedding) else _REPLICATED


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Modules that are alike in this have the same errors."""
    replaced = replaced_forward(module) is not None
    return type(module), replaced, *(p.shape for p in module.parameters(recurse=False))


# Styles.


def _misfits(model: nn.Module, found: Found, ranks: int) -> Iterator[str]:
    """A error for every kind of module that is not what its style is for, or does not divide."""
    told: set[tuple[object, ...]] = set()
    read = {its for m in model.modules() if isinstance(m, nn.MultiheadAttention) for its in m.children()}
    for name, module in model.named_modules():
        style = found.get(module)
        kind = (_pattern(name), *_kind(module), style)
        if style is None or kind in told:
            continue
        told.add(kind)
        what = f"{name or 'the model'} ({type(module).__name__})"
        if module in read and style.word in _SPLIT:
            yield f"{what}: torch's attention reads its weights and does not call it; make it 'replicated'"
        elif misfit := _misfit(module, style):
            yield f"{what}: cannot be '{style}'{misfit}"
        else:
            yield from _indivisible(name, module, style, ranks)


def _misfit(module: Any, style: Style) -> str:
    """Why a module cannot have a style, and the mend; empty, if it can."""
    if style.word in _SPLIT:
        return _unsplittable(module, style)
    if style.word == "region" and any(True for _ in module.parameters(recurse=False)):
        return ", which is for modules without weights of their own; give the weights a module of their own"
    if style.word == "inner" and isinstance(module, _OVER_FEATURES):
        return ", since it needs all features together; make it 'replicated', and the matrices around it too"
    if style.word == "inner" and isinstance(module, _DropoutNd) and not drops_each_element(module):
        return ", since it drops whole channels; use nn.Dropout there"
    return ""


def _unsplittable(module: Any, style: Style) -> str:
    if style.word == "experts":
        right = hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")
    else:
        right = is_matrix(module) or (style.word == "vocabulary" and isinstance(module, nn.Embedding))
    if not right:
        return f"; make it {_REPLICATED}"
    if find_wrapper(module, SplitModule) is not None:
        return ": another engine has split it already; close that engine, and build the model again"
    if replaced_forward(module) is not None or (style.word != "experts" and not _is_plain(module)):
        plain = "nn.Embedding" if isinstance(module, nn.Embedding) else "nn.Linear"
        return f": it would lose the forward of its own; make it 'replicated', or a plain {plain}"
    made = [its.name for its in cuts(module, style) if its.name not in module._parameters]
    if made:
        return f": its {made[0]} is made of other parameters; make it one itself, or all of them 'replicated'"
    return ""


def _is_plain(module: nn.Module) -> bool:
    """Whether its class computes what a split one does."""
    return is_transposed(module) or type(module).forward in (nn.Linear.forward, nn.Embedding.forward)


def _indivisible(name: str, module: nn.Module, style: Style, ranks: int) -> Iterator[str]:
    for parameter, dim, parts in cuts(module, style):
        value, by = getattr(module, parameter), parts * ranks
        if value is None or value.shape[dim] % by == 0:
            continue
        size = value.shape[dim]
        more = -(-size // by) * by
        what = "vocabulary" if style.word == "vocabulary" else f"dim that '{style.word}' splits"
        mend = f"pad the vocabulary to {more}" if style.word == "vocabulary" else f"make it {more}"
        which = f"{name}.{parameter}: its {what} is {size}"
        yield f"{which}, which {by} does not divide; {mend}, or use fewer ranks"


def _between(model: nn.Module, found: Found) -> Iterator[str]:
    """A error for every dropout of torch's transformers that would give all ranks' features one mask."""
    for name, module in model.named_modules():
        if not isinstance(module, _HAVE_BETWEEN) or not _drops(module.dropout):
            continue
        column, style = found.get(module.linear1), found.get(module.dropout)
        if column is not None and column.word == "column" and style is not None and style.word != "inner":
            path = f"{name}.dropout".lstrip(".")
            yield f"{path}: stands between a column and a row, and cannot be '{style}'; make it 'inner'"


# What is shared.


def _ties(model: nn.Module, styles: Styles, found: Found, partial: Collection[nn.Module]) -> Iterator[str]:
    """A error for every module or parameter of two names that would be split, or summed, in two ways."""
    first: dict[nn.Parameter, tuple[str, object, bool]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        style, other = styles.of(name), found.get(module)
        if style is not None and style != other:
            yield f"{name} is '{style}' in the table, and '{other}' by another name; give it one style"
        how = {getattr(module, its.name, None): its[1:] for its in cuts(module, other)} if other else {}
        for parameter in module.parameters(recurse=False):
            cut, in_parts = how.get(parameter), parameter not in how and module in partial
            before, its_cut, its_parts = first.setdefault(parameter, (name, cut, in_parts))
            if cut != its_cut:
                yield f"{before} and {name} share a parameter, and their styles split it differently"
            elif in_parts != its_parts:
                yield (
                    f"{before} and {name} share a parameter, and a rank has all of its gradient in one of "
                    "them, but a part of it in the other; give each its own"
                )


def _of_sequences(model: nn.Module, found: Found, whole: Collection[nn.Module]) -> Iterator[str]:
    """A error for every module that sees a part of the sequence, and in the first layer or by nature all."""
    later = {its for layer in listed_layers(model)[1:] for its in layer.modules()}
    for name, module in model.named_modules():
        what = f"{name} ({type(module).__name__})"
        if module not in whole and isinstance(module, _OVER_POSITIONS) and found.get(module) == _WHOLE:
            yield f"{what}: needs all positions, and with sequence=true has a part; use sequence=false"
        if module in whole and module in later and _keeps_something(module):
            yield (
                f"{what}: is in the first layer, which sees whole sequences, and in a later one, which with "
                "sequence=true sees a part of them; give each its own, or use sequence=false"
            )


# Numbers.


def _indivisible_numbers(styles: Styles, ranks: int) -> Iterator[str]:
    for word in OF_NUMBERS:
        values = {name: getattr(owner, attribute) for name, owner, attribute in styles.numbers(word)}
        for name, value in sorted(values.items()):
            if value is None:
                continue
            if type(value) is not int or value < 1:
                yield f"{name}={value!r}: only a number that counts something can be '{word}'; drop it"
            elif value % ranks:
                yield (
                    f"{name}={value}: {ranks} ranks take an equal part each; use tensor="
                    f"{_divisor_below(value, ranks)}, or a model where it is a multiple of {ranks}"
                )


def _divisor_below(value: int, ranks: int) -> int:
    return next(n for n in range(min(ranks, value), 0, -1) if value % n == 0)
