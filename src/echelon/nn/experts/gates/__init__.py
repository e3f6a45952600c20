"""Which experts a token goes to: noisy top-k, Switch, GShard, sigmoid and other gates."""
