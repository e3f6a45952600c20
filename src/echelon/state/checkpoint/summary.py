"""What is in a checkpoint, in numbers: for people who look at one, and programs that do."""

import math
from collections import Counter
from typing import Any

from echelon.state.checkpoint.manifest_reader import dtype_of
from echelon.state.checkpoint.saved import SavedState
from echelon.state.ownership import MASTER, VALUE

# Any other part is of the optimizer; of a name that is no tensor of the model, it is the engine's own.
KINDS = {VALUE: "weights", MASTER: "masters"}


def summarize(saved: SavedState) -> dict[str, Any]:
    """Plan, step, date and versions; bytes and tensors of weights, masters and the optimizer; files."""
    manifest = saved.manifest
    sizes: dict[str, Counter[str]] = {}
    dtypes: dict[str, set[str]] = {}
    for parts in manifest.tensors.values():
        for part, record in parts.items():
            kind = KINDS.get(part, "optimizer" if VALUE in parts else "other")
            num_bytes = math.prod(record.shape) * dtype_of(record.dtype).itemsize
            sizes.setdefault(kind, Counter()).update(tensors=1, bytes=num_bytes)
            dtypes.setdefault(kind, set()).add(record.dtype)
    return {
        "path": str(saved.path),
        "step": manifest.step,
        "plan": manifest.plan,
        "ranks": manifest.ranks,
        "saved": manifest.saved,
        "versions": manifest.versions,
        "sizes": {kind: {**sizes[kind], "types": sorted(dtypes[kind])} for kind in sizes},
        "optimizer_parts": sorted(
            {p for parts in manifest.tensors.values() if VALUE in parts for p in parts if p not in KINDS}
        ),
        "numbers": manifest.numbers,
        "extra": manifest.extra,
        "files": {name: record.bytes for name, record in manifest.files.items()},
    }
