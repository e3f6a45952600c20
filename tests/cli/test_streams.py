"""No character stops a message."""

import io
import sys

from echelon.cli.main import make_robust


def printed(text: str, encoding: str) -> bytes:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    make_robust(stream)
    stream.write(text)
    stream.flush()
    return stream.buffer.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_ascii_has_words_for_our_signs() -> None:
    assert printed("… 1 → 2 ✓ ▁█", "ascii") == b"... 1 -> 2 ok .#"
    assert printed("ü 日", "ascii") == rb"\xfc \u65e5"
    assert printed("ü … 日", "latin-1") == b"\xfc ... \\u65e5"


def test_utf8_is_left_alone_but_for_broken_names() -> None:
    assert printed("… ✓", "utf-8") == "… ✓".encode()
    assert printed("\udcff", "utf-8") == rb"\udcff"


def test_what_is_no_such_stream_is_left_alone() -> None:
    make_robust(io.StringIO(), None)
    assert sys.stdout is not None
