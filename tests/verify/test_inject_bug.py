"""The contract can fail: it finds each known bug."""

import pytest

from echelon.verify import verify
from tests.cases import perceptron_case


@pytest.mark.parametrize("bug", ["divide-twice", "skip-bucket"])
@pytest.mark.parametrize("plan", ["data=2", "data=4", "data=2 zero=1", "data=2 zero=3"])
def test_an_injected_bug_is_found_and_its_parameter_named(bug: str, plan: str) -> None:
    verdict = verify(perceptron_case(steps=3), plan, inject_bug=bug)
    assert not verdict.equal
    names = {name for name, _ in perceptron_case().build().named_parameters(remove_duplicate=False)}
    assert verdict.worst_tensor[0].split()[0] in names
    assert verdict.worst_tensor[0] in str(verdict)
    assert verdict.worst[0] in str(verdict)
    assert "DIFFERS" in str(verdict)


def test_a_bug_between_replicas_needs_replicas() -> None:
    with pytest.raises(ValueError, match="set data=2 or more"):
        verify(perceptron_case(), "data=1", inject_bug="skip-bucket")
    with pytest.raises(ValueError, match="needs sync=all-reduce"):
        verify(perceptron_case(), "data=2 sync=parameter-server", inject_bug="divide-twice")
