"""The embedded server belongs to the program that starts it, not to the terminal of that program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from support.worker_process import wait_for

PROGRAM = """
import signal
from lora_worker.embedded import EmbeddedServer
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
server = EmbeddedServer(ends_with_parent=True)
server.start()
print(server.port, flush=True)
while True:
    signal.pause()
"""


def answers(connection: Redis) -> bool:
    try:
        return bool(connection.ping())
    except RedisConnectionError:
        return False


def test_ctrl_c_reaches_the_program_alone_and_a_kill_of_it_ends_the_server() -> None:
    # In a group of its own, as a terminal starts a command: Ctrl-C is a signal to the whole group.
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert program.stdout is not None
    try:
        with Redis(port=int(program.stdout.readline())) as connection:
            assert os.getpgid(connection.info("server")["process_id"]) != os.getpgid(program.pid)
            os.killpg(program.pid, signal.SIGINT)
            assert program.stdout.readline() == "interrupted\n"
            assert answers(connection)
            program.kill()
            program.wait()
            wait_for(lambda: not answers(connection), "the server has ended with its program")
    finally:
        program.kill()
        program.communicate()
