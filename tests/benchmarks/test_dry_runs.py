"""The table of dry runs: a row of today is that of the record."""

import json
from pathlib import Path

import pytest

from benchmarks import dry_runs

RECORD = Path(dry_runs.__file__).parent / "results" / "dry-run.json"


@pytest.mark.slow
def test_a_row_is_that_of_the_record() -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["table"]
    assert [row["plan"].strip("`") for row in rows] == list(dry_runs.PLANS)
    recorded = next(row for row in rows if row["plan"] == "`pipeline=8 microbatches=16 schedule=gpipe`")
    found = dry_runs.row("pipeline=8 microbatches=16 schedule=gpipe")
    exact = {name for name in found if name != "activations_bytes"}
    assert {name: found[name] for name in exact} == {name: recorded[name] for name in exact}
