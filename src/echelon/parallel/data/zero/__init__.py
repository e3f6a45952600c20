"""ZeRO: units of weights, gradients and optimizer state in parts, gathered when they are used."""
