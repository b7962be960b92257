"""Flower's configuration: `celery -A lora_worker flower --conf=config/flowerconfig.py`.

Flower reads a file of this name from the working directory only, hence `--conf`. It shows queues, workers and the
adapter pool (in a worker's Pool tab), and it can revoke tasks and shut workers down, so it asks for a password:
FLOWER_BASIC_AUTH=user:password in the environment. Without it, Flower does not start.
"""

import os
import secrets

if not os.environ.get("FLOWER_BASIC_AUTH"):
    raise SystemExit("Flower needs a password: set FLOWER_BASIC_AUTH=user:password in the environment")

basic_auth = os.environ["FLOWER_BASIC_AUTH"].split(",")
cookie_secret = os.environ.get("FLOWER_COOKIE_SECRET") or secrets.token_urlsafe(32)

# A worker that is gone leaves the list after a minute; a task that is done, after so many others.
purge_offline_workers = 60
max_tasks = 20000

# A worker answers between two steps of its engine, which take a while on a CPU.
inspect_timeout = 5000.0
