"""What a step of a plan would take: bytes, seconds by part, rates."""
