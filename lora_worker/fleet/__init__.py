"""Between Celery and the engine: the pool, what its tasks have in common, and what must not be logged."""
