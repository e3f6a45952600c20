"""JSON without the words that JSON does not have."""

import json
import math

from echelon.train.strict_json import dump


def test_numbers_that_are_none_are_null() -> None:
    value = {"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf}, "d": "NaN", "e": True, "f": None}
    plain = {"a": [None, [1.5, None]], "b": {"c": None}, "d": "NaN", "e": True, "f": None}
    assert json.loads(dump(value)) == plain
    assert dump({"a": 1}, indent=1) == '{\n "a": 1\n}'
