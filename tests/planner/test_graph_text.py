"""PipeDream's graph.txt: what it says, and each error with its line."""

import pytest

from echelon.errors import UserError
from echelon.planner.graph_text import parse_graph_text
from tests.planner.shared_data import PIPEDREAM, needs_pipedream


def line(name: str, about: str, forward: str = "1.500", output: str = "8.0") -> str:
    return (
        f"{name} -- {about} -- forward_compute_time={forward}, backward_compute_time=2.000, "
        f"activation_size={output}, parameter_size=64.000"
    )


TEXT = "\n".join(
    [
        line("node4", "Add -- (inplace)") + " -- stage_id=1",
        line("node1", "Input0"),
        line("node2", "LSTM(2, 1)", output="[6.0; 1.0; 1.0]"),
        line("node3", "__getitem__(1)"),
        line("node5", "__getitem__(0)"),
        "\tnode2 -- node5",
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode5 -- node4",
        "",
    ]
)


def test_what_it_says() -> None:
    profile = parse_graph_text(TEXT)
    assert [node.name for node in profile.nodes] == ["node2", "node5", "node4"]
    first = profile.nodes[0]
    assert (first.about, first.forward_seconds, first.backward_seconds) == ("LSTM(2, 1)", 0.0015, 0.002)
    assert (first.output_bytes, first.parameter_bytes, first.stash_bytes) == (8.0, 64.0, 8.0)
    assert profile.nodes[2].about == "Add -- (inplace)"
    assert profile.is_chain


def test_every_error_with_its_line() -> None:
    text = "\n".join(
        [
            line("a", "Linear", forward="x"),
            "what is this",
            line("b", "Linear"),
            line("b", "Linear"),
            line("c", "Linear").replace("parameter_size", "size"),
            line("d", "Linear", output="[1; -9]"),
            "\tb -- nosuch",
            "\ta -- b",
            "\tb",
        ]
    )
    with pytest.raises(UserError) as caught:
        parse_graph_text(text)
    lines = sorted(error.split(":")[0] for error in caught.value.errors)
    assert lines == [f"line {number}" for number in (1, 2, 4, 5, 6, 7, 9)]


@needs_pipedream
@pytest.mark.parametrize(
    ("name", "layers"),
    [("vgg16", 40), ("alexnet", 22), ("gnmt", 37), ("resnet18", 70), ("squeezenet1_0", 67)],
)
def test_measured_profiles(name: str, layers: int) -> None:
    text = (PIPEDREAM / f"{name}.graph.txt").read_text(encoding="utf-8")
    assert len(parse_graph_text(text).nodes) == layers
