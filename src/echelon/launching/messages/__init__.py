"""What the launcher and its ranks tell each other."""
