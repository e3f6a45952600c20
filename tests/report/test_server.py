"""The live page: this machine alone, and new data when the run has some."""

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.errors import UserError
from echelon.report.server import PageServer
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
