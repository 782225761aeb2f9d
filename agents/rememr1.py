"""ReMemR1: MemAgent that can look back at its earlier memories (arXiv 2509.23040).

One response holds the new memory and, if wanted, a query over all earlier memories; what the query
finds stands in the next prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from agents.demos import Demo, Size
from agents.retrieval import RETRIEVERS
from config.errors import UserError
from config.options import COUNT, LIMIT
from data import Task, extract_answer, normalize_answer, strip_thinking
from memagent import (
    NO_MEMORY,
    Agent,
    Finish,
    Limits,
    Line,
    Prompt,
    ReadConfig,
    Trajectory,
    Turn,
    Wording,
)
from memory import MemoryState, Recall
from tasks.mentions import answer_recall, count_phrases, phrases

if TYPE_CHECKING:
    from tokens.codec import Codec

# ---------------------------------------------------------------- wording and settings

NOT_RECALLED = "No memory was recalled."
EXAMPLE = "the year in which the bridge was opened"
LOOK_BACK = Wording(
    "You read a long document one section at a time and carry a short memory from section to "
    "section. Your earlier memories are stored and can be looked up. Read the section below, then "
    "write:\n"
    "- what the section adds and what is still missing, briefly, as <thinking>...</thinking>;\n"
    "- the memory anew, exactly once, as <update>...</update>: keep every old detail that helps "
    "to solve the problem, add what this section contributes, leave out the rest;\n"
    "- only if a piece is missing that an earlier memory may hold: what to look for, at most "
    "once, as <recall>...</recall>, for example <recall>{example}</recall>. What is found is shown "
    "beside the next section.",
    ("section", "problem", "recalled_memory", "memory"),
    cue="Updated memory:",
    needs=("section", "recalled_memory"),
)
LOOKED_BACK = Wording(
    "Solve the problem with the help of the memory, and of the earlier one that was looked up. "
    "{answer}",
    ("problem", "recalled_memory", "memory"),
    needs=("recalled_memory",),
)


@dataclass(frozen=True, slots=True)
class ReMemR1Config(ReadConfig):
    """How ReMemR1 reads, and what its single turns are paid for."""

    callback: Literal["learned", "question", "off"] = "learned"
    """what looks back into the earlier memories: learned = the policy's own query; question = the
    question, after every section; off = nothing. The prompts are the same in all three"""
    retriever: Literal["word_recall", "bm25"] = "word_recall"
    """word_recall = share of the query's words that a memory has; bm25"""
    recall_k: Annotated[int, COUNT] = 1
    """memories that a look back brings"""
    query_tokens: Annotated[int, COUNT] = 128
    """most tokens of a query"""
    step_tokens: Annotated[int | None, LIMIT] = None
    """most tokens of a response to a section, thinking and tags included; 0 or None = two memories
    and a query"""
    example_query: str = EXAMPLE
    """the example in our prompt; a query that repeats it counts as degenerate"""
    memory_reward: Literal["gain", "level"] = "gain"
    """a turn's reward for its memory: gain = the share of an accepted answer that the update added;
    level = the share that the memory then holds"""

    def __post_init__(self):
        ReadConfig.__post_init__(self)
        if {*"{}<>"} & {*self.example_query}:
            raise UserError(
                "example_query must be plain text without braces and tags, not "
                f"{self.example_query!r}."
            )

    @property
    def most_step_tokens(self) -> int:
        return self.step_tokens or 2 * self.memory_tokens + self.query_tokens


PUBLISHED = {
    "grpo": dict(tasks_per_step=(128,), group_size=16, updates_per_rollout=16, normalisation="mean",
                 clip_low=0.2, clip_high=0.2, dual_clip=3.0, kl=1e-3, importance="none", lr=1e-6,
                 warmup=20, warmup_from="zero", betas=(0.9, 0.999), weight_decay=0.01, top_p=0.999,
                 alpha=0.8, without_signal="keep"),
    "agent": dict(chunk_tokens=5000, memory_tokens=2048, query_tokens=128, step_tokens=2048,
                  final_tokens=2048, max_sections=8, over="center", layout="paper"),
    "run": dict(shuffle=False, save_every=20),
}  # fmt: skip

# Chosen on the dev split (dev/LESSONS.md), for each agent on its own: MemAgent learns nothing at 4
# sections and more before it has learnt 2.
TRAINING = {
    "rememr1": dict(steps=60, grow_at=0.7, grow_steps=10, temperature=(1.2, 1.3)),
    "memagent": dict(steps=60, grow_at=0.6, grow_steps=10, temperature=(1.0, 1.1, 1.2)),
}
LENGTHS = {"rememr1": (4, 8), "memagent": (2, 4, 8)}
BRIEF = dict(steps=2, tasks_per_step=(2,), group_size=4)
DEMO = Demo(
    beside=("memagent",),
    kind="two_hop_reverse",  # the fact that answers comes first; which one it was turns out later
    title="memagent: looking back",
    sizes={
        "default": Size(3, TRAINING, LENGTHS, {4: 64, 16: 128, 64: 24}),
        "short": Size(1, dict.fromkeys(LENGTHS, BRIEF), dict.fromkeys(LENGTHS, (4,)), {4: 4}),
    },
    variants={"rememr1, not looking back": {"callback": "off"}},
)

# ---------------------------------------------------------------- what a response says

ERRORS = (
    "no_update",
    "multi_update",
    "empty_update",
    "multi_recall",
    "unclosed_recall",
    "empty_recall",
    "truncated",
)
_OURS = re.compile("</?(?:thinking|update|recall)>")


@dataclass(slots=True, frozen=True)
class Response:
    """What one response says."""

    thinking: str | None = None
    memory: str | None = None  # None: the response holds none
    query: str | None = None
    errors: tuple[str, ...] = ()  # names of `ERRORS`, each once
    memory_cut: bool = False  # at `memory_tokens`
    query_cut: bool = False  # at `query_tokens`
    stray: bool = False  # a tag is left without its other half


def _blocks(text: str, tag: str) -> list[str]:
    """Return the contents of all closed blocks; one that is opened anew before it was closed counts
    from there."""
    return re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)


def _without(tag: str, text: str) -> str:
    return re.sub(rf"<{tag}>.*?</{tag}>", "", text, flags=re.DOTALL)


def parse_step(text: str, finish: str = Finish.STOP) -> Response:
    r"""Parse a response: thinking, memory, query, and its errors. Rollout, reward and evaluation
    share it.

    The memory is the first update that is not blank, over as many lines as it has, without queries
    and tags of ours inside. The query is the first recall, tags in it dropped, on one line. What
    stands in closed thinking is no update and no query.

    >>> response = "<update>Anna\nmet Otto.</update><recall>Otto</recall> or <recall>Ida</recall>"
    >>> step = parse_step(response)
    >>> step.memory, step.query, step.errors
    ('Anna\nmet Otto.', 'Otto', ('multi_recall',))
    """
    thoughts, text = _blocks(text, "thinking"), _without("thinking", text)
    recalls = _blocks(text, "recall")
    queries = [" ".join(re.sub(r"</?\w+>", " ", query).split()) for query in recalls]
    updates = [_OURS.sub("", _without("recall", u)).strip() for u in _blocks(text, "update")]
    wrong = {
        "no_update": not updates,
        "multi_update": text.count("<update>") > 1,
        "empty_update": "" in updates,
        "multi_recall": len(recalls) > 1,
        "unclosed_recall": text.count("<recall>") > len(recalls),
        "empty_recall": "" in queries,
        "truncated": finish == Finish.LENGTH,
    }
    return Response(
        thoughts[0].strip() if thoughts else None,
        next(filter(None, updates), None),
        next(filter(None, queries), None),
        tuple(name for name in ERRORS if wrong[name]),
        stray=any(text.count(f"<{tag}>") != text.count(f"</{tag}>") for tag in ("update", "recall"))
        or bool(re.search("</?thinking>", text)),
    )


def read_step(turn: Turn, config: ReMemR1Config, codec: Codec) -> Response:
    """Parse a turn, memory and query cut at their caps."""
    step = parse_step(codec.after_thinking(turn.response), turn.finish)
    memory, memory_cut = _capped(step.memory, config.memory_tokens, codec)
    query, query_cut = _capped(step.query, config.query_tokens, codec)
    return replace(step, memory=memory, query=query, memory_cut=memory_cut, query_cut=query_cut)


def _capped(text: str | None, n_tokens: int, codec: Codec) -> tuple[str | None, bool]:
    if text is None:
        return None, False
    text = codec.text(text)
    return (text, False) if len(text.ids) <= n_tokens else (codec.decode(text.ids[:n_tokens]), True)


# ---------------------------------------------------------------- the agent


@dataclass(slots=True)
class RecallNotes:
    """What ReMemR1 keeps of a turn."""

    recalled: Recall  # what stood in the prompt
    evidence: str = ""  # what the recalled text holds, see `EvidenceSearch.in_text`
    sought: bool = False  # whether there is an accepted answer to look for
    step: Response | None = None  # what the response says; None in the final turn
    asked: str = ""  # what was looked for after this turn
    degenerate: bool = False  # a query of this trajectory, or of the prompt's example, once more
    memory_tokens: int = 0  # of the memory that the turn leaves
    gain: float = 0.0  # set by `turn_rewards`
    level: float = 0.0
    covered: float = 0.0


ERROR_RATES = {f"format_{error}": (error, "updates") for error in (*ERRORS, "stray_tag")}


class ReMemR1(Agent):
    """One bounded memory, overwritten after each section, and a look back at the memories before
    it."""

    name = "rememr1"
    Config = ReMemR1Config
    prompts = {"recall_update": LOOK_BACK, "recall_final": LOOKED_BACK}
    presets = {"rememr1": PUBLISHED}
    had = (
        "recall_at_zero history_scope memory_text on_missing_update query_text boxed_literal "
        "callback_reward format_reward recall_match recall_words"
    )
    training = {"normalisation": "mean"}  # the published advantages are divided by no deviation
    rates = {
        "recall_queries": ("queries", "updates"),
        "recall_hits": ("hits", "queries"),
        "recall_holds": ("holds", "sought"),
        "recall_evidence": ("evidence", "evidence_sought"),
        "recall_age": ("ages", "hits"),
        "recall_degenerate": ("degenerate", "updates"),
        "answer_gain": ("gain", "updates"),
        "answer_level": ("level", "updates"),
        "answer_covered": ("covered", "updates"),
        "memory_length": ("memory_length", "updates"),
        "memory_capped": ("memory_capped", "updates"),
        "query_capped": ("query_capped", "updates"),
    } | ERROR_RATES
    extras = {"demo": DEMO}

    def wording(self, name: str) -> Wording:
        c, wording = self.config, super().wording(name)
        head = wording.head.replace("{example}", c.example_query)
        hidden = {"recalled_memory"} if c.callback == "off" else {}
        needs = tuple(slot for slot in wording.needs if slot not in hidden)
        return replace(wording, head=head, needs=needs)

    def limits(self) -> Limits:
        c = self.config
        return Limits((1 + c.recall_k) * c.memory_tokens, c.most_step_tokens)

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        c, codec, sections = self.config, self.codec, self.sections(task)
        first, nothing = codec.text(NO_MEMORY), codec.text(NOT_RECALLED)
        state = MemoryState(first, RETRIEVERS[c.retriever](), placeholder=first)
        evidence, queries = EvidenceSearch(task), {normalize_answer(c.example_query)}

        def prompt(name: str, max_tokens: int, **more) -> Prompt:
            recalled = codec.text(state.recalled.text) if state.recalled.steps else nothing
            return self.prompt(
                name,
                max_tokens,
                cut=sections.left_out,
                problem=task.question,
                memory=state.memory,
                recalled_memory=recalled,
                **more,
            )

        for section in sections:
            turn = yield prompt("recall_update", c.most_step_tokens, section=section)
            step = read_step(turn, c, codec)
            turn.notes = notes = evidence.notes(state.recalled, step)
            query = {"learned": step.query, "question": task.question, "off": None}[c.callback]
            if step.query and c.callback == "learned":
                normal = normalize_answer(step.query)
                notes.degenerate = normal in queries
                queries.add(normal)
            state.update(step.memory, query, c.recall_k)
            notes.asked = state.recalled.query
            notes.memory_tokens = len(state.memory.ids)
        turn = yield prompt("recall_final", c.final_tokens, final=True)
        turn.notes = evidence.notes(state.recalled)

    def turn_rewards(self, trajectory: Trajectory) -> list[dict[str, float]]:
        """Reward memory, look back and form of every turn; arXiv 2509.23040, equations 5 to 7.

        memory    by `memory_reward` the share of an accepted answer that the update added, in [-1,
                  1], or the share that the memory then holds, in [0, 1]
        callback  the share that this turn's own query brought and that the turn had not in sight;
                  with callback = question there is none
        format    1 or 0; in the final turn: whether there is an answer in the form asked for

        Memory and callback are 0 where no accepted answer has a word to look for. These rewards are
        lexical: any copy of the answer is paid, whatever the text says about it, and length costs
        nothing; the caps of the settings bound a memory.
        """
        c, task, rewards = self.config, trajectory.task, []

        def share(text: str) -> float | None:
            return answer_recall(task.answers, text, task.question, task.asks_for_all)

        covered = share("") is not None
        for turn, following in zip(trajectory.turns, [*trajectory.turns[1:], None], strict=True):
            gain = level = brought = right = 0.0
            if turn.prompt.final:
                right = float(extract_answer(strip_thinking(turn.response), c.form)[1])
            elif turn.notes is not None:  # else it was never read: the engine has failed
                right = float(not turn.notes.step.errors and not turn.notes.step.stray)
                if covered:
                    level = share(written((following or turn).prompt.memory))
                    gain = level - share(written(turn.prompt.memory))
                    brought = self._brought(turn, following, share)
                turn.notes.gain, turn.notes.level = gain, level
                turn.notes.covered = float(covered)
            memory = {"gain": gain, "level": level}[c.memory_reward]
            rewards.append({"memory": memory, "callback": brought, "format": right})
        return rewards

    @staticmethod
    def _brought(turn: Turn, following: Turn | None, share: Callable[[str], float]) -> float:
        """Return the share of an answer that the turn's own query added to what the turn had in
        sight, never below 0."""
        notes, query = following and following.notes, turn.notes.step.query
        if notes is None or not query or notes.recalled.query != query:
            return 0.0
        sight = f"{written(turn.prompt.memory)}\n{turn.prompt.section}"
        return share(f"{notes.recalled.text}\n{sight}") - share(sight)

    def count(self, task: Task, turn: Turn) -> Mapping[str, float]:
        """Count looks back at the turn whose prompt shows their result, and the errors of its
        response."""
        notes, n = turn.notes, {} if turn.prompt.final else {"updates": 1}
        if notes is None:  # the engine has failed
            return n
        recalled, step = notes.recalled, notes.step
        if recalled.query:
            n |= {"queries": 1, "hits": bool(recalled.steps), "ages": recalled.age}
        if recalled.query and recalled.steps:
            n |= {"sought": notes.sought, "holds": notes.evidence == "answer"}
            n |= {"evidence_sought": notes.evidence != "unknown"}
            n |= {"evidence": notes.evidence in ("answer", "evidence")}
        if step is not None:
            n |= dict.fromkeys(step.errors, 1) | {"stray_tag": step.stray}
            n |= {"memory_capped": step.memory_cut, "query_capped": step.query_cut}
            n |= {"degenerate": notes.degenerate, "memory_length": notes.memory_tokens}
            n |= {name: getattr(notes, name) for name in ("gain", "level", "covered")}
        return n

    def memory_after(self, turn: dict) -> str:
        step = (turn.get("notes") or {}).get("step") or {}
        return step.get("memory") or turn["memory"]

    def lines(self, turn: dict) -> list[Line]:
        notes = turn.get("notes")
        if not notes:
            return []
        recalled, step, lines = notes["recalled"], notes["step"] or {}, []
        if recalled["steps"]:
            sections = ", ".join(f"{n:,}" for n in sorted(recalled["steps"]))
            note = (
                f"written after section {sections}, found for {recalled['query']!r} "
                f"(score {recalled['score']:.2f}), {IN_WORDS[notes['evidence']]}"
            )
            lines.append(Line("recalled", recalled["text"].strip(), note, before=True))
        elif recalled["query"]:
            note = f"nothing found for {recalled['query']!r}"
            lines.append(Line("recalled", "", note, before=True))
        errors = [*step.get("errors", ()), *(["stray_tag"] if step.get("stray") else [])]
        if errors := [error.replace("_", " ") for error in errors if error != "truncated"]:
            lines.append(Line("form", ", ".join(errors)))
        if notes["asked"]:
            lines.append(Line("looks for", notes["asked"]))
        return lines


def written(memory: str) -> str:
    """Return a memory without the wording of the first one, which nobody has read anywhere."""
    return "" if memory.strip() == NO_MEMORY else memory


# ---------------------------------------------------------------- evidence

IN_WORDS = {  # `EvidenceSearch.in_text` -> how it is shown
    "answer": "holds the answer", "evidence": "holds evidence", "neither": "without evidence",
    "unknown": "evidence not known",
}  # fmt: skip


class EvidenceSearch:
    """What a recalled text is searched for: the accepted answers, and the names of the passages
    with evidence.

    Neither yes and no, which stand everywhere, nor names that the question has too.
    """

    def __init__(self, task: Task):
        self.answers, self.all_asked = phrases(task.answers), task.asks_for_all
        self.clues = [
            clue for clue in phrases(task.clues) if not count_phrases([clue], task.question)
        ]

    def in_text(self, text: str) -> str:
        """Return what a text holds of the evidence.

        answer (all of them where all are asked for), evidence (one of them, or a passage that leads
        there), neither; unknown = there is nothing to look for.
        """
        n = count_phrases(self.answers, text)
        if n and n >= (len(self.answers) if self.all_asked else 1):
            return "answer"
        if n or count_phrases(self.clues, text):
            return "evidence"
        return "neither" if self.answers or self.clues else "unknown"

    def notes(self, recalled: Recall, step: Response | None = None) -> RecallNotes:
        evidence = self.in_text(recalled.text) if recalled.steps else ""
        return RecallNotes(recalled, evidence, bool(self.answers), step)
