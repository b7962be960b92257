"""`lora-worker demo`: a worker, a small real model and three adapters, without a server, an account or a GPU."""
