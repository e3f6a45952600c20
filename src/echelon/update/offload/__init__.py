"""What leaves the device for the memory of its host, and comes back in time."""
