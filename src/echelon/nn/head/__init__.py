"""The matrix that makes logits, together with a loss that is known: logits are never whole."""
