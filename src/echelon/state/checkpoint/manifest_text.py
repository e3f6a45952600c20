"""The bytes of manifest.json: one line that says what it is and the hash of the rest, then the rest.

    {"format": "echelon-checkpoint", "version": 2, "sha256": "…",
    "step": 100, "plan": …}

So every changed byte is found, also in the manifest itself. What is read may come from a stranger: nothing
but a UserError is raised, and neither sizes, nesting nor numbers are without a limit.
"""

import hashlib
import json
import math
import re
from collections import Counter
from typing import Any

from echelon.errors import UserError
from echelon.state.bounded_json import parse_json

FORMAT, VERSION = "echelon-checkpoint", 2  # 1: hashes of CRC-32

MOST_BYTES = 2**27
MOST_VALUES = 2**23  # some 900,000 pieces of tensors
_MOST_DIGITS = 20  # of an integer: all that 64 bits hold
_HEAD = re.compile(rb'\{"format": "([\w-]{1,40})", "version": (\d{1,9}), "sha256": "([0-9a-f]{64})",')


class OtherVersionError(UserError):
    """The file may be whole, for another echelon."""


def to_bytes(entries: dict[str, Any]) -> bytes:
    """Entries as a file. Raises a UserError for what JSON cannot hold."""
    try:
        rest = json.dumps(entries, allow_nan=False)[1:].encode()
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError) as error:
        raise UserError(
            f"the manifest cannot be written: {error}; give `extra` plain data with finite numbers"
        ) from error
    digest = hashlib.sha256(rest).hexdigest()
    return f'{{"format": "{FORMAT}", "version": {VERSION}, "sha256": "{digest}",\n'.encode() + rest


def from_bytes(data: bytes) -> dict[str, Any]:
    """The entries of a file."""
    head, _, rest = data.partition(b"\n")
    matched = _HEAD.fullmatch(head)
    if matched is None or matched[1] != FORMAT.encode():
        raise UserError(f"is damaged, or is not the manifest of a checkpoint (format {FORMAT!r})")
    check_version(int(matched[2]))
    if hashlib.sha256(rest).hexdigest() != matched[3].decode():
        raise UserError("is damaged: its contents do not match the hash in its first line")
    return parse(b"{" + rest)


def check_version(version: object) -> None:
    if type(version) is not int or version != VERSION:
        raise OtherVersionError(
            f"is of version {str(version)[:40]}; this echelon reads version {VERSION}; use the one that "
            "saved it"
        )


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object of finite numbers, in which every key stands once."""
    try:
        value = parse_json(
            data,
            most_bytes=MOST_BYTES,
            most_values=MOST_VALUES,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_finite,
            object_pairs_hook=_object,
        )
    except ValueError as error:  # not UTF-8 or JSON, or too much of it
        raise UserError(f"is not JSON that a checkpoint has: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"must hold a JSON object, holds a {type(value).__name__}")
    return value


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is not finite")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return value
