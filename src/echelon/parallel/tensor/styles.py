"""The tables of tensor parallelism: from the names of modules to what is done with them.

    column          a matrix with its outputs split; its input is whole. An embedding by its features
    column/3        the same, where it is three equal matrices in one (fused query, key and value)
    column:8,2,2    the same, where they have so many heads (of query, key and value); numbers, or names of
                    the model's config. '1 whole': every rank uses that part whole (one key for all heads)
    row             a matrix with its inputs split; its output is summed over the ranks
    vocabulary      an embedding, or the projection to logits, split by vocabulary
    experts         the matrices of many experts, each split as column and row
    replicated      whole on every rank, outside of what is split
    heads           whole on every rank, for this rank's heads: a norm of each head, or a dropout of
                    [batch, heads, …], whose dim 1 counts them
    inner           whole on every rank, for this rank's features, between a column and a row: a dropout of
                    [batch, …, features], in the order of one matrix, or one weight for all (PReLU)
    entered         whole on every rank, inside of what is split: a matrix before this rank's columns, or a
                    dropout of all features and positions
    norm            a norm over all features behind a column: its weight is split, ranks add up its sums
    region          no weights of its own: its input is the input of all columns inside it
    enclosed        no weights of its own: its input enters once, and all inside it is for this rank's heads
    tied            its weights are those of modules inside it, which have styles

for an argument of a module's forward, `blocks.*.attention(bias)`:

    heads:8         it has a part for each of 8 heads: [batch, heads, …], or [batch · heads, …] of three dims

and for integers of a module, or of the model's config:

    divided         the module computes with this rank's part of it; `blocks.*.attention.config.heads`: the
                    module reads it from a config, which stays as it is for all others
    divisible       it must be a multiple of the ranks

Names are patterns: `blocks.*.mlp.up`. The first that matches counts. Where hidden states are split along the
sequence, all replicated modules behind the first layer work on a part of it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any, NamedTuple, final

from torch import Tensor, nn

from echelon.errors import UserError, did_you_mean
from echelon.nn.experts import Experts, Gate
from echelon.nn.huggingface.adapters import BASE, LAYER, Place, adapted_model, find_places
from echelon.nn.huggingface.modules import is_transposed
from echelon.nn.huggingface.tensor_tables import CONFIG_LINES, PAIRS, TENSOR_TABLES
from echelon.nn.wrapping import Wrapping

# Integers that modules compute with, like their number of heads: where a pattern finds them, and how a rank
# gets its part of one.


class Number(NamedTuple):
    """`attribute` of a module or of the model's config; 'config.heads' of a module, where that reads it."""

    name: str
    owner: Any
    attribute: str

    @property
    def value(self) -> Any:
        return attrgetter(self.attribute)(self.owner)

    def divide(self, ranks: int, wrapping: Wrapping) -> None:
        if self.value is None:
            return
        part, (*path, attribute) = self.value // ranks, self.attribute.split(".")
        if not path:
            wrapping.assign(self.owner, attribute, part)
            return
        local = ModuleConfig(self.owner.config)
        setattr(local, attribute, part)
        wrapping.assign(self.owner, "config", local)


@final
class ModuleConfig:
    """The config as one module reads it: some numbers are this rank's, all others those of the model."""

    def __init__(self, config: Any) -> None:
        self._shared_config = config

    def __getattr__(self, name: str) -> Any:
        if name == "_shared_config":  # not there yet, while a copy is made
            raise AttributeError(name)
        return getattr(self._shared_config, name)


def find_numbers(model: nn.Module, pattern: str) -> Iterator[Number]:
    """The numbers that a pattern matches: of modules, of the configs that they read, or of the model's."""
    path, _, attribute = pattern.rpartition(".")
    if path == "config":
        config = getattr(model, "config", None)
        if hasattr(config, attribute):
            yield Number(pattern, config, attribute)
        return
    for name, module in model.named_modules():
        if fnmatchcase(name, path) and hasattr(module, attribute):
            yield Number(f"{name}.{attribute}", module, attribute)
        elif _reads_from_config(name, module, path, attribute):
            yield Number(f"{name}.config.{attribute}", module, f"config.{attribute}")


def _reads_from_config(name: str, module: nn.Module, path: str, attribute: str) -> bool:
    matches = bool(name) and path.endswith(".config") and fnmatchcase(name, path.removesuffix(".config"))
    return matches and hasattr(getattr(module, "config", None), attribute)


Table = Mapping[str, str]

MODULE_WORDS = (
    *("column", "row", "vocabulary", "experts", "replicated", "heads", "inner", "entered", "norm", "region"),
    *("enclosed", "tied"),
)
NUMBER_WORDS = ("divided", "divisible")
_WORDS = (*MODULE_WORDS, *NUMBER_WORDS)
_PART = re.compile(r"(?P<count>\w+)(?P<whole> whole)?")
_ARGUMENT = re.compile(r"(?P<module>.*)\((?P<argument>\w+)\)")


class Style(NamedTuple):
    """A word of a table. A column may be several matrices in one, with sizes in the proportions of `parts`.
    These are numbers of heads, if `heads`; every rank uses those of them whole that are in `whole`."""

    word: str
    parts: tuple[int, ...] = (1,)
    heads: bool = False
    whole: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.heads:
            marked = [f"{n} whole" if i in self.whole else str(n) for i, n in enumerate(self.parts)]
            return f"{self.word}:{','.join(marked)}"
        return self.word if len(self.parts) == 1 else f"{self.word}/{len(self.parts)}"

    @classmethod
    def read(cls, pattern: str, text: str, config: object = None) -> "Style":
        """The style of a line; names of numbers are those of `config`."""
        word, sign, rest = re.fullmatch(r"([^/:]*)([/:]?)(.*)", str(text), re.DOTALL).groups()  # type: ignore[union-attr]
        is_argument = _ARGUMENT.fullmatch(pattern) is not None
        if is_argument and (word != "heads" or sign != ":"):
            raise UserError(
                f"tensor: '{pattern}': '{text}' in the table: an argument of a forward can only be "
                "'heads:8', with the number of all heads, or its name in the model's config"
            )
        if word not in _WORDS or (sign and word != "column" and not is_argument):
            raise UserError(
                f"tensor: '{pattern}': '{text}' in the table must be one of {', '.join(_WORDS)} (or column/3 "
                "for three matrices in one, column:8,2,2 for matrices of so many heads)"
                f"{did_you_mean(word, _WORDS)}"
            )
        if sign == ":":
            return _read_heads(pattern, text, word, rest, config)
        if sign and not (rest.isdecimal() and int(rest)):
            raise UserError(
                f"tensor: '{pattern}': '{text}' in the table: a column is 1 matrix or more; write 'column', "
                "or 'column/3' for three in one"
            )
        return cls(word, (1,) * int(rest or 1))


def _read_heads(pattern: str, text: str, word: str, rest: str, config: object) -> Style:
    """'column:8,2 whole' as a style."""
    parts, whole = [], []
    for index, part in enumerate(rest.split(",")):
        match = _PART.fullmatch(part.strip())
        count = _count(match["count"], config) if match else None
        if match is None or count is None:
            raise UserError(
                f"tensor: '{pattern}': '{text}' in the table: '{part.strip()}' must be a number of heads, or "
                "the name of one in the model's config (with ' whole' behind it, if every rank uses all of "
                "them): 'column:8,2,2'"
            )
        parts.append(count)
        whole += [index] if match["whole"] else []
    return Style(word, tuple(parts), heads=True, whole=tuple(whole))


def _count(text: str, config: object) -> int | None:
    """A positive number, or that of the config with this name."""
    value = int(text) if text.isdecimal() else getattr(config, text, None)
    return value if type(value) is int and value > 0 else None


_ECHELON: Table = {
    "config.heads": "divisible",
    "config.num_kv_heads": "divisible",
    "embedding.tokens": "vocabulary",
    "embedding.positions": "replicated",
    "embedding.dropout": "replicated",
    "blocks.*.attention.query": "column",
    "blocks.*.attention.key": "column",
    "blocks.*.attention.value": "column",
    "blocks.*.attention.*_norm": "heads",
    "blocks.*.attention.output": "row",
    "blocks.*.mlp.gate": "column",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "blocks.*.mlp.shared.gate": "column",
    "blocks.*.mlp.shared.up": "column",
    "blocks.*.mlp.shared.down": "row",
    "blocks.*.mlp.shared.expert.gate": "column",
    "blocks.*.mlp.shared.expert.up": "column",
    "blocks.*.mlp.shared.expert.down": "row",
    "blocks.*.mlp.shared.weight": "replicated",
    "blocks.*_norm": "replicated",
    "blocks.*_dropout": "replicated",
    "head.norm": "replicated",
    "head.projection": "vocabulary",
}

# By the name of a model's class.
TABLES: dict[str, Table] = {"GPT": _ECHELON, "Llama": _ECHELON, **TENSOR_TABLES}


def known_table(model: nn.Module) -> Table:
    """The table of a model's class; empty if there is none."""
    known = next((cls.__name__ for cls in type(model).__mro__ if cls.__name__ in TABLES), None)
    if known is None:
        return {}
    lines = CONFIG_LINES[known](getattr(model, "config", None)) if known in CONFIG_LINES else {}
    return {**lines, **{p: text for p, text in TABLES[known].items() if p not in lines}}


def _styles_by_class(model: nn.Module) -> dict[str, Style]:
    """By the name of the module: experts, and all that belongs to a gate."""
    styles = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Experts):
            styles[name] = Style("experts")
        elif isinstance(module, Gate):
            inside = module.named_modules(prefix=name, remove_duplicate=False)
            styles |= {each: Style("replicated") for each, _ in inside}
    return styles


def _first_match(name: str, entries: Iterable[tuple[str, Style]]) -> Style | None:
    return next((s for p, s in entries if s.word in MODULE_WORDS and fnmatchcase(name, p)), None)


class Argument(NamedTuple):
    """An argument of a module's forward that has a part for each of `heads`."""

    module: nn.Module
    name: str
    heads: int


def _style_of_part(style: Style, role: str) -> Style | None:
    """The style of a part of a layer that peft has adapted, where the layer itself would have `style`."""
    words = PAIRS.get(style.word, {})
    word = words.get(role, "" if role == LAYER else words.get("", ""))
    return style if word == "same" else Style(word) if word else None


class Styles:
    """The styles of a model's modules: by the user's table, then by that of the model's class. Names in
    tables are those of the model without adapters of peft, and so are `names`."""

    def __init__(self, model: nn.Module, table: Table | None) -> None:
        self._places = find_places(model)
        self._model = model = adapted_model(model)
        self.names = list(dict.fromkeys(place.plain for place in self._places.values()))
        config = getattr(model, "config", None)
        self._own = {pattern: Style.read(pattern, text, config) for pattern, text in (table or {}).items()}
        self._by_class = _styles_by_class(model)
        others = {p: Style.read(p, text, config) for p, text in known_table(model).items()}
        self._entries = [*self._own.items(), *((p, s) for p, s in others.items() if p not in self._own)]

    def of(self, name: str) -> Style | None:
        """The style of the module `name`; None if no pattern matches. `*` matches dots too. The gates and
        experts of a mixture of experts are known by their class; only the user's table comes before that."""
        plain, role = self._places.get(name, Place(name))
        style = self._of_plain(plain)
        return style if style is None or role in ("", BASE) else _style_of_part(style, role)

    def adapted(self) -> dict[str, tuple[str, Style]]:
        """The layers that peft has adapted, by name: without adapters, their name and style."""
        layers = {name: plain for name, (plain, role) in self._places.items() if role == LAYER}
        styles = {name: (plain, self._of_plain(plain)) for name, plain in layers.items()}
        return {name: (plain, style) for name, (plain, style) in styles.items() if style is not None}

    def _of_plain(self, name: str) -> Style | None:
        own = _first_match(name, self._own.items())
        by_class = self._by_class.get(name) if own is None else None
        return own or by_class or _first_match(name, self._entries)

    def numbers(self, word: str) -> list[Number]:
        patterns = [pattern for pattern, style in self._entries if style.word == word]
        found = [number for pattern in patterns for number in find_numbers(self._model, pattern)]
        return list({(id(number.owner), number.attribute): number for number in found}.values())

    def arguments(self) -> list[Argument]:
        """The arguments of modules that have a part for each head."""
        return [
            Argument(module, match["argument"], style.parts[0])
            for pattern, style in self._entries
            if (match := _ARGUMENT.fullmatch(pattern))
            for name, module in self._model.named_modules()
            if fnmatchcase(name, match["module"])
        ]

    def unused(self) -> list[tuple[str, Style]]:
        """The lines of the user's table that match nothing of the model."""

        def matches(pattern: str, style: Style) -> bool:
            if style.word in NUMBER_WORDS:
                return any(True for _ in find_numbers(self._model, pattern))
            argument = _ARGUMENT.fullmatch(pattern)
            return any(fnmatchcase(name, argument["module"] if argument else pattern) for name in self.names)

        return [(pattern, style) for pattern, style in self._own.items() if not matches(pattern, style)]


# Which parameters of a module its style splits, along which dim.


class Cut(NamedTuple):
    """The parameter `name` of a module is split along `dim`; it is matrices in one, in these proportions."""

    name: str
    dim: int
    parts: tuple[int, ...] = (1,)

    def sizes(self, parameter: Tensor) -> tuple[int, ...]:
        """The sizes of the matrices, which are the dim together."""
        unit = parameter.shape[self.dim] // sum(self.parts)
        return tuple(unit * part for part in self.parts)


def cuts(module: nn.Module, style: Style) -> list[Cut]:
    outputs, inputs = (1, 0) if is_transposed(module) else (0, 1)
    if style.word == "experts":
        first = Cut("gate_up_proj", 1, (1, 1)) if hasattr(module, "gate_up_proj") else Cut("up_proj", 1)
        return [first, Cut("down_proj", 2)]
    if isinstance(module, nn.Embedding) and style.word in ("vocabulary", "column"):
        return [Cut("weight", 0 if style.word == "vocabulary" else 1, style.parts)]
    if style.word == "norm":
        return [Cut(name, 0) for name in ("weight", "bias") if name in module._parameters]
    if style.word in ("column", "vocabulary") and not style.whole:
        return [Cut("weight", outputs, style.parts), Cut("bias", 0, style.parts)]
    return [Cut("weight", inputs)] if style.word == "row" else []


def rows_of_rank(style: Style, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """Return the outputs of a column that a rank computes, as (begin, end); some parts it uses whole."""
    unit, begin, spans = size // sum(style.parts), 0, []
    for index, part in enumerate(style.parts):
        is_whole = index in style.whole
        share = unit * part if is_whole else unit * part // ranks
        first = begin if is_whole else begin + share * rank
        spans.append((first, first + share))
        begin += unit * part
    return spans
