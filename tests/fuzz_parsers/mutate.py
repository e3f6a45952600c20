"""Changes of valid inputs: of bytes, and of JSON-like values."""

import copy
import json
import random
from typing import Any

RAW = "\u2063raw:"  # marks a text that is written without quotes, as JSON that Python would not write

WORDS = [
    *("0", "-1", "1", "2147483648", "9223372036854775807", "9223372036854775808", "1" * 30, "9" * 5000),
    *("1e308", "1e999", "-1e999", "NaN", "Infinity", "0.0", "1_000", "0x10", "٣", "true", "null", "none"),
    *("..", "../..", "/etc/passwd", "/dev/zero", "a/../../b", "C:\\x", "~", "~nobody/x", "file:///x"),
    *("\0", "\x1b[2J", "\ud7ff", "\u202e", "é", "🦀", "\ufeff", "\u2028", "%s%n", "{0.__class__}", "$(id)"),
    *("[", "]", "{", "}", ",", ":", "=", '"', "'", "\\", "#", "@", "<", ">", "\n", "\t", "\r\n", " "),
    *("a" * 10_000, "[" * 5_000, '{"a":' * 3_000, "a." * 3_000, "-" * 3_000),
]
VALUES: list[Any] = [
    *(0, -1, 1, 2, 3, 7, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 10**9, 10**6),
    *(0.0, -0.0, 0.5, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), True, False, None),
    *("", "..", "../x", "/etc/passwd", "\0", "\ud800", "\x1b[2J", "a" * 5_000, "float32", "1", "weight"),
    *([], {}, [[]], [0], [0, 0], [1, -1], [10**10, 10**10], [None], {"a": 1}, {"": None}, [[0, 1], [1]]),
    *(
        RAW + "1e999",
        RAW + "9" * 5_000,
        RAW + "[" * 5_000,
        RAW + '{"a":1,"a":2}',
        RAW + "[" * 400 + "]" * 400,
    ),
]


def change_bytes(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    """One to four changes of bytes."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = _change_once(data, others, draw)
    return data[:2_000_000]


def _change_once(data: bytes, others: list[bytes], draw: random.Random) -> bytes:
    begin = draw.randint(0, len(data))
    end = min(len(data), begin + int(2 ** draw.uniform(0, 8)))
    kind = draw.randrange(8)
    if kind == 0 and data:
        place = draw.randrange(len(data))
        return data[:place] + bytes([data[place] ^ 1 << draw.randrange(8)]) + data[place + 1 :]
    if kind == 1:
        return data[:begin] + data[end:]
    if kind == 2:
        times = draw.choice((2, 2, 3, 50, 1000))
        return data[:begin] + data[begin:end] * times + data[end:]
    if kind == 3:
        return data[:begin] + draw.randbytes(draw.randint(1, 8)) + data[begin:]
    if kind == 4:
        other = draw.choice(others)
        cut = draw.randint(0, len(other))
        return data[:begin] + other[cut : cut + 200] + data[end:]
    if kind == 5:
        return data[:begin]
    word = draw.choice(WORDS).encode("utf-8", "surrogatepass")
    return data[:begin] + word + data[end if kind == 6 else begin :]


def change_value(value: Any, draw: random.Random) -> Any:
    """A copy with one to three entries replaced, removed, renamed, doubled or exchanged."""
    value = copy.deepcopy(value)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return draw.choice(VALUES)
        table, key = draw.choice(places)
        kind = draw.randrange(8)
        if kind <= 2:
            table[key] = copy.deepcopy(draw.choice(VALUES))
        elif kind == 3:
            del table[key]
        elif kind == 4:
            other, at = draw.choice(places)
            table[key] = copy.deepcopy(other[at])
        elif kind == 5 and isinstance(table, dict):
            table[draw.choice(["", "x", "__class__", "a" * 3000, "\ud800", *map(str, table)])] = table.pop(
                key
            )
        elif kind == 6 and isinstance(table, list):
            table[key : key + 1] = [table[key]] * draw.choice((2, 3, 1000))
        elif isinstance(table[key], int) and not isinstance(table[key], bool):
            table[key] += draw.choice((-1, 1, 2, 2**32, -(2**40)))
        else:
            table[key] = [table[key]]
    return value


def _places(value: Any) -> Any:
    """Every (table, key) below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in list(items):
        yield value, key
        yield from _places(each)


def to_json(value: Any) -> bytes:
    """JSON, with marked texts as they are."""
    text = json.dumps(value, ensure_ascii=False)
    while RAW in text:
        before, _, after = text.partition(f'"{RAW}')
        if not after:
            break
        raw, _, rest = _until_quote(after)
        text = before + raw + rest
    return text.encode("utf-8", "surrogatepass")


def _until_quote(text: str) -> tuple[str, str, str]:
    """A JSON text up to its closing quote, decoded."""
    end = 0
    while text[end] != '"':
        end += 2 if text[end] == "\\" else 1
    return json.loads(f'"{text[:end]}"'), '"', text[end + 1 :]
