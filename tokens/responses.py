"""What a model's responses are made of: where they end, which part is thought, what never occurs.

Models mark their thoughts in many ways, often by special tokens, which decoding drops. Here every
way becomes one: a response is shown with its thoughts between <think> and </think>, which graders,
memories and records know alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokens.chat_templates import rendered
from tokens.trie import common_prefix

OPEN, CLOSE = "<think>", "</think>"

# those down to the blank line stand in vLLM 0.31's parsers; the others were not looked up
PAIRS = (
    (OPEN, CLOSE),
    ("[THINK]", "[/THINK]"),  # Magistral, Ministral
    ("<|channel>", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax
    ("<ifm|think>", "</ifm|think>"),  # K2
    ("<ifm|think_fast>", "</ifm|think_fast>"),
    ("<ifm|think_faster>", "</ifm|think_faster>"),
    ("<reasoning>", "</reasoning>"),

    ("<longcat_think>", "</longcat_think>"),
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<thought>", "</thought>"),  # EXAONE Deep
    ("<|begin_of_thought|>", "<|end_of_thought|>"),  # Sky-T1
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)  # fmt: skip
"""How models mark thoughts. The first pair is known of every model."""

CHANNELS = ("<|channel|>", "<|message|>")
"""Marks of gpt-oss, whose responses are messages in channels: those are not read here."""


class Thoughts:
    """Where thoughts begin and end in a model's responses, among ids and in text.

    vocabulary: the tokenizer's, None if it is not known: marks are then looked for where a text
    begins with one. template: the source of the chat template. decode: ids to text.
    """

    def __init__(
        self,
        vocabulary: Mapping[str, int] | None = None,
        template: str = "",
        decode: Callable[[list[int]], str] = lambda ids: "",
    ):
        known = vocabulary or {}
        self.pairs = [
            pair for pair in PAIRS[1:] if all(mark in known or mark in template for mark in pair)
        ]
        self._any = vocabulary is None
        self._mark_of = {
            known[mark]: (OPEN, CLOSE)[k]
            for pair in (PAIRS[0], *self.pairs)
            for k, mark in enumerate(pair)
            if mark in known
        }
        # ids of which decoding would not give the mark
        self._hidden = {i for i, mark in self._mark_of.items() if decode([i]).strip() != mark}

    @property
    def ids(self) -> set[int]:
        """The ids of all marks."""
        return {*self._mark_of}

    def last_end(self, ids: Sequence[int]) -> int:
        """Return the place behind the last mark that ends thoughts, 0 where none does."""
        return max((k for k, i in enumerate(ids, 1) if self._mark_of.get(i) == CLOSE), default=0)

    def decode(self, ids: list[int], decode: Callable[[list[int]], str]) -> str:
        """Decode ids to a text with its thoughts between <think> and </think>."""
        text, at = "", 0
        for k, i in () if self._hidden.isdisjoint(ids) else enumerate(ids):
            if i in self._mark_of:
                text += decode(ids[at:k]) + self._mark_of[i]
                at = k + 1
        return self.shown(text + decode(ids[at:]))

    def shown(self, text: str) -> str:
        """Return a text with its thoughts between <think> and </think>, however they are marked."""
        pairs = self.pairs
        if self._any:
            pairs = [pair for pair in PAIRS[1:] if text.lstrip().startswith(pair[0])]
        for opening, closing in pairs:
            text = text.replace(opening, OPEN).replace(closing, CLOSE)
        return text

    def are_unknown(self, template: str) -> bool:
        """Tell whether a chat template speaks of thoughts, and no mark of theirs is known."""
        speaks = re.search("reasoning|thinking|thought", template, re.IGNORECASE) is not None
        return speaks and not self.ids and not self.pairs and CLOSE not in template


# ---------------------------------------------------------------- what the template writes

ANSWER = "MEMAGENT-ANSWER"
_CALL = {"name": "f", "arguments": {}}
_TOOL = {"name": "f", "description": "-", "parameters": {"type": "object", "properties": {}}}


def _written(tokenizer, **more: object) -> str:
    """Return what the chat template writes of an assistant's message behind its cue, "" if it
    cannot. more: further fields of the message."""
    from jinja2 import TemplateError

    tools = [{"type": "function", "function": _TOOL}] if more else None
    question = [{"role": "user", "content": "-"}]
    answer = {"role": "assistant", "content": ANSWER, **more}

    try:
        cue, whole = (
            rendered(tokenizer, messages, tools=tools, add_generation_prompt=wanted)
            for messages, wanted in ((question, True), ([*question, answer], False))
        )
    except TemplateError:
        return ""  # a template without assistants, tools, or this form of calls
    return whole[common_prefix(cue, whole) :]


def special_ids(tokenizer) -> set[int]:
    """Return the ids of a tokenizer's special tokens."""
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


def end_of_turn(tokenizer, thoughts: Thoughts) -> int | None:
    """Return the special id that the chat template puts directly behind an assistant's message.

    None if it puts none, or one that ends thoughts as well.
    """
    if tokenizer.chat_template is None:
        return None
    behind = _written(tokenizer).rpartition(ANSWER)[2].strip()
    ids = tokenizer.encode(behind, add_special_tokens=False) if behind else []
    ends = ids and ids[0] in special_ids(tokenizer) and ids[0] not in thoughts.ids
    return ids[0] if ends else None


def configured_ends(path: str | Path, local: bool) -> set[int]:
    """Return the ids that end a response by generation_config.json and config.json of a model.

    As transformers' `generate` reads them, of both files. local: download nothing. OSError: one of
    the files is damaged.
    """
    from transformers import GenerationConfig, PreTrainedConfig

    where: dict[str, bool] = {"local_files_only": local}
    readers: dict[str, Callable[[], dict]] = {
        "generation_config.json": lambda: GenerationConfig.from_pretrained(path, **where).to_dict(),
        "config.json": lambda: PreTrainedConfig.get_config_dict(path, **where)[0],
    }
    ends: set[object] = set()
    for name, read in readers.items():
        try:
            config = read()
        except OSError:
            if Path(path, name).exists():  # there, but damaged
                raise
            continue
        for part in (config, config.get("text_config") or {}):
            found = part.get("eos_token_id")
            ends.update(found if isinstance(found, list) else [found])
    return {i for i in ends if isinstance(i, int) and i >= 0}


def never_sampled(tokenizer, rows: int, ends: frozenset[int], thoughts: Thoughts) -> list[int]:
    """Return the ids below `rows` that no response may have.

    They are those that the tokenizer has no token for, and the special tokens that neither end a
    response (`ends`) nor mark thoughts, and that the chat template does not write in an assistant's
    message or its call of a tool.
    """
    vocabulary = {*tokenizer.get_vocab().values()}
    allowed, special = {*ends, *thoughts.ids}, special_ids(tokenizer)
    if tokenizer.chat_template is not None and special - allowed:
        call = {"id": "a12345678", "type": "function"}
        in_text = _CALL | {"arguments": "{}"}
        called = _written(tokenizer, tool_calls=[call | {"function": _CALL}]) or _written(
            tokenizer, tool_calls=[call | {"function": in_text}]
        )
        for text in (_written(tokenizer), called):
            allowed.update(tokenizer.encode(text, add_special_tokens=False))
    never = special - allowed
    return [i for i in range(rows) if i not in vocabulary or i in never]
