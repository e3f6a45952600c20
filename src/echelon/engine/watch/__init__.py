"""Changes by hand to what the engine owns: taken over, or refused by name."""
