"""Agents: generators that yield prompts and are sent turns. The words of the project, and MemAgent itself, on one page.

Holds: `Prompt`, `Turn`, `Trajectory`, `Group`; all templates, `AgentConfig`; MemAgent.
Leaves out: the other agents (agents/rememr1.py, agents/baselines.py), engines (rollout.py, engines/hf.py), losses (grpo.py). No torch.
Exercise it: `python cli.py ask FILE "question"`. Read next: agents/rememr1.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from config.errors import UserError
from data import Task, grade
from memory import Recall, overwrite
from tokens.codec import Codec, Text


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"  # an end-of-sequence id was sampled
    LENGTH = "length"  # cut at max_tokens
    FULL = "full"  # prompt + max_tokens do not fit the model's window: nothing was sampled
    ERROR = "error"  # the engine failed; the reason is in Turn.error


@dataclass(slots=True, frozen=True)
class Prompt:
    """One user message as pieces, in order. `constant` pieces belong to the template; the others are slots."""

    pieces: tuple[tuple[str, bool], ...]  # (text, constant?)
    max_tokens: int
    final: bool = False  # the turn that answers
    section: str = ""  # what the turn reads, "" in a final turn
    memory: str = ""  # the memory it starts from
    cut: int = 0  # tokens of the document that the agent never reads, by `max_sections` or `window`
    recalled: Recall | None = None  # what a look back has brought; None: the agent has none

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


@dataclass(slots=True, frozen=True)
class Step:
    """What an agent reads out of one response (rememr1.parse_step): once, for rollout, reward and evaluation alike."""

    thinking: str | None = None
    memory: str | None = None  # None: the response holds none
    query: str | None = None
    errors: tuple[str, ...] = ()  # by name, each once
    memory_cut: bool = False  # a cap has cut it
    query_cut: bool = False
    stray: bool = False  # a tag is left without its other half


@dataclass(slots=True)
class Turn:
    """One model call."""

    prompt: Prompt
    prompt_ids: list[int]
    response_ids: list[int]  # as sampled, the end-of-sequence id included
    logprobs: list[float]  # the sampler's, one per response id, at the sampling temperature
    finish: Finish
    response: Text  # without the end-of-sequence id
    error: str = ""
    step: Step | None = (
        None  # what the agent has read out of the response, where it reads more than a memory
    )


@dataclass(slots=True)
class Trajectory:
    """All turns of one rollout of one task."""

    task: Task
    turns: list[Turn] = field(default_factory=list)
    sample: int = 0  # which of the group's G trajectories
    reward: float = 0.0  # raw, never overwritten
    states: list[dict[str, float]] = field(
        default_factory=list
    )  # one a turn: its own rewards by name, raw, where the agent has such
    error: str = ""  # why it failed; a failed trajectory counts as wrong
    seconds: float = 0.0

    @property
    def answer(self) -> str:
        """The final turn's response, "" if there is none."""
        return str(self.turns[-1].response) if self.turns and self.turns[-1].prompt.final else ""


@dataclass(slots=True)
class Group:
    """The G trajectories of one task."""

    task: Task
    trajectories: list[Trajectory]

    @property
    def signal(self) -> bool:
        """Whether there is anything to learn: in a group whose rewards are all the same every advantage is 0."""
        return len(self.trajectories) == 1 or len({t.reward for t in self.trajectories}) > 1


Agent = Callable[[Task, "AgentConfig", Codec], Generator[Prompt, Turn, None]]


# ---------------------------------------------------------------- templates

NO_MEMORY = "No previous memory"
NOT_RECALLED = "No memory was recalled."

_UPDATE = (
    "You read a long document one section at a time and carry a short memory from section to section. Read the section below, then "
    "write the memory anew: keep every old detail that helps to solve the problem, add what this section contributes, leave out the rest."
)
_FINAL = {
    "boxed": "Solve the problem with the help of the memory alone. Give the answer inside \\boxed{}.",
    "sentence": 'Solve the problem with the help of the memory alone. End with the sentence "Therefore, the answer is (...)".',
}
_FULL = {
    "boxed": "Read the document, then solve the problem. Give the answer inside \\boxed{}.",
    "sentence": 'Read the document, then solve the problem. End with the sentence "Therefore, the answer is (...)".',
}
_NONE = {
    "boxed": "Solve the problem. Give the answer inside \\boxed{}.",
    "sentence": 'Solve the problem. End with the sentence "Therefore, the answer is (...)".',
}
_LOOK_BACK = (
    "You read a long document one section at a time and carry a short memory from section to section. Your earlier memories are stored and "
    "can be looked up. Read the section below, then write:\n"
    "- what the section adds and what is still missing, briefly, as <thinking>...</thinking>;\n"
    "- the memory anew, exactly once, as <update>...</update>: keep every old detail that helps to solve the problem, add what this section "
    "contributes, leave out the rest;\n"
    "- only if a piece is missing that an earlier memory may hold: what to look for, at most once, as <recall>...</recall>, for example "
    "<recall>{example}</recall>. What is found is shown beside the next section."
)
_LOOKED_BACK = {
    "boxed": "Solve the problem with the help of the memory, and of the earlier one that was looked up. Give the answer inside \\boxed{}.",
    "sentence": "Solve the problem with the help of the memory, and of the earlier one that was looked up. End with the sentence "
    '"Therefore, the answer is (...)".',
}
EXAMPLE = "the year in which the bridge was opened"
SLOTS = {
    "problem": "problem",
    "memory": "memory",
    "recalled_memory": "recalled_memory",
    "section": "section",
}
SLOTS |= {"prompt": "problem", "chunk": "section"}  # the names that MemAgent and ReMemR1 have


def _block(slot: str) -> str:
    return f"<{slot}>\n{{{slot}}}\n</{slot}>\n\n"


def default_template(turn: str, layout: str, form: str, example: str = EXAMPLE) -> str:
    """Our wording. turn: one of `TEMPLATES`; layout: shared (section first) | paper (section last); form: boxed | sentence; example: the query
    that recall_update shows."""
    order = {
        "shared": ("section", "problem", "recalled_memory", "memory"),
        "paper": ("problem", "recalled_memory", "memory", "section"),
    }[layout]
    head, cue = {
        "update": (_UPDATE, "Updated memory:"),
        "final": (_FINAL[form], "Your answer:"),
        "full": (_FULL[form], "Your answer:"),
        "none": (_NONE[form], "Your answer:"),
        "recall_update": (_LOOK_BACK.replace("{example}", example), "Updated memory:"),
        "recall_final": (_LOOKED_BACK[form], "Your answer:"),
    }[turn]
    return (
        f"{head}\n\n"
        + "".join(_block(slot) for slot in order if slot not in WITHOUT[turn])
        + f"{cue}\n"
    )


def split_template(template: str) -> tuple[tuple[str, bool], ...]:
    """A template as (piece, constant?) pairs. Slots are `{problem}`, `{memory}`, `{recalled_memory}`, `{section}`, or MemAgent's `{prompt}` and
    `{chunk}` for the first and the last; every other brace stands for itself.

    >>> split_template("Q: {problem} \\\\boxed{}")
    (('Q: ', True), ('problem', False), (' \\\\boxed{}', True))
    """
    pieces: list[tuple[str, bool]] = []
    while template:
        found = [(at, slot) for slot in SLOTS if (at := template.find(f"{{{slot}}}")) >= 0]
        at, slot = min(found, default=(len(template), ""))
        if at:
            pieces.append((template[:at], True))
        if slot:
            pieces.append((SLOTS[slot], False))
        template = template[at + len(slot) + 2 :] if slot else ""
    return tuple(pieces)


# the prompts, and the slots that each has not
WITHOUT = {
    "update": ("recalled_memory",),
    "final": ("section", "recalled_memory"),
    "full": ("memory", "recalled_memory"),
    "none": ("section", "memory", "recalled_memory"),
    "recall_update": (),
    "recall_final": ("section",),
}
TEMPLATES = tuple(WITHOUT)


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """How an agent reads. Every field is a flag of `train`, `eval` and `ask`. A model folder may bring its own defaults (agent.yaml)."""

    chunk_tokens: int = 2048
    """tokens of one section"""
    memory_tokens: int = 512
    """most tokens of a memory, the end-of-sequence id included"""
    final_tokens: int = 256
    """most tokens of an answer, the end-of-sequence id included"""
    max_sections: int | None = None
    """longer documents are cut to this many sections; 0 or None reads all of it"""
    over: str = "center"
    """what is kept of a longer document: center = its first and last half, head = its beginning"""
    layout: str = "shared"
    """order of the update prompt: shared = section, problem, memory; paper = problem, memory, section"""
    form: str = "boxed"
    """form of the answer: boxed = \\boxed{...}; sentence = "the answer is (...)" """
    empty: str = "placeholder"
    """what an empty memory becomes: placeholder = the first-memory literal, keep = the previous memory, empty = stays empty"""
    window: int | None = None
    """most tokens of a prompt of full, bm25 or oracle and its answer, what they read is cut to fit; never more than the model's own window,
    which is also what 0 or None means"""
    top_k: int = 4
    """sections that the bm25 baseline reads"""
    thinking: bool = False
    """let a model think that can (its chat template's enable_thinking); thoughts never enter a memory and are not graded"""
    callback: str = "learned"
    """rememr1, what looks back into the earlier memories: learned = the policy's own query; question = the question, after every section;
    off = nothing. The prompts are the same in all three"""
    retriever: str = "word_recall"
    """rememr1: word_recall = share of the query's words that a memory has; tfidf, bm25; tfidf_tokens = over the model's tokens, as upstream"""
    recall_k: int = 1
    """rememr1: memories that a look back brings"""
    recall_at_zero: bool = False
    """rememr1: bring a memory that shares nothing with the query too, as upstream"""
    history_scope: str = "exclude_current"
    """rememr1, what is looked through: exclude_current = the earlier memories without the one that the next prompt shows anyway;
    include_current = that one too; exclude_new = that one only if an earlier response had written it already, as upstream trains"""
    memory_text: str = "update"
    """rememr1, what becomes the memory: update = what stands in <update>; response_minus_recall = the whole response but <recall>"""
    on_missing_update: str = "keep_previous"
    """rememr1, a response without an update: keep_previous = the memory stays; reset = the first-memory literal; whole_response = the
    response becomes the memory, whatever it is"""
    query_text: str = "first"
    """rememr1, what of a response is the query: first = the first recall that is not blank, on one line, tags in it and all in <thinking>
    left out; greedy = from the first <recall> to the last </recall> of one line, as it stands and however long, as upstream"""
    query_tokens: int = 128
    """rememr1: most tokens of a query (query_text first)"""
    step_tokens: int | None = None
    """rememr1: most tokens of a response to a section, thinking and tags among them; 0 or None = two memories and a query"""
    example_query: str = EXAMPLE
    """rememr1: the example that our prompt gives; a query that repeats it counts as degenerate"""
    boxed_literal: str = "single"
    """rememr1, how our final prompt names the box: single = \\boxed{}; double = \\boxed{{}}, which upstream shows in training; templates of
    your own stay as they are"""
    templates: str = ""
    """folder with update.txt, final.txt, full.txt, none.txt, recall_update.txt, recall_final.txt (any of them), used byte for byte instead of
    our wording; slots: {problem}, {recalled_memory}, {memory}, {section}, or MemAgent's {prompt}, {memory}, {chunk}"""

    def __post_init__(self):
        for name, allowed in (
            ("over", ("center", "head")),
            ("layout", ("shared", "paper")),
            ("form", ("boxed", "sentence")),
            ("empty", ("placeholder", "keep", "empty")),
            ("callback", ("learned", "question", "off")),
            ("retriever", ("word_recall", "tfidf", "bm25", "tfidf_tokens")),
            ("history_scope", ("exclude_current", "include_current", "exclude_new")),
            ("query_text", ("first", "greedy")),
            ("memory_text", ("update", "response_minus_recall")),
            ("on_missing_update", ("keep_previous", "reset", "whole_response")),
            ("boxed_literal", ("single", "double")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(
                    f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}."
                )
        for name in (
            "chunk_tokens",
            "memory_tokens",
            "final_tokens",
            "top_k",
            "recall_k",
            "query_tokens",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if {*"{}<>"} & {*self.example_query}:
            raise UserError(
                f"example_query must be plain text without braces and tags, not {self.example_query!r}."
            )
        for name in ("max_sections", "window", "step_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(
                    f"{name} must be at least 1, or 0 for no limit, not {getattr(self, name)}."
                )
        if self.templates:
            if not any(Path(self.templates, f"{turn}.txt").is_file() for turn in TEMPLATES):
                raise UserError(
                    f"There are no templates in {self.templates}: it must be a folder with {', '.join(f'{turn}.txt' for turn in TEMPLATES)}, or some of them."
                )
            for turn in TEMPLATES:
                self.template(turn)  # one that cannot be used is refused now

    def template(self, turn: str) -> tuple[tuple[str, bool], ...]:
        """The pieces of one of the prompts, `TEMPLATES`."""
        path = Path(self.templates, f"{turn}.txt")
        if not (self.templates and path.is_file()):
            text = default_template(turn, self.layout, self.form, self.example_query)
            return _pieces(
                text.replace("{}", "{{}}")
                if turn == "recall_final" and self.boxed_literal == "double"
                else text
            )
        try:
            pieces = _pieces(path.read_bytes().decode())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"The template {path} cannot be read as UTF-8 text ({error})."
            ) from error
        slots = {piece for piece, constant in pieces if not constant}
        if turn in ("update", "full", "recall_update") and "section" not in slots:
            raise UserError(
                f"The template {path} shows no text to the model: it needs the slot {{section}} (or {{chunk}})."
            )
        if turn.startswith("recall") and "recalled_memory" not in slots and self.callback != "off":
            raise UserError(
                f"The template {path} does not show what was recalled: it needs the slot {{recalled_memory}}, or --callback off."
            )
        if empty := next((slot for slot in WITHOUT[turn] if slot in slots), ""):
            raise UserError(
                f"The template {path} has a slot for the {empty.replace('_', ' ')}, which there is none of in this prompt."
            )
        return pieces

    @property
    def most_step_tokens(self) -> int:
        """Most tokens of a response of rememr1 to a section."""
        return self.step_tokens or 2 * self.memory_tokens + self.query_tokens


def turn_tokens(config: AgentConfig, agent: str = "memagent") -> tuple[int, int]:
    """Most tokens that a turn with a section shows of memories, and that it writes; of an agent that reads section by section."""
    if agent == "rememr1":
        return (1 + config.recall_k) * config.memory_tokens, config.most_step_tokens
    return config.memory_tokens, config.memory_tokens


def window_of(config: AgentConfig, agent: str = "memagent") -> int:
    """Tokens that a turn takes at most: a section, what it shows of memories, the response, and 1,024 for question and template."""
    shown, written = turn_tokens(config, agent)
    return config.chunk_tokens + shown + max(written, config.final_tokens) + 1024


_pieces = lru_cache(maxsize=64)(split_template)


def fill(
    template: tuple[tuple[str, bool], ...],
    max_tokens: int,
    final: bool = False,
    cut: int = 0,
    recalled: Recall | None = None,
    **slots: str,
) -> Prompt:
    pieces = tuple(
        (piece, True) if constant else (slots[piece], False) for piece, constant in template
    )
    return Prompt(
        pieces, max_tokens, final, slots.get("section", ""), slots.get("memory", ""), cut, recalled
    )


# ---------------------------------------------------------------- agents


def memagent(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """MemAgent: one bounded memory, overwritten after each section; the answer comes from question + memory (arXiv 2507.02259)."""
    update, final = config.template("update"), config.template("final")
    problem, first = codec.text(task.question), codec.text(NO_MEMORY)
    sections = codec.cut(task.document, config.chunk_tokens, config.max_sections, config.over)
    memory, cut = first, sections.left_out
    for section in sections:
        turn = yield fill(
            update, config.memory_tokens, cut=cut, problem=problem, section=section, memory=memory
        )
        memory = overwrite(memory, codec.after_thinking(turn.response), first, config.empty)
    yield fill(final, config.final_tokens, final=True, cut=cut, problem=problem, memory=memory)


def reward(form: str, outcome: str = "exact"):
    """The outcome reward: the final answer's box (or sentence) equals an accepted answer, or the share of the answers it holds where all
    are asked for; nothing else counts (spec memagent.md 4). outcome: `GRPOConfig.outcome`."""
    name = {"exact": "reward"}.get(outcome, outcome)

    def of(trajectory: Trajectory) -> float:
        scores = grade(
            trajectory.answer, trajectory.task.answers, form, trajectory.task.asks_for_all
        )
        return scores.reward if trajectory.task.asks_for_all else getattr(scores, name)

    return of
