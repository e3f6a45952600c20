"""offload=optimizer: masters, optimizer state and updates in host memory."""
