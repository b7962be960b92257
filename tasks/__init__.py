"""The Celery tasks; installed as `lora_worker.tasks`."""
