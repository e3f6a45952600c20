"""A part of torchrun's store that no earlier ranks have written to.

torchrun keeps one store while it starts ranks again and again (--max-restarts, nodes that come and go). There
ranks would find addresses of ranks that are gone. No number that all of them know says which start this is.
So each rank writes a word of its own, and rank 0 proposes a name for all words that it reads:

    rank 1   "word-1" = c07f…                       over the word of the rank 1 before
    rank 0   "proposal" = a31b…, [9e21…, c07f…]     again, whenever a word has changed
    rank 1   finds its word there: "a31b…/seen-1"
    rank 0   all have seen it: "a31b…/go", and all keep their keys below a31b…
"""

import json
import secrets
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not marked so

from echelon.launching.errors import PeerLost

_PERIOD_SECONDS = 0.02


def fresh_store(store: Store, rank: int, ranks: int, limit: timedelta) -> Store:
    """The part of `store` for the ranks that call this now; all of them must."""
    keys, word = PrefixStore("echelon/start", store), secrets.token_hex(8)
    keys.set(f"word-{rank}", word)
    give_up = time.monotonic() + limit.total_seconds()
    name, words = "", [""] * ranks
    while time.monotonic() < give_up:
        if rank == 0:
            name, words = _propose(keys, name, words)
        elif keys.check(["proposal"]):
            name, words = json.loads(keys.get("proposal"))
        if name and words[rank] == word and len(words) == ranks:
            keys.set(f"{name}/seen-{rank}", "")
            if rank == 0 and keys.check([f"{name}/seen-{each}" for each in range(ranks)]):
                keys.set(f"{name}/go", "")
            if keys.check([f"{name}/go"]):
                return PrefixStore(f"echelon/{name}", store)
        time.sleep(_PERIOD_SECONDS)
    raise PeerLost(f"the {ranks} ranks did not all start within {limit}")


def _propose(keys: Store, name: str, words: list[str]) -> tuple[str, list[str]]:
    """Rank 0: the proposal, which is a new one if words have changed; '' while some are missing."""
    names = [f"word-{rank}" for rank in range(len(words))]
    if not keys.check(names):
        return "", words
    current = [keys.get(each).decode() for each in names]
    if current == words:
        return name, words
    name = secrets.token_hex(8)
    keys.set("proposal", json.dumps([name, current]))
    return name, current
