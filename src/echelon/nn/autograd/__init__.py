"""Small tools for autograd: what it saves, what runs twice, generators, products."""
