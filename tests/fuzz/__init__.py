"""Random plans, each verified against one device. `make test` runs some, `make fuzz` many."""
