"""The bank beside a naive one in plain Python: the same entries, the same utilities; transactions,
a process that is killed at any time, files of strangers, one writer."""

import hashlib
import itertools
import math
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import HANG_S, calls_of, killed_in_child

from agents.bank import Bank, BankConfig, Entry, Found, Retrieved
from agents.likeness import Words
from config.errors import UserError
from data import seed_of

ROOT = Path(__file__).parents[2]


class Plane:
    """An embedder of test vectors: what a text says it is, else a direction by its words."""

    def __init__(self, name="plane", dim=8, end="", **known):
        self.name, self.dim, self.end, self.known, self.calls = name, dim, end, known, 0

    def cut(self, texts, query=False):
        return [len(text) > 60 for text in texts]

    def embed(self, texts, query=False):
        self.calls += len(texts)
        return np.stack([*map(self.row, texts)])

    def row(self, text):
        if text in self.known:
            x = self.known[text]
            return np.array([x, math.sqrt(1 - x * x), *[0] * (self.dim - 2)], np.float32)
        text += self.end
        row = sum(direction(word, self.dim) for word in [text, *text.split()])
        return (row / np.linalg.norm(row)).astype(np.float32)


@cache
def direction(word, dim):
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4], "big")
    return np.random.default_rng(seed).normal(size=dim)


def bank(path=None, embedder=None, frozen=False, **settings) -> Bank:
    if embedder is not None:
        settings = {"retrieve": "dense", "embedder": "hash:8"} | settings
    return Bank(path, BankConfig(**({"delta": 0.5} | settings)), embedder, frozen=frozen)


def filled(values, path=None, **settings) -> Bank:
    """A bank of entries (similarity to the query "q", Q); each is a task and an intent."""
    known = {"q": 1.0} | {f"i{k}": sim for k, (sim, _) in enumerate(values)}
    made = bank(path, Plane(**known), **({"same_intent": 1.1} | settings))
    with made.batch():
        for k, (_, q) in enumerate(values):
            id = made.write(f"i{k}", f"experience {k}", success=True, task_id=f"t{k}")
            made._db.execute("UPDATE entry SET q = ? WHERE id = ?", (q, id))
    return made


class Naive:
    """The same by the formulas of MemRL, everything looked at anew each time."""

    def __init__(self, config: BankConfig, embedder: Plane | None):
        self.c, self.embedder = config, embedder
        self.row = embedder and cache(embedder.row)
        self.intents, self.entries = [], []  # of all that was written
        self.see(())

    def see(self, intents) -> None:
        """Intents that a batch sees: those that have an entry."""
        self.seen = intents
        self.having = Counter(word for intent in intents for word in {*intent.split()})
        self.mean = sum(len(intent.split()) for intent in intents) / max(1, len(intents))

    def similarity(self, text: str, other: str) -> float:
        if self.embedder:
            return float(self.row(text) @ self.row(other))
        asked, n, df = text.split(), len(self.seen), self.having

        def bm25(item):  # Lucene's
            return sum(
                math.log(1 + (n - df[word] + 0.5) / (df[word] + 0.5))
                * item.count(word)
                / (item.count(word) + 1.5 * (0.25 + 0.75 * len(item) / self.mean))
                for word in {*asked} & {*item}
            )

        return bm25(other.split()) / bm25(asked)

    def nearest(self, text: str) -> list[tuple[float, str]]:
        found = [(round(self.similarity(text, other), 6), other) for other in self.seen]
        found.sort(key=lambda hit: (-hit[0], self.intents.index(hit[1])))
        return found if self.embedder else [hit for hit in found if hit[0] > 0]

    def retrieve(self, text: str, task: str, seed: int) -> tuple:
        """Equation 7: the ids that are shown, those by chance, the pool's size, the best
        similarity."""
        c, near = self.c, self.nearest(text)
        sims = {intent: sim for sim, intent in near[: c.k1] if sim > c.delta}
        pool = [e for e in self.entries if e["intent"] in sims and not e["dead"]]
        pool = [e for e in pool if not (c.exclude_same_task and e["task"] == task)]
        columns = np.array([(sims[e["intent"]], e["q"]) for e in pool]).reshape(-1, 2)
        spread = columns.std(0) if pool else np.ones(2)
        z = (columns - columns.mean(0) if pool else columns) / np.where(spread < 1e-6, 1, spread)
        z[:, spread < 1e-6] = 0
        scores = ((1 - c.lam) * z[:, 0] + c.lam * z[:, 1].clip(-3, 3)).round(9)

        def rank(k):
            return -scores[k], -columns[k][0], pool[k]["id"]

        order, rng = sorted(range(len(pool)), key=rank), random.Random(seed_of(seed, task))
        shown, chance = {}, []
        if c.epsilon and pool and rng.random() < c.epsilon:
            chance = [rng.choice(order)]
            order = chance + [k for k in order if k != chance[0]]
        for k in order:
            if len(shown) < c.k2:
                shown.setdefault(pool[k]["task"], k)
        ids = [pool[k]["id"] for k in sorted(shown.values(), key=rank)]
        return ids, [pool[k]["id"] for k in chance], len(pool), near[0][0] if near else 0.0

    def learn(self, lessons) -> None:
        """Equation 4 for what was shown; then every experience, and the least useful go."""
        c, n = self.c, len(self.entries)
        for ids, reward, *_ in lessons:
            for entry in (self.entries[id - 1] for id in ids):
                entry["q"] += c.alpha * (reward - entry["q"])
        for _, _, intent, task in lessons:
            near = self.nearest(intent) if intent not in self.intents else []
            if near and near[0][0] >= c.same_intent:
                intent = near[0][1]
            self.intents += [intent] if intent not in self.intents else []
            made = dict(id=len(self.entries) + 1, intent=intent, task=task, q=c.q_init, dead=False)
            self.entries.append(made | {"visits": 0})
        for ids, *_ in lessons:
            for id in ids:
                self.entries[id - 1]["visits"] += 1
        live = [e for e in self.entries if not e["dead"]]
        if c.max_entries:
            old = [e for e in live if e["id"] <= n]
            old.sort(key=lambda e: (e["q"], e["visits"], e["id"]))
            for entry in old[: max(0, len(live) - c.max_entries)]:
                entry["dead"] = True
        alive = {e["intent"] for e in self.entries if not e["dead"]}
        self.see([intent for intent in self.intents if intent in alive])


VOCABULARY = "count delete sum dogs cats prices table rows of in with ann otto ida red".split()
GRID = [*itertools.product(("bm25", "dense"), (1, 5, 20), (0.0, 0.5), (False, True))]


def test_the_naive_bank_shows_the_same_entries_with_the_same_utilities():
    retrievals = utilities = 0
    for seed, (retrieve, k1, epsilon, exclude) in enumerate(GRID):
        rng, embedder = random.Random(seed), Plane() if retrieve == "dense" else None
        config = BankConfig(
            retrieve=retrieve, embedder="x" if embedder else "", k1=k1, k2=rng.choice((1, 3, 5)),
            epsilon=epsilon, exclude_same_task=exclude, lam=rng.choice((0.0, 0.3, 0.5, 1.0)),
            delta=rng.choice((0.0, 0.2, 0.4)), alpha=rng.choice((0.1, 0.3, 1.0)),
            q_init=rng.choice((0.0, 0.5)), same_intent=rng.choice((0.9, 0.7, 1.1)),
            max_entries=rng.choice((0, 25)),
        )  # fmt: skip
        made, naive = Bank(None, config, embedder), Naive(config, embedder)
        for step in range(12):
            lessons = []
            for _ in range(3):
                intent = " ".join(rng.choices(VOCABULARY, k=rng.randint(1, 6)))
                task = f"t{rng.randint(0, 30)}"
                found = made.retrieve(intent, task_id=task, seed=step)
                ids, chance, pool, best = naive.retrieve(intent, task, step)
                assert ([*found.ids], found.pool) == (ids, pool), (seed, step, intent)
                assert [f.entry.id for f in found.shown if f.by_chance] == chance
                assert found.best_sim == pytest.approx(best, abs=2e-6)
                lessons.append((found, rng.choice((1.0, -1.0, 0.25)), intent, task))
                retrievals += 1
            with made.batch():
                for found, reward, _, task in lessons:
                    made.feedback(found.shown, reward, task_id=task)
                for _, _, intent, task in lessons:
                    made.write(intent, "x", success=True, task_id=task)
            naive.learn([(found.ids, *rest) for found, *rest in lessons])
        values = [(e["id"], e["q"], e["visits"], e["intent"]) for e in naive.entries]
        kept = [made.entry(id) for id, *_ in values]
        assert [(e.id, e.q, e.visits, e.intent) for e in kept] == values
        dead = [e["id"] for e in naive.entries if e["dead"]]
        assert {*range(1, len(values) + 1)} - {e.id for e in made.entries()} == {*dead}
        utilities += len(values)
    assert (retrievals, utilities) == (864, 864)


def test_phase_b_is_a_hand_computed_table():
    """sims .9 .8 .7 (mean .8, deviation .0816497), Q 0 .5 1 (mean .5, deviation .4082483)."""
    found, z = filled([(0.9, 0.0), (0.8, 0.5), (0.7, 1.0)], lam=0.25).retrieve("q"), 1.2247449
    assert [f.entry.task_id for f in found.shown] == ["t0", "t1", "t2"]
    assert [f.sim_z for f in found.shown] == pytest.approx([z, 0, -z], abs=1e-4)
    assert [f.q_z for f in found.shown] == pytest.approx([-z, 0, z], abs=1e-4)
    assert [f.score for f in found.shown] == pytest.approx([0.5 * z, 0, -0.5 * z], abs=1e-4)
    assert found.pool == 3 and found.best_sim == pytest.approx(0.9, abs=1e-6)
    assert filled([(0.9, 0.0), (0.5, 0.0)]).retrieve("q").ids == (1,)  # .5 is not above .5
    assert filled([(0.7, 0.3), (0.9, 0.3), (0.8, 0.3)]).retrieve("q").ids == (2, 3, 1)
    outlier = filled([(0.9, 0.0)] * 30 + [(0.9, 1.0)], k1=40, lam=1.0, k2=1).retrieve("q")
    assert outlier.ids == (31,) and outlier.shown[0].q_z == 3.0  # CLIP
    assert bank(embedder=Plane()).retrieve("q") == Retrieved()


GHOST = Found(Entry(99, "x", "script", "x", True, 0, 0, 0, "t", 0, 0, (), {}), 1, 0, 0, 0)


@pytest.mark.parametrize(("wrong", "word"), [
    (lambda made: made.feedback(made.retrieve("q").shown, math.nan), "reward"),
    (lambda made: made.feedback(made.retrieve("q").shown, 1.5), "reward"),
    (lambda made: made.feedback(made.retrieve("q").shown, -2), "reward"),
    (lambda made: made.feedback([GHOST], 1.0), "no entry 99"),
    (lambda made: made.write("i", "x", success=True, task_id="t", parents=[7]), "no entry 7"),
    (lambda made: made.write(" \n", "x", success=True, task_id="t"), "empty"),
    (lambda made: made.retrieve(""), "empty"),
])  # fmt: skip
def test_what_cannot_be_changes_nothing(wrong, word):
    made = filled([(0.9, 0.0)])
    before = made.digest
    with pytest.raises(ValueError, match=word):
        wrong(made)
    assert made.digest == before


def test_an_error_in_a_batch_undoes_all_of_it():
    made = filled([(0.9, 0.0)])
    before, shown = made.digest, made.retrieve("q").shown
    for error in (RuntimeError, ValueError):
        with pytest.raises(error), made.batch():
            made.feedback(shown, 1.0)
            made.write("q", "x", success=True, task_id="t")
            raise error("the summary of the second task failed")
    assert made.digest == before and made.retrieve("q").ids == (1,)
    with made.batch():
        made.write("q", "x", success=True, task_id="t9")
        assert made.retrieve("q").ids == (1,)  # what is written is seen when the batch has ended
    assert {*made.retrieve("q").ids} == {1, 2} and made.digest != before


@pytest.mark.parametrize(("how", "meta"), [("dense", {"not_read": True}), ("bm25", {})])
def test_intents_that_are_not_read_to_their_end_are_counted(how, meta):
    made = bank(embedder=Plane(), retrieve=how)
    for text in ("x" * 60, "x" * 61, "z" * 5000):
        made.write(text, "y", success=True, task_id="t")
    cut = {"cut": 5000 - 4096} | meta
    assert [entry.meta for entry in made.entries()] == [{}, meta, cut]
    assert made.stats()["cut"] == 1 + bool(meta) and len(made.entries()[-1].intent) == 4096
    assert [made.cut("x" * k) for k in (60, 61, 4097)] == [False, bool(meta), True]


def test_statistics():
    made = filled([(0.9, -0.5), (0.9, 0.0), (0.9, 0.5), (0.9, 1.0)])
    made.feedback(made.retrieve("q").shown[:1], 1.0)
    wanted = dict(
        entries=4, intents=4, never_shown=0.75, q_negative=0.25, q_zero=0.25, q_positive=0.5,
        q_mean=0.25, q_min=-0.5, q_10=-0.5, q_median=0.5, q_90=1.0, q_max=1.0, visits=1, wins=1,
        cut=0, bytes=made.stats()["bytes"],
    )  # fmt: skip
    assert made.stats() == pytest.approx(wanted) and wanted["bytes"] > 0
    assert bank().stats()["q_mean"] == 0.0


@pytest.mark.parametrize("how", ["dense", "bm25"])
def test_delta_is_the_quantile_of_all_pairs(how, tmp_path):
    texts = [f"task {k} about {word}" for k, word in enumerate(["dogs", "cats", "dogs", "birds"])]
    embedder = Plane() if how == "dense" else None
    made, own = (bank(path, embedder, delta=None) for path in (tmp_path / "b.db", None))
    naive = Naive(made.config, embedder)
    naive.see(texts)
    pairs = [naive.similarity(a, b) for a in texts for b in texts if a != b]
    wanted = pytest.approx(float(np.quantile(pairs, 0.8)), abs=1e-5)
    assert made.calibrate(texts) == wanted
    made.close()
    assert bank(tmp_path / "b.db", embedder, delta=None).delta == wanted
    assert own.delta == 0.0
    with own.batch():
        for text in texts:
            own.write(text, "x", success=True, task_id=text)
    assert own.delta == wanted


def test_it_is_kept_and_opened_again_with_the_same_rows(tmp_path):
    made = filled([(0.9, 0.5), (0.8, 0.1)], tmp_path / "b.db")
    pragmas = [made._value(f"PRAGMA {name}") for name in ("journal_mode", "synchronous")]
    assert pragmas == ["wal", 2]  # also a machine that loses its power loses no whole batch
    made.feedback(made.retrieve("q").shown, 1.0)
    made.note("cursor", {"epoch": 2, "solved": ["t1"]})
    assert made.embedder.calls == 4  # each text once, and what identifies the embedder
    digest, found, events = made.digest, made.retrieve("q"), made.events()
    made.close()
    again = bank(tmp_path / "b.db", Plane(q=1.0), same_intent=1.1)
    assert (again.digest, again.retrieve("q"), again.events()) == (digest, found, events)
    assert again.noted("cursor", dict) == {"epoch": 2, "solved": ["t1"]}
    with pytest.raises(UserError, match="cursor"):
        again.noted("cursor", int)
    copy = bank(embedder=Plane(q=1.0))
    copy.load(again.dump())
    assert copy.digest == digest and copy.retrieve("q").ids == found.ids


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
    assert found.ids == (1,) and frozen.calibrate(["a", "b"]) <= 1
    frozen.close()
    assert path.read_bytes() == before and [*tmp_path.iterdir()] == [path]


def test_another_embedder_is_refused(tmp_path):
    path, words = tmp_path / "b.db", tmp_path / "words.db"
    filled([(0.9, 0.5)], path).close()
    bank(words).close()
    pooled = Plane(end="!")  # the same name and dimension, other vectors
    for file, embedder in (
        (path, Plane("other", 16)), (path, pooled), (path, None), (words, Plane()),
    ):  # fmt: skip
        with pytest.raises(UserError, match="embedder"):
            bank(file, embedder)
    bank(path, Plane("elsewhere")).close()  # another folder, the same model
    assert bank(path, frozen=True).entries()  # it may be searched by words


def test_frozen_sees_what_a_killed_process_left_in_the_log(tmp_path):
    path = tmp_path / "b.db"

    def fill():
        made = filled([(0.9, 0.5)], path)
        os.kill(os.getpid(), 9 * bool(made))

    assert killed_in_child(fill, 1 << 30) and Path(f"{path}-wal").stat().st_size
    before = path.read_bytes()
    assert bank(path, Plane(q=1.0), frozen=True).retrieve("q").ids == (1,)
    assert path.read_bytes() == before


def test_a_bank_in_use_a_full_disk_and_a_making_broken_off_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("agents.bank.BUSY_S", 0.1)
    path = tmp_path / "b.db"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Bank, "_set", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        bank(path, Plane(q=1.0, i0=0.9))
    made = filled([(0.9, 0.5)], path)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    digest = made.digest
    with pytest.raises(UserError, match="locked"):
        made.write("x", "y", success=True, task_id="t")
    holder.execute("ROLLBACK")
    made._db.execute(f"PRAGMA max_page_count = {made._value('PRAGMA page_count')}")
    with pytest.raises(UserError, match="full"):
        made.write("x", "y" * 1_000_000, success=True, task_id="t")
    assert made.digest == digest and made._value("PRAGMA integrity_check") == "ok"


def filling(path: Path) -> None:
    """Make forty batches, or those that are missing."""
    made = bank(path, Plane(), delta=-1.0, same_intent=1.1)
    for k in range(made.noted("next") or 0, 40):
        with made.batch():
            made.feedback(made.retrieve(f"task {k}").shown, 1.0 if k % 3 else -1.0, epoch=k)
            made.write(f"task {k}", "x" * 200, success=k % 3 > 0, task_id=f"t{k}", epoch=k)
            made.note("next", k + 1)


def test_killed_at_any_time_it_goes_on_to_the_same_rows(tmp_path):
    """As an interpreter of its own makes them: they do not depend on its hashes either."""
    whole, killed = tmp_path / "whole.db", tmp_path / "killed.db"
    code = "import sys; sys.path[:0] = ['.', 'tests', 'tests/agents']; from test_bank import *; "
    words = [sys.executable, "-c", f"{code}filling(Path({str(whole)!r}))"]
    subprocess.run(words, cwd=ROOT, check=True)
    rng, calls = random.Random(0), calls_of(lambda: filling(tmp_path / "counted.db"))
    for _ in range(3):
        assert killed_in_child(lambda: filling(killed), int(calls * rng.uniform(0.05, 0.2)))
        found = bank(killed, Plane(), delta=-1.0, frozen=True)
        assert found._value("PRAGMA integrity_check") == "ok"
    filling(killed)
    one, other = (bank(p, Plane(), delta=-1.0, frozen=True).digest for p in (killed, whole))
    assert one == other


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> bytes:
    """The bytes of a bank: two entries, a delta and an event."""
    path = tmp_path_factory.mktemp("sound") / "b.db"
    with closing(Bank(path, BankConfig(delta=0.0))) as made:
        first = made.write("count dogs", "SELECT", success=True, task_id="t1", kind="script")
        made.write("drop cats", "it", success=False, task_id="t2", parents=[first], meta={"n": 1})
        made.feedback(made.retrieve("count dogs").shown, 1.0)
        made.calibrate(["count dogs", "drop cats"])
    return path.read_bytes()


@pytest.fixture
def path(tmp_path, sound) -> Path:
    (tmp_path / "b.db").write_bytes(sound)
    return tmp_path / "b.db"


def run(path: Path, sql: str) -> None:
    """Execute SQL without any of the care that a bank takes."""
    with closing(sqlite3.connect(path)) as db:
        db.executescript(sql)


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"
ALTER = "PRAGMA writable_schema = ON; UPDATE sqlite_master SET "
WRONG = {
    "view": f"DROP TABLE event; CREATE VIEW event AS {ENDLESS}",
    "view beside": f"CREATE VIEW other AS {ENDLESS}",
    "trigger": "CREATE TRIGGER tr AFTER INSERT ON info BEGIN DELETE FROM entry; END",
    "endless trigger":
        f"CREATE TRIGGER tr AFTER UPDATE ON entry BEGIN INSERT INTO event (t) {ENDLESS}; END",
    "generated column": "ALTER TABLE entry ADD COLUMN g AS (zeroblob(1000000000))",
    "index of an expression": "CREATE INDEX ix ON entry (abs(q))",
    "missing table": "DROP TABLE event",
    "one table more": "CREATE TABLE more (x)",
    "virtual table": "DROP TABLE event; CREATE VIRTUAL TABLE event USING fts5 (x)",
    "constraint": f"{ALTER}sql = replace(sql, 'q REAL NOT NULL,', "
                  "'q REAL NOT NULL CHECK (abs(random()) > q),') WHERE name = 'entry'",
    "no SQL": f"{ALTER}sql = 'noise' WHERE name = 'entry'",
    "another program's": "PRAGMA application_id = 7",
    "newer": "UPDATE info SET value = '99' WHERE key = 'schema'",
    "no version": "DELETE FROM info WHERE key = 'schema'",
    "other tables": "PRAGMA application_id = 0; DROP TABLE event; DROP TABLE entry; "
                    "DROP TABLE intent",
    "no embedder": "UPDATE info SET value = '{\"name\": 1, \"dim\": \"x\"}' "
                   "WHERE key = 'embedder'",
    "a count in words": "UPDATE entry SET wins = 'many'",
    "a vector in words": "UPDATE intent SET vec = 'far'",
    "text": lambda raw: b"these are notes, no bank\n" * 40,
    "zeros": lambda raw: bytes(8192),
    "truncated": lambda raw: raw[: len(raw) // 2],
    "header alone": lambda raw: raw[:100],
    "noise": lambda raw: raw[:100] + bytes(range(256)) * 40,
}  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True], ids=["open", "frozen"])
@pytest.mark.parametrize("how", WRONG)
def test_what_is_no_bank_is_one_sentence_and_stays_as_it_is(path, how, frozen):
    if frozen and how == "no embedder":  # it may be searched by words
        return
    if isinstance(WRONG[how], str):
        run(path, WRONG[how])
    else:
        path.write_bytes(WRONG[how](path.read_bytes()))
    before = path.read_bytes()
    with pytest.raises(UserError, match=path.name) as caught:
        Bank(path, BankConfig(), frozen=frozen)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert path.read_bytes() == before


def test_functions_of_a_schema_are_not_trusted_and_values_are_bounded(path):
    for frozen in (False, True):
        with closing(Bank(path, BankConfig(), frozen=frozen)) as made:
            assert made._value("PRAGMA trusted_schema") == 0
            assert made._db.getlimit(sqlite3.SQLITE_LIMIT_LENGTH) < 1 << 27


def test_what_is_no_file_of_a_bank_is_one_sentence(path, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("folder", "fifo", "loop", "a\0b", "x" * 300, "none/b.db", "none.db"):
        with pytest.raises(UserError):
            Bank(tmp_path / name, BankConfig(), frozen=name == "none.db")
    monkeypatch.setattr("agents.bank.MOST_BYTES", 4096)
    with pytest.raises(UserError, match="too large"):
        Bank(path, BankConfig(), frozen=True)


@pytest.mark.parametrize("rows", [
    {}, [], {"info": 7}, {"intent": [[1, "default", "x"]]}, {"intent": [[1, "default", "x", "?"]]},
    {"event": [[10**30] * 9]}, {"info": [["schema", "[" * 100_000]]}, {"info": [["schema", "2"]]},
    {"entry": [[1, 55, "k", "e", 1, 0.5, 0, 0, "t", 0, 1, "[1]", "[]", 0]]},
])  # fmt: skip
def test_rows_of_a_model_folder_that_are_no_bank_are_one_sentence(rows, path):
    with closing(Bank(path, BankConfig(), frozen=True)) as sound_one:
        whole = sound_one.dump()
    made = Bank(None, BankConfig(delta=0.0))
    made.load(whole)
    before = made.digest
    with pytest.raises(UserError) as caught:
        made.load(whole | rows if isinstance(rows, dict) and rows else rows)
    assert "\n" not in str(caught.value) and made.digest == before


def test_a_journal_of_a_stranger_is_not_used(path):
    """SQLite removes the file that a journal names at its end, wherever it is."""
    Path(f"{path}-journal").write_bytes(bytes.fromhex("d9d505f920a163d7"))
    with pytest.raises(UserError, match="is not of a bank"):
        Bank(path, BankConfig())
    with closing(Bank(path, BankConfig(), frozen=True)) as looking:
        assert len(looking.entries()) == 2
    assert Path(f"{path}-journal").exists()


def hold(path, pipe) -> None:
    made = Bank(path, BankConfig())
    pipe.send(len(made.entries()))
    pipe.recv()


def test_a_second_writer_is_told_who_the_first_one_is(path):
    """Readers are not kept out, and a writer that was killed keeps nobody out."""
    pipe, other = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    writer = fork.Process(target=hold, args=(path, other), daemon=True)
    writer.start()
    try:
        assert pipe.recv() == 2
        with pytest.raises(UserError, match=f"written by process {writer.pid} .* since 2"):
            Bank(path, BankConfig())
        with closing(Bank(path, BankConfig(), frozen=True)) as looking:
            assert len(looking.entries()) == 2
    finally:
        writer.kill()
        writer.join(HANG_S)
    with closing(Bank(path, BankConfig())) as left:
        assert len(left.entries()) == 2
    assert not [each for each in path.parent.iterdir() if each != path]


def test_an_intent_without_a_word_in_common_is_not_like_a_text():
    words = Words()
    words.begin([(1, "ask for pears", b""), (2, "sell the house", b"")])
    assert [id for id, _ in words.nearest("pears, please", 2)] == [1]
    assert words.nearest("zebra", 2) == [] == words.nearest("", 2)
