"""ReMemR1: MemAgent that can look back (arXiv 2509.23040; spec rememr1.md). One response holds the new memory and, if wanted, a query over all
earlier memories; what the query finds stands in the next prompt.

Holds: `parse_step`, the agent, the rewards of single turns. Leaves out: the history and its retrievers (memory.py), prompts and settings
(memagent.py), advantages (grpo.py). No torch.
Exercise it: `pytest tests/agents/test_rememr1.py`. Read next: agents/baselines.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator
from dataclasses import replace

from agents.retrieval import RETRIEVERS, Retriever
from data import (
    Task,
    answer_recall,
    count_phrases,
    extract_boxed,
    extract_sentence,
    normalize_answer,
    phrases,
    strip_thinking,
)
from memagent import (
    NO_MEMORY,
    NOT_RECALLED,
    AgentConfig,
    Finish,
    Prompt,
    Step,
    Trajectory,
    Turn,
    fill,
)
from memory import MemoryState
from tokens.codec import Codec

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
TAGS = ("thinking", "update", "recall")
_TAG = re.compile(r"</?\w+>")
_OURS = re.compile(rf"</?(?:{'|'.join(TAGS)})>")


def _blocks(text: str, tag: str) -> list[str]:
    """The contents of all closed blocks; one that is opened anew before it was closed counts from there."""
    return re.findall(rf"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)


def parse_step(text: str, finish: str = Finish.STOP) -> Step:
    r"""What a response says: thinking, memory, query; its errors, a subset of `ERRORS`, and whether a tag is left without its other half. For
    rollout, reward and evaluation (D-2, D-7).

    The memory is the first update that is not blank, over as many lines as it has, without queries and tags of ours inside. The query is the
    first recall, tags in it dropped, on one line. What stands in closed thinking is no update and no query.

    >>> step = parse_step("<update>Anna\nmet Otto.</update><recall>Otto</recall> or <recall>Ida</recall>")
    >>> step.memory, step.query, step.errors
    ('Anna\nmet Otto.', 'Otto', ('multi_recall',))
    """
    thoughts = _blocks(text, "thinking")
    text = re.sub(r"<thinking>.*?</thinking>", "", text, flags=re.DOTALL)
    updates, recalls = _blocks(text, "update"), _blocks(text, "recall")
    queries = [" ".join(_TAG.sub(" ", query).split()) for query in recalls]
    memories = [
        memory for update in updates if (memory := _OURS.sub("", without_recall(update)).strip())
    ]
    wrong = {
        "no_update": not updates,
        "multi_update": text.count("<update>") > 1,
        "empty_update": len(memories) < len(updates),
        "multi_recall": len(recalls) > 1,
        "unclosed_recall": text.count("<recall>") > len(recalls),
        "empty_recall": "" in queries,
        "truncated": finish == Finish.LENGTH,
    }
    return Step(
        thoughts[0].strip() if thoughts else None,
        memories[0] if memories else None,
        next(filter(None, queries), None),
        tuple(name for name in ERRORS if wrong[name]),
        stray=any(text.count(f"<{tag}>") != text.count(f"</{tag}>") for tag in ("update", "recall"))
        or bool(re.search("</?thinking>", text)),
    )


def without_recall(text: str) -> str:
    return re.sub(r"<recall>.*?</recall>", "", text, flags=re.DOTALL).strip()


def greedy_query(response: str) -> str | None:
    """The query as upstream's code reads it: what stands between the first `<recall>` and the last `</recall>` of the first line that has
    both, as it is: tags, blanks, thoughts and all.

    >>> greedy_query("<recall>Otto</recall> or <recall> Ida</recall>"), greedy_query("<recall>Otto\\nLima</recall>")
    ('Otto</recall> or <recall> Ida', None)
    """
    found = re.search("<recall>(.+)</recall>", response)
    return found and found[1]


def read_step(turn: Turn, config: AgentConfig, codec: Codec) -> Step:
    """`parse_step` of a turn under the settings of `memory_text`, `on_missing_update` and `query_text`; memory and query end at their caps,
    but for a greedy query, which has none."""
    response = codec.after_thinking(turn.response)
    step = parse_step(response, turn.finish)
    memory = step.memory
    if config.memory_text == "response_minus_recall" or (
        memory is None and config.on_missing_update == "whole_response"
    ):
        memory = without_recall(response)
        if not memory and config.on_missing_update != "whole_response":
            memory = None
    if memory is None and config.on_missing_update == "reset":
        memory = NO_MEMORY
    memory, memory_cut = _capped(memory, config.memory_tokens, codec)
    query, query_cut = _capped(step.query, config.query_tokens, codec)
    if config.query_text == "greedy":
        query, query_cut = greedy_query(turn.response), False
    return replace(step, memory=memory, query=query, memory_cut=memory_cut, query_cut=query_cut)


def _capped(text: str | None, n_tokens: int, codec: Codec) -> tuple[str | None, bool]:
    if text is None:
        return None, False
    text = codec.text(text)
    return (text, False) if len(text.ids) <= n_tokens else (codec.decode(text.ids[:n_tokens]), True)


# ---------------------------------------------------------------- the agent


def rememr1(task: Task, config: AgentConfig, codec: Codec) -> Generator[Prompt, Turn, None]:
    """One bounded memory, overwritten after each section, and a look back at the memories before it; the answer comes from question, memory and
    what was recalled last."""
    update, final = config.template("recall_update"), config.template("recall_final")
    problem, nothing = codec.text(task.question), codec.text(NOT_RECALLED)
    sections = codec.cut(task.document, config.chunk_tokens, config.max_sections, config.over)
    first = codec.text(NO_MEMORY)
    state, cut = (
        MemoryState(first, retriever_of(config, codec), placeholder=first),
        sections.left_out,
    )

    def shown() -> dict:
        return {
            "problem": problem,
            "memory": state.memory,
            "recalled": state.recalled,
            "cut": cut,
            "recalled_memory": codec.text(state.recalled.text) if state.recalled.steps else nothing,
        }

    for section in sections:
        turn = yield fill(update, config.most_step_tokens, section=section, **shown())
        turn.step = read_step(turn, config, codec)
        query = {"learned": turn.step.query, "question": task.question, "off": None}[
            config.callback
        ]
        state.update(
            turn.step.memory, query, config.recall_k, config.history_scope, config.recall_at_zero
        )
    yield fill(final, config.final_tokens, final=True, **shown())


def retriever_of(config: AgentConfig, codec: Codec) -> Retriever:
    """A retriever of its own for each trajectory."""
    if config.retriever == "tfidf_tokens":
        return RETRIEVERS["tfidf"](tokens=codec.tokens)
    return RETRIEVERS[config.retriever]()


# ---------------------------------------------------------------- rewards of single turns


def states(
    trajectory: Trajectory,
    form: str = "boxed",
    memory: str = "gain",
    callback: str = "seen",
    tags: str = "all",
    match: str = "words",
    words: str = "unseen",
) -> list[dict[str, float]]:
    """The rewards of every turn, raw and each by its name (spec rememr1.md 7, eq. 5 to 7); `state` is what trains, the sum of `memory`, `callback`
    and `format`. [turns]

    gain, level  what the update has added of an accepted answer to the memory, in [-1, 1], and what the memory then has of it, in [0, 1];
                 memory: which of the two is `memory`
    callback     what this turn's own query has brought of an accepted answer that the turn had not in sight (nothing else is its doing:
                 with callback = question there is none). callback: seen = in memory and section, prompt = in the whole prompt,
                 question and all
    format       1 or 0. tags: all = no error of `parse_step` and no stray tag; one_line = exactly one update on one line; the first such is
                 then also all that `level` sees. In the final turn: an answer in the form asked for
    covered      0 where no accepted answer has a word that could be looked for (`graders.answer_recall`): gain, level, callback are then 0
    match        words = `answer_recall`'s own, substring = upstream's
    words        unseen = neither yes and no nor words that the question has are looked for, all = they are

    Whatever copies the answer is paid, wherever it stands and whatever it says about it, and length costs nothing: these rewards are
    lexical (D-6). The caps of `AgentConfig` are what bounds a memory.
    """
    task, out = trajectory.task, []

    def held(text: str) -> float | None:
        return answer_recall(
            task.answers, written(text), task.question, match, task.asks_for_all, words
        )

    covered = held("") is not None
    for turn, following in zip(trajectory.turns, [*trajectory.turns[1:], None], strict=True):
        gain = level = called = 0.0
        if turn.prompt.final:
            right = one_box(turn.response, form, tags)
        elif turn.step is None:  # it was never read: the engine or the agent has failed
            right = 0.0
        else:
            right = right_tags(turn, tags)
            after = following.prompt.memory if following else turn.prompt.memory
            if tags == "one_line":
                after = on_one_line(strip_thinking(turn.response))[0]
            if covered:
                level = held(after)
                gain = level - held(turn.prompt.memory)
            if (
                covered
                and following
                and turn.step.query
                and following.prompt.recalled.query == turn.step.query
            ):
                sight = (
                    turn.prompt.text
                    if callback == "prompt"
                    else f"{written(turn.prompt.memory)}\n{turn.prompt.section}"
                )
                both = f"{following.prompt.recalled.text}\n{sight}"
                called = held(both) - held(sight)  # never below 0: there is only more to see
        of_memory = {"gain": gain, "level": level}[memory]
        out.append(
            {
                "state": of_memory + called + right,
                "memory": of_memory,
                "gain": gain,
                "level": level,
                "callback": called,
                "format": right,
                "covered": float(covered),
            }
        )
    return out


def written(memory: str) -> str:
    """A memory without the wording of the first one, which nobody has read anywhere."""
    return "" if memory.strip() == NO_MEMORY else memory


def right_tags(turn: Turn, tags: str) -> float:
    if tags == "one_line":
        return float(
            sum(bool(update.strip()) for update in on_one_line(strip_thinking(turn.response))) == 1
        )
    return float(not turn.step.errors and not turn.step.stray)


def on_one_line(response: str) -> list[str]:
    """The updates that stand on one line, all that upstream's rewards see; [""] without any."""
    return re.findall(r"<update>(.*?)</update>", response) or [""]


def one_box(response: str, form: str, tags: str = "all") -> float:
    """Whether the final response has an answer in the form asked for. tags: one_line = on exactly one line a box with something in it, as upstream."""
    text = strip_thinking(response)
    if tags == "one_line":
        return float(
            sum(bool(answer.strip()) for answer in re.findall(r"\\boxed\{(.+)\}", text)) == 1
        )
    return float(
        bool(((extract_boxed(text) if form == "boxed" else extract_sentence(text)) or "").strip())
    )


# ---------------------------------------------------------------- what is counted


class Sought:
    """What a text that came back is looked through for: the accepted answers, and what the passages with the evidence are called. Not yes and no,
    which stand everywhere, nor names that the question has too."""

    def __init__(self, task: Task):
        self.answers, self.all_asked = phrases(task.answers), task.asks_for_all
        self.clues = [
            clue for clue in phrases(task.clues) if not count_phrases([clue], task.question)
        ]

    def held(self, text: str) -> str:
        """answer (all of them where all are asked for), evidence (one of them, or a passage that leads there), neither; unknown = there is
        nothing to look for."""
        n = count_phrases(self.answers, text)
        if n and n >= (len(self.answers) if self.all_asked else 1):
            return "answer"
        if n or count_phrases(self.clues, text):
            return "evidence"
        return "neither" if self.answers or self.clues else "unknown"


class Looks:
    """What is counted of one trajectory's looks back, turn by turn as it goes on."""

    def __init__(self, task: Task, config: AgentConfig):
        self.sought = Sought(task)
        self.learned, self.asked = (
            config.callback == "learned",
            {normalize_answer(config.example_query)},
        )
        self.n: Counter[str] = Counter(dict.fromkeys((*COUNTS, *ERRORS), 0))

    def add(self, turn: Turn) -> None:
        """A turn after the agent has read it."""
        recalled, step = turn.prompt.recalled, turn.step
        if recalled is None:
            return
        if recalled.query:
            self.n.update(
                queries=1, hits=bool(recalled.steps), ages=recalled.age, current=recalled.current
            )
            if recalled.steps:
                held = self.sought.held(recalled.text)
                self.n.update(
                    sought=bool(self.sought.answers),
                    holds=held == "answer",
                    evidence_sought=held != "unknown",
                    evidence=held in ("answer", "evidence"),
                )
        if turn.prompt.final:
            return
        self.n["updates"] += 1
        if step is None:
            return
        self.n.update({error: 1 for error in step.errors})
        self.n.update(
            stray_tag=step.stray, memory_capped=step.memory_cut, query_capped=step.query_cut
        )
        if step.query and self.learned:
            said = normalize_answer(step.query)
            self.n["degenerate"] += said in self.asked
            self.asked.add(said)


COUNTS = (
    "updates",
    "queries",
    "hits",
    "ages",
    "current",
    "sought",
    "holds",
    "evidence_sought",
    "evidence",
    "degenerate",
    "stray_tag",
    "memory_capped",
    "query_capped",
)
