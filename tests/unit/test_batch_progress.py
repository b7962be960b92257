"""What is shown of a batch while it runs, and what is said of it at the end."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lora_worker.batch.progress import Progress
from lora_worker.batch.store import ModelCount
from lora_worker.batch.summary import ErrorKind, Summary
from lora_worker.batch.tally import Tally


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be set by the test."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def half_done(clock: list[float]) -> Tally:
    """100 lines of which 10 were done before; 40 more, of which 1 failed, in 20 s, 5 tokens each."""
    tally = Tally([ModelCount(1, "alice", 60, 10), ModelCount(2, None, 40, 0)], total=100, done=10, failed=0)
    for i in range(60):
        tally.sent(1 if i < 30 else 2)
    for i in range(40):
        if i % 2 == 0:
            clock[0] += 1
            tally.sample()
        tally.landed(1 if i < 25 else 2)
        tally.answered(1 if i < 25 else 2, response=None if i == 7 else {"usage": {"completion_tokens": 5}})
    return tally


def test_rates_are_those_of_this_run_and_the_rest_follows(clock: list[float]) -> None:
    tally = half_done(clock)
    assert (tally.done, tally.failed, tally.in_flight) == (50, 1, 20)
    assert tally.rows_per_second == pytest.approx(2)
    assert tally.tokens_per_second == pytest.approx(39 * 5 / 20)
    assert tally.eta_seconds == pytest.approx(25)
    assert [(model.name, model.done, model.in_flight) for model in tally.models_in_flight] == [
        ("alice", 35, 5),
        ("(base)", 15, 15),
    ]


def test_only_the_last_minute_counts(clock: list[float]) -> None:
    tally = half_done(clock)
    for _ in range(120):
        clock[0] += 1
        tally.sample()
    assert tally.rows_per_second == 0
    assert tally.eta_seconds is None


def test_a_log_gets_a_line_every_ten_seconds(clock: list[float]) -> None:
    tally, file = half_done(clock), io.StringIO()
    with Progress(tally, Console(file=file)) as progress:
        for _ in range(25):
            clock[0] += 1
            progress.update()
    lines = file.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("50 of 100 done (50.0 %), 1 failed, ")
    assert lines[0].endswith("20 in flight: alice 35/60, (base) 15/40")
    assert "\x1b" not in file.getvalue()


def test_a_terminal_gets_a_bar_that_is_redrawn(clock: list[float]) -> None:
    tally, file = half_done(clock), io.StringIO()
    with Progress(tally, Console(file=file, force_terminal=True, width=200, color_system="truecolor")) as progress:
        clock[0] += 1
        progress.update()
        progress.say("a line that stays [not markup]")
    shown = file.getvalue()
    assert "━" in shown
    assert "50 of 100 done (50.0 %), 1 failed" in shown
    assert "alice 35/60" in shown
    assert "a line that stays [not markup]" in shown


def test_more_adapters_than_fit_are_counted(clock: list[float]) -> None:
    models = [ModelCount(i, f"a{i}", 10, 0) for i in range(1, 9)]
    tally, file = Tally(models, total=80, done=0, failed=0), io.StringIO()
    for i in range(1, 9):
        tally.sent(i)
    with Progress(tally, Console(file=file)) as progress:
        clock[0] += 11
        progress.update()
    assert file.getvalue().rstrip().endswith("a4 0/10, a5 0/10 and 3 more")


@pytest.mark.parametrize(
    ("summary", "first"),
    [
        (Summary(10, 10, [], []), "10 lines: 10 answered, 0 failed."),
        (Summary(10, 10, [ErrorKind("a", 3, [1, 2, 3])], []), "10 lines: 7 answered, 3 failed."),
        (Summary(10, 10, [ErrorKind("a", 10, [1, 2, 3, 4, 5])], []), "All 10 rows failed."),
        (Summary(1000, 400, [ErrorKind("a", 1, [3])], []), "400 of 1,000 lines are done, 1 of them failed."),
        (Summary(0, 0, [], []), "0 lines: 0 answered, 0 failed."),
    ],
)
def test_the_summary_begins_with_what_matters_most(summary: Summary, first: str) -> None:
    assert next(summary.sentences()) == first


def test_kinds_of_error_are_counted_with_their_first_lines() -> None:
    kinds = [ErrorKind("invalid_json", 7, [1, 2, 3, 4, 5]), ErrorKind("wrong_url", 1, [9])]
    assert list(Summary(20, 20, kinds, []).sentences())[1:] == [
        "  invalid_json: 7 (lines 1, 2, 3, 4, 5, ...)",
        "  wrong_url: 1 (line 9)",
    ]
