"""Tables: which style a name has, which numbers a pattern matches, and which lines match nothing."""

from types import SimpleNamespace

import pytest
from torch import nn

from echelon.errors import UserError
from echelon.parallel.tensor.styles import MODULE_WORDS, NUMBER_WORDS, TABLES, Style, Styles


class GPT(nn.Module):
    """Has the name of a class that a table knows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"mlp_norm": nn.LayerNorm(4)}), nn.Linear(4, 4)])
        self.config = nn.Linear(6, 6)  # stands for any object with numbers


def test_words_are_read_and_printed() -> None:
    for text in (*MODULE_WORDS, *NUMBER_WORDS, "column/3"):
        assert str(Style.read("x", text)) == text
    assert Style.read("x", "column/3") == Style("column", (1, 1, 1))
    assert str(Style.read("x", "column/1")) == "column"


def test_heads_are_numbers_or_names_of_the_config() -> None:
    config = SimpleNamespace(heads=8, groups=2, ratio=0.5)
    style = Style.read("x", "column:heads,groups, 2", config)
    assert style == Style("column", (8, 2, 2), heads=True)
    shared = Style.read("x", "column:heads,1 whole,1 whole", config)
    assert shared == Style("column", (8, 1, 1), heads=True, whole=(1, 2))
    assert (str(style), str(shared)) == ("column:8,2,2", "column:8,1 whole,1 whole")
    assert Style.read("a(bias)", "heads:heads", config) == Style("heads", (8,), heads=True)


@pytest.mark.parametrize(
    "text", ["column:", "column:8,0", "column:8,ratio", "column:8,depth", "column:8 half"]
)
def test_other_heads_are_refused_with_the_part_that_is_wrong(text: str) -> None:
    config = SimpleNamespace(ratio=0.5)
    part = text.partition(":")[2].split(",")[-1]
    with pytest.raises(UserError, match=f"'a': '{text}' in the table: '{part}' must be a number of heads"):
        Style.read("a", text, config)


@pytest.mark.parametrize("text", ["heads", "row", "column:8"])
def test_an_argument_has_heads(text: str) -> None:
    with pytest.raises(UserError, match=r"'a\(bias\)': .* an argument of a forward can only be 'heads:8'"):
        Style.read("a(bias)", text)


def test_a_module_has_no_number_of_heads() -> None:
    with pytest.raises(UserError, match=r"'heads:8' in the table must be one of"):
        Style.read("a", "heads:8")


@pytest.mark.parametrize("text", ["rows", "row/2", "", "Column", "columns/3"])
def test_other_words_are_refused_with_all_that_there_are(text: str) -> None:
    with pytest.raises(UserError, match=r"'a\.b': '.*' in the table must be one of column, row, .*divisible"):
        Style.read("a.b", text)


def test_every_word_of_the_known_tables_can_be_read() -> None:
    numbers = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, n_head=4)
    for table in TABLES.values():
        assert all(Style.read(pattern, text, numbers) for pattern, text in table.items())


def test_the_users_table_comes_before_that_of_the_class() -> None:
    model = GPT()
    assert Styles(model, None).of("blocks.0.mlp_norm") == Style("replicated")
    assert Styles(model, {"blocks.*": "inner"}).of("blocks.0.mlp_norm") == Style("inner")
    assert Styles(model, None).of("blocks.1") is None


def test_the_first_pattern_that_matches_counts_and_a_star_matches_dots() -> None:
    styles = Styles(nn.Linear(1, 1), {"a.*.c": "row", "a.*": "column"})
    assert styles.of("a.b.b.c") == Style("row")
    assert styles.of("a.b.d") == Style("column")
    assert styles.of("b") is None


def test_a_word_for_numbers_is_no_style_of_a_module() -> None:
    styles = Styles(nn.Linear(1, 1), {"a": "divided", "*": "row"})
    assert styles.of("a") == Style("row")


def test_numbers_are_found_in_modules_and_in_the_config() -> None:
    divided = {"blocks.1.in_features": "divided", "*.in_features": "divided"}
    styles = Styles(GPT(), divided | {"config.out_features": "divisible"})
    assert [(name, attribute) for name, _, attribute in styles.numbers("divided")] == [
        ("blocks.1.in_features", "in_features"),
        ("config.in_features", "in_features"),
    ]
    owners = {name: owner for name, owner, _ in styles.numbers("divisible")}
    assert owners["config.out_features"].out_features == 6


def test_only_lines_of_the_user_can_be_unused() -> None:
    table = {"blocks.*": "inner", "layers.*": "row", "blocks.1.heads": "divided", "config.heads": "divisible"}
    unused = Styles(GPT(), table).unused()
    assert unused == [
        ("layers.*", Style("row")),
        ("blocks.1.heads", Style("divided")),
        ("config.heads", Style("divisible")),
    ]


# Shards: the part that a rank takes, and where it lies in the whole.


def test_the_table_of_our_models_knows_no_module_that_was_added() -> None:
    """`blocks.0.adapter.down` is no matrix of an MLP, though it has the name of one."""
    styles = Styles(GPT(), TABLES["GPT"])
    assert styles.of("blocks.0.mlp.shared.expert.down") == Style("row")
    assert styles.of("blocks.0.adapter.down") is None
