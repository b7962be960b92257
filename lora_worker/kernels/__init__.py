"""The arithmetic of the LoRA delta."""
