"""Inputs made from the words of a language: most are wrong in meaning rather than in form."""

import random
from typing import Any

from echelon.plan import FIELDS
from echelon.program import Op
from tests.fuzz_parsers.mutate import VALUES, WORDS

_VALUES = (
    *(
        "1",
        "2",
        "3",
        "4",
        "8",
        "0",
        "-1",
        "1.5",
        "auto",
        "true",
        "false",
        "none",
        "full",
        "2-1",
        "3-1",
        "1-1-1",
    ),
    *("1f1b", "gpipe", "interleaved", "pipedream", "async", "all-reduce", "fp32", "bf16", "fp16", "fp64"),
    *(
        "optimizer",
        "activations",
        "optimizer,activations",
        "inf",
        "ring",
        "all-to-all",
        "parameters",
        "999999999",
    ),
)


def plan(draw: random.Random) -> bytes:
    fields = [*FIELDS, "dta", "", "data"]
    words = []
    for _ in range(draw.choice((1, 2, 3, 5, 30))):
        value = draw.choice(_VALUES) if draw.random() < 0.85 else draw.choice(WORDS)
        words.append(draw.choice(fields) + draw.choice(("=", "=", "=", "==", " = ", "")) + value)
    return draw.choice((" ", " ", "  ", ",")).join(words).encode("utf-8", "surrogatepass")


def schedule(draw: random.Random) -> bytes:
    ranks = draw.choice((1, 2, 2, 3, 8))
    lines = [f"schedule: {draw.choice(('x', '', 'a b'))}"] if draw.random() < 0.3 else []
    lines += [f"stage {n}: {draw.randrange(ranks)}" for n in range(draw.choice((0, 0, ranks, ranks + 1)))]
    for rank in range(ranks):
        words = [_instruction(draw, ranks) for _ in range(draw.choice((0, 2, 4, 20)))]
        lines.append(f"rank {rank}: {' '.join(words)}")
    if draw.random() < 0.2:
        lines.append(f"microbatches: {draw.choice(('1', '4', '0', '-1', '999999999', '9' * 12, 'x'))}")
    if draw.random() < 0.2:
        draw.shuffle(lines)
    return "\n".join(lines).encode()


def _instruction(draw: random.Random, ranks: int) -> str:
    op = draw.choice([op.value for op in Op] + ["F", "B", "F", "B", "X"])
    number = draw.choice(("", "0", "0", "1", "2", "9", "9" * 6, "9" * 25))
    marks = draw.choice(("", "", "@0", "@1", "v1", f"@{'9' * 20}"))
    peer = draw.choice(("", f">{draw.randrange(ranks)}", f"<{draw.randrange(ranks)}", ">99"))
    return op + number + marks + peer


def graph_text(draw: random.Random) -> bytes:
    """PipeDream's graph.txt."""
    keys = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    numbers = ("0.0", "1.5", "3", "[1; 2]", "[1.0; 2.0; 3e5]", "nan", "inf", "-1", "1e400", "x", "")
    count = draw.choice((1, 2, 5, 20))
    lines = []
    for node in range(count):
        amounts = ", ".join(f"{key}={draw.choice(numbers[: draw.choice((5, 11))])}" for key in keys)
        about = draw.choice(("Linear(1, 2)", "Input0", "__getitem__(0)", "", "a -- b", "🦀"))
        lines.append(f"node{node} -- {about} -- {amounts}{draw.choice(('', '', ' -- stage_id=1'))}")
    for _ in range(draw.randint(0, 2 * count)):
        lines.append(f"\tnode{draw.randrange(count)} -- node{draw.randrange(count + 1)}")
    return "\n".join(lines).encode()


def toml(value: dict[str, Any], draw: random.Random) -> bytes:
    """A job of any values, as TOML; now and then what TOML does not have."""
    lines = [f"{_key(key)} = {_toml(each, draw)}" for key, each in value.items() if not _is_table(each)]
    for key, each in value.items():
        if _is_table(each):
            lines.append(f"[{_key(key)}]")
            lines += [f"{_key(name)} = {_toml(entry, draw)}" for name, entry in each.items()]
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else f"'{name}'"


def _toml(value: Any, draw: random.Random) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(each, draw) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(each, draw)}" for key, each in value.items()) + "}"
    return _toml(draw.choice([each for each in VALUES if each is not None]), draw)
