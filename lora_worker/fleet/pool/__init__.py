"""Celery's pool in front of the engine, and a task's way through it."""
