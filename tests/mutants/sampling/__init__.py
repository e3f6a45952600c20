"""Mutants that a tool makes: changes of the syntax tree of the heart, drawn by a seed.

operators   which changes a source file allows, and what is left alone
draw        a number of them, the same number for each package
tracer      notes in every process, ranks too, which test runs which line
recording   runs the tests with it, folder by folder
coverage    which tests a change is given to, from that record or from the imports of tests
verdict     whether they find it: a failure counts if the test passes without the change

`python -m tests.mutants.sampling` runs 200 of them.
"""
