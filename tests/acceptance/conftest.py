"""Fleets of real workers on a Redis of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lora_worker.embedded import EmbeddedServer

# Sets a figure beside the test's name, whatever pytest captures.
Say = Callable[[str], None]


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as started:
        yield started


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> Say:
    def print_figure(figure: str) -> None:
        with capsys.disabled():
            print(f"\n{request.node.name}: {figure}")  # noqa: T201 - the figures are what these tests are run for

    return print_figure
