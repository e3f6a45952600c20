"""What a person sees of predictions and searches, in 80 columns."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from echelon.cli.plan_view import show_prediction, show_question, show_search
from echelon.planner.cluster.read import read_cluster
from echelon.planner.foresight.predict import predict
from echelon.planner.searching.search import SearchResult, search
from echelon.planner.shape.presets import preset_shape

SHAPE, CLUSTER = preset_shape("llama3-8b"), read_cluster("h100:8")


@pytest.fixture
def screen() -> Console:
    return Console(width=80, record=True, file=StringIO())


def test_the_question_says_a_length_that_nobody_gave(screen: Console) -> None:
    show_question(SHAPE, CLUSTER, 64, None, screen)
    show_question(SHAPE, CLUSTER, 64, 4096, screen)
    text = " ".join(screen.export_text().split())
    assert "8.0 billion parameters" in text
    assert "64 × 8,192 tokens (the length of the model)" in text
    assert text.endswith("64 × 4,096 tokens")


def test_a_row_of_the_search_is_a_line(screen: Console) -> None:
    result = search(SHAPE, CLUSTER, 64, top=4)
    show_search(result, screen)
    lines = screen.export_text().splitlines()
    assert all(len(line) <= 80 for line in lines[:-1])
    assert lines[0].startswith("All plans: ")
    common = lines[0].removeprefix("All plans: ").split()
    rows = lines[3 : 3 + len(result.best)]
    assert all(row.lstrip()[0].isdigit() for row in rows)
    assert not any(word in rows[0].split() for word in common)
    assert lines[-1] == f"The first, in full: {result.best[0].plan}"


def test_one_plan_has_all_its_words_in_its_row(screen: Console) -> None:
    result = search(SHAPE, CLUSTER, 64, top=1)
    show_search(result, screen)
    text = " ".join(screen.export_text().split())
    assert result.best[0].plan in text
    assert "All plans" not in text


def test_bubbles_and_costs_have_columns_where_there_are_any(screen: Console) -> None:
    show_search(search(SHAPE, replace(CLUSTER, price=2.0), 64, top=2), screen)
    text = screen.export_text()
    assert "cost" in text
    assert "bubble" not in text


def test_what_would_fit_is_said_where_nothing_does(screen: Console) -> None:
    show_search(SearchResult((), {}, "does not fit: use more devices"), screen)
    assert screen.export_text().strip() == "does not fit: use more devices"


def test_stages_are_columns(screen: Console) -> None:
    show_prediction(predict(SHAPE, "pipeline=4 data=2 precision=bf16 microbatches=8", CLUSTER, 64), screen)
    text = screen.export_text()
    for word in ("stage 0", "stage 1", "stage 3", "activations", "peak", "does not fit", "tokens/s"):
        assert word in text
    assert "…" not in text
