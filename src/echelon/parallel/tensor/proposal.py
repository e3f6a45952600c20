"""A table to paste for a model that no table knows, from the sizes of its modules.

Matrices of one parent that lead from width h to another width and back are columns and a row:

    q, k, v: 16 → 16    o: 16 → 16      column, column, column, row
    up: 16 → 64         down: 64 → 16   column, row
    qkv: 16 → 48        o: 16 → 16      column/3, row

It is a guess: what the code of a forward does with them cannot be read from sizes.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from echelon.nn.huggingface.modules import is_transposed
from echelon.parallel.tensor.modules import is_matrix

_FEED_FORWARDS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_HEAD_COUNTS = ("heads", "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads")


class Sizes(NamedTuple):
    name: str
    inputs: int
    outputs: int


def propose(model: nn.Module, unknown: Collection[nn.Module]) -> dict[str, str]:
    """Lines for the `unknown` modules of a model, and for numbers of heads beside them."""
    words = {name: "replicated" for name, module in model.named_modules() if module in unknown}
    words |= {name: "vocabulary" for name in _vocabularies(model) if name in words}
    for parent, matrices in _groups(model, unknown):
        words |= _pair(matrices, model.get_submodule(parent))
        words |= _dropouts(parent, model.get_submodule(parent), words)
    return _by_pattern(words, model) | _numbers(model, words)


def pattern_of(name: str) -> str:
    """The name with `*` for numbers of list members."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _vocabularies(model: nn.Module) -> Iterator[str]:
    """The largest embedding, and the matrices to as many outputs outside of lists."""
    embeddings = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    if not embeddings:
        return
    largest = max(module.num_embeddings for _, module in embeddings)
    yield from (name for name, module in embeddings if module.num_embeddings == largest)
    for name, module in model.named_modules():
        if is_matrix(module) and _sizes(name, module).outputs == largest and not _is_in_list(name):
            yield name


def _is_in_list(name: str) -> bool:
    return "*." in pattern_of(name)


def _sizes(name: str, module: Any) -> Sizes:
    inputs, outputs = module.weight.shape if is_transposed(module) else reversed(module.weight.shape)
    return Sizes(name, inputs, outputs)


def _groups(model: nn.Module, unknown: Collection[nn.Module]) -> Iterator[tuple[str, list[Sizes]]]:
    """The matrices of each parent; those that are alone in theirs, by the list member around them."""
    groups: dict[str, list[Sizes]] = {}
    for name, module in model.named_modules():
        if module in unknown and is_matrix(module) and _is_in_list(name):
            groups.setdefault(name.rpartition(".")[0], []).append(_sizes(name, module))
    alone: dict[str, list[Sizes]] = {}
    for parent, matrices in groups.items():
        if len(matrices) > 1:
            yield parent, matrices
        else:
            member = re.match(r".*?(?<![^.])\d+(?![^.])", parent)
            alone.setdefault(member[0] if member else parent, []).extend(matrices)
    yield from ((member, matrices) for member, matrices in alone.items() if len(matrices) > 1)


def _pair(matrices: Sequence[Sizes], parent: nn.Module) -> dict[str, str]:
    """Columns and a row, wherever matrices lead from a width to another and back."""
    words: dict[str, str] = {}
    columns: list[Sizes] = []
    for matrix in matrices:
        is_back = bool(columns) and matrix.outputs == columns[0].inputs and _fits(columns, matrix, matrices)
        if is_back:
            words |= {column.name: _column(column, matrix, parent) for column in columns}
            words[matrix.name] = "row"
            columns = []
        else:
            columns = [column for column in columns if column.inputs == matrix.inputs] + [matrix]
    return words


def _fits(columns: Sequence[Sizes], row: Sizes, matrices: Sequence[Sizes]) -> bool:
    """Return whether `row` takes what the columns return: of square matrices, the last of the parent does."""
    is_square = row.inputs == row.outputs == columns[0].outputs
    if is_square:
        return row is matrices[-1]
    return columns[-1].outputs in (row.inputs, 2 * row.inputs, 3 * row.inputs) or (
        row is matrices[-1] and columns[-1].outputs > row.inputs and len(columns) == 1
    )


def _column(column: Sizes, row: Sizes, parent: Any) -> str:
    """The word for a column in front of `row`: several matrices in one, if its outputs are more."""
    if column.outputs <= row.inputs:
        return "column"
    heads = next((getattr(parent, name) for name in _HEAD_COUNTS if hasattr(parent, name)), None)
    width = row.inputs // heads if isinstance(heads, int) and heads else 0
    groups, rest = divmod(column.outputs - row.inputs, 2 * width) if width else (0, 1)
    if rest == 0 and groups < (heads or 0):
        return f"column:{heads},{groups},{groups}"
    whole, rest = divmod(column.outputs, row.inputs)
    return "replicated" if rest else f"column/{whole}"


def _dropouts(parent: str, module: nn.Module, words: dict[str, str]) -> dict[str, str]:
    """Dropouts between a column and a row, where the order of modules is that of their calls."""
    prefix = f"{parent}." if parent else ""
    if isinstance(module, _FEED_FORWARDS):
        return {f"{prefix}dropout": "inner"} if f"{prefix}dropout" in words else {}
    if not isinstance(module, nn.Sequential):
        return {}
    inside, found = False, {}
    for name, child in module.named_children():
        word = words.get(prefix + name, "")
        inside = (inside or word.startswith("column")) and word != "row"
        if inside and isinstance(child, _DropoutNd) and prefix + name in words:
            found[prefix + name] = "inner"
    return found


def _by_pattern(words: dict[str, str], model: nn.Module) -> dict[str, str]:
    """One line for all members of a list that have the same word."""
    table: dict[str, str] = {}
    names = [name for name, _ in model.named_modules()]
    for name, word in words.items():
        fits = (
            pattern
            for pattern in _patterns(name)
            if all(words.get(other) == word for other in names if fnmatchcase(other, pattern))
        )
        table[next(fits, name)] = word
    return table


def _patterns(name: str) -> Iterator[str]:
    """`*` for all numbers of list members, then for all but the last."""
    yield pattern_of(name)
    last = re.fullmatch(r"(.*\.)(\d+(?:\..*)?)", name)
    if last:
        yield pattern_of(last[1].removesuffix(".")) + "." + last[2]


def _numbers(model: nn.Module, words: dict[str, str]) -> dict[str, str]:
    """Numbers of heads of modules whose children are split."""
    return {
        f"{pattern_of(name)}.{attribute}": "divided"
        for name, module in model.named_modules()
        for attribute in _HEAD_COUNTS
        if type(getattr(module, attribute, None)) is int
        and any(words.get(f"{name}.{child}") == "row" for child, _ in module.named_children())
    }
