"""One self-contained HTML page: the data, the script that draws them, and uPlot for the curves.

But for its title, the page has no text of a run in its markup. All of it is JSON in a script of a type that
no browser runs, with `<`, `>` and `&` escaped, so that no name can end it; app.js writes texts as texts.
"""

import html
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any, final
from urllib.parse import parse_qs, urlsplit

from echelon.errors import UserError, printable
from echelon.report.contents import contents, differences
from echelon.report.foresight import foresee
from echelon.report.run_files import file_mark, read_run
from echelon.train import strict_json

MOST_BYTES = 2 * 10**6
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
# No network, whatever a run is called: the page may only run what stands in it.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def gather(paths: list[Path], *, predict: bool = True) -> dict[str, Any]:
    """The data of a page of one run, or of several side by side."""
    runs = []
    for path in paths:
        files = read_run(path)
        runs.append(contents(files, foresee(files) if predict else {}))
    return {"runs": runs, "differences": differences(runs) if len(runs) > 1 else [], "live": False}


def render(data: dict[str, Any]) -> str:
    """The page of some data. `live`: it asks the server that sent it for newer ones."""
    policy = _POLICY + ("; connect-src 'self'" if data.get("live") else "")
    title = ", ".join(run["name"] for run in data["runs"])
    return _asset("page.html").format(
        policy=policy,
        title=html.escape(printable(f"{title} · echelon")),
        style=_asset("uPlot.min.css") + _asset("style.css"),
        data=in_script(data),
        library=_asset("uPlot.iife.min.js"),
        script=_asset("app.js"),
    )


def in_script(data: dict[str, Any]) -> str:
    """JSON that can stand in a script element."""
    text = strict_json.dump(data)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _asset(name: str) -> str:
    return resources.files("echelon.report").joinpath("assets", name).read_text(encoding="utf-8")


# The page of runs that go on: a server of this machine alone, which the page asks for newer data.
#
# Only requests that name this machine are answered: a page from elsewhere could else read a run through a
# name that it lets point here (DNS rebinding).

HOST = "127.0.0.1"
_NAMES = (HOST, "localhost")


@final
class LiveData:
    """The data of the page; made again when a file of a run has changed."""

    def __init__(self, runs: Sequence[Path], *, predict: bool) -> None:
        self._runs, self._lock = list(runs), threading.Lock()
        self._version, self._data = "", dict[str, Any]()
        self._foresight: dict[Path, dict[str, Any]] = {}
        for path in self._runs:
            read_run(path)  # a folder that is none is refused at once
        if predict:
            # A plan and a device do not change, and a prediction takes seconds: once, beside the page.
            threading.Thread(target=self._foresee, name="foresight", daemon=True).start()

    def get(self) -> dict[str, Any]:
        with self._lock:
            version = self._current_version()
            if version != self._version:
                runs = [contents(read_run(path), self._foresight.get(path, {})) for path in self._runs]
                compared = differences(runs) if len(runs) > 1 else []
                self._data = {"runs": runs, "differences": compared, "live": True, "version": version}
                self._version = version
            return self._data

    @property
    def version(self) -> str:
        with self._lock:
            return self._current_version()

    def _current_version(self) -> str:
        """Names, sizes and times of the files that a page is made of."""
        marks = [str(sorted(map(str, self._foresight)))]
        for path in self._runs:
            names = ("run.json", "metrics.jsonl", "saved.jsonl", "measured.json", "trace.json")
            marks += [file_mark(path / name) for name in names]
        return " ".join(marks)

    def _foresee(self) -> None:
        for path in self._runs:
            try:
                found = foresee(read_run(path))
            except UserError as error:
                found = {"notes": [f"no prediction: {error}"]}
            with self._lock:
                self._foresight = {**self._foresight, path: found}


@final
class PageServer(ThreadingHTTPServer):
    """`with PageServer([run]) as server: server.serve()`, at `server.url`."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], port: int = 0, *, predict: bool = True) -> None:
        data = LiveData(runs, predict=predict)
        try:
            super().__init__((HOST, port), _handler(data))
        except OSError as error:
            raise UserError(
                f"--port {port}: cannot be used: {error.strerror or error}; leave it out, and one that is "
                "free is taken"
            ) from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}/"

    def serve(self) -> None:
        """Answer until `shutdown`, from another thread, or an interrupt."""
        self.serve_forever(poll_interval=0.2)


def _handler(data: LiveData) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        """Two addresses: the page, and its data if they are newer than what the page has."""

        def do_GET(self) -> None:
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            address = urlsplit(self.path)
            if host not in _NAMES:
                self._answer(403, "text/plain", "this server answers its own machine alone")
            elif address.path == "/":
                self._answer(200, "text/html", self._content(page=True))
            elif address.path == "/data.json":
                if parse_qs(address.query).get("after") == [data.version]:
                    self._answer(204, "application/json", "")
                else:
                    self._answer(200, "application/json", self._content(page=False))
            else:
                self._answer(404, "text/plain", "there is the page / and its data, /data.json")

        def _content(self, *, page: bool) -> str:
            found = data.get()
            return render(found) if page else in_script(found)

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Requests are no news."""

    return Handler
