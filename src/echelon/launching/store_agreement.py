"""Ranks agree through a store, before they have a process group: on a decision, on a part of the store."""

import contextlib
import json
import secrets
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, PrefixStore, Store  # type: ignore[attr-defined]  # public, not marked so

from echelon.errors import DamagedError, UserError
from echelon.launching.watch.failure import PeerLost

_READ_SECONDS = 10.0
_POLL_SECONDS = 0.1  # how long a rank reads a file again and again,
_PAUSE = 0.0002  # with pauses of so many seconds


def agree(
    store: Store,
    rank: int,
    ranks: int,
    report: Callable[[], object],
    decide: Callable[[list[Any]], object],
    *,
    limit: timedelta | None = None,
) -> Any:
    """Return what `decide` makes of all ranks' reports, in rank order. Rank 0 decides.

    A UserError, of `decide` or of any rank's `report`, is raised on every rank. Any other error is raised on
    the rank where it happens, and is a PeerLost on the others. Reports and decision are JSON: tuples arrive
    as lists. `limit` is how long the decision may take; without it, the store's own.
    """
    outcome, local_error = _run(report, rank)
    store.set(f"report-{rank}", outcome)
    if rank == 0 and local_error is None:
        outcome, local_error = _run(lambda: decide(_read_reports(store, ranks)), rank)
    if rank == 0:
        store.set("decision", outcome)
    poll_file(store, "decision")
    if limit is not None:
        store.wait(["decision"], limit)
    decision = json.loads(store.get("decision"))
    if "value" in decision:
        return decision["value"]
    # Rank 0 may hold the store: if it ended now, the others would lose the store and not read the error.
    if store.add("readers", 1) == ranks:
        store.set("all have read", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):  # a rank is gone; the error is still the one to raise
            store.wait(["all have read"], timedelta(seconds=_READ_SECONDS))
    raise local_error or _error_of(decision)


def _run(function: Callable[[], object], rank: int) -> tuple[str, Exception | None]:
    """Return the JSON of what `function` returns or raises; and the error, if it is for this rank alone."""
    try:
        return json.dumps({"value": function()}), None
    except UserError as error:
        kind = "damage" if isinstance(error, DamagedError) else "user error"
        return json.dumps({kind: [error.title, error.errors]}), None
    except PeerLost as error:  # says which rank is the cause
        return json.dumps({"peer lost": str(error)}), error
    except Exception as error:
        headline = "".join(traceback.format_exception_only(error)).strip()
        return json.dumps({"peer lost": f"rank {rank} raised {headline}"}), error


def poll_file(store: Store, key: str) -> None:
    """Return soon after the key is there, or after a while; at once if the store is no file.

    torch reads a file that it waits for every 10 ms: longer than all the rest of an agreement.
    """
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    end = time.monotonic() + _POLL_SECONDS
    while isinstance(inner, FileStore) and not store.check([key]) and time.monotonic() < end:
        time.sleep(_PAUSE)


def _read_reports(store: Store, ranks: int) -> list[Any]:
    """Wait for the reports of all ranks, also where one has failed: others may still be at work."""
    reports = []
    for key in (f"report-{rank}" for rank in range(ranks)):
        poll_file(store, key)
        reports.append(json.loads(store.get(key)))
    for report in reports:
        if "value" not in report:
            raise _error_of(report)
    return [report["value"] for report in reports]


def _error_of(outcome: dict[str, Any]) -> Exception:
    if "user error" in outcome:
        return UserError(*outcome["user error"])
    if "damage" in outcome:
        return DamagedError(*outcome["damage"])
    return PeerLost(outcome["peer lost"])


_PERIOD_SECONDS = 0.02


def fresh_store(store: Store, rank: int, ranks: int, limit: timedelta) -> Store:
    """Return a part of `store` that no earlier ranks have written to; all that start now must call this.

    torchrun keeps one store while it starts ranks again and again (--max-restarts, nodes that come and go).
    There ranks would find addresses of ranks that are gone. No number that all of them know says which start
    this is. So each rank writes a word of its own, and rank 0 proposes a name for all words that it reads:

        rank 1   "word-1" = c07f…                       over the word of the rank 1 before
        rank 0   "proposal" = a31b…, [9e21…, c07f…]     again, whenever a word has changed
        rank 1   finds its word there: "a31b…/seen-1"
        rank 0   all have seen it: "a31b…/go", and all keep their keys below a31b…
    """
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
