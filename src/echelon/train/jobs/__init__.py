"""A job file: its keys, its rules, and plans that fit the machine."""
