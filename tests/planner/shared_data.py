"""Where published data lies, if it is there: beside the project, or where ECHELON_SHARED_DATA says."""

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[2].parent / "shared" / "data"
PIPEDREAM = Path(os.environ.get("ECHELON_SHARED_DATA", _BESIDE)) / "pipedream"

PUBLISHED_RUNS = PIPEDREAM.parent / "published_runs"

needs_pipedream = pytest.mark.skipif(not PIPEDREAM.is_dir(), reason=f"no {PIPEDREAM}")
needs_published_runs = pytest.mark.skipif(not PUBLISHED_RUNS.is_dir(), reason=f"no {PUBLISHED_RUNS}")
