"""One thread for the references of contract tests, as for pipelines."""

from tests.pipeline_parallel.conftest import one_thread  # noqa: F401 (a fixture)
