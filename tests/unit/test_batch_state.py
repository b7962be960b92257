"""The state beside an output: the order of sending, the order of writing, and what kills leave behind."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_worker.batch.output import Output, OutputFile
from lora_worker.batch.rows import number_of, row_id
from lora_worker.batch.scan import Scan, take_turns
from lora_worker.batch.source import open_source
from lora_worker.batch.store import FinishedRow, ModelCount, Store
from lora_worker.batch.writer import Writer
from lora_worker.errors import BatchError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "out.batch")
    yield made
    made.close()


def index(store: Store, folder: Path, models: list[str | None]) -> None:
    """Index a file with one line for each model."""
    lines = [{"prompt": f"p{i}"} | ({"model": model} if model else {}) for i, model in enumerate(models)]
    (folder / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with open_source(str(folder / "in"), spool_folder=folder) as source, store.transaction():
        Scan(store, job="j", default_model=None).run(source)


def sending_order(store: Store, lane_count: int) -> list[int]:
    with store.transaction():
        store.set_turns(take_turns(store.models(), lane_count), lane_count)
    numbers, turn = [], -1
    while lines := store.waiting(turn, 7):
        numbers += [line.number for line in lines]
        turn = lines[-1].turn
    return numbers


def test_the_lines_of_an_adapter_are_sent_one_after_the_other(store: Store, tmp_path: Path) -> None:
    models = [f"a{i}" for i in range(10)] * 10
    random.Random(1).shuffle(models)
    index(store, tmp_path, [*models])
    order = [models[number - 1] for number in sending_order(store, 1)]
    assert sorted(order) == sorted(models)
    changes = sum(before != after for before, after in itertools.pairwise(order))
    assert changes == 9


def test_as_many_adapters_are_sent_side_by_side_as_there_are_lanes(store: Store, tmp_path: Path) -> None:
    models = [f"a{i}" for i in range(12)] * 50
    random.Random(2).shuffle(models)
    index(store, tmp_path, [*models])
    order = [models[number - 1] for number in sending_order(store, 4)]
    assert all(len(set(order[i : i + 100])) <= 8 for i in range(len(order)))
    assert {len(set(order[i : i + 40])) for i in range(0, 600, 200)} == {4}


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 8))
def test_lanes_are_about_equally_long_and_no_turn_is_given_twice(counts: list[int], lane_count: int) -> None:
    models = [ModelCount(i, f"a{i}", count, 0) for i, count in enumerate(counts)]
    turns = take_turns(models, lane_count)
    places = [(lane, start + i) for id_, lane, start in turns for i in range(counts[id_])]
    assert len(set(places)) == sum(counts)
    ends = [max((place + 1 for where, place in places if where == lane), default=0) for lane in range(lane_count)]
    assert max(ends) - min(ends) <= max(counts)


def test_a_thousand_lines_of_the_base_take_their_turn_among_the_adapters(store: Store, tmp_path: Path) -> None:
    index(store, tmp_path, [None, "a", None, "a", None])
    assert sending_order(store, 2) == [1, 2, 3, 4, 5]
    assert [(model.name, model.lines) for model in store.models()] == [(None, 3), ("a", 2)]


def finish(store: Store, *numbers: int, code: str | None = None) -> None:
    with store.transaction():
        store.finish(FinishedRow(number, code, f"{number}\n".encode()) for number in numbers)


@pytest.fixture
def write(store: Store, tmp_path: Path) -> Callable[..., str]:
    """Open the output as a run does, write what may be written, and return its content."""
    out = tmp_path / "out"

    def run(order: str = "input") -> str:
        with Output(OutputFile(out, store.lengths_bytes[0]), None) as output:
            Writer(store, output, in_input_order=order == "input").write()
        return out.read_text().replace("\n", " ")

    return run


def test_rows_are_written_in_the_order_of_the_input(store: Store, tmp_path: Path, write: Callable[..., str]) -> None:
    index(store, tmp_path, ["a"] * 5)
    finish(store, 4, 2)
    assert write() == ""
    finish(store, 1)
    assert write() == "1 2 "
    finish(store, 3, 5)
    assert write() == "1 2 3 4 5 "


def test_rows_are_written_as_they_come_where_the_order_is_completion(
    store: Store, tmp_path: Path, write: Callable[..., str]
) -> None:
    index(store, tmp_path, ["a"] * 5)
    finish(store, 4, 2)
    assert write("completion") == "2 4 "
    finish(store, 5, 1, 3)
    assert write("completion") == "2 4 1 3 5 "


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_what_a_kill_tore_is_cut_off_and_written_again(store: Store, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"out{suffix}"
    index(store, tmp_path, ["a"] * 3)
    finish(store, 1, 2)
    with Output(OutputFile(out, 0), None) as output:
        Writer(store, output, in_input_order=True).write()
        whole = out.read_bytes()
        # Killed after the rows were written and before the state knew it, and within a row.
        output.append([FinishedRow(3, None, b"3\n")])
    with out.open("ab") as file:
        file.write(b'{"id": "batch_r')
    with Output(OutputFile(out, store.lengths_bytes[0]), None) as output:
        assert out.read_bytes() == whole
        finish(store, 3)
        Writer(store, output, in_input_order=True).write()
    assert out.read_bytes().startswith(whole)
    assert store.last_written() == store.count() == 3


def test_an_output_that_is_shorter_than_its_state_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"1\n")
    with pytest.raises(BatchError, match=r"2 bytes, but 5 were written"):
        OutputFile(tmp_path / "out", 5)


def test_a_row_counts_once_even_if_it_comes_twice(store: Store, tmp_path: Path, write: Callable[..., str]) -> None:
    index(store, tmp_path, ["a"] * 2)
    finish(store, 1)
    finish(store, 1)
    write()
    finish(store, 1, 2)
    assert write() == "1 2 "


def test_blank_lines_within_are_bad_and_at_the_end_are_none(store: Store, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b'\n{"prompt": "p"}\n\n \n{"prompt": "q"}\n\n\r\n')
    with open_source(str(tmp_path / "in"), spool_folder=tmp_path) as source, store.transaction():
        Scan(store, job="j", default_model=None).run(source)
    assert store.count() == 5
    assert store.errors() == {"blank_line": 3}
    assert store.first_errors("blank_line", 5) == [1, 3, 4]


@pytest.mark.usefixtures("store")
def test_a_state_that_another_process_has_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="another lora-worker batch is writing out"):
        Store(tmp_path / "out.batch")
    (tmp_path / "text.batch").write_text("no database" * 1000)
    with pytest.raises(BatchError, match="is no state of a batch"):
        Store(tmp_path / "text.batch")


def test_a_row_names_its_batch_and_line() -> None:
    assert row_id("job", 17) == "batch_req_job_17"
    assert number_of(row_id("job_1", 17)) == 17


def test_a_full_disk_is_said_and_changes_nothing(store: Store, tmp_path: Path) -> None:
    index(store, tmp_path, ["a"] * 3)
    store._db.execute(f"PRAGMA max_page_count = {store._one('PRAGMA page_count')}")
    with pytest.raises(BatchError, match="disk is full; the batch can go on later"), store.transaction():
        store.finish([FinishedRow(1, None, b"x" * 1_000_000)])
    assert store.count_done() == 0


def test_a_signal_right_after_the_commit_stays_what_it_is(store: Store) -> None:
    def commit_and_end() -> None:
        with store.transaction():
            store.set(job="j")
            store._db.execute("COMMIT")
            raise SystemExit

    with pytest.raises(SystemExit):
        commit_and_end()
    assert store.get("job") == "j"
