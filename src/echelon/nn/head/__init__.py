"""The matrix that makes logits, together with the loss that reads them: logits are never whole."""
