"""Output on streams that cannot show every character: an ASCII terminal, a file name that is not UTF-8.

Characters that a stream cannot encode are written in plain letters.
"""

import codecs
import io
from typing import Any

_PLAIN = {"…": "...", "→": "->", "✓": "ok", "✗": "failed", "×": "x", "−": "-", "·": "-", "│": "|", "─": "-"}
_PLAIN |= dict(zip("▁▂▃▄▅▆▇█", "._-=+*%#", strict=True))


def make_robust(*streams: Any) -> None:
    """Let these streams write every character, in plain letters where they must."""
    codecs.register_error("echelon.plain", _in_plain_letters)
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="echelon.plain")


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    wrong = error.object[error.start : error.end]
    return "".join(map(_plain, wrong)), error.end


def _plain(character: str) -> str:
    return _PLAIN.get(character) or character.encode("ascii", "backslashreplace").decode("ascii")
