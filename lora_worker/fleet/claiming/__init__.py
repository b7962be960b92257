"""Which messages a worker takes, how many, and where others of them go."""
