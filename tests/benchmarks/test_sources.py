"""When a result is stale: its sources have changed, and nothing else plays a part."""

from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.sources import SUBJECTS, are_current, hashes

from benchmarks import benches, pipeline, sources


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one bench that measures one room."""
    room = tmp_path / "src" / "echelon" / "program"
    room.mkdir(parents=True)
    (room / "build.py").write_text("a")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "toy.py").write_text("b")
    monkeypatch.setattr(sources, "_ROOT", tmp_path)
    monkeypatch.setitem(SUBJECTS, "toy", sources.Subject("toy.md", ("program",)))
    return tmp_path


@pytest.mark.parametrize(
    ("path", "text", "current"),
    [
        ("src/echelon/program/build.py", "a", True),
        ("src/echelon/program/build.py", "c", False),
        ("src/echelon/program/new.py", "", False),
        ("src/echelon/program/notes.txt", "c", True),
        ("src/echelon/other.py", "c", True),
        ("benchmarks/toy.py", "c", False),
    ],
)
def test_a_result_is_current_until_what_it_measures_changes(
    checkout: Path, path: str, text: str, current: bool
) -> None:
    kept = hashes("toy", ModuleType("benchmarks.toy"))
    assert list(kept) == ["benchmarks/toy.py", "src/echelon/program"]
    assert are_current(kept)
    (checkout / path).write_text(text)
    assert are_current(kept) == current


def test_a_file_that_moves_makes_it_stale(checkout: Path) -> None:
    kept = hashes("toy", ModuleType("benchmarks.toy"))
    room = checkout / "src" / "echelon" / "program"
    (room / "build.py").rename(room / "lower.py")
    assert not are_current(kept)


def test_a_result_without_hashes_is_stale() -> None:
    assert not are_current({})


def test_the_modules_of_a_bench_are_those_that_it_imports_from() -> None:
    own = [path for path in hashes("pipeline", pipeline) if path.startswith("benchmarks/")]
    names = ("compare", "harness", "pipeline", "stages")
    assert own == [f"benchmarks/{name}.py" for name in names]


def test_every_bench_names_sources_and_a_page_that_exist() -> None:
    assert list(SUBJECTS) == list(benches())
    for subject in SUBJECTS.values():
        assert (sources._ROOT / "docs" / subject.page).exists()
        assert all((sources._ROOT / "src" / "echelon" / room).exists() for room in subject.rooms)
