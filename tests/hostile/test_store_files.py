"""Files of strangers given as stores: what is unpacked and done again has a bound; one writer."""

import gzip
import json
import os
import random
from dataclasses import replace

import pytest
from child import in_child
from conftest import calls_of, killed_in_child
from typer.testing import CliRunner

import cli
from agents import store as stores
from agents.store import Entry, Snapshot, Store
from commands.stores import _first_value, store_of
from config.errors import UserError


def said(*words, code=0) -> str:
    result = CliRunner().invoke(cli.app, ["memory", *map(str, words)])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize("head", ["", '{"text": "', '{"format": "memory store", "version": 1}\n'])
@pytest.mark.parametrize("filling", [b" ", b"\n", b"x"])
def test_four_gigabytes_in_a_small_file_are_refused(tmp_path, head, filling):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(head.encode()) + gzip.compress(filling * (1 << 26)) * 64)

    def look():
        with pytest.raises(UserError, match=r"more than 128 MiB|more than 400 times its size"):
            store_of(path)
        return "refused"

    assert in_child(look, 1 << 30) == "refused"


@pytest.mark.parametrize("text", ["", '{"text": "It rains."}\n'])
def test_a_store_of_eight_gigabytes_is_read_no_further_than_it_may_be(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    os.truncate(path, 1 << 33)

    def look():
        with pytest.raises(UserError, match="holds more than 128 MiB, too much for a store"):
            store_of(path)
        return "refused"

    assert in_child(look) == "refused"


def test_a_first_value_is_not_looked_for_behind_blank_lines_without_end(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" * 500 + b"{}")
    assert _first_value(path) == {}
    path.write_bytes(b"\n" * 2000 + b"{}")
    assert _first_value(path) is None


def test_killed_at_any_time_a_store_is_the_one_before_or_the_one_after(tmp_path):
    path, rng = tmp_path / "s.jsonl", random.Random(0)
    done = Store(Entry("", f"text {k}") for k in range(20))

    def add() -> None:
        store = Store.from_jsonl(path)
        (id,) = store.new_ids(1)
        store.record("add", {}, "added", after=[Entry(id, f"more {len(store.journal)}")])
        store.to_jsonl(path)

    done.to_jsonl(path)
    calls = calls_of(add)
    done.to_jsonl(path)
    for _ in range(10):
        n = len(Store.from_jsonl(path).journal)
        assert killed_in_child(add, rng.randrange(calls // 2, calls))
        assert len(Store.from_jsonl(path).journal) in (n, n + 1)
    while len(Store.from_jsonl(path).journal) < 12:
        add()
    texts = [json.loads(line)["after"][0]["text"] for line in path.read_text().splitlines()[21:]]
    assert texts == [f"more {k}" for k in range(12)]


def chain(roots: int, links: int) -> Store:
    """Merge some entries away into the first of a chain, whose links are all live."""
    store = Store(Entry("", f"text {k}") for k in range(roots))
    gone = [replace(entry, version=2, deleted=True) for entry in store.snapshot().entries]
    parents, after = tuple(entry.id for entry in gone), []
    for id in store.new_ids(links):
        after.append(Entry(id, "more", parents=parents))
        parents = (id,)
    store.record("merge", {}, "merged", after=[*gone, *after])
    return store


def branches(n: int) -> Store:
    """Split an entry, one of its parts, one of that part's, and so on: the others are live."""
    store = Store([Entry("", "text")])
    old = store.snapshot().get("m1")
    for _ in range(n):
        new = [Entry(id, "part", parents=(old.id,)) for id in store.new_ids(2)]
        store.record("split", {}, "x", after=[replace(old, version=2, deleted=True), *new])
        old = new[1]
    return store


def test_a_difference_follows_no_chain_from_every_link(tmp_path, monkeypatch):
    path, looked_at = tmp_path / "s.jsonl", []
    chain(20, 1_000).to_jsonl(path)
    real = Snapshot.get
    monkeypatch.setattr(Snapshot, "get", lambda *of: looked_at.append(of) or real(*of))
    told = said("diff", path)
    assert told.startswith("added 999, removed 0, changed 0, merged 1, split 0")
    assert len(looked_at) < 20_000
    monkeypatch.undo()
    # what would be shown is too long
    monkeypatch.setattr(stores, "MOST_FOLLOWED", 1_000_000)
    branches(100).to_jsonl(path)
    assert "split 1" in said("diff", path)
    branches(1_000).to_jsonl(path)
    assert "compare states that are nearer" in said("diff", path, code=2)
    assert "split 1" in said("diff", path, "--from", 900)


def test_long_texts_of_few_words_are_compared_in_part(tmp_path):
    store, end = Store([Entry("", "It is " + "a " * 2_000)]), "a b " * 1_000
    old = store.snapshot().get("m1")
    store.record("u", {}, "x", after=[replace(old, version=2, text=f"It is {end}")])
    store.to_jsonl(tmp_path / "s.jsonl")
    told = in_child(lambda: said("diff", tmp_path / "s.jsonl", "--from", 0)[-50_000:])
    assert "[m1] It is a" in told
