"""A stand-in for the model where the queue is the subject: `celery -A lora_worker.testing worker`.

The worker is the real one in all but its engine. That has the real one's doors and scheduler, computes nothing and
takes its time: PACED_TOKENS_PER_SECOND for a row (100), PACED_LOAD_SECONDS for an adapter on its way into a slot (0.1).
It reads no model and imports no torch; the setting `model` is a name alone. An adapter is any folder with an
adapter_config.json, and its digest that of the files. Nothing outside of this package knows of it.
"""
