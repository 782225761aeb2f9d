"""The words of the project, MemAgent's way of reading, and what an agent may say of itself.

Tokens in, tokens out: a section is a slice of the document's ids, a memory the ids that were
sampled. Both are `Text`, a string that carries its ids, and never encoded again unless a string
operation (`strip`, `+`) has made a plain string of them.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from config.errors import AgentError, UserError
from config.settings import COUNT, LIMIT, UNFLAGGED, Settings
from data import NOT_FOUND, Task, formed, grade, places, stands_in, strip_thinking
from memory import overwrite
from tokens.templates import Wording, read_template, split_template, wording_of

if TYPE_CHECKING:
    from tokens.codec import Codec, Sections, Text


def __getattr__(name: str):
    """Find the function `ask` in the commands, which import this module (commands/questions.py)."""
    if name != "ask":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("commands.questions").ask


# ---------------------------------------------------------------- the words


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"  # an end-of-sequence id was sampled
    LENGTH = "length"  # cut at max_tokens
    FULL = "full"  # prompt + max_tokens do not fit the model's window: nothing was sampled
    ERROR = "error"  # the engine failed; the reason is in Turn.error


@dataclass(slots=True, frozen=True)
class Prompt:
    """One message to the model: constants of a template and texts of its slots, in order."""

    pieces: tuple[tuple[str, bool], ...]  # (text, constant?)
    max_tokens: int
    final: bool = False  # the turn that answers
    section: str = ""  # what the turn reads, "" in a final turn
    memory: str = ""  # the memory it starts from
    cut: int = 0  # tokens of the document that the agent never reads, by `max_sections` or `window`
    role: str = "user"  # of the message, as the model's chat template calls it
    system: str = ""  # a system message before it; a conversation has its first prompt's
    tools: tuple[dict, ...] = ()  # JSON schemas for the chat template; likewise
    images: tuple[str, ...] = ()  # data URLs; only servers that take messages are sent them
    after: Turn | None = None  # go on from the very tokens of this turn; None: a new conversation
    trained: bool = True  # False: the response is sampled, but no token of it is trained
    frozen: bool = False  # answered greedily by the policy before training; never trained
    given: str | None = None  # the agent's own response, for which no model is asked
    aside: bool = False  # it reads nothing and writes no memory: a plan, a lesson for later tasks

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)

    def ids(self, codec: Codec) -> list[int]:
        """Return the prompt's token ids, those of the conversation before it first."""
        before = [*self.after.prompt_ids, *self.after.response_ids] if self.after else None
        return codec.chat(self.pieces, self.role, self.system, self.tools, before)

    @property
    def conversation(self) -> list[Prompt]:
        """The prompts of the conversation up to this one, in order."""
        prompts = [self]
        while prompts[-1].after:
            prompts.append(prompts[-1].after.prompt)
        return prompts[::-1]

    def messages(self) -> list[dict]:
        """Return the conversation as messages, for servers that take no token ids."""
        system = self.conversation[0].system
        messages = [{"role": "system", "content": system}] if system else []
        for prompt in self.conversation:
            if prompt.after:
                messages.append({"role": "assistant", "content": str(prompt.after.response)})
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in prompt.images]
            content = [{"type": "text", "text": prompt.text}, *parts] if parts else prompt.text
            messages.append({"role": prompt.role, "content": content})
        return messages

    def all_tools(self) -> tuple[dict, ...]:
        """Return the tools of the conversation: those of its first prompt."""
        return self.conversation[0].tools


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
    reused_tokens: int = 0  # of the prompt, taken from a cache
    notes: object = None  # what the agent keeps of the turn: a dataclass of its own, or None
    rewards: dict[str, float] = field(default_factory=dict)  # its own rewards by name, raw

    @property
    def trained(self) -> bool:
        """Whether there are tokens to train on."""
        return bool(self.response_ids) and self.prompt.trained and not self.prompt.frozen


def place_of(turn: Turn, k: int) -> int:
    """Return which turns of a group the k-th turn of a trajectory is compared with."""
    return -1 if turn.prompt.final else k


@dataclass(slots=True)
class Trajectory:
    """All turns of one rollout of one task."""

    task: Task
    turns: list[Turn] = field(default_factory=list)
    sample: int = 0  # which of the group's G trajectories
    reward: float | None = 0.0  # raw, never overwritten; None: it could not be given
    error: str = ""  # why it failed; a failed trajectory counts as wrong
    seconds: float = 0.0
    fault: bool = False  # it failed by an engine or a server, and says nothing of the policy

    @property
    def answer(self) -> str:
        """The response of the turn that answers, "" if there is none."""
        return next((str(turn.response) for turn in self.turns[::-1] if turn.prompt.final), "")


@dataclass(slots=True)
class Group:
    """The G trajectories of one task, in the group-relative advantage's sense."""

    task: Task
    trajectories: list[Trajectory]
    left_out: list[Trajectory] = field(default_factory=list)  # without a reward: they play no part

    @property
    def sampled(self) -> list[Trajectory]:
        """Those left out as well."""
        return sorted([*self.trajectories, *self.left_out], key=lambda t: t.sample)

    @property
    def signal(self) -> bool:
        """Whether the rewards differ: where they are all the same every advantage is 0."""
        lone = len(self.sampled) == len(self.trajectories) == 1
        return lone or differ([t.reward for t in self.trajectories])


def differ(rewards: Sequence[float]) -> bool:
    """Tell whether rewards are a signal: they differ by more than their rounding."""
    return bool(rewards) and max(rewards) - min(rewards) >= 1e-9


# ---------------------------------------------------------------- MemAgent's way of reading

NO_MEMORY = "No previous memory"
NO_ENTRIES = "No memories are stored."  # of a store


def read_by_section(agent: MemAgent, task: Task) -> Generator[Prompt, Turn, None]:
    """Read a document section by section: what the model writes after one is the memory with which
    it reads the next, and the last one answers (arXiv 2507.02259)."""
    c, problem, sections = agent.config, task.question, agent.sections(task)
    memory = first = agent.codec.text(NO_MEMORY)
    cut = sections.left_out
    for section in sections:
        turn = yield agent.prompt(
            "update", c.memory_tokens, cut=cut, problem=problem, section=section, memory=memory
        )
        memory = overwrite(memory, agent.codec.after_thinking(turn.response), first, c.empty)
    yield agent.prompt("final", c.final_tokens, final=True, cut=cut, problem=problem, memory=memory)


# ---------------------------------------------------------------- the interface


@dataclass(frozen=True, slots=True)
class ReadConfig(Settings):
    """How an agent reads: every field is a flag; a model folder may bring its own (agent.yaml)."""

    chunk_tokens: Annotated[int, COUNT] = 2048
    """tokens of one section"""
    memory_tokens: Annotated[int, COUNT] = 512
    """most tokens of a memory, the end-of-sequence id included"""
    final_tokens: Annotated[int, COUNT] = 256
    """most tokens of an answer, the end-of-sequence id included"""
    max_sections: Annotated[int | None, LIMIT] = None
    """cut longer documents to this many sections; 0 or None reads all of them"""
    over: Annotated[Literal["center", "head"], UNFLAGGED] = "center"
    """what is kept of a longer document: center = its first and last half, head = its beginning"""
    layout: Literal["shared", "paper"] = "shared"
    """order of the update prompt: shared = section, problem, memory; paper = problem, memory,
    section"""
    form: Literal["boxed", "sentence", "plain"] = "boxed"
    """form of the answer: boxed = \\boxed{...}; sentence = "the answer is (...)"; plain = the whole
    response, without quotes, emphasis, "The answer is" or a final full stop around it"""
    thinking: bool = False
    """let a model think that can (its chat template's enable_thinking); thoughts never enter a
    memory and are not graded"""
    not_found: Literal["guess", "say"] = "guess"
    """what is answered from a memory in which nothing was noted: guess = what the model answers all
    the same, as published agents do; say = "not found in the document", by the agent itself"""
    templates: str = ""
    """folder with a file PROMPT.txt for any of the agent's prompts, used byte for byte instead of
    our wording; slots: {problem}, {memory}, {section} and the agent's own, or MemAgent's {prompt},
    {chunk}"""


class Limits(NamedTuple):
    """The most tokens that a turn with a section shows of memories, and that it writes."""

    shown: int
    written: int


@dataclass(frozen=True, slots=True)
class Line:
    """A line that an agent adds to a recorded turn when it is shown to a person."""

    label: str
    text: str
    note: str = ""
    before: bool = False  # it stood in the prompt; else it came out of the response


ROOM_TOKENS = 1024  # for the question and the template, beside section, memories and response


class Agent:
    """An agent: how it reads, what it is paid for, what is counted and shown of it.

    A new agent is one subclass in one file, `agents/NAME.py` or any other (`--agent my_agent.py`),
    or a generator function like `read_by_section` alone. Everything but `run` has a default. An
    instance holds settings; `on` gives an agent that has a codec as well and can run.

    | to | say |
    |---|---|
    | read | `run`, `prompts`, `prompt`, `sections`, `limits`, `window_needed` |
    | keep what it makes of a document for all questions about it | `keeps`, `source` |
    | have settings | `Config`, `presets`, `training` (fields of GRPOConfig) |
    | be paid | `reward`, by turn `turn_rewards`; `check` refuses a task; `demonstrate` for `sft` |
    | be counted and shown | `count`, `rates`, `lines`, `memory_after`, `in_words` |
    | outlive a task | `after_group`, `state`, `load_state`, `freeze`, `close` |

    What one agent alone needs stands in its `extras`, by the name under which it is asked for: a
    `demo` (agents/demos.py); the `arms` of a stream; `whole`, where it is shown the whole document
    at once; `table` (agent, turn) below a recorded turn, rows of column -> a text or its lines;
    `files` (agent, turns) that `ask` writes, name -> text.
    """

    name: ClassVar[str] = ""  # that of agents/NAME.py, or the file's path
    Config: ClassVar[type[ReadConfig]] = ReadConfig  # each field is a flag, its docstring the help
    prompts: ClassVar[Mapping[str, Wording | str]] = {}  # a str is a template, with {slots}
    presets: ClassVar[Mapping[str, Mapping[str, dict]]] = {}  # section (grpo, agent, run) -> fields
    training: ClassVar[dict] = {}  # whatever the preset; a flag goes before them
    by_section: ClassVar[bool] = True  # False: one prompt, cut to the model's window
    trains: ClassVar[bool] = True  # whether it makes turns that can be trained
    frozen_turns: ClassVar[bool] = False  # whether prompts are `frozen`: training keeps that policy
    keeps: ClassVar[bool] = False  # then it has generators `make(task)` and `answer(task, made)`
    rates: ClassVar[Mapping[str, tuple[str, str]]] = {}  # column -> two names of `count`, divided
    in_words: ClassVar[str] = ""  # how it reads, in a report's sentences; "" = its name
    had: ClassVar[str] = (
        ""  # settings that went, which its rows' fingerprints hold (config/gone.py)
    )
    extras: ClassVar[Mapping[str, object]] = {}
    embedder: str = ""  # what turns texts into vectors, given to it as `embed` (models/embedder.py)
    needs_embedder: bool = False  # whether it cannot do without

    def __init__(self, config: ReadConfig | None = None, codec: Codec | None = None, window=None):
        self.config = self.Config() if config is None else config
        self.codec, self.window = codec, window  # window: most tokens of a prompt and its response
        self._templates: dict[str, tuple[tuple[str, bool], ...]] = {}
        self._check_templates()

    @property
    def label(self) -> str:
        """The name as it stands in rows and reports: a file's without its folder."""
        return Path(self.name).stem

    def on(self, codec: Codec, window: int | None = None) -> Agent:
        """Return this agent with a codec, ready to run; `window` is the engine's."""
        if self.codec is codec and self.window == window:
            return self
        other = copy.copy(self)
        other.codec, other.window = codec, window
        return other

    def with_settings(self, **fields: object) -> Agent:
        """Return this agent with other settings."""
        other = type(self)(replace(self.config, **fields), self.codec, self.window)
        other.name = self.name
        return other

    # ---- what it does

    def run(self, task: Task) -> Generator[Prompt, Turn, None]:
        """Yield prompts and be sent turns, until the last prompt is answered."""
        raise NotImplementedError

    def source(self, task: Task) -> str | None:
        """Return a fingerprint of what is read, for an agent that `keeps`: an evaluation makes of
        it once what all its questions are answered from. None: for this task alone."""
        return None

    def check(self, task: Task) -> None:
        """Raise a UserError if a task cannot be done at all; asked before anything is."""

    def reward(self, trajectory: Trajectory, outcome: str = "exact") -> float:
        """Grade the answer, in [0, 1]; `outcome` is GRPOConfig's. One that failed has none."""
        task = trajectory.task
        scores = grade(trajectory.answer, task.answers, self.config.form, task.asks_for_all)
        if (score := task.score(scores.pred)) is not None:
            return score
        exact = outcome == "exact" or task.asks_for_all
        return scores.reward if exact else getattr(scores, outcome)

    def demonstrate(self, task: Task, prompt: Prompt) -> str | None:
        """Write what a careful reader would answer to a prompt, for `sft`; None: not known.

        By default the answer to a final prompt: the first, or all where all are asked for.
        """
        answer = ", ".join(task.answers) if task.asks_for_all else task.answers[0]
        return formed(answer, self.config.form) if prompt.final else None

    def turn_rewards(self, trajectory: Trajectory) -> Sequence[dict[str, float]] | None:
        """Return each turn's own rewards by name, raw; their sum is compared by turn; or None."""
        return None

    def count(self, task: Task, turn: Turn) -> Mapping[str, float]:
        """Count things of one turn; sums stand in rows and reports, `rates` of them in metrics.csv
        as well.

        `memory_capped` is known to others: it marks a memory that was cut, beside those cut at
        `max_tokens`.
        """
        return {}

    def lines(self, turn: dict) -> Sequence[Line]:
        """Return what to show of a recorded turn (`report.records`) beside section, memory and
        response."""
        return ()

    def memory_after(self, turn: dict) -> str:
        """Return the memory that a recorded turn leaves, where no later prompt shows it."""
        return strip_thinking(turn["response"])

    def after_group(self, group: Group) -> None:
        """Learn from a group whose rewards are known: for memories that outlive a task."""

    def state(self) -> dict | None:
        """Return what outlives a task, as JSON can hold it; it is saved with every checkpoint."""
        return None

    def load_state(self, state: dict) -> None:
        """Take over what `state` returned."""

    def freeze(self) -> None:
        """Learn nothing from now on: the agent is only asked."""

    def close(self) -> None:
        """Release what outlives a task; nothing more will be asked."""

    # ---- what it needs

    def limits(self) -> Limits:
        return Limits(shown=self.config.memory_tokens, written=self.config.memory_tokens)

    def turn_tokens(self) -> int:
        """Return the most tokens of a turn by section: section, memories, response, question and
        template."""
        limits, config = self.limits(), self.config
        response = max(limits.written, config.final_tokens)
        return config.chunk_tokens + limits.shown + response + ROOM_TOKENS

    def window_needed(self) -> int | None:
        """Return the window that a sampler must reserve; None: all that the model has."""
        return self.turn_tokens()

    # ---- prompts

    def sections(self, task: Task) -> Sections:
        """Cut the task's document into sections of `chunk_tokens`."""
        c = self.config
        return self.codec.cut(task.document, c.chunk_tokens, c.max_sections, c.over)

    def prompt(
        self, name: str, max_tokens: int, *, final: bool = False, cut: int = 0, **slots: str
    ) -> Prompt:
        """Fill a template. final: this turn answers, from an empty memory by the agent itself
        (`not_found`). cut: tokens of the document that are never read.

        The other fields of a prompt are set with `dataclasses.replace`:
        `replace(self.prompt("result", 64, result=text), after=turn, role="tool")`.
        """
        pieces = []
        slots = {slot: self.codec.text(text) for slot, text in slots.items()}
        for piece, constant in self.template(name):
            if not constant and piece not in slots:
                where = f"the slot {{{piece}}} of its prompt {name!r}"
                raise AgentError(f"The agent {self.label} gave no text for {where}.")
            pieces.append((piece, True) if constant else (slots[piece], False))
        section, memory = slots.get("section", ""), slots.get("memory", "")
        nothing = final and "memory" in slots and memory.strip() in ("", NO_MEMORY, NO_ENTRIES)
        given = None
        if nothing and self.config.not_found == "say":
            given = formed(NOT_FOUND, self.config.form)
        return Prompt(tuple(pieces), max_tokens, final, section, memory, cut, given=given)

    def template(self, name: str) -> tuple[tuple[str, bool], ...]:
        """Return a prompt's template as (piece, constant?) pairs: the user's file, else our
        wording."""
        if name not in self.prompts:
            raise AgentError(f"The agent {self.label} has no prompt {name!r}.")
        if name not in self._templates:
            c, wording = self.config, self.wording(name)
            path = Path(c.templates, f"{name}.txt")
            if c.templates and path.is_file():
                every = {slot for prompt in self.prompts for slot in self.wording(prompt).slots}
                pieces = read_template(path, wording.slots, every, wording.needs)
            else:
                pieces = split_template(wording.text(c.layout, c.form), wording.slots)
            self._templates[name] = pieces
        return self._templates[name]

    def wording(self, name: str) -> Wording:
        """Return our wording of a prompt."""
        return wording_of(self.prompts[name])

    def _check_templates(self) -> None:
        """Refuse templates of the user's that cannot be used, before anything is loaded."""
        if not (folder := self.config.templates):
            return
        names = [f"{name}.txt" for name in self.prompts]
        used = any(Path(folder, name).is_file() for name in names)
        if not used and (self.by_section or not any(Path(folder).glob("*.txt"))):
            must = f"it must be a folder with {', '.join(names)}, or some of them"
            raise UserError(f"There are no templates in {folder}: {must}.")
        for name in self.prompts:
            self.template(name)


# ---------------------------------------------------------------- MemAgent

UPDATE = Wording(
    "You read a long document one section at a time and carry a short memory from section to "
    "section. Read the section below, then write the memory anew: keep every old detail that helps "
    "to solve the problem, add what this section contributes, leave out the rest.",
    ("section", "problem", "memory"),
    cue="Updated memory:",
    needs=("section",),
)
FINAL = Wording(
    "Solve the problem with the help of the memory alone. {answer}", ("problem", "memory")
)


@dataclass(frozen=True, slots=True)
class MemAgentConfig(ReadConfig):
    """How MemAgent reads."""

    empty: Literal["placeholder", "keep", "empty"] = "placeholder"
    """what an empty memory becomes: placeholder = the first-memory literal, keep = the previous
    memory, empty = stays empty"""


class MemAgent(Agent):
    """One bounded memory, overwritten after each section (arXiv 2507.02259)."""

    name = "memagent"
    Config = MemAgentConfig
    prompts = {"update": UPDATE, "final": FINAL}
    rates = {"writes": ("writes", "updates")}
    run = read_by_section

    def demonstrate(self, task: Task, prompt: Prompt) -> str | None:
        """Write the notes of the evidence so far; a section that adds none leaves the memory.

        An unchanged memory is written as nothing where that keeps it (`empty`).
        """
        if prompt.final or not (task.notes or task.absent):
            return super().demonstrate(task, prompt)
        known = [words for words, _ in task.notes if any(places(words, prompt.memory))]
        added = [
            words for words, passage in task.notes if stands_in(words, passage, prompt.section)
        ]
        if set(added) <= set(known):
            return "" if self.config.empty == "keep" else prompt.memory
        notes = dict.fromkeys((*known, *added))
        return (" " if all(note.endswith(".") for note in notes) else "; ").join(notes)

    def count(self, task: Task, turn: Turn) -> Mapping[str, float]:
        """Count the sections read, and the writes: those after which the memory is another."""
        if turn.prompt.final:
            return {}
        made = {"memory": turn.prompt.memory, "response": turn.response}
        return {"updates": 1, "writes": self.memory_after(made) != turn.prompt.memory}

    def memory_after(self, turn: dict) -> str:
        return overwrite(turn["memory"], super().memory_after(turn), NO_MEMORY, self.config.empty)
