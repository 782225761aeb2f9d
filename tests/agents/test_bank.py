"""The bank: both phases by hand, utilities, transactions, bad files, speed."""

import hashlib
import math
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import calls_of, killed_in_child

from agents.bank import Bank, BankConfig, Entry, Found, Retrieved
from agents.likeness import Meanings, Words
from agents.retrieval import tokens
from config.errors import UserError


class Plane:
    """An embedder of test vectors: what a text says it is, else a direction by its digest."""

    name, dim = "plane", 8

    def __init__(self, **known):
        self.known, self.calls = known, 0

    def cut(self, texts, query=False):
        return [False] * len(texts)

    def embed(self, texts, query=False):
        self.calls += len(texts)
        rows = []
        for text in texts:
            row = np.zeros(self.dim, np.float32)
            if text in self.known:
                row[0] = self.known[text]
                row[1] = math.sqrt(1 - row[0] ** 2)
            else:
                seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
                row = np.random.default_rng(seed).normal(size=self.dim).astype(np.float32)
                row /= np.linalg.norm(row)
            rows.append(row)
        return np.stack(rows)


def bank(path=None, embedder=None, frozen=False, **settings) -> Bank:
    if embedder is not None:
        settings = {"retrieve": "dense", "embedder": "hash:8"} | settings
    config = BankConfig(**({"delta": 0.5} | settings))
    return Bank(path, config, embedder, frozen=frozen)


def filled(values, path=None, **settings) -> Bank:
    """A bank of entries (similarity to the query "q", Q); each is a task and an intent."""
    known = {"q": 1.0} | {f"i{k}": sim for k, (sim, _) in enumerate(values)}
    made = bank(path, Plane(**known), **({"same_intent": 1.1} | settings))
    with made.batch():
        for k, (_, q) in enumerate(values):
            id = made.write(f"i{k}", f"experience {k}", success=True, task_id=f"t{k}")
            made._db.execute("UPDATE entry SET q = ? WHERE id = ?", (q, id))
    return made


# ---------------------------------------------------------------- the two phases, by hand


def test_phase_b_is_a_hand_computed_table():
    """sims .9 .8 .7 (mean .8, deviation .0816497), Q 0 .5 1 (mean .5, deviation .4082483)."""
    made = filled([(0.9, 0.0), (0.8, 0.5), (0.7, 1.0)], lam=0.25)
    found, z = made.retrieve("q"), 1.2247449
    assert [f.entry.task_id for f in found.shown] == ["t0", "t1", "t2"]
    assert [f.sim_z for f in found.shown] == pytest.approx([z, 0, -z], abs=1e-4)
    assert [f.q_z for f in found.shown] == pytest.approx([-z, 0, z], abs=1e-4)
    assert [f.score for f in found.shown] == pytest.approx([0.5 * z, 0, -0.5 * z], abs=1e-4)
    assert found.pool == 3 and found.best_sim == pytest.approx(0.9, abs=1e-6)
    for lam, ids in ((0.0, (1, 2, 3)), (1.0, (3, 2, 1))):
        made.config = replace(made.config, lam=lam)
        assert made.retrieve("q").ids == ids


def test_phase_a_keeps_k1_intents_above_delta():
    values = [(0.95, 0), (0.9, 0), (0.8, 0), (0.7, 0), (0.5, 0), (0.2, 0)]
    assert filled(values, k1=3, k2=9).retrieve("q").pool == 3
    assert filled(values, k1=9, k2=9).retrieve("q").pool == 4  # .5 is not above .5
    assert filled(values, k1=9, k2=2).retrieve("q").ids == (1, 2)


def test_an_empty_pool_shows_nothing_and_a_single_candidate_is_shown():
    nothing = filled([(0.4, 1.0)]).retrieve("q")
    assert nothing.shown == () and nothing.pool == 0
    assert nothing.best_sim == pytest.approx(0.4, abs=1e-6)
    assert bank(embedder=Plane()).retrieve("q") == Retrieved()
    (one,) = filled([(0.9, -0.7)]).retrieve("q").shown
    assert (one.sim_z, one.q_z, one.score) == (0.0, 0.0, 0.0)


def test_ties_go_to_similarity_then_to_the_lower_id_and_an_outlier_is_clipped():
    assert filled([(0.7, 0.3), (0.9, 0.3), (0.8, 0.3)]).retrieve("q").ids == (2, 3, 1)
    assert filled([(0.8, 0.3)] * 5, lam=1.0).retrieve("q").ids == (1, 2, 3)
    # with utility alone, equal scores are parted by similarity
    assert filled([(0.7, 0.3), (0.9, 0.3)], lam=1.0).retrieve("q").ids == (2, 1)

    found = filled([(0.9, 0.0)] * 30 + [(0.9, 1.0)], k1=40, lam=1.0).retrieve("q")
    assert found.shown[0].entry.id == 31 and found.shown[0].q_z == 3.0


def test_one_entry_a_task_and_none_of_the_task_itself():
    made = bank(embedder=Plane(q=1.0, a=0.9), k2=3)
    for task in ("t1", "t1", "t2", "t3"):
        made.write("a", "x", success=True, task_id=task)
    assert made.retrieve("q").ids == (1, 3, 4)
    made.config = replace(made.config, exclude_same_task=True)
    assert made.retrieve("q", task_id="t1").ids == (3, 4)


def test_chance_replaces_a_slot_and_is_a_function_of_seed_and_task():
    values = [(0.9, 0.9)] * 3 + [(0.9, -0.9)] * 20
    made = filled(values, k1=30, epsilon=1.0, lam=1.0)
    seen = {made.retrieve("q", task_id=f"t{k}", seed=1).ids for k in range(100, 140)}
    assert len(seen) > 5
    for ids in seen:
        assert len({*ids} & {1, 2, 3}) >= 2  # one slot
    again = [made.retrieve("q", task_id="t100", seed=1).ids for _ in range(3)]
    assert len({*again}) == 1
    share = filled(values, k1=30, epsilon=0.3, lam=1.0)
    by_chance = [
        any(f.by_chance for f in share.retrieve("q", task_id=f"x{k}").shown) for k in range(400)
    ]
    assert 0.2 < sum(by_chance) / 400 < 0.4


def test_chance_shows_one_entry_a_task_too():
    made = bank(embedder=Plane(q=1.0, a=0.9), epsilon=1.0)
    for k in range(12):
        made.write("a", "x", success=True, task_id=f"t{k % 4}")
    shown = [made.retrieve("q", task_id=f"x{k}").shown for k in range(80)]
    assert all(len({f.entry.task_id for f in each}) == 3 for each in shown)
    assert {sum(f.by_chance for f in each) for each in shown} == {1}
    assert len({f.entry.id for each in shown for f in each if f.by_chance}) == 12


# ---------------------------------------------------------------- utilities


def test_utilities_follow_the_closed_form():
    made, rewards = filled([(0.9, 0.2)]), [1.0, -1.0, 0.5, 1.0]
    for reward in rewards:
        made.feedback(made.retrieve("q").shown, reward)
    t, a = len(rewards), 0.3
    expected = (1 - a) ** t * 0.2
    expected += sum(a * (1 - a) ** (t - k) * r for k, r in enumerate(rewards, 1))
    (entry,) = made.entries()
    assert entry.q == pytest.approx(expected) and (entry.visits, entry.wins) == (4, 3)
    assert [event[-2] for event in made.events()] == rewards


def test_one_reward_each_and_each_entry_once():
    made = filled([(0.9, 0.0), (0.8, 0.0)])
    shown = made.retrieve("q").shown
    made.feedback([*shown, shown[0]], [1.0, -1.0, 1.0])
    assert [(e.id, round(e.q, 9), e.visits) for e in made.entries()] == [(1, 0.3, 1), (2, -0.3, 1)]


@pytest.mark.parametrize("reward", [math.nan, 1.5, -2, math.inf, "1", None])
def test_a_reward_out_of_range_changes_nothing(reward):
    made = filled([(0.9, 0.0)])
    before = made.digest
    with pytest.raises(ValueError, match=r"reward|iterable"):
        made.feedback(made.retrieve("q").shown, [reward])
    assert made.digest == before


def test_unknown_entries_and_empty_intents_are_refused():
    made = filled([(0.9, 0.0)])
    before = made.digest
    ghost = Entry(99, "x", "script", "x", True, 0, 0, 0, "t", 0, 0, (), {})
    with pytest.raises(ValueError, match="no entry 99"):
        made.feedback([Found(ghost, 1, 0, 0, 0)], 1.0)
    with pytest.raises(ValueError, match="no entry 7"):
        made.write("i", "x", success=True, task_id="t", parents=[7])
    for intent in ("", " \n"):
        with pytest.raises(ValueError, match="empty"):
            made.write(intent, "x", success=True, task_id="t")
        with pytest.raises(ValueError, match="empty"):
            made.retrieve(intent)
    assert made.digest == before


# ---------------------------------------------------------------- writing


def test_known_and_similar_intents_get_one_entry_more():
    made = bank(embedder=Plane(a=1.0, b=0.95, c=0.5), same_intent=0.9)
    for intent in ("a", "a", "b", "c"):
        made.write(intent, "x", success=True, task_id=intent)
    assert [entry.intent for entry in made.entries()] == ["a", "a", "a", "c"]
    assert made.stats()["intents"] == 2


def test_an_error_in_a_batch_undoes_all_of_it():
    made = filled([(0.9, 0.0)])
    before, shown = made.digest, made.retrieve("q").shown
    with pytest.raises(RuntimeError), made.batch():
        made.feedback(shown, 1.0)
        made.write("q", "x", success=True, task_id="t")
        raise RuntimeError("the summary of the second task failed")
    assert made.digest == before and made.retrieve("q").ids == (1,)
    with made.batch():
        made.write("q", "x", success=True, task_id="t9")
        assert made.retrieve("q").ids == (1,)  # what is written is seen when the batch has ended
    assert {*made.retrieve("q").ids} == {1, 2}


def test_intents_that_are_not_read_to_their_end_are_counted():
    class Short(Plane):
        def cut(self, texts, query=False):
            return [len(text) > 10 for text in texts]

    for how, n in (("dense", 1), ("hybrid", 1), ("bm25", 0)):
        made = bank(embedder=Short(), retrieve=how)
        for text in ("x" * 10, "x" * 11):
            made.write(text, "y", success=True, task_id="t")
        assert [entry.meta for entry in made.entries()] == [{}, {"not_read": True} if n else {}]
        assert made.stats()["cut"] == n
        assert [made.cut("x" * k) for k in (10, 11, 4097)] == [False, n == 1, True]
    made.write("z" * 5000, "y", success=True, task_id="t")  # of words: cut at 4,096 characters
    entry = made.entries()[-1]
    assert len(entry.intent) == 4096 and entry.meta == {"cut": 5000 - 4096}
    assert made.stats()["cut"] == 1 and made.retrieve("z" * 5000).ids == (3,)


def test_eviction_takes_the_least_useful_and_never_the_new():
    made = filled([(0.9, 0.5), (0.9, -0.5), (0.9, 0.1), (0.9, -0.5)])
    made._db.execute("UPDATE entry SET visits = 3 WHERE id = 2")
    made.config = replace(made.config, max_entries=3, q_init=-1.0, k2=9)
    made.write("q", "x", success=True, task_id="new")  # q -1, the least of all
    assert [entry.id for entry in made.entries()] == [1, 3, 5]
    assert {*made.retrieve("q").ids} == {1, 3, 5}
    # an intent without entries takes no place among the k1
    made = filled([(0.99, 0.0), (0.9, 0.5)], k1=1)
    assert made.retrieve("q").ids == (1,)
    made.config = replace(made.config, max_entries=1)
    made.note("a", 1)
    assert made.retrieve("q").ids == (2,)


def test_statistics():
    made = filled([(0.9, -0.5), (0.9, 0.0), (0.9, 0.5), (0.9, 1.0)])
    made.feedback(made.retrieve("q").shown[:1], 1.0)
    stats = made.stats()
    assert stats["entries"] == 4 and stats["never_shown"] == 0.75
    assert (stats["q_negative"], stats["q_zero"], stats["q_positive"]) == (0.25, 0.25, 0.5)
    assert stats["q_mean"] == pytest.approx(sum(e.q for e in made.entries()) / 4)
    assert (stats["visits"], stats["wins"]) == (1, 1) and stats["bytes"] > 0


# ---------------------------------------------------------------- by words and both


def test_by_words_without_an_embedder_and_the_mean_of_both():
    made = Bank(None, BankConfig(delta=0.2))
    for k, text in enumerate(["count the dogs in the table", "delete the cat", "sum of prices"]):
        made.write(text, "x", success=True, task_id=f"t{k}")
    found = made.retrieve("count the cats in the table")
    assert found.ids[0] == 1 and 0.2 < found.best_sim < 1
    assert made.retrieve("count the dogs in the table").best_sim == pytest.approx(1.0, abs=1e-6)
    assert made.retrieve("nothing alike").shown == ()
    both = bank(embedder=Plane(q=1.0, i0=0.9), retrieve="hybrid", delta=0.3)
    both.write("i0", "x", success=True, task_id="t")
    assert both.retrieve("q").best_sim == pytest.approx(0.45, abs=1e-6)
    assert both.retrieve("i0").best_sim == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("how", ["dense", "bm25", "hybrid"])
def test_delta_is_the_quantile_of_all_pairs(how, tmp_path):
    texts = [f"task {k} about {word}" for k, word in enumerate(["dogs", "cats", "dogs", "birds"])]
    settings = {"retrieve": how, "delta": None}
    embedder = None if how == "bm25" else Plane()
    made = Bank(
        tmp_path / "b.db", BankConfig(embedder="hash:8" if embedder else "", **settings), embedder
    )
    delta = made.calibrate(texts)
    naive = []
    words = Words()
    words.begin([(k, text, b"") for k, text in enumerate(texts)])
    for i, text in enumerate(texts):
        for j, other in enumerate(texts):
            lexical = words.scores(Counter(tokens(text)))[j]
            one, two = Plane().embed([text, other])
            cosine = float(one @ two)
            both = {"bm25": lexical, "dense": cosine, "hybrid": (lexical + cosine) / 2}
            naive += [both[how]] if i != j else []
    assert delta == pytest.approx(float(np.quantile(naive, 0.8)), abs=1e-5)
    made.close()
    again = Bank(
        tmp_path / "b.db", BankConfig(embedder="hash:8" if embedder else "", **settings), embedder
    )
    assert again.delta == delta
    own = Bank(None, BankConfig(**settings | {"embedder": "hash:8" if embedder else ""}), embedder)
    assert own.delta == 0.0
    with own.batch():
        for text in texts:
            own.write(text, "x", success=True, task_id=text)
    assert own.delta == (delta if how == "bm25" else pytest.approx(delta, abs=1e-5))


def test_the_nearest_are_those_of_the_naive_way_and_of_equals_the_lower_ids():
    rng, n, d = np.random.default_rng(0), 300, Plane.dim
    rows = rng.normal(size=(n, d)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows[n // 2 :] = rows[: n // 2]  # each one twice
    meanings, ids = Meanings(Plane()), rng.permutation(n).tolist()
    listed = [(id, f"text {id}", row.tobytes()) for id, row in zip(ids, rows, strict=True)]
    meanings.begin(listed[:100])
    meanings.add(listed[100:])
    for text in ("one", "two", "text 7"):
        (vector,) = meanings.embedded([text])
        cosines = {id: round(float(row @ vector), 6) for id, row in zip(ids, rows, strict=True)}
        wanted = sorted(ids, key=lambda id: (-cosines[id], id))
        for k in (1, 7, n, n + 9):
            found = meanings.nearest(text, k)
            assert [id for id, _ in found] == wanted[:k]
            assert [sim for _, sim in found] == pytest.approx(
                [cosines[id] for id, _ in found], abs=2e-6
            )
    meanings.begin(())
    assert meanings.nearest("one", 3) == []


# ---------------------------------------------------------------- the file


def test_it_is_kept_and_opened_again_with_the_same_rows(tmp_path):
    made = filled([(0.9, 0.5), (0.8, 0.1)], tmp_path / "b.db")
    made.feedback(made.retrieve("q").shown, 1.0)
    made.note("cursor", {"epoch": 2, "solved": ["t1"]})
    assert made.embedder.calls == 4  # each text once, and what identifies the embedder
    digest, found = made.digest, made.retrieve("q")
    made.close()
    again = bank(tmp_path / "b.db", Plane(q=1.0), same_intent=1.1)
    assert again.digest == digest and again.retrieve("q") == found
    assert (
        again.noted("cursor") == {"epoch": 2, "solved": ["t1"]}
        and again._value("PRAGMA integrity_check") == "ok"
    )


def test_frozen_reads_and_never_writes(tmp_path):
    path = tmp_path / "b.db"
    filled([(0.9, 0.5)], path).close()
    before = path.read_bytes()
    frozen = bank(path, Plane(q=1.0), frozen=True)
    found = frozen.retrieve("q")
    for change in (
        lambda: frozen.feedback(found.shown, 1.0),
        lambda: frozen.write("x", "y", success=True, task_id="t"),
        lambda: frozen.note("a", 1),
    ):
        with pytest.raises(UserError, match="frozen"):
            change()
    frozen.close()
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]
    with pytest.raises(UserError, match="no bank at"):
        bank(tmp_path / "none.db", Plane(), frozen=True)


def test_frozen_sees_what_a_killed_process_left_in_the_log(tmp_path):
    path = tmp_path / "b.db"
    code = (
        "import os, sys; sys.path[:0] = ['.', 'tests', 'tests/agents']; from test_bank import *\n"
        f"made = filled([(0.9, 0.5)], Path({str(path)!r})); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert Path(f"{path}-wal").stat().st_size
    before = path.read_bytes()
    assert bank(path, Plane(q=1.0), frozen=True).retrieve("q").ids == (1,)
    assert path.read_bytes() == before


@pytest.mark.parametrize("at", ["schema", "embedder"])
def test_a_bank_whose_making_was_broken_off_is_made_anew(tmp_path, at, monkeypatch):
    path, real = tmp_path / "b.db", Bank._set

    def broken(self, key, value):
        if key == at:
            raise KeyboardInterrupt
        real(self, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(Bank, "_set", broken)
        with pytest.raises(KeyboardInterrupt):
            bank(path, Plane())
    made = bank(path, Plane())
    made.write("q", "x", success=True, task_id="t")
    made.close()
    assert bank(path, Plane(), frozen=True)._value("PRAGMA integrity_check") == "ok"


class Other(Plane):
    name, dim = "other", 16


def test_another_embedder_is_refused(tmp_path):
    path = tmp_path / "b.db"
    filled([(0.9, 0.5)], path).close()
    with pytest.raises(UserError, match=r"embedder plane \(8 numbers\), not with other \(16\)"):
        bank(path, Other())

    class Pooled(Plane):  # the same name and dimension, other vectors
        def embed(self, texts, query=False):
            return super().embed([f"{text}!" for text in texts])

    with pytest.raises(UserError, match="was made with the embedder"):
        bank(path, Pooled())
    with pytest.raises(UserError, match="new intents need them"):
        Bank(path, BankConfig(delta=0.1))
    assert Bank(path, BankConfig(delta=0.1), frozen=True).entries()
    words = tmp_path / "words.db"
    Bank(words, BankConfig(delta=0.1)).close()
    with pytest.raises(UserError, match="without an embedder"):
        bank(words, Plane())


def test_a_bank_in_use_is_refused_with_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("agents.bank.BUSY_S", 0.1)
    path = tmp_path / "b.db"
    made = filled([(0.9, 0.5)], path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    digest = made.digest
    with pytest.raises(UserError, match="in use by another process"):
        made.write("x", "y", success=True, task_id="t")
    holder.execute("ROLLBACK")
    assert made.digest == digest
    made.write("x", "y", success=True, task_id="t")


def test_a_full_disk_writes_nothing(tmp_path):
    path = tmp_path / "b.db"
    made = filled([(0.9, 0.5)], path)
    digest = made.digest
    pages = made._value("PRAGMA page_count")
    made._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(UserError, match="full"):
        made.write("x", "y" * 1_000_000, success=True, task_id="t")
    assert made.digest == digest and made._value("PRAGMA integrity_check") == "ok"


# ---------------------------------------------------------------- killed


def filling(path: Path) -> None:
    """Make forty batches, or those that are missing."""
    made = bank(path, Plane(), delta=-1.0, same_intent=1.1)
    for k in range(made.noted("next") or 0, 40):
        with made.batch():
            made.feedback(made.retrieve(f"task {k}").shown, 1.0 if k % 3 else -1.0, epoch=k)
            made.write(f"task {k}", "x" * 200, success=k % 3 > 0, task_id=f"t{k}", epoch=k)
            made.note("next", k + 1)


def test_killed_at_any_time_it_goes_on_to_the_same_rows(tmp_path):
    # an interpreter of its own: what comes out may not depend on its hashes either
    code = (
        "import sys; sys.path[:0] = ['.', 'tests', 'tests/agents']; from test_bank import *\n"
        f"filling(Path({str(tmp_path / 'whole.db')!r}))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
    rng, path = random.Random(0), tmp_path / "killed.db"
    calls = calls_of(lambda: filling(tmp_path / "counted.db"))
    for _ in range(3):
        assert killed_in_child(lambda: filling(path), int(calls * rng.uniform(0.05, 0.2)))
        assert bank(path, Plane(), delta=-1.0, frozen=True)._value("PRAGMA integrity_check") == "ok"
    filling(path)
    digests = [
        bank(p, Plane(), delta=-1.0, frozen=True).digest for p in (path, tmp_path / "whole.db")
    ]
    assert digests[0] == digests[1]
