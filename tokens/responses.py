"""What a model's responses are made of: which part is thought, and where they end.

Models mark their thoughts in many ways, often by special tokens, which decoding drops. Every way
becomes <think>...</think>, which graders, memories and records know alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

OPEN, CLOSE = "<think>", "</think>"
PAIRS = (  # those before LongCat's stand in vLLM 0.31's parsers
    (OPEN, CLOSE),  # known of every model
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
)
CHANNELS = ("<|channel|>", "<|message|>")
"""Marks of gpt-oss, whose responses are messages in channels: those are not read here."""


class Thoughts:
    """The marks of thoughts that one model has, as tokens or spelled out in its chat template.

    vocabulary: None = a server's model, of which a mark counts where a text begins with it.
    """

    def __init__(self, vocabulary: Mapping[str, int] | None = None, template: str = ""):
        known = vocabulary or {}
        self.pairs = [
            pair for pair in PAIRS[1:] if all(mark in known or mark in template for mark in pair)
        ]
        self._any = vocabulary is None
        self.marks = {  # id -> what it becomes
            known[mark]: (OPEN, CLOSE)[k]
            for pair in (PAIRS[0], *self.pairs)
            for k, mark in enumerate(pair)
            if mark in known
        }
        speaks = re.search("reasoning|thinking|thought", template, re.IGNORECASE)
        self.are_unknown = bool(
            speaks and not self.marks and not self.pairs and CLOSE not in template
        )
        """whether the chat template speaks of thoughts, and no mark of theirs is known"""

    def last_end(self, ids: Sequence[int]) -> int:
        """Return the place behind the last mark that ends thoughts, 0 where none does."""
        return max((k for k, i in enumerate(ids, 1) if self.marks.get(i) == CLOSE), default=0)

    def decode(self, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Decode ids to a text with its thoughts between <think> and </think>."""
        text, start = "", 0
        for at, i in enumerate(ids):
            if i in self.marks:
                text += decode(ids[start:at]) + self.marks[i]
                start = at + 1
        return self.shown(text + decode(ids[start:]))

    def shown(self, text: str) -> str:
        """Return a text with its thoughts between <think> and </think>, however they are marked."""
        pairs = self.pairs
        if self._any:
            pairs = [pair for pair in PAIRS[1:] if text.lstrip().startswith(pair[0])]
        for opening, closing in pairs:
            text = text.replace(opening, OPEN).replace(closing, CLOSE)
        return text


def configured_ends(path: str | Path, local: bool) -> set[int]:
    """Return the ids that end a response by generation_config.json and config.json of a model.

    transformers' `generate` reads both. local: download nothing. OSError: one is damaged.
    """
    from transformers import GenerationConfig, PreTrainedConfig

    def read(name: str) -> dict:
        try:
            if name == "config.json":
                return PreTrainedConfig.get_config_dict(path, local_files_only=local)[0]
            return GenerationConfig.from_pretrained(path, local_files_only=local).to_dict()
        except OSError:
            if Path(path, name).exists():  # there, but damaged
                raise
            return {}

    configs = [read("generation_config.json"), read("config.json")]
    found = [c.get("eos_token_id") for c in (*configs, configs[1].get("text_config") or {})]
    ends = [i for ids in found for i in (ids if isinstance(ids, list) else [ids])]
    return {i for i in ends if isinstance(i, int) and i >= 0}
