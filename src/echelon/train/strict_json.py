"""JSON that every reader accepts: NaN and infinity, which JSON does not have, are written as null."""

import json
import math
from typing import Any


def dump(value: Any, indent: int | None = None) -> str:
    """`value` (dicts, lists and plain values) as JSON.

    dump({"loss": math.nan})  ->  '{"loss": null}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
