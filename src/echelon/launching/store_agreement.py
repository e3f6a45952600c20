"""A decision that all ranks share, made before they have a process group: through a store, as JSON."""

import contextlib
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not marked so

from echelon.errors import UserError

_READ_SECONDS = 10.0


def agree(
    store: Store,
    rank: int,
    ranks: int,
    report: Callable[[], object],
    decide: Callable[[list[Any]], object],
    *,
    limit: timedelta | None = None,
) -> Any:
    """What `decide` makes of all ranks' reports, in rank order. Rank 0 decides.

    A UserError, of `decide` or of any rank's `report`, is raised on every rank. Reports and decision are
    JSON: tuples arrive as lists. `limit` is how long the decision may take; without it, the store's own.
    """
    store.set(f"report-{rank}", json.dumps(_outcome(report)))
    if rank == 0:
        reports = [json.loads(store.get(f"report-{each}")) for each in range(ranks)]
        store.set("decision", json.dumps(_decide(reports, decide)))
    if limit is not None:
        store.wait(["decision"], limit)
    outcome = json.loads(store.get("decision"))
    if "error" in outcome:
        _await_readers(store, rank, ranks)
        raise UserError(*outcome["error"])
    return outcome["value"]


def _decide(reports: list[dict[str, Any]], decide: Callable[[list[Any]], object]) -> dict[str, Any]:
    for report in reports:
        if "error" in report:
            return report
    return _outcome(lambda: decide([report["value"] for report in reports]))


def _outcome(function: Callable[[], object]) -> dict[str, Any]:
    try:
        return {"value": function()}
    except UserError as error:
        return {"error": [error.title, error.errors]}


def _await_readers(store: Store, rank: int, ranks: int) -> None:
    """Rank 0 may hold the store: if it ended now, the others would lose the store and not read the error."""
    if store.add("readers", 1) == ranks:
        store.set("all have read", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):  # a rank is gone; the error is still the one to raise
            store.wait(["all have read"], timedelta(seconds=_READ_SECONDS))
