"""Parameter sets, and the ways for the ranks of one to hold it and agree on its gradients."""
