"""Entries of the audit."""

from echelon.engine.audit import MODES, AuditResult, held, skipped


def test_entries_say_what_held_and_why_something_was_skipped() -> None:
    assert held("a") == AuditResult("a", "held", "", True)
    assert held("a", "but") == AuditResult("a", "held", "but", True)
    assert skipped("b", "why") == AuditResult("b", "skipped", "why", True)
    assert skipped("b", "why", is_final=False) == AuditResult("b", "skipped", "why", False)
    assert AuditResult("c", "held").is_final is True
    assert (str(held("a")), str(skipped("b", "why"))) == ("a: held", "b: skipped (why)")
    assert MODES == ("first", "sampled", "always", "off")
