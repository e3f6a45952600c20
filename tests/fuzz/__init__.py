"""Random plans, each held to the equality contract. `make test` runs some, `make fuzz` many."""
