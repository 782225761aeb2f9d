"""MemUpdate: a store of dated entries, edited by tools, and paid for by questions asked afterwards.

    sessions --edit, edit, ...--> store --search--> entries --answer, by a frozen policy--> scores

In training an episode has hidden probes: the policy never sees them, and is paid for how much
better they are answered from the store that it leaves than from the one it was given. They are
answered, greedily, by the policy as it was before training, from the entries that a search finds:
what is learnt is what to keep, not how to answer. In an evaluation there is one question, asked in
the same way. Any other document is read as well: each of its sections is a session without a date.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

from agents.calls import Call, Fault, Format, format_of
from agents.demos import Demo, Size
from agents.pay import Answer, Editing, compare, gains, parts
from agents.search import Embedder, Search, recall
from agents.store import Entry, Op, Snapshot, Store, number
from agents.tools import MALFORMED, REMOVABLE, Scope, apply, refuse, schemas
from config.errors import UserError
from config.options import COUNT, LIMIT, NOT_NEGATIVE
from data import Task, extract_answer
from memagent import (
    NO_ENTRIES,
    Agent,
    Limits,
    Line,
    Prompt,
    ReadConfig,
    Trajectory,
    Turn,
    Wording,
)
from tasks.conversations import Memory, Probe, Session
from tokens.codec import Codec

# ---------------------------------------------------------------- wording and settings

BUILD = Wording(
    "You keep a store of memories about dated conversations. Questions will be asked later, and "
    "answered from the store alone. Below are a part of a session, the tools, what is stored, and "
    "your latest calls with their results. Call tools to add what may be asked for, to correct "
    "what has changed and to delete what is no longer worth its place. An update keeps the date "
    "of its entry unless it gives another. When the store is as it should be, answer without a "
    "call.",
    ("tools", "section", "memory", "state", "results"),
    cue="Your calls:",
    needs=("section", "memory"),
)
REFINE = Wording(
    "You keep a store of memories. Questions will be asked later, and answered from the store "
    "alone. Below are the tools, entries of the store, and your latest calls with their results. "
    "Search the store and call tools to make it more useful: correct, merge, split, delete. When "
    "it is as it should be, answer without a call.",
    ("tools", "memory", "state", "results"),
    cue="Your calls:",
    needs=("memory",),
)
ANSWER = Wording(
    "Solve the problem with the help of the memories alone; they are dated. {answer}",
    ("memory", "problem"),
    needs=("memory",),
)


@dataclass(frozen=True, slots=True)
class MemUpdateConfig(ReadConfig):
    """How MemUpdate edits its store, and what it is paid for."""

    mode: Literal["build", "refine"] = "build"
    """build = sessions are read one after the other, the store is empty at first; refine = the
    store holds the task's memories, and no session is read"""
    show: Literal["relevant", "all"] = "relevant"
    """entries in a prompt: relevant = those that match the session best (or, without one, the
    newest), as many as show_k; all = every one"""
    show_k: Annotated[int, COUNT] = 10
    """entries that a prompt shows"""
    call_tokens: Annotated[int, COUNT] = 512
    """most tokens of a turn that edits, thoughts and the end-of-sequence id included"""
    reply_tokens: Annotated[int, COUNT] = 512
    """most tokens of one tool's reply"""
    max_ops: Annotated[int, COUNT] = 30
    """most operations, errors and searches included, on one piece of text: a session, or a part of
    one longer than chunk_tokens (refine: in the episode); further calls get an error each"""
    max_turns: Annotated[int, COUNT] = 30
    """most turns on one piece of text (refine: in the episode); the calls of the last one are
    executed"""
    max_calls: Annotated[int, COUNT] = 4
    """calls of one turn that are executed; further ones get an error each"""
    max_invalid: Annotated[int, COUNT] = 3
    """malformed turns in a row that end the episode: turns that call tools, but with no call that
    can be read, names a tool and has arguments that fit it"""
    without: tuple[Literal[REMOVABLE], ...] = ()
    """tools that there are not, such as delete_memory; update = no updates by manage_memory"""
    search: Literal["bm25", "dense"] = "bm25"
    """how entries are found; dense needs an embedder"""
    embedder: str = ""
    """hf:FOLDER, whose own files say how it is used, or openai:URL#MODEL"""
    answer_k: Annotated[int, COUNT] = 10
    """entries that a question is answered from"""
    answer_order: Literal["best", "newest", "oldest"] = "best"
    """their order in the prompt"""
    budget: Literal["soft", "hard", "none"] = "soft"
    """what a store over its budget costs: soft = reward; hard = what would enlarge it fails"""
    memory_budget: Annotated[float, NOT_NEGATIVE] = 0.0
    """tokens of all entries, as a share of the tokens of the source (build) or of the store at the
    start (refine); 0 = 0.1 of the source, 1.0 of the start"""
    budget_entries: Annotated[int, LIMIT] = 0
    """count the budget in entries instead; 0 = in tokens"""
    turn_credit: bool = False
    """pay each turn for what it has changed in what the episode is paid for the probes"""
    format_weight: Annotated[float, NOT_NEGATIVE] = 0.05
    """weight of the share of calls that were valid; without a call it is 0"""
    compression_weight: Annotated[float, NOT_NEGATIVE] = 0.05
    """build: weight of 1 - tokens of the store / tokens of the source"""


STOPS = ("no_call", "ops", "turns", "context", "invalid")
ANSWERS = 1 << 14  # of the frozen policy that are remembered
LEAST_ENTRY = 8  # tokens of the shortest entry worth the name, with its id
ENTRY_TOKENS = 48  # of an entry in a prompt, for the window that a sampler reserves


# Chosen on the dev split with 30 steps; 27 are for the time (docs/results.md). Sessions grow after
# five steps, whatever the reward.
TRAINING = dict(steps=27, tasks_per_step=(6,), group_size=12, lr=4e-4, decay_from=0.5, kl=0.0,
                temperature=(1.0,), normalisation="std", turns_per_trajectory=0, grow_at=0.0,
                grow_steps=5)  # fmt: skip
BRIEF = dict(steps=2, tasks_per_step=(2,), group_size=4, kl=0.0, temperature=(1.0,))
LENGTHS = {"memupdate": (6, 8, 10, 12)}
DEMO = Demo(
    beside=(),
    kind="ledger",
    data="ledger",
    model="keeper_weights",
    title="memagent: a store edited by tools",
    sizes={
        "default": Size(3, {"memupdate": TRAINING}, LENGTHS, {12: 128, 24: 32}),
        "short": Size(1, {"memupdate": BRIEF}, {"memupdate": (6,)}, {6: 8}),
    },
    baselines=("newest", "idle", "facts"),
)

# ---------------------------------------------------------------- what is kept of a turn

CURVE = 64  # sessions after which the store's size is counted
# parts of an episode's reward (agents/pay.py), each a column of metrics.csv: the mean of the
# episodes that have it
PARTS = (
    "delta", "format", "size", "compression", "retained", "unread", "tokens_before", "tokens_after",
    *(f"delta_{category}" for category in range(1, 6)),
)  # fmt: skip
OPS = ("search_memory", "create", "update", "noop", "delete_memory", "sample_memory",
       "merge_memory", "split_memory")  # fmt: skip


@dataclass(slots=True)
class EditNotes:
    """What is kept of a turn; its record has it as JSON values."""

    phase: Literal["edit", "probe", "answer"]
    session: int | None = None
    ops: list[dict] = field(default_factory=list)  # operations: see `note`
    entries: int = 0  # after the turn
    tokens: int = 0  # of them
    stop: str = ""  # why the editing of the session or the episode ended with this turn
    probe: str = ""  # id of the question
    found: list[str] = field(default_factory=list)  # lines of the entries that it is answered from
    recall: float | None = None  # share of its evidence that they were taken from; None: unknown
    # of the whole episode, in its last turn: parts of the reward, and what each edit turn has won
    parts: dict[str, float] = field(default_factory=dict)
    gains: list[float] = field(default_factory=list)
    answers: list[dict] = field(default_factory=list)  # of the probes: see `pay.compare`
    # in the last turn that edits: the whole store with its journal, as lines of its file
    store: list[str] = field(default_factory=list)


def note(op: Op) -> dict:
    """Return an operation as notes keep it, with ids and lines of the entries that it wrote, "" of
    one that it deleted."""
    return {
        "tool": op.tool,
        "args": op.args,
        "ok": op.ok,
        "code": op.code,
        "message": op.message,
        "ids": [entry.id for entry in op.after],
        "lines": ["" if entry.deleted else entry.line for entry in op.after],
    }


def table_of(agent: Agent, turn: dict) -> list[dict[str, str | list[str]]]:
    """Return, of the turn that ends editing, what each probe was answered before and after,
    with the score, and the operations and entries that have changed it."""
    return [
        {
            "question": a["question"],
            "expected": a["expected"],
            "before": f"{a['before'] or 'nothing'} ({a['score_before']:g})",
            "after": f"{a['after'] or 'nothing'} ({a['score_after']:g}, {a['won']:+g})",
            "found before": a["found_before"],
            "found after": a["found_after"],
            "changed by": a["caused"],
            "changed entries": a["entries"],
        }
        for a in (turn.get("notes") or {}).get("answers", ())
    ]


def files_of(agent: Agent, turns: Sequence[dict]) -> Mapping[str, str]:
    """Return the store with its journal."""
    stores = [(turn.get("notes") or {}).get("store") for turn in turns]
    last = next(filter(None, reversed(stores)), None)
    return {"store.jsonl": "".join(f"{line}\n" for line in last)} if last else {}


# ---------------------------------------------------------------- the agent


class MemUpdate(Agent):
    """A store of dated entries, searched and rewritten by six tools."""

    Config = MemUpdateConfig
    frozen_turns = keeps = True
    prompts = {"build": BUILD, "refine": REFINE, "answer": ANSWER}
    edits: bool = True
    """False: a baseline, whose store is never edited"""
    rates = {
        **{part: (f"part_{part}", f"with_{part}") for part in PARTS},
        **{f"op_{op}": (f"op_{op}", "episodes") for op in OPS},
        **{f"stop_{why}": (f"stop_{why}", "episodes") for why in STOPS},
        "valid": ("valid_calls", "calls"),
        "calls": ("calls", "edit_turns"),
        "store_tokens": ("store_tokens", "edit_turns"),
        "store_entries": ("store_entries", "edit_turns"),
        "score_before": ("score_before", "episodes"),
        "score_after": ("score_after", "episodes"),
        "recall": ("recall", "sought"),
    }
    training = dict(kl=0.001)
    extras = {
        "demo": DEMO,
        "table": table_of,
        "files": files_of,
    }

    embed: Embedder | None = None
    """of the setting `embedder`"""

    def __init__(self, config=None, codec=None, window=None):
        super().__init__(config, codec, window)
        self._answers: dict[tuple[str, str], str] = {}  # to a memory and a problem

    def on(self, codec: Codec, window: int | None = None) -> Agent:
        """Return this agent for a codec, without the answers of another one's policy."""
        other = super().on(codec, window)
        other._answers = self._answers if other is self else {}
        return other

    # ---- what it does

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        editing = yield from self._edit_all(task)
        if task.probes:
            yield from self._settle(editing)
        else:
            yield from self.answer(task, editing.store)

    def make(self, task: Task) -> Generator[Prompt, Turn, Store]:
        """Read everything, and return the store that this leaves."""
        return (yield from self._edit_all(task)).store

    def answer(self, task: Task, store: Store) -> Generator[Prompt, Turn, None]:
        """Answer a task's question from a store."""
        yield from self._ask(store.snapshot(), task, final=True)

    def source(self, task: Task) -> str | None:
        """Return a fingerprint of the text and of what a store begins with; None where the store is
        made for its probes."""
        read = f"{task.document_digest} {task.beginning}"
        return read if self.keeps and not task.probes else None

    def check(self, task: Task) -> None:
        """Refuse a budget that holds no entry."""
        if self.edits:
            self._begin(task)

    def start(self, task: Task) -> list[Entry]:
        """Return what the store holds at first."""
        return [] if self.config.mode == "build" else entries_of(task.memories)

    def source_tokens(self, task: Task, entries: Sequence[Entry]) -> int:
        """Return the tokens of the document or, in `refine`, of the entries at the start."""
        if self.config.mode == "refine":
            return sum(self.measure(entry.line) for entry in entries)
        return len(self.codec.cut(task.document, self.config.chunk_tokens).ids)

    def budget_tokens(self, source: int) -> int:
        """Return the tokens that a store may have. source: those of what it is made from."""
        share = self.config.memory_budget or {"build": 0.1, "refine": 1.0}[self.config.mode]
        return max(1, round(share * source))

    # ---- editing

    def _begin(self, task: Task) -> Editing:
        c, store = self.config, Store(self.start(task))
        source, budget = self.source_tokens(task, store.snapshot().entries), None
        if c.budget != "none" and not c.budget_entries:
            budget = self.budget_tokens(source)
            if self.edits and budget < LEAST_ENTRY:
                reason = f"A budget of {budget} tokens holds no entry"
                raise UserError(f"{reason}: give a larger --memory-budget, or --budget-entries.")
        hard = c.budget == "hard"
        scope = Scope(
            search=self.search,
            measure=self.measure,
            seed=(task.document_digest,),
            budget_tokens=budget if hard else None,
            budget_entries=c.budget_entries or None if hard else None,
            reply_tokens=c.reply_tokens,
            without=c.without,
        )
        left_out = {s.number for s in task.sessions} - {s.number for s in self._sessions(task)}
        return Editing(task, store, scope, budget, source, [store.snapshot()], left_out)

    def _sessions(self, task: Task) -> Sequence[Session]:
        """Return the sessions that are read: of more than `max_sections` those that `over` keeps;
        in `refine`, where none is, all of them."""
        c, sessions = self.config, task.sessions
        if c.mode == "refine" or not c.max_sections or len(sessions) <= c.max_sections:
            return sessions
        last = c.max_sections // 2 if c.over == "center" else 0
        return (*sessions[: c.max_sections - last], *sessions[len(sessions) - last :])

    def _pieces(self, task: Task) -> Iterator[tuple[int | None, str | None, str]]:
        """Yield (session, date, text) of everything to be read, in pieces that fit a section."""
        if not self.edits:
            return
        if self.config.mode == "refine":
            yield None, None, ""
        elif not task.sessions:
            for k, section in enumerate(self.sections(task), 1):
                yield k, None, section
        else:
            for session in self._sessions(task):
                text = f"{session.when}\n{session.text}"
                for piece in self.codec.cut(text, self.config.chunk_tokens):
                    yield session.number, session.date or None, piece

    def _edit_all(self, task: Task) -> Generator[Prompt, Turn, Editing]:
        """Read everything and edit a store by it."""
        editing, pieces = self._begin(task), self._pieces(task)
        for session, date, piece in pieces:
            stop = yield from self._edit(editing, session, date, piece)
            if stop == "context":
                editing.unread |= {later for later, _, _ in pieces}
            if stop in ("context", "invalid"):
                break
        if editing.turns:
            editing.turns[-1].notes.store = [*editing.store.lines()]
        return editing

    def _edit(
        self, editing: Editing, session: int | None, date: str | None, piece: str
    ) -> Generator[Prompt, Turn, str]:
        """Edit the store by one piece of text; return why that ended, one of STOPS.

        no_call, ops and turns end the piece, whose limits are its own; context and invalid, which
        is counted over pieces, end the episode.
        """
        c, store = self.config, editing.store
        scope = replace(editing.scope, session=session, date=date)
        ops, turns, replies, stop = 0, 0, [], ""
        while not stop:
            prompt = self._edit_prompt(editing, piece, replies, ops, turns)
            if self.window and len(prompt.ids(self.codec)) + c.call_tokens > self.window:
                if not editing.turns:
                    reason = "A first prompt of this agent does not fit the model's window"
                    raise UserError(f"{reason}: lower --chunk-tokens or --show-k.")
                if not turns:
                    editing.unread.add(session)
                editing.turns[-1].notes.stop = "context"
                return "context"
            turn = yield prompt
            calls = self.format.parse(str(turn.response))
            done = self._execute(store, scope, calls, c.max_ops - ops)
            ops, turns = min(c.max_ops, ops + len(done)), turns + 1
            replies = [op.message for op in done]
            editing.calls.update("ok" if op.ok else "failed" for op in done)
            malformed = calls and all(op.code in MALFORMED for op in done)
            editing.invalid = editing.invalid + 1 if malformed else 0
            stop = (
                "no_call" if not calls
                else "invalid" if editing.invalid >= c.max_invalid
                else "ops" if ops >= c.max_ops
                else "turns" if turns >= c.max_turns
                else ""
            )  # fmt: skip
            snapshot = store.snapshot()
            size = len(snapshot), self.tokens_of(snapshot)
            turn.notes = EditNotes("edit", session, [*map(note, done)], *size, stop=stop)
            editing.turns.append(turn)
            editing.states.append(snapshot)
        return stop

    def _edit_prompt(
        self, editing: Editing, piece: str, replies: list[str], ops: int, turns: int
    ) -> Prompt:
        c, snapshot = self.config, editing.store.snapshot()
        tools = schemas(c.without)
        # how much is stored, and what may still be done
        if c.budget_entries and c.budget != "none":
            room = f" of at most {c.budget_entries} memories"
        else:
            room = f" of at most {editing.budget} tokens" if editing.budget else ""
        left = min(c.max_ops - ops, c.max_calls * (c.max_turns - turns))
        stored = f"{len(snapshot)} memories, {self.tokens_of(snapshot)} tokens{room}"
        slots = dict(
            tools=self.format.instructions(tools),
            memory="\n".join(e.line for e in self._relevant(snapshot, piece)) or NO_ENTRIES,
            state=f"{stored}; {left} operations left.",
            results="\n".join(replies) or "None yet.",
        )
        if c.mode == "build":
            slots["section"] = piece
        prompt = self.prompt(c.mode, c.call_tokens, **slots)
        return replace(prompt, tools=tools if self.format.by_template else ())

    def _relevant(self, snapshot: Snapshot, piece: str) -> list[Entry]:
        """Return the entries that a prompt shows, in the order of their ids."""
        c, entries = self.config, snapshot.entries
        if c.show == "all" or len(entries) <= c.show_k:
            return [*entries]
        found = self.search.top(entries, piece, c.show_k) if piece else []
        best = dict.fromkeys([*(entry.id for entry, _ in found), *(e.id for e in entries[::-1])])
        chosen = {*[*best][: c.show_k]}
        return [entry for entry in entries if entry.id in chosen]

    def _execute(
        self, store: Store, scope: Scope, calls: Sequence[Call | Fault], left: int
    ) -> list[Op]:
        """Run the calls of a turn; return a record of each one, run or refused.

        left: operations that may still be done; calls past them, and past `max_calls`, are not run.
        """
        c, done = self.config, []
        for k, call in enumerate(calls):
            if k >= min(c.max_calls, left):
                is_turn = k >= c.max_calls
                most = f"{c.max_calls} calls in a turn" if is_turn else f"{c.max_ops} operations"
                done.append(
                    refuse(store, scope, "too_many", f"at most {most}; this one was not run")
                )
            elif isinstance(call, Fault):
                done.append(refuse(store, scope, call.code, call.message))
            else:
                done.append(apply(store, call.name, call.arguments, scope))
        return done

    # ---- answering

    @cached_property
    def search(self) -> Search:
        return Search(self.config.search, self.embed)

    def context(self, snapshot: Snapshot, question: str) -> list[Entry]:
        """Return the entries that a question is answered from."""
        c = self.config
        hits = self.search.top(snapshot.entries, question, len(snapshot))
        if c.answer_order == "best":
            return [entry for entry, _ in hits[: c.answer_k]]

        def age(entry: Entry) -> tuple[str, int]:
            return entry.date or "", number(entry.id)

        # of entries that match equally well the newest ones are taken
        hits.sort(key=lambda hit: (hit[1], age(hit[0])), reverse=True)
        found = [entry for entry, _ in hits[: c.answer_k]]
        return sorted(found, key=age, reverse=c.answer_order == "newest")

    def _ask(
        self, snapshot: Snapshot, about: Task | Probe, final: bool = False
    ) -> Generator[Prompt, Turn, tuple[str, list[str]]]:
        """Ask the frozen policy a question; what is known already is not asked again.

        Returns its response and the lines of the entries that it is answered from.
        """
        probe = about if isinstance(about, Probe) else about.probe
        problem = probe.problem if probe else about.question
        # the search is for the question without the answers to choose from
        entries = self.context(snapshot, (probe or about).question)
        memory = "\n".join(entry.shown for entry in entries) or NO_ENTRIES
        lines = [entry.line for entry in entries]
        key = memory, problem  # ids are not shown to the frozen policy
        if final or key not in self._answers:
            slots = dict(memory=memory, problem=problem)
            prompt = self.prompt("answer", self.config.final_tokens, final=final, **slots)
            turn = yield replace(prompt, frozen=True)
            turn.notes = EditNotes(
                "answer" if final else "probe",
                entries=len(snapshot),
                tokens=self.tokens_of(snapshot),
                probe=about.id,
                found=lines,
                recall=recall(entries, probe.evidence) if probe else None,
            )
            if len(self._answers) >= ANSWERS:
                self._answers.clear()
            self._answers[key] = str(turn.response)
        return self._answers[key], lines

    def _settle(self, editing: Editing) -> Generator[Prompt, Turn, None]:
        """Answer the probes from the first store and the last, and note what that is worth."""
        c, states = self.config, editing.states
        answered: dict[int, list[Answer]] = {}  # the operation that wrote last -> of each probe
        for state in states if c.turn_credit else [states[0], states[-1]]:
            if state.n in answered:
                continue
            answered[state.n] = []
            for probe in editing.shown_probes:
                response, lines = yield from self._ask(state, probe)
                said = extract_answer(response, c.form)[0]
                answered[state.n].append(Answer(said, lines, editing.task.score(said, probe)))
        notes = editing.turns[-1].notes
        first, last = answered[states[0].n], answered[states[-1].n]
        tokens = self.tokens_of(states[0]), self.tokens_of(states[-1])
        notes.parts = parts(c, editing, first, last, tokens)
        notes.answers = compare(editing, first, last)
        if c.turn_credit:
            notes.gains = gains(editing, [answered[state.n] for state in states])

    def reward(self, trajectory: Trajectory, outcome: str = "exact") -> float:
        """Return an episode's reward, or grade the answer where one question was asked."""
        if not trajectory.task.probes:
            return Agent.reward(self, trajectory, outcome)
        ends = [turn.notes.parts for turn in trajectory.turns if turn.notes and turn.notes.parts]
        return ends[-1]["reward"] if ends else 0.0

    def turn_rewards(self, trajectory: Trajectory) -> list[dict[str, float]] | None:
        """Return, with `turn_credit`, what each turn has changed in the probes' mean score."""
        if not self.config.turn_credit:
            return None
        turns = trajectory.turns
        edits = [k for k, turn in enumerate(turns) if turn.notes and turn.notes.phase == "edit"]
        won = [gain for k in edits for gain in turns[k].notes.gains]
        by_turn = dict(zip(edits, won, strict=False))  # an episode that failed has none
        return [{"gain": by_turn[k]} if k in by_turn else {} for k in range(len(turns))]

    # ---- what it needs

    @property
    def embedder(self) -> str:
        return self.config.embedder

    @property
    def needs_embedder(self) -> bool:
        return self.config.search == "dense"

    @property
    def format(self) -> Format:
        """How the model writes calls."""
        return format_of(getattr(self.codec, "tokenizer", None))

    def measure(self, text: str) -> int:
        """Return the tokens of a text; those of an entry's line are asked for again and again."""
        return len(self.codec.text(text).ids)

    def tokens_of(self, snapshot: Snapshot) -> int:
        return sum(self.measure(entry.line) for entry in snapshot.entries)

    def limits(self) -> Limits:
        c = self.config
        shown = c.show_k * ENTRY_TOKENS + c.max_calls * c.reply_tokens
        return Limits(shown, c.call_tokens)

    # ---- what is counted and shown

    def count(self, task: Task, turn: Turn) -> Mapping[str, float]:
        notes = turn.notes
        if notes is None or notes.phase == "probe":
            return {}
        if notes.phase == "answer":
            counts = {"store_at_end": notes.tokens, "entries_at_end": notes.entries, "answers": 1}
            return counts | ({} if notes.recall is None else {"recall": notes.recall, "sought": 1})
        counts = Counter(edit_turns=1, store_tokens=notes.tokens, store_entries=notes.entries)
        for op in notes.ops:
            counts["calls"] += 1
            counts["valid_calls"] += op["ok"]
            what = op["args"].get("operation") or op["tool"]  # create and update are one tool
            counts[f"op_{what}" if op["ok"] else f"error_{op['code']}"] += 1
        if notes.stop:
            counts[f"stop_{notes.stop}"] += 1
            if notes.session and notes.session <= CURVE:
                counts[f"tokens_after_{notes.session}"] += notes.tokens
                counts[f"stores_after_{notes.session}"] += 1
        if notes.parts:
            counts["episodes"] += 1
            counts.update({name: notes.parts[name] for name in ("score_before", "score_after")})
            for part in notes.parts.keys() & {*PARTS}:
                counts.update({f"part_{part}": notes.parts[part], f"with_{part}": 1})
        return counts

    def lines(self, turn: dict) -> list[Line]:
        """Return what was found for a turn, its calls, what the episode is worth, why it ended."""
        notes = turn.get("notes") or {}
        lines = [Line("found", line, before=True) for line in notes.get("found", ())]
        lines += [
            Line(op["tool"], op["message"], "" if op["ok"] else op["code"])
            for op in notes.get("ops", ())
        ]
        if worth := notes.get("parts"):
            shown = ", ".join(f"{name} {value:.3f}" for name, value in worth.items())
            lines.append(Line("worth", shown))
        if notes.get("stop"):
            lines.append(Line("stops", notes["stop"].replace("_", " ")))
        return lines

    def memory_after(self, turn: dict) -> str:
        """Return the entries that the prompt shows, with what the turn has made of the store."""
        lines = {
            line.partition("]")[0][1:]: line
            for line in map(str.strip, turn["memory"].splitlines())
            if line.startswith("[")
        }
        for op in (turn.get("notes") or {}).get("ops", ()):
            lines |= zip(op["ids"], op.get("lines", ()), strict=False)
        kept = [lines[id] for id in sorted(lines, key=number) if lines[id]]
        return "\n".join(kept) or (NO_ENTRIES if turn["memory"].strip() else "")


def entries_of(memories: Sequence[Memory]) -> list[Entry]:
    """Return a task's memories as entries of a new store."""
    return [
        Entry(**asdict(memory) | {"text": " ".join(memory.text.split()), "origin": "init"})
        for memory in memories
    ]
