"""The base model: loading it, and its attention over a cache in blocks."""
