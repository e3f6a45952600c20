"""Models that cannot be split: every reason why a table would not train a model as one device does."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from echelon.nn.dropout.modules import drops_each_element
from echelon.nn.huggingface.adapters import adapted_model
from echelon.nn.huggingface.modules import embedding_scale, is_plain_matrix, is_transposed
from echelon.nn.layering import listed_layers
from echelon.nn.wrapping import find_wrapper, replaced_forward
from echelon.parallel.tensor.modules import SplitModule, is_matrix, is_norm, num_outputs
from echelon.parallel.tensor.proposal import pattern_of, propose
from echelon.parallel.tensor.styles import MODULE_WORDS, NUMBER_WORDS, Style, Styles, cuts

StyleOf = Mapping[nn.Module, Style]  # for every module that has a style

_SPLIT = ("column", "row", "vocabulary", "experts", "norm")
_OVER_FEATURES = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
_OVER_POSITIONS = (nn.MultiheadAttention, nn.RNNBase, _ConvNd, nn.GroupNorm, _NormBase)
_FEED_FORWARDS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # linear1 · dropout · linear2
_WHOLE = Style("replicated")
_REPLICATED = "'replicated' (or 'inner', if it is between a column and a row, on a part of the features)"


def find_errors(
    model: nn.Module,
    styles: Styles,
    style_of: StyleOf,
    ranks: int,
    *,
    partial: Collection[nn.Module],
    whole_sequence: Collection[nn.Module] | None,
) -> list[str]:
    """All errors at once, one for each kind of module.

    `partial`: modules of whose unsplit parameters a rank has only a part of the gradient. `whole_sequence`:
    the modules that see the whole sequence, if others see a part of it.
    """
    refused = list(_adapter_errors(model, styles))
    if refused:  # no table knows the parts of such adapters
        return list(dict.fromkeys(refused))
    numbers = list(_indivisible_numbers(styles, ranks))
    # Where heads cannot be shared out, neither can matrices: that is one error, not one for each of them.
    misfits = _misfits(model, style_of, 1 if numbers else ranks)
    errors = [
        *_unused_lines(model, styles),
        *_unknown_modules(model, style_of),
        *misfits,
        *hooked_weights(model, style_of),
        *_dropout_between(model, style_of),
        *_ties(model, styles, style_of, partial),
        *(() if whole_sequence is None else _sequence_errors(model, style_of, whole_sequence)),
        *numbers,
    ]
    return list(dict.fromkeys(errors))


# Names.


def _unused_lines(model: nn.Module, styles: Styles) -> Iterator[str]:
    """An error for every line of the user's table that matches nothing."""
    for pattern, style in styles.unused():
        is_number = style.word in NUMBER_WORDS
        names = _number_names(adapted_model(model)) if is_number else styles.names
        near = difflib.get_close_matches(pattern, dict.fromkeys([*map(pattern_of, names), *names]), 3, 0.5)
        yield (
            f"'{pattern}': '{style}' in the table matches no {'number' if is_number else 'module'} of the "
            f"model; drop it, or fix the name{' (near: ' + ', '.join(near) + ')' if near else ''}"
        )


def _number_names(model: nn.Module) -> list[str]:
    owners = {**dict(model.named_modules()), "config": getattr(model, "config", None)}
    return [
        f"{name}.{attribute}"
        for name, owner in owners.items()
        for attribute, value in getattr(owner, "__dict__", {}).items()
        if type(value) is int
    ]


def _unknown_modules(model: nn.Module, style_of: StyleOf) -> Iterator[str]:
    """One error for all modules that have weights or drop, and that no table knows, with lines for them."""
    unstyled = ((name, module) for name, module in model.named_modules() if module not in style_of)
    unknown = {module: name for name, module in unstyled if _needs_style(module)}
    if not unknown:
        return
    patterns = list(dict.fromkeys(pattern_of(name) or "the model" for name in unknown.values()))
    names = ", ".join(patterns[:4]) + ", …" * (len(patterns) > 4)
    yield "\n".join(
        [
            f"no table knows {_count(len(unknown))} ({names}); pass one to parallelize. From their sizes, "
            "this may be it; look it over:",
            "    tensor_table={",
            *(f"        {p!r}: {word!r}," for p, word in propose(model, unknown.keys()).items()),
            "    }",
            f"    The words are {', '.join(MODULE_WORDS)} (docs/tensor.md). A dropout or a weight between a "
            "column and a row is 'inner' or 'heads'.",
            "    It fits a forward that takes sizes from its tensors: q.view(batch, length, -1, head_width), "
            "and not a whole width divided by a number of heads.",
        ]
    )


def _count(modules: int) -> str:
    return "1 module" if modules == 1 else f"{modules} modules"


def _needs_style(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False)) or _drops(module)


def _drops(module: Any) -> bool:
    return isinstance(module, _DropoutNd) and module.p > 0


def _kind(module: nn.Module) -> tuple[object, ...]:
    """Modules of one kind have the same errors."""
    is_replaced = replaced_forward(module) is not None
    return type(module), is_replaced, *(p.shape for p in module.parameters(recurse=False))


# Styles.


def _misfits(model: nn.Module, style_of: StyleOf, ranks: int) -> Iterator[str]:
    """An error for every kind of module that its style is not for, or that is not divisible."""
    reported: set[tuple[object, ...]] = set()
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    read_only = {child for attention in attentions for child in attention.children()}
    for name, module in model.named_modules():
        style = style_of.get(module)
        kind = (pattern_of(name), *_kind(module), style)
        if style is None or kind in reported:
            continue
        reported.add(kind)
        subject = f"{name or 'the model'} ({type(module).__name__})"
        if module in read_only and style.word in _SPLIT:
            yield f"{subject}: torch's attention reads its weights and does not call it; make it 'replicated'"
        elif reason := _misfit(module, style):
            yield f"{subject}: cannot be '{style}'{reason}"
        else:
            yield from _indivisible(name, module, style, ranks)


def _misfit(module: Any, style: Style) -> str:
    """Why a module cannot have a style, and the fix; empty if it can."""
    if style.word in _SPLIT:
        return _unsplittable(module, style)
    own = set(module.parameters(recurse=False))
    if style.word in ("region", "enclosed") and own:
        return ", which is for modules without weights of their own; give the weights a module of their own"
    inside = {p for child in module.children() for p in child.parameters()}
    if style.word == "tied" and not own <= inside:
        return ", which is for weights that modules inside it share; make it 'replicated'"
    if style.word == "inner" and isinstance(module, _OVER_FEATURES):
        return ", since it needs all features together; make it 'replicated', and the matrices around it too"
    if style.word == "inner" and isinstance(module, _DropoutNd) and not drops_each_element(module):
        return ", since it drops whole channels; use nn.Dropout there"
    return ""


def _unsplittable(module: Any, style: Style) -> str:
    """Why a module cannot be split, and the fix; empty if it can."""
    if not _is_right_kind(module, style):
        return f"; make it {_REPLICATED}"
    if find_wrapper(module, SplitModule) is not None:
        return ": another engine has split it already; close that engine first"
    if replaced_forward(module) is not None or (
        style.word not in ("experts", "norm") and not _is_plain(module)
    ):
        plain = "nn.Embedding" if isinstance(module, nn.Embedding) else "nn.Linear"
        return f": its own forward would be lost; make it 'replicated', or a plain {plain}"
    if isinstance(module, nn.Embedding) and style.word == "column" and module.max_norm is not None:
        return ", since max_norm needs all features of a row; leave it out, or make it 'replicated'"
    computed = [cut.name for cut in cuts(module, style) if cut.name not in module._parameters]
    if computed:
        return (
            f": its {computed[0]} is computed from other parameters; make it a parameter, or all of them "
            "'replicated'"
        )
    return ""


def _is_right_kind(module: nn.Module, style: Style) -> bool:
    if style.word == "experts":
        has_first = hasattr(module, "gate_up_proj") or hasattr(module, "up_proj")
        return has_first and hasattr(module, "down_proj")
    if style.word == "norm":
        return is_norm(module)
    by_rows_or_features = style.word == "vocabulary" or style == Style("column")
    return is_matrix(module) or (by_rows_or_features and isinstance(module, nn.Embedding))


def _is_plain(module: nn.Module) -> bool:
    """Return whether its class computes what a split module does."""
    if is_transposed(module) or is_plain_matrix(module) or embedding_scale(module) is not None:
        return True
    return type(module).forward in (nn.Linear.forward, nn.Embedding.forward)


def _indivisible(name: str, module: nn.Module, style: Style, ranks: int) -> Iterator[str]:
    if style.word == "vocabulary":  # it is padded
        return
    if style.heads:
        yield from _indivisible_heads(name, module, style, ranks)
        return
    for cut in cuts(module, style):
        value, divisor = getattr(module, cut.name), sum(cut.parts) * ranks
        if value is None or value.shape[cut.dim] % divisor == 0:
            continue
        size = value.shape[cut.dim]
        next_size = -(-size // divisor) * divisor
        yield (
            f"{name}.{cut.name}: its split dim of {size} is not divisible by {divisor}; make it "
            f"{next_size}, or use fewer ranks"
        )


def _indivisible_heads(name: str, module: nn.Module, style: Style, ranks: int) -> Iterator[str]:
    """Errors of a column whose heads are in the table: a rank must have heads, not parts of them."""
    size, heads = num_outputs(module), sum(style.parts)
    if size % heads:
        yield (
            f"{name}: '{style}' in the table is {heads} heads, and its {size} outputs are not divisible by "
            f"{heads}; fix the numbers in the table"
        )
    for index, part in enumerate(style.parts):
        if part % ranks and index not in style.whole:
            yield (
                f"{name}: {part} heads of '{style}' in the table are not divisible by {ranks} ranks; use "
                f"tensor={_largest_divisor(part, ranks)}, or '{part} whole', if every rank uses all of them"
            )


def _dropout_between(model: nn.Module, style_of: StyleOf) -> Iterator[str]:
    """An error for every dropout of torch's transformers that would give all ranks' features one mask."""
    for name, module in model.named_modules():
        if not isinstance(module, _FEED_FORWARDS) or not _drops(module.dropout):
            continue
        column, style = style_of.get(module.linear1), style_of.get(module.dropout)
        if column is not None and column.word == "column" and style is not None and style.word != "inner":
            path = f"{name}.dropout".lstrip(".")
            yield f"{path}: is between a column and a row, and cannot be '{style}'; make it 'inner'"


# Sharing.


def _ties(
    model: nn.Module, styles: Styles, style_of: StyleOf, partial: Collection[nn.Module]
) -> Iterator[str]:
    """An error for every module or parameter with two names that would be split, or summed, in two ways."""
    first_use: dict[nn.Parameter, tuple[str, object, bool]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        style, used_style = styles.of(name), style_of.get(module)
        if style is not None and used_style is not None and style != used_style:
            yield f"{name} is '{style}' in the table, and '{used_style}' by another name; give it one style"
        module_cuts = cuts(module, used_style) if used_style else []
        cut_of = {getattr(module, cut.name, None): cut[1:] for cut in module_cuts}
        is_tied = used_style is not None and used_style.word == "tied"
        for parameter in () if is_tied else module.parameters(recurse=False):
            cut, is_partial = cut_of.get(parameter), parameter not in cut_of and module in partial
            before, cut_before, partial_before = first_use.setdefault(parameter, (name, cut, is_partial))
            if cut != cut_before:
                yield f"{before} and {name} share a parameter, and their styles split it differently"
            elif is_partial != partial_before:
                yield (
                    f"{before} and {name} share a parameter, and a rank has all of its gradient in one of "
                    "them, but a part of it in the other; do not share it"
                )


def _adapter_errors(model: nn.Module, styles: Styles) -> Iterator[str]:
    """An error for every kind of layer that peft has adapted in a way that cannot be split."""
    for name, (plain, style) in styles.adapted().items():
        reason = _reason_not_splittable(model.get_submodule(name), style)
        if reason:
            yield (
                f"{pattern_of(plain)} is '{style}' in the table, and {reason}; leave it without this "
                "adapter, or use data, zero and pipeline instead of tensor"
            )


def _reason_not_splittable(module: Any, style: Style) -> str:
    """Say why an adapter of a layer with this style cannot be split; empty if it can."""
    kind = type(module).__name__
    base: Any = getattr(module, "base_layer", None)
    if kind == "ModulesToSaveWrapper" or style.word in ("replicated", "heads"):
        return ""
    is_embedding = style.word == "vocabulary" and isinstance(base, nn.Embedding)
    if not hasattr(module, "lora_A") or not (is_matrix(base) or is_embedding):
        method = type(module).__module__.removeprefix("peft.tuners.").partition(".")[0]
        return f"{method}.{kind} of peft adapts it; only LoRA of matrices and embeddings can be split"
    if module.lora_variant:
        variants = {type(variant).__name__ for variant in module.lora_variant.values()}
        return f"{', '.join(sorted(variants))} of peft needs its whole matrix (norms of DoRA, for one)"
    if style.word == "vocabulary" and not is_embedding:
        return "logits of an adapter cannot be split by vocabulary"
    return ""


def _sequence_errors(
    model: nn.Module, style_of: StyleOf, whole_sequence: Collection[nn.Module]
) -> Iterator[str]:
    """An error for every module that gets a part of the sequence, and needs all of it."""
    later = {module for layer in listed_layers(model)[1:] for module in layer.modules()}
    for name, module in model.named_modules():
        subject, is_first = f"{name} ({type(module).__name__})", module in whole_sequence
        if not is_first and isinstance(module, _OVER_POSITIONS) and style_of.get(module) == _WHOLE:
            yield f"{subject}: needs all positions, and with sequence=true gets a part; use sequence=false"
        if is_first and module in later and _needs_style(module):
            yield (
                f"{subject}: is in the first layer, which gets whole sequences, and in a later one, which "
                "with sequence=true gets a part of them; give each layer its own, or use sequence=false"
            )


# Numbers.


def _indivisible_numbers(styles: Styles, ranks: int) -> Iterator[str]:
    for word in NUMBER_WORDS:
        values = {number.name: number.value for number in styles.numbers(word)}
        reported = dict[object, list[str]]()  # names of the same number: heads, and heads of keys and values
        for name, value in sorted(values.items()):
            reported.setdefault((type(value), value), []).append(f"{name}={value}")
        for name, value in sorted(values.items()):
            same = reported[type(value), value]
            if value is None or not same[0].startswith(f"{name}="):
                continue
            if type(value) is not int or value < 1:
                yield f"{name}={value!r}: only a positive integer can be '{word}'; drop it"
            elif value % ranks:
                others = f" (nor is {', '.join(same[1:])})" if same[1:] else ""
                yield (
                    f"{name}={value} is not divisible by {ranks} ranks{others}; use tensor="
                    f"{_largest_divisor(value, ranks)}, or a model where it is a multiple of {ranks}"
                )


def _largest_divisor(value: int, limit: int) -> int:
    return next(n for n in range(min(limit, value), 0, -1) if value % n == 0)


# Weights with hooks of the user's own: a rank's part of a weight has only a part of the gradient.


def hooked_weights(model: nn.Module, style_of: Mapping[nn.Module, Style]) -> Iterator[str]:
    """An error for every weight with a hook that would be split: the hook is written for the whole one."""
    for name, module in model.named_modules():
        for cut in cuts(module, style_of[module]) if module in style_of else ():
            parameter = module._parameters.get(cut.name)
            if parameter is None:
                continue
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                path = f"{name}.{cut.name}".lstrip(".")
                yield (
                    f"{path}: has a hook on its gradient, of which each rank would have only a part; remove "
                    f"the hook, or make the module 'replicated' (tensor_table={{'{name}': 'replicated'}})"
                )
