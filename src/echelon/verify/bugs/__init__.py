"""Silent errors that users of other libraries have reported, as functions that break an engine in that way.

Each takes a finished engine and returns whether it has broken anything on this rank. What each of them is,
and where it was reported, is a table in docs/verify.md; `inject_bug` has their names.
"""
