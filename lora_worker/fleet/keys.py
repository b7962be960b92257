"""Every name a fleet has in Redis: queues, which kombu splits by priority, and keys of its own.

All begin with the setting `queue_prefix`, which holds neither '.' nor ':', so fleets of different prefixes never meet.
"""

from __future__ import annotations

# Part of the wire contract: 0 is the highest, and unset means 0.
PRIORITY_STEPS = (0, 3, 6, 9)
# kombu's own separator between a queue's name and its priority step.
SEPARATOR = "\x06\x16"


class Keys:
    """The names of one fleet.

    Args:
        prefix: the setting `queue_prefix`.
        partitions: how many queues the adapters' names are spread over.
    """

    def __init__(self, prefix: str, partitions: int) -> None:
        self.prefix = prefix
        # Where clients send that know no partitions; workers forward from here what they don't run at once.
        self.inbox = prefix
        self.partitions = [f"{prefix}.p{n:02d}" for n in range(partitions)]
        # Requests for the bare base model that no worker had a row for when they came.
        self.base = f"{prefix}.base"
        # Adapter-management tasks, which no backlog of generations holds up.
        self.manage = f"{prefix}.manage"
        # Sorted set: worker id -> when its lease ends, in Redis's time; 0 while its messages are being restored.
        self.workers = f"{prefix}:workers"
        # Hash: `partitions` as the first worker had it, to which others are held; `epoch`, which tells whether Redis
        # came back without its data; `members`, a count that moves when a worker comes, goes, drains or changes pins;
        # `registry`, which tells the same of the registry; `registry_floor`, up to which its changes are forgotten.
        self.fleet = f"{prefix}:fleet"
        # Hash: id of a worker with nothing to do -> rows it could take, and when it said so.
        self.idle = f"{prefix}:idle"
        # Sorted set: ids of revoked tasks -> when that was, in Redis's time.
        self.revoked = f"{prefix}:revoked"
        # Hash: an adapter's name -> its entry in the registry, JSON.
        self.registry = f"{prefix}:registry"
        # Sorted set: the names that were registered, changed or removed last, by the number of that change.
        self.registry_changes = f"{prefix}:registry:changes"
        # The number of the fleet registry's last change.
        self.generation = f"{prefix}:registry:generation"

    def worker(self, worker_id: str) -> str:
        """Hash: what a worker says of itself."""
        return f"{self.prefix}:worker:{worker_id}"

    def unacked(self, worker_id: str) -> str:
        """Hash: tag -> the messages a worker has claimed and not acknowledged, each after the list it came from."""
        return f"{self.prefix}:unacked:{worker_id}"

    def started(self, worker_id: str) -> str:
        """Set: the tags of those whose rows have started."""
        return f"{self.prefix}:started:{worker_id}"

    def direct(self, worker_id: str) -> str:
        """The queue that one worker alone claims from; what it leaves there goes back to the inbox when it is gone."""
        return f"{self.prefix}.w.{worker_id}"

    def batch(self, job: str) -> str:
        """Set: the names of the tasks of one batch that are published and whose answers have not been taken."""
        return f"{self.prefix}:batch:{job}"

    @property
    def queues(self) -> list[str]:
        """Every queue but the workers' own."""
        return [self.inbox, self.manage, self.base, *self.partitions]


def lists_of(queue: str) -> list[str]:
    """The Redis lists of a queue, from the highest priority to the lowest."""
    return [list_of(queue, step) for step in PRIORITY_STEPS]


def step_of(priority: int) -> int:
    """The index of the step that a priority falls into."""
    return max((index for index, step in enumerate(PRIORITY_STEPS) if step <= priority), default=0)


def list_of(queue: str, priority: int) -> str:
    """The Redis list of a queue that holds messages of this priority."""
    step = PRIORITY_STEPS[step_of(priority)]
    return f"{queue}{SEPARATOR}{step}" if step else queue
