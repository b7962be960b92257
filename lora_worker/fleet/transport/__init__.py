"""The two transports: kombu's for Redis with leases, and one that claims atomically."""
