"""The fleet's adapters: what is registered in Redis, and how each worker's engine keeps with it."""
