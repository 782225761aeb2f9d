"""Agents: generators that yield prompts and are sent turns. The words of the project, and MemAgent itself, on one page.

Holds: `Prompt`, `Turn`, `Trajectory`, `Group`; templates; MemAgent and the baselines full context, BM25, no context, oracle.
Leaves out: engines (rollout.py, slots.py), losses (grpo.py). No torch.
Exercise it: `python cli.py ask FILE "question"`. Read next: rollout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from data import Task
from memory import overwrite
from text import Codec, Text, UserError


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

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


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


@dataclass(slots=True)
class Trajectory:
    """All turns of one rollout of one task."""

    task: Task
    turns: list[Turn] = field(default_factory=list)
    sample: int = 0  # which of the group's G trajectories
    reward: float = 0.0  # raw, never overwritten
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
SLOTS = {
    "problem": "problem",
    "memory": "memory",
    "section": "section",
    "prompt": "problem",
    "chunk": "section",
}  # also MemAgent's names


def _block(slot: str) -> str:
    return f"<{slot}>\n{{{slot}}}\n</{slot}>\n\n"


def default_template(turn: str, layout: str, form: str) -> str:
    """Our wording. turn: update | final | full | none; layout: shared (section first) | paper (section last); form: boxed | sentence."""
    order = {
        "shared": ("section", "problem", "memory"),
        "paper": ("problem", "memory", "section"),
    }[layout]
    head, cue = {
        "update": (_UPDATE, "Updated memory:"), "final": (_FINAL[form], "Your answer:"), "full": (_FULL[form], "Your answer:"),
        "none": (_NONE[form], "Your answer:"),
    }[turn]  # fmt: skip
    return f"{head}\n\n" + "".join(_block(slot) for slot in order if slot not in WITHOUT[turn]) + f"{cue}\n"


def split_template(template: str) -> tuple[tuple[str, bool], ...]:
    """A template as (piece, constant?) pairs. Slots are `{problem}`, `{memory}`, `{section}`, or MemAgent's `{prompt}` and `{chunk}` for the
    first and the last; every other brace stands for itself.

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


TEMPLATES = ("update", "final", "full", "none")
WITHOUT = {"update": (), "final": ("section",), "full": ("memory",), "none": ("section", "memory")}  # slots that a prompt has not


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
    templates: str = ""
    """folder with update.txt, final.txt, full.txt, none.txt (any of them), used byte for byte instead of our wording; slots: {problem}, {memory},
    {section}, or MemAgent's {prompt}, {memory}, {chunk}"""

    def __post_init__(self):
        for name, allowed in (
            ("over", ("center", "head")),
            ("layout", ("shared", "paper")),
            ("form", ("boxed", "sentence")),
            ("empty", ("placeholder", "keep", "empty")),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}.")
        for name in ("chunk_tokens", "memory_tokens", "final_tokens", "top_k"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("max_sections", "window"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"{name} must be at least 1, or 0 for no limit, not {getattr(self, name)}.")
        if self.templates:
            if not any(Path(self.templates, f"{turn}.txt").is_file() for turn in TEMPLATES):
                raise UserError(
                    f"There are no templates in {self.templates}: it must be a folder with update.txt, final.txt, full.txt or none.txt."
                )
            for turn in TEMPLATES:
                self.template(turn)  # one that cannot be used is refused now

    def template(self, turn: str) -> tuple[tuple[str, bool], ...]:
        """The pieces of one of the prompts: update, final, full, none."""
        path = Path(self.templates, f"{turn}.txt")
        if not (self.templates and path.is_file()):
            return _pieces(default_template(turn, self.layout, self.form))
        try:
            pieces = _pieces(path.read_bytes().decode())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"The template {path} cannot be read as UTF-8 text ({error}).") from error
        slots = {piece for piece, constant in pieces if not constant}
        if turn in ("update", "full") and "section" not in slots:
            raise UserError(f"The template {path} shows no text to the model: it needs the slot {{section}} (or {{chunk}}).")
        if empty := next((slot for slot in WITHOUT[turn] if slot in slots), ""):
            raise UserError(f"The template {path} has a slot for the {empty}, which there is none of in this prompt.")
        return pieces


def window_of(config: AgentConfig) -> int:
    """Tokens that a turn of memagent takes at most: a section, the memory before, the response, and 1,024 for question and template."""
    return config.chunk_tokens + config.memory_tokens + max(config.memory_tokens, config.final_tokens) + 1024


_pieces = lru_cache(maxsize=64)(split_template)


def fill(template: tuple[tuple[str, bool], ...], max_tokens: int, final: bool = False, cut: int = 0, **slots: str) -> Prompt:
    pieces = tuple((piece, True) if constant else (slots[piece], False) for piece, constant in template)
    return Prompt(pieces, max_tokens, final, slots.get("section", ""), slots.get("memory", ""), cut)


# ---------------------------------------------------------------- agents


def memagent(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """MemAgent: one bounded memory, overwritten after each section; the answer comes from question + memory (arXiv 2507.02259)."""
    update, final = config.template("update"), config.template("final")
    problem, first = codec.text(task.question), codec.text(NO_MEMORY)
    sections = codec.cut(task.document, config.chunk_tokens, config.max_sections, config.over)
    memory, cut = first, sections.left_out
    for section in sections:
        turn = yield fill(update, config.memory_tokens, cut=cut, problem=problem, section=section, memory=memory)
        memory = overwrite(memory, codec.after_thinking(turn.response), first, config.empty)
    yield fill(final, config.final_tokens, final=True, cut=cut, problem=problem, memory=memory)


def _room(problem: Text, config: AgentConfig, codec: Codec) -> int | None:
    """Tokens that may stand for the document in the full template, beside the question and the answer; None without a window."""
    if not config.window:
        return None
    around = len(codec.chat(fill(config.template("full"), 1, problem=problem, section="").pieces)) + config.final_tokens
    if config.window <= around:
        raise UserError(f"The question alone does not fit a window of {config.window} tokens; give a larger --window.")
    return config.window - around


def _at_once(task: Task, text: str, config: AgentConfig, codec: Codec) -> Prompt:
    """One prompt with the whole text. Past the window the middle of the text is cut, never the question."""
    problem, ids = codec.text(task.question), codec.ids(text)
    room = _room(problem, config, codec) or len(ids)
    kept = ids[: room - room // 2] + ids[len(ids) - room // 2 :] if len(ids) > room else ids
    cut = len(ids) - len(kept)
    return fill(config.template("full"), config.final_tokens, final=True, cut=cut, problem=problem, section=codec.decode(kept))


def full_context(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """Baseline: the whole document in one prompt. Past the window the document's middle is cut, never the question."""
    yield _at_once(task, task.document, config, codec)


def no_context(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """Baseline: the question alone. What it answers right says nothing about reading."""
    yield fill(config.template("none"), config.final_tokens, final=True, problem=codec.text(task.question))


def oracle(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """Baseline: the passages that hold the evidence and nothing else, in reading order, in one prompt."""
    if task.evidence is None:
        raise UserError(f"Task {task.id} does not say where its evidence stands: the agent oracle cannot read it")
    yield _at_once(task, task.evidence, config, codec)


def bm25(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """Baseline: the `top_k` sections that match the question best (Lucene BM25), in reading order, in one prompt.

    Where the window has no room for them all, the ones that match worst lose their ends, then go.
    """
    yield _best_sections(task, config, codec)  # made elsewhere: while it is answered, no words of the document are held here


def _best_sections(task: Task, config: AgentConfig, codec: Codec) -> Prompt:
    import bm25s

    def words_of(text: str) -> list[str]:
        return bm25s.tokenize([text], stopwords=None, show_progress=False, return_ids=False)[0]

    problem = codec.text(task.question)
    sections = codec.cut(task.document, config.chunk_tokens, config.max_sections, config.over)
    asked, words = words_of(task.question), [words_of(section) for section in sections]
    best = [*range(len(sections))][: config.top_k]  # where neither side has a word to match: the beginning
    if asked and any(words):
        index = bm25s.BM25()
        index.index(words, show_progress=False)
        best = index.retrieve([asked], k=min(config.top_k, len(sections)), show_progress=False)[0][0].tolist()
    room = _room(problem, config, codec)
    cut = sections.left_out
    kept: dict[int, tuple[int, ...]] = {}
    for k in best:
        kept[k] = sections[k].ids[:room]
        cut += len(sections[k].ids) - len(kept[k])
        room = None if room is None else room - len(kept[k])
    ids = [i for k in sorted(kept) for i in kept[k]]
    return fill(config.template("full"), config.final_tokens, final=True, cut=cut, problem=problem, section=codec.decode(ids))


AGENTS: dict[str, Agent] = {"memagent": memagent, "full": full_context, "bm25": bm25, "none": no_context, "oracle": oracle}
