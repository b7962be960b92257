"""Batch files: lines in, ordinary generate tasks through Redis, one row for every line out."""
