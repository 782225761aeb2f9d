"""A bank of experiences in one SQLite file: (intent, experience, utility Q), found in two phases.

    intent --similarity above delta, k1--> pool --z-scores of similarity and Q, k2--> entries
    reward --Q += alpha * (reward - Q)--> the entries that were shown

Method: MemRL (arXiv 2601.03192 v2), equations 4, 6 and 7. What a batch of tasks teaches is one
transaction: a process that is killed leaves all of it or nothing. A file may be a stranger's: one
that has anything in its schema but our tables and index, to the letter, is refused.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Annotated, Literal

from config.errors import UserError, clip, first_line
from config.files import is_file
from config.locks import writing
from config.options import COUNT, LIMIT, SHARE
from data import seed_of
from memagent import ReadConfig

if TYPE_CHECKING:
    from agents.search import Embedder

SCHEMA = 1
APPLICATION = 0x6D656D62  # in the file's header: a bank of ours
BUSY_S = 5.0  # how long another process may hold the file
MOST_BYTES = 1 << 32  # of a file
MOST_VALUE = 1 << 26  # bytes of a text, an embedding or a statement
MOST_CHARACTERS = 4096  # of an intent; the rest is cut, and counted
CLIP = 3.0  # of Q's z-score
DELTA_SHARE = 0.8  # of the similarities of all pairs of intents, below delta
NAMESPACE = "default"  # of all intents; banks had several before
TABLES = """
CREATE TABLE info (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE intent (
    id INTEGER PRIMARY KEY, ns TEXT NOT NULL, text TEXT NOT NULL, vec BLOB NOT NULL,
    UNIQUE (ns, text));
CREATE TABLE entry (
    id INTEGER PRIMARY KEY, intent_id INTEGER NOT NULL REFERENCES intent (id), kind TEXT NOT NULL,
    experience TEXT NOT NULL, success INTEGER NOT NULL, q REAL NOT NULL, visits INTEGER NOT NULL,
    wins INTEGER NOT NULL, task_id TEXT NOT NULL, epoch INTEGER NOT NULL, created INTEGER NOT NULL,
    parents TEXT NOT NULL, meta TEXT NOT NULL, dead INTEGER NOT NULL);
CREATE INDEX entry_of_intent ON entry (intent_id);
CREATE TABLE event (
    t INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, task_id TEXT NOT NULL,
    entry_id INTEGER NOT NULL REFERENCES entry (id), sim REAL NOT NULL, q_before REAL NOT NULL,
    score REAL NOT NULL, reward REAL NOT NULL, q_after REAL NOT NULL);
"""
LAYOUT = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
KEPT = ("info", "intent", "entry", "event")  # tables, those that others point to first


@dataclass(frozen=True, slots=True)
class BankConfig(ReadConfig):
    """How experiences are found, what becomes of their utilities, and which are kept."""

    retrieve: Literal["dense", "bm25"] = "bm25"
    """what similarity is: dense = of embeddings, which needs an embedder; bm25 = of words"""
    embedder: str = ""
    """hf:FOLDER, or openai:URL#MODEL"""
    k1: Annotated[int, COUNT] = 5
    """most similar intents whose entries are candidates"""
    k2: Annotated[int, COUNT] = 3
    """entries that a task is shown"""
    delta: float | None = None
    """similarity above which an intent counts; None = the .8 quantile of all pairs of the tasks'
    intents (in training, of the bank's intents)"""
    lam: Annotated[float, SHARE] = 0.5
    """weight of the utility beside similarity: 0 = similarity alone, 1 = utility alone"""
    exclude_same_task: bool = False
    """entries of the task itself are not shown"""
    epsilon: Annotated[float, SHARE] = 0.0
    """probability that chance decides one of the k2"""
    alpha: Annotated[float, SHARE] = 0.3
    """learning rate of utilities; 0 = they stay"""
    q_init: float = 0.0
    """utility of a new entry"""
    same_intent: float = 0.9
    """similarity from which a new entry belongs to an intent that is there"""
    max_entries: Annotated[int, LIMIT] = 0
    """entries that are kept; beyond, those with the lowest utility go, of equals those shown least,
    then the oldest; 0 = all are kept"""

    def __post_init__(self):
        ReadConfig.__post_init__(self)
        if self.retrieve == "dense" and not self.embedder:
            raise UserError("retrieve dense compares meanings: name an embedder.")


@dataclass(frozen=True, slots=True)
class Entry:
    """An experience with its utility."""

    id: int
    intent: str
    kind: str  # script, reflection, trajectory
    experience: str
    success: bool
    q: float
    visits: int  # how often it was shown
    wins: int  # ... and the task succeeded
    task_id: str
    epoch: int
    created: int  # the batch, from 1
    parents: tuple[int, ...]  # entries that were shown when it was made
    meta: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Found:
    """An entry that was retrieved, and why."""

    entry: Entry
    sim: float
    sim_z: float
    q_z: float
    score: float
    by_chance: bool = False


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What a task is shown, the best first, and where it came from."""

    shown: tuple[Found, ...] = ()
    pool: int = 0  # candidates
    best_sim: float = 0.0  # of all intents; 0 in an empty bank

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(found.entry.id for found in self.shown)


SELECT = (
    "SELECT entry.id, intent.text, kind, experience, success, q, visits, wins, task_id, epoch, "
    "created, parents, meta FROM entry JOIN intent ON intent.id = intent_id WHERE "
)


class Bank:
    """Experiences of one file, or of memory alone.

    path: the file, made if it is not there; None: nothing is kept. frozen: read, never written.
    UserError: the file is damaged, not a bank, of another version or embedder, or in use.
    All retrievals between two batches see the same state: their order changes nothing.
    """

    def __init__(
        self,
        path: str | Path | None,
        config: BankConfig,
        embedder: Embedder | None = None,
        *,
        frozen: bool = False,
    ):
        from agents.likeness import Meanings, Words  # numpy comes with them

        self.config, self.embedder, self.frozen = config, embedder, frozen
        self.path = Path(path) if path else None
        self._writing = False  # a batch is under way
        self._own_delta = -1, 0.0  # batches so far, and delta then
        self.likeness = Meanings(embedder) if config.retrieve == "dense" else Words()
        with ExitStack() as files, self._sentences():
            self._open(files)
            self._files = files.pop_all()

    def close(self) -> None:
        self._files.close()

    # ---- the door

    def _open(self, files: ExitStack) -> None:
        """Check the file before anything is written to it; make the tables of a new one."""
        self._db = self._connect(self._place(files), files)
        layout = self._rows(LAYOUT)
        new = not (layout or self.frozen or self._value("PRAGMA application_id"))
        if not new:
            self._check(layout)
        if self.frozen:  # neither the file nor what lies beside it is written
            file, self._db = self._db, self._connect(":memory:", files)
            file.backup(self._db)
        elif self.path:
            self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if new:
            self._db.executescript(f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION}")
            self._set("schema", SCHEMA)
            self._set("embedder", self.likeness.identity)
            self._db.execute("COMMIT")
        self._load()

    def _place(self, files: ExitStack) -> str:
        """Return what SQLite is to open; a file that is written has this process as its writer."""
        if self.path is None:
            return ":memory:"
        if not is_file(self.path) and (self.frozen or self.path.exists()):
            raise UserError(f"There is no bank at {self.path}.")
        if self.path.exists() and self.path.stat().st_size > MOST_BYTES:
            raise UserError(f"{self.path} is too large for a bank.")
        if self.frozen:  # `immutable` would pass over what a killed process has left in the log
            log = _beside(self.path, "wal")
            how = "" if log.exists() and log.stat().st_size else "&immutable=1"
            return f"{self.path.absolute().as_uri()}?mode=ro{how}"
        if not self.path.parent.is_dir():
            raise UserError(f"There is no folder {self.path.parent} for a bank.")
        files.enter_context(writing(self.path, f"The bank {self.path}"))
        # a bank leaves a log, never a journal; by a stranger's SQLite would remove any file
        if (journal := _beside(self.path, "journal")).exists():
            raise UserError(f"{journal} is not of a bank: remove it, and open {self.path} again.")
        return str(self.path)

    def _connect(self, place: str, files: ExitStack) -> sqlite3.Connection:
        """Open a database that is not to be trusted."""
        db = sqlite3.connect(place, timeout=BUSY_S, isolation_level=None, uri=self.frozen)
        files.callback(db.close)
        db.execute("PRAGMA trusted_schema = OFF")
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE)
        db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MOST_VALUE)
        return db

    def _check(self, layout: Sequence[tuple]) -> None:
        """Refuse another file, one with a trigger, a view or a table that no bank has, another
        version, and another embedder; nothing is read from a table before the layout is ours.

        A frozen bank may be searched by words whatever made it.
        """
        with closing(sqlite3.connect(":memory:")) as ours:
            ours.executescript(TABLES)
            same = layout == ours.execute(LAYOUT).fetchall()
        is_ours = same and self._value("PRAGMA application_id") == APPLICATION
        if not is_ours or self.noted("schema") != SCHEMA:
            raise UserError(f"{self.path} is no bank of version {SCHEMA}, or damaged.")
        for table in ("intent", "entry"):  # a column of SQLite holds values of any type
            columns = self._rows(f"PRAGMA table_info({table})")
            other = " OR ".join(
                f"typeof({name}) <> '{kind.lower()}'" for _, name, kind, *_ in columns
            )
            if self._value(f"SELECT EXISTS (SELECT 1 FROM {table} WHERE {other})"):
                raise UserError(f"{self.path} is damaged: a value of {table} has a wrong type.")
        made, mine = self.noted("embedder", dict) or {}, self.likeness.identity
        if not (self.likeness.fits(made) or (self.frozen and not mine)):
            names = [clip(str(each.get("name", "none")), 80) for each in (made, mine)]
            raise UserError(f"{self.path} was made with the embedder {names[0]}, not {names[1]}.")

    def _load(self) -> None:
        """Build the index of the intents that have entries: others take no place among the k1."""
        self.likeness.begin(
            self._rows(
                "SELECT id, text, vec FROM intent WHERE id IN (SELECT intent_id FROM entry WHERE "
                "NOT dead) ORDER BY id"
            )
        )

    # ---- reading and writing

    def _rows(self, query: str, *values: object) -> list[tuple]:
        with self._sentences():
            return self._db.execute(query, values).fetchall()

    def _value(self, query: str, *values: object) -> object:
        """Return the first value that a query finds, None if it finds nothing."""
        return next(iter(self._rows(query, *values)), (None,))[0]

    def _set(self, key: str, value: object) -> None:
        self._rows("INSERT OR REPLACE INTO info VALUES (?, ?)", key, json.dumps(value))

    def note(self, key: str, value: object) -> None:
        """Keep a value, as JSON can hold it, beside the entries: part of the batch under way."""
        with self.batch():
            self._set(key, value)

    def noted(self, key: str, kind: type = object) -> object:
        """Return a value that was kept; None: there is none. UserError: it is of another kind."""
        if (text := self._value("SELECT value FROM info WHERE key = ?", key)) is None:
            return None
        with self._sentences():
            value = json.loads(text)
            if not isinstance(value, kind) and (kind, type(value)) != (float, int):
                raise ValueError(f"{key} is {clip(repr(value), 80)}")
        return value

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """Turn errors of the file, and of what a stranger has written in it, into one sentence."""
        try:
            yield
        except (sqlite3.Error, OSError, *DAMAGE) as error:
            what = self.path or "that a model or a run holds"
            raise UserError(f"The bank {what} cannot be used: {first_line(error)}.") from error

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Make everything that happens within one transaction; an error undoes all of it.

        Retrievals see what it has written once it has ended. One within another is a part of it.
        """
        if self.frozen:
            raise UserError(f"{self.path} is frozen: nothing is written to it.")
        if self._writing:
            yield
            return
        self._rows("BEGIN IMMEDIATE")
        self._writing = True
        try:
            self._set("batches", self.batches + 1)
            yield
            self.evict()
            self._rows("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # SQLite itself ends one that a full disk breaks off
                self._db.execute("ROLLBACK")
            raise
        finally:
            self._writing = False
        with self._sentences():
            self._load()

    @property
    def batches(self) -> int:
        return self.noted("batches", int) or 0

    # ---- finding

    @property
    def delta(self) -> float:
        """Return the similarity above which an intent counts.

        Where it is neither set nor calibrated by tasks, it is that of the bank's own intents.
        """
        if self.config.delta is not None:
            return self.config.delta
        if (known := self.noted(self._delta_key, float)) is not None:
            return known
        if self._own_delta[0] != self.batches:
            self._own_delta = self.batches, self._quantile(e.intent for e in self.entries())
        return self._own_delta[1]

    @property
    def _delta_key(self) -> str:
        return f"delta {self.config.retrieve} {DELTA_SHARE:g} {NAMESPACE}"

    def _quantile(self, intents: Iterable[str]) -> float:
        from agents.likeness import quantile

        return quantile(self.likeness, [*dict.fromkeys(intents)], DELTA_SHARE)

    def calibrate(self, intents: Sequence[str]) -> float:
        """Return the delta that the similarities of all pairs suggest, and keep it."""
        delta = self._quantile(intent[:MOST_CHARACTERS] for intent in intents)
        if not self.frozen:
            self.note(self._delta_key, delta)
        return delta

    def retrieve(self, intent: str, *, task_id: str = "", seed: int = 0) -> Retrieved:
        """Return what a task is shown: k2 candidates, one of each task, the best first; with
        probability epsilon one of them is any.

        seed: of what chance decides, with the task's id. ValueError: the intent is empty.
        """
        c, near = self.config, self.likeness.nearest(_text(intent), self.config.k1)
        scored = self._scored({id: sim for id, sim in near if sim > self.delta}, task_id)
        rng, order = random.Random(seed_of(seed, task_id)), scored
        if c.epsilon and scored and rng.random() < c.epsilon:
            first = replace(rng.choice(scored), by_chance=True)
            order = [first, *(found for found in scored if found.entry.id != first.entry.id)]
        chosen: dict[str, Found] = {}
        for found in order:
            if len(chosen) < c.k2:
                chosen.setdefault(found.entry.task_id, found)
        shown = tuple(sorted(chosen.values(), key=_order))
        return Retrieved(shown, len(scored), near[0][1] if near else 0.0)

    def _scored(self, near: Mapping[int, float], task_id: str) -> list[Found]:
        """Return the entries of the near intents (id -> similarity) with their scores, the best
        first: phase B (Eq. 7)."""
        c, marks = self.config, ", ".join("?" * len(near))
        texts = self._rows(f"SELECT text, id FROM intent WHERE id IN ({marks})", *near)
        similarity = {text: near[id] for text, id in texts}
        pool = self._entries(f"intent_id IN ({marks}) AND NOT dead", *near)
        if c.exclude_same_task and task_id:
            pool = [entry for entry in pool if entry.task_id != task_id]
        sims = [similarity[entry.intent] for entry in pool]
        found, qs = [], _z([entry.q for entry in pool])
        for entry, sim, sim_z, q_z in zip(pool, sims, _z(sims), qs, strict=True):
            q_z = max(-CLIP, min(CLIP, q_z))  # an outlier decides no more than CLIP deviations
            found.append(Found(entry, sim, sim_z, q_z, (1 - c.lam) * sim_z + c.lam * q_z))
        return sorted(found, key=_order)

    # ---- learning

    def feedback(
        self, shown: Sequence[Found], reward: float, *, task_id: str = "", epoch: int = 0
    ) -> None:
        """Move the utilities of the entries that were shown towards a reward in [-1, 1] (Eq. 4).

        ValueError: the reward is out of range, an entry is not in the bank.
        """
        if not -1 <= reward <= 1:  # NaN compares as False
            raise ValueError(f"a reward must be a number in [-1, 1], not {reward!r}")
        with self.batch():
            for found in shown:
                id, before = found.entry.id, self.entry(found.entry.id).q
                after = before + self.config.alpha * (reward - before)
                change = "q = ?, visits = visits + 1, wins = wins + ?"
                self._rows(f"UPDATE entry SET {change} WHERE id = ?", after, reward > 0, id)
                event = epoch, task_id, id, found.sim, before, found.score, reward, after
                self._insert("event", None, *event)

    def write(
        self,
        intent: str,
        experience: str,
        *,
        success: bool,
        task_id: str,
        epoch: int = 0,
        kind: str = "trajectory",
        parents: Sequence[int] = (),
        meta: Mapping[str, object] = {},
    ) -> int:
        """Keep an experience; return its id.

        A known intent gets one entry more, and so does one that is as similar as `same_intent`.
        ValueError: the intent is empty, a parent is not in the bank.
        """
        meta, text = dict(meta), _text(intent)
        if len(intent) > len(text):
            meta["cut"] = len(intent) - len(text)  # characters
        if self.likeness.cut(text):
            meta["not_read"] = True  # to its end, by the embedder
        for parent in parents:
            self.entry(parent)
        with self.batch():
            entry = (self._intent_id(text), kind, experience, success, self.config.q_init, 0, 0,
                     task_id, epoch, self.batches, json.dumps([*parents]), json.dumps(meta),
                     0)  # fmt: skip
            return self._insert("entry", None, *entry)

    def _intent_id(self, text: str) -> int:
        """Return the intent that an entry belongs to; make it if there is none."""
        query = "SELECT id FROM intent WHERE ns = ? AND text = ?"
        if (known := self._value(query, NAMESPACE, text)) is not None:
            return known
        near = self.likeness.nearest(text, 1)
        if near and near[0][1] >= self.config.same_intent:
            return near[0][0]
        return self._insert("intent", None, NAMESPACE, text, self.likeness.vector(text))

    def _insert(self, table: str, *row: object) -> int:
        """Insert a row; return its id, a new one for None."""
        self._rows(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", *row)
        return self._value("SELECT last_insert_rowid()")

    def cut(self, intent: str) -> bool:
        """Whether similarities are those of a part of an intent: it is too long for a bank, or for
        the embedder."""
        return len(intent) > MOST_CHARACTERS or self.likeness.cut(intent)

    def prepare(self, intent: str) -> None:
        """Embed an intent that will be written, while no batch is under way: then `write` needs no
        server. ValueError: it is empty. ServerFailed: the embedder's has."""
        self.likeness.vector(_text(intent))

    def evict(self) -> None:
        """Let go of entries beyond `max_entries`, none of those that this batch has written."""
        if most := self.config.max_entries:
            excess = self._value("SELECT count(*) FROM entry WHERE NOT dead") - most
            self._rows(
                "UPDATE entry SET dead = 1 WHERE id IN (SELECT id FROM entry WHERE NOT dead AND "
                "created < ? ORDER BY q, visits, id LIMIT ?)",
                self.batches,
                max(0, excess),
            )

    # ---- looking at it

    def entries(self, task_id: str | None = None) -> list[Entry]:
        """Return the entries by id; task_id: those that this task has left alone."""
        return self._entries("NOT dead AND (task_id = ?1 OR ?1 IS NULL)", task_id)

    def _entries(self, clause: str, *values: object) -> list[Entry]:
        with self._sentences():
            return [
                Entry(*row[:4], bool(row[4]), *row[5:11], tuple(json.loads(row[11])),
                      dict(json.loads(row[12])))
                for row in self._rows(f"{SELECT} {clause} ORDER BY entry.id", *values)
            ]  # fmt: skip

    def entry(self, id: int) -> Entry:
        """Return an entry, also one that was let go of. ValueError: there was never one."""
        for entry in self._entries("entry.id = ?", id):
            return entry
        raise ValueError(f"the bank has no entry {id}")

    def stats(self) -> dict[str, float]:
        """Count entries and describe their utilities and how often they were shown."""
        entries = self.entries()
        n, qs = len(entries), sorted(entry.q for entry in entries) or [0.0]
        places = {"q_min": 0.0, "q_10": 0.1, "q_median": 0.5, "q_90": 0.9, "q_max": 1.0}
        shares = {
            "never_shown": sum(not entry.visits for entry in entries),
            "q_negative": sum(entry.q < 0 for entry in entries),
            "q_zero": sum(entry.q == 0 for entry in entries),
            "q_positive": sum(entry.q > 0 for entry in entries),
        }
        return {
            "entries": n,
            "intents": len({entry.intent for entry in entries}),
            **{name: count / max(1, n) for name, count in shares.items()},
            "q_mean": fmean(qs),
            **{name: qs[min(len(qs) - 1, int(at * n))] for name, at in places.items()},
            "visits": sum(entry.visits for entry in entries),
            "wins": sum(entry.wins for entry in entries),
            "cut": sum(not {"cut", "not_read"}.isdisjoint(entry.meta) for entry in entries),
            "bytes": self._value("PRAGMA page_count") * self._value("PRAGMA page_size"),
        }

    def events(self) -> list[tuple]:
        """Return (epoch, task id, entry id, similarity, Q before, score, reward, Q after)."""
        return [row[1:] for row in self._rows("SELECT * FROM event ORDER BY t")]

    @property
    def digest(self) -> str:
        """Return a hex fingerprint of all rows: intents, entries and events."""
        found = blake2b(digest_size=16)
        for table in KEPT[1:]:
            for row in self._rows(f"SELECT * FROM {table} ORDER BY 1"):
                found.update(repr(row).encode(errors="surrogatepass"))
        return found.hexdigest()

    def dump(self) -> dict:
        """Return all rows as JSON can hold them, for `load`."""
        return {
            table: [
                [base64.b64encode(x).decode() if isinstance(x, bytes) else x for x in row]
                for row in self._rows(f"SELECT * FROM {table} ORDER BY 1")
            ]
            for table in KEPT
        }

    def load(self, dumped: dict) -> None:
        """Become what `dump` returned. UserError: it is of another version or embedder."""
        with self._sentences():
            info = {key: json.loads(value) for key, value in dumped["info"]}
            if any(info.get(key) != self.noted(key) for key in ("schema", "embedder")):
                raise UserError(f"{self.path or 'The bank'} is of another version or embedder.")
            with self.batch():
                for table in reversed(KEPT):
                    self._rows(f"DELETE FROM {table}")
                for table in KEPT:
                    for values in map(list, dumped[table]):
                        if table == "intent":
                            values[3] = base64.b64decode(values[3])
                        self._insert(table, *values)


def _beside(path: Path, what: str) -> Path:
    """Return the file that SQLite keeps beside one."""
    return Path(f"{os.path.realpath(path)}-{what}")  # of a loop of links as well


def _text(intent: str) -> str:
    """Return what a bank keeps of an intent. ValueError: it is empty."""
    if not intent.strip():
        raise ValueError("an intent must not be empty")
    return intent[:MOST_CHARACTERS]


def _order(found: Found) -> tuple[float, float, int]:
    """Return the key by which what was found is sorted: equals by similarity, then by id."""
    return -found.score, -found.sim, found.entry.id


def _z(values: Sequence[float]) -> list[float]:
    """Return z-scores by the population's deviation; 0 where there is none.

    >>> _z([1.0, 3.0]), _z([2.0])
    ([-1.0, 1.0], [0.0])
    """
    std = pstdev(values) if len(values) > 1 else 0.0
    if std < 1e-6:
        return [0.0] * len(values)
    mean = fmean(values)
    return [(value - mean) / std for value in values]
