"""The tables of tensor parallelism: from the names of modules to what is done with them.

    column          a matrix with its outputs split; its input is whole
    column/3        the same, where it is three matrices in one (fused query, key and value)
    row             a matrix with its inputs split; its output is summed over the ranks
    vocabulary      an embedding, or the projection to logits, split by vocabulary
    experts         the matrices of many experts, each split as column and row
    replicated      whole on every rank, outside of what is split
    heads           whole on every rank, for this rank's heads: a norm of each head, or a dropout of
                    [batch, heads, …], whose dim 1 counts them
    inner           whole on every rank, for this rank's features, between a column and a row: a dropout of
                    [batch, …, features], in the order of one matrix, or one weight for all (PReLU)
    region          no weights of its own: its input is the input of all columns inside it

and for integers of a module, or of the model's config:

    divided         the module computes with this rank's part of it
    divisible       it must be a multiple of the ranks

Names are patterns: `blocks.*.mlp.up`. The first that matches counts. Where hidden states are split along the
sequence, all replicated modules behind the first layer work on a part of it.
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from echelon.errors import UserError, did_you_mean
from echelon.huggingface import TENSOR_TABLES

Table = Mapping[str, str]

MODULE_WORDS = ("column", "row", "vocabulary", "experts", "replicated", "heads", "inner", "region")
NUMBER_WORDS = ("divided", "divisible")


class Style(NamedTuple):
    """A word of a table; a column may be `parts` matrices in one."""

    word: str
    parts: int = 1

    def __str__(self) -> str:
        return self.word if self.parts == 1 else f"{self.word}/{self.parts}"

    @classmethod
    def read(cls, pattern: str, text: str) -> "Style":
        word, slash, parts = str(text).partition("/")
        words = (*MODULE_WORDS, *NUMBER_WORDS)
        if word not in words or (slash and word != "column"):
            raise UserError(
                f"tensor: '{pattern}': '{text}' in the table must be one of {', '.join(words)} (or column/3 "
                f"for three matrices in one){did_you_mean(word, words)}"
            )
        if slash and not (parts.isdecimal() and int(parts)):
            raise UserError(
                f"tensor: '{pattern}': '{text}' in the table: a column is 1 matrix or more; write 'column', "
                "or 'column/3' for three in one"
            )
        return cls(word, int(parts or 1))


_ECHELON: Table = {
    "config.heads": "divisible",
    "config.num_kv_heads": "divisible",
    "embedding.tokens": "vocabulary",
    "embedding.positions": "replicated",
    "embedding.dropout": "replicated",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.output": "row",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "blocks.*_norm": "replicated",
    "blocks.*_dropout": "replicated",
    "head.norm": "replicated",
    "head.projection": "vocabulary",
}

# By the name of a model's class.
TABLES: dict[str, Table] = {"GPT": _ECHELON, "Llama": _ECHELON, **TENSOR_TABLES}


class Styles:
    """The styles of a model's modules: by the user's table, then by that of the model's class."""

    def __init__(self, model: nn.Module, table: Table | None) -> None:
        known = next((TABLES[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in TABLES), {})
        self._model = model
        self._own = {pattern: Style.read(pattern, text) for pattern, text in (table or {}).items()}
        others = {pattern: Style.read(pattern, text) for pattern, text in known.items()}
        self._entries = [*self._own.items(), *((p, s) for p, s in others.items() if p not in self._own)]

    def of(self, name: str) -> Style | None:
        """The style of the module `name`; None if no pattern matches. `*` matches dots too."""
        return next((s for p, s in self._entries if s.word in MODULE_WORDS and fnmatchcase(name, p)), None)

    def numbers(self, word: str) -> list[tuple[str, Any, str]]:
        """The numbers with style `word`, once each: (name, owner, attribute)."""
        patterns = [pattern for pattern, style in self._entries if style.word == word]
        found = [number for pattern in patterns for number in _attributes(self._model, pattern)]
        return list({(id(owner), attribute): (n, owner, attribute) for n, owner, attribute in found}.values())

    def unused(self) -> list[tuple[str, Style]]:
        """The lines of the user's table that match nothing of the model."""
        names = [name for name, _ in self._model.named_modules(remove_duplicate=False)]

        def matches(pattern: str, style: Style) -> bool:
            if style.word in NUMBER_WORDS:
                return any(True for _ in _attributes(self._model, pattern))
            return any(fnmatchcase(name, pattern) for name in names)

        return [(pattern, style) for pattern, style in self._own.items() if not matches(pattern, style)]


def _attributes(model: nn.Module, pattern: str) -> Iterator[tuple[str, Any, str]]:
    """The numbers that a pattern matches: of modules, or of the model's config."""
    path, _, attribute = pattern.rpartition(".")
    if path == "config":
        config = getattr(model, "config", None)
        if hasattr(config, attribute):
            yield pattern, config, attribute
        return
    for name, module in model.named_modules():
        if fnmatchcase(name, path) and hasattr(module, attribute):
            yield f"{name}.{attribute}", module, attribute
