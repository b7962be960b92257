"""LoRA inside the model: the layer, its injection, and the step's view of it."""
