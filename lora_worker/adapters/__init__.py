"""Adapters: where they come from, what they mean, and where their weights are."""
