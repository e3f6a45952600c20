"""The live page: this machine alone, and new data when the run has some."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.report.page import MOST_BYTES, PageServer, gather, in_script, render
from tests.report.folders import step_row, write_run


@contextmanager
def served(*runs: Path, predict: bool = False) -> Iterator[PageServer]:
    with PageServer(runs, predict=predict) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def get(server: PageServer, path: str, host: str | None = None) -> tuple[int, str]:
    address = server.url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(address, timeout=30)
    try:
        connection.request("GET", path, headers={"Host": host or address})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_page_and_its_data_follow_the_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=4)
    with served(folder) as server:
        assert server.url.startswith("http://127.0.0.1:")
        status, page = get(server, "/")
        assert (status, page.startswith("<!doctype html>")) == (200, True)
        _, text = get(server, "/data.json")
        data = json.loads(text)
        assert data["live"] is True
        assert data["runs"][0]["figures"]["steps"] == 4
        after = "/data.json?after=" + data["version"].replace(" ", "%20")
        assert get(server, after) == (204, "")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step_row(5)) + "\n" + '{"kind": "step", "st')
        status, text = get(server, after)
        assert status == 200
        assert json.loads(text)["runs"][0]["figures"]["steps"] == 5


def test_only_this_machine_is_answered(tmp_path: Path) -> None:
    with served(write_run(tmp_path, steps=2)) as server:
        port = server.url.rstrip("/").rpartition(":")[2]
        assert get(server, "/", f"localhost:{port}")[0] == 200
        for host in (f"evil.example:{port}", "evil.example", ""):
            assert get(server, "/data.json", host or "x")[0] == 403
        for path in ("/run.json", "/../run.json", "/%2e%2e/run.json", "//etc/passwd"):
            assert get(server, path)[0] == 404


def test_a_folder_that_is_no_run_and_a_port_that_is_taken_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        PageServer([tmp_path / "none"])
    with PageServer([write_run(tmp_path, steps=2)], predict=False) as server:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        with pytest.raises(UserError, match=f"--port {port}: cannot be used: .*; leave it out"):
            PageServer([tmp_path / "run"], port, predict=False)


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u2028&lt;\ud800"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(page)
    return parser.found


def hostile_run(path: Path) -> Path:
    return write_run(
        path,
        name="<img src=x onerror=alert(1)>",
        plan=HOSTILE,
        state=HOSTILE,
        reason=HOSTILE,
        job={HOSTILE: HOSTILE},
        versions={HOSTILE: HOSTILE},
        events=[{"kind": HOSTILE, "reason": HOSTILE, "time": HOSTILE}],
    )


def test_a_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = render(gather([write_run(tmp_path)], predict=False))
    assert len(page.encode()) < MOST_BYTES
    tags = elements(page)
    assert not [attributes for _, attributes in tags if {"src", "href"} & attributes.keys()]
    (policy,) = [a["content"] for tag, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "connect-src 'self'" in render({"runs": [], "differences": [], "live": True})


def test_hostile_names_are_text(tmp_path: Path) -> None:
    data = gather([hostile_run(tmp_path)], predict=False)
    page = render(data)
    plain = render(gather([write_run(tmp_path / "plain")], predict=False))
    assert [tag for tag, _ in elements(page)] == [tag for tag, _ in elements(plain)]
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(text)["runs"][0]["plan"] == data["runs"][0]["plan"] == HOSTILE
    assert not {"<", ">", "&", "\u2028"} & set(in_script(data))
    page.encode()


def test_the_script_writes_no_html() -> None:
    script = Path(__file__).parents[2] / "src" / "echelon" / "report" / "assets" / "app.js"
    text = script.read_text(encoding="utf-8")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser"):
        assert way not in text


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_runs_are_compared(count: int, tmp_path: Path) -> None:
    data = gather([write_run(tmp_path, name=f"run-{n}", steps=10 + n) for n in range(count)], predict=False)
    assert [run["name"] for run in data["runs"]] == [f"run-{n}" for n in range(count)]
    assert bool(data["differences"]) == (count > 1)
