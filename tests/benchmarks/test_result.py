import dataclasses
import getpass
import json
import platform
import re
import subprocess
from pathlib import Path

from benchmarks.result import commit, make_result, read

from benchmarks import Result, Row, Spread, save

ROW = Row("case", "a", "a", Spread(1.0, 2.0, 3.0), Spread(1.0, 1.0, 1.0), {"peak_bytes": 10})


def make() -> Result:
    return make_result("toy", "python -m benchmarks toy", {"rounds": 3}, [ROW])


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_a_saved_result_is_whole(tmp_path: Path) -> None:
    path = save(make(), tmp_path / "benchmarks" / "results")

    data = json.loads(path.read_text())
    assert path.name == "toy.json"
    assert {*data} == {
        *["name", "command", "commit", "date", "versions", "hardware", "settings", "rows", "sources"]
    }
    assert data["settings"] == {"rounds": 3}
    assert data["rows"][0]["seconds"] == {"low": 1.0, "median": 2.0, "high": 3.0}
    assert data["rows"][0]["extras"] == {"peak_bytes": 10}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", data["date"])
    assert {"echelon", "python", "torch"} <= {*data["versions"]}


def test_a_saved_result_reads_back(tmp_path: Path) -> None:
    result = dataclasses.replace(make(), sources={"a.py": "12"})
    assert read(save(result, tmp_path)) == result


def test_a_result_of_before_there_were_hashes_and_with_more_is_read(tmp_path: Path) -> None:
    path = save(make(), tmp_path)
    data = json.loads(path.read_text())
    del data["sources"]
    path.write_text(json.dumps(data | {"outcomes": []}))
    assert read(path).sources == {}


def test_a_result_tells_nothing_of_who_measured_where(tmp_path: Path) -> None:
    text = save(make(), tmp_path).read_text()

    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    assert f'"{getpass.getuser()}"' not in text
    assert platform.node() not in text


def test_the_commit_is_that_of_the_checkout_that_tracks_the_file(tmp_path: Path) -> None:
    git(tmp_path, "init")
    tracked, stranger = tmp_path / "a.py", tmp_path / "b.py"
    tracked.write_text("a")
    stranger.write_text("b")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-m", "a")
    git(tmp_path, "tag", "v1")

    assert re.fullmatch("[0-9a-f]{40}", commit(tracked) or "")
    assert commit(stranger) is None
    tracked.write_text("changed")
    assert (commit(tracked) or "").endswith("-dirty")


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    assert commit(tmp_path / "a.py") is None
