"""All agents by name, and the baselines: full context, BM25, no context, oracle.

Holds: `AGENTS`; the agents that read a document at once, or not at all. Leaves out: MemAgent (memagent.py), ReMemR1 (agents/rememr1.py).
Exercise it: `python cli.py eval --n 8`. Read next: config/options.py.

An agent of your own is a generator function and an entry here.
"""

from __future__ import annotations

from collections.abc import Generator

from agents.rememr1 import rememr1, states
from config.errors import UserError
from data import Task
from memagent import Agent, AgentConfig, Prompt, Turn, fill, memagent
from tokens.codec import Codec, Text


def _room(problem: Text, config: AgentConfig, codec: Codec) -> int | None:
    """Tokens that may stand for the document in the full template, beside the question and the answer; None without a window."""
    if not config.window:
        return None
    around = (
        len(codec.chat(fill(config.template("full"), 1, problem=problem, section="").pieces))
        + config.final_tokens
    )
    if config.window <= around:
        raise UserError(
            f"The question alone does not fit a window of {config.window} tokens; give a larger --window."
        )
    return config.window - around


def _at_once(task: Task, text: str, config: AgentConfig, codec: Codec) -> Prompt:
    """One prompt with the whole text. Past the window the middle of the text is cut, never the question."""
    problem, ids = codec.text(task.question), codec.ids(text)
    room = _room(problem, config, codec) or len(ids)
    kept = ids[: room - room // 2] + ids[len(ids) - room // 2 :] if len(ids) > room else ids
    cut = len(ids) - len(kept)
    return fill(
        config.template("full"),
        config.final_tokens,
        final=True,
        cut=cut,
        problem=problem,
        section=codec.decode(kept),
    )


def full_context(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """Baseline: the whole document in one prompt. Past the window the document's middle is cut, never the question."""
    yield _at_once(task, task.document, config, codec)


def no_context(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """Baseline: the question alone. What it answers right says nothing about reading."""
    yield fill(
        config.template("none"), config.final_tokens, final=True, problem=codec.text(task.question)
    )


def oracle(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """Baseline: the passages that hold the evidence and nothing else, in reading order, in one prompt."""
    if task.evidence is None:
        raise UserError(
            f"Task {task.id} does not say where its evidence stands: the agent oracle cannot read it"
        )
    yield _at_once(task, task.evidence, config, codec)


def bm25(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """Baseline: the `top_k` sections that match the question best (Lucene BM25), in reading order, in one prompt.

    Where the window has no room for them all, the ones that match worst lose their ends, then go.
    """
    yield _best_sections(
        task, config, codec
    )  # made elsewhere: while it is answered, no words of the document are held here


def _best_sections(task: Task, config: AgentConfig, codec: Codec) -> Prompt:
    import bm25s

    def words_of(text: str) -> list[str]:
        return bm25s.tokenize([text], stopwords=None, show_progress=False, return_ids=False)[0]

    problem = codec.text(task.question)
    sections = codec.cut(task.document, config.chunk_tokens, config.max_sections, config.over)
    asked, words = words_of(task.question), [words_of(section) for section in sections]
    best = [*range(len(sections))][
        : config.top_k
    ]  # where neither side has a word to match: the beginning
    if asked and any(words):
        index = bm25s.BM25()
        index.index(words, show_progress=False)
        best = index.retrieve([asked], k=min(config.top_k, len(sections)), show_progress=False)[0][
            0
        ].tolist()
    room = _room(problem, config, codec)
    cut = sections.left_out
    kept: dict[int, tuple[int, ...]] = {}
    for k in best:
        kept[k] = sections[k].ids[:room]
        cut += len(sections[k].ids) - len(kept[k])
        room = None if room is None else room - len(kept[k])
    ids = [i for k in sorted(kept) for i in kept[k]]
    return fill(
        config.template("full"),
        config.final_tokens,
        final=True,
        cut=cut,
        problem=problem,
        section=codec.decode(ids),
    )


AGENTS: dict[str, Agent] = {
    "memagent": memagent,
    "rememr1": rememr1,
    "full": full_context,
    "bm25": bm25,
    "none": no_context,
    "oracle": oracle,
}
# who reads section by section: a model's window then decides nothing but failures
SECTIONWISE = ("memagent", "rememr1")
USES = {  # the prompts of each
    "memagent": ("update", "final"),
    "rememr1": ("recall_update", "recall_final"),
    "full": ("full",),
    "bm25": ("full",),
    "oracle": ("full",),
    "none": ("none",),
}
LOOKING_BACK = (  # settings that mean nothing to the others
    "callback",
    "retriever",
    "recall_k",
    "recall_at_zero",
    "history_scope",
    "memory_text",
    "on_missing_update",
    "query_tokens",
    "step_tokens",
    "example_query",
    "boxed_literal",
)
STATES = {"rememr1": states}  # whose turns have rewards of their own
