"""Limits of the text of a manifest."""

import pytest

from echelon.errors import UserError
from echelon.state.checkpoint.manifest_text import parse


def test_the_longest_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(b'{"a": -9223372036854775808, "b": 18446744073709551615}') == {"a": -(2**63), "b": 2**64 - 1}
    with pytest.raises(UserError, match="an integer of 21 digits"):
        parse(b'{"a": 118446744073709551615}')
    with pytest.raises(UserError, match="the key 'b' stands twice"):
        parse(b'{"a": 1, "b": 2, "b": 3, "c": 4}')
    asked = {}
    monkeypatch.setattr(
        "echelon.state.checkpoint.manifest_text.parse_json", lambda _, **options: asked.update(options) or {}
    )
    parse(b"")
    assert (asked["most_bytes"], asked["most_values"]) == (2**27, 2**23)
