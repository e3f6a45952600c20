"""Training loops of many kinds, as people write them; each has a twin in plain torch under plain/."""
