"""The same loops in plain torch, on one device."""
