"""Chat templates that tell the date are told one, and nothing looks at the clock."""

import pytest
import yaml
from transformers.utils import chat_template_utils

from config.files import typed
from config.options import TEMPLATE_DATE
from embedded import tiny
from memagent import ReadConfig
from report.reading import settings_of_row
from report.rows import Cell
from rollout import Sampling
from tokens import codec as codecs
from tokens.codec import Codec

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CLOCK = "Today: {{ strftime_now('%d %b %Y, %H:%M:%S') }}\n" + PLAIN  # Llama 3.2, Granite, SmolLM3
STRING = "Today: {{ date_string if date_string is defined else 'any day' }}\n" + PLAIN  # Llama 3.1
WITH_TOOLS = "{% if tools %}" + CLOCK + "{% else %}" + PLAIN + "{% endif %}"
OTHER = "2026-11-29"


@pytest.mark.parametrize(("template", "usual", "other"), [
    (CLOCK, "26 Jul 2024, 00:00:00", "29 Nov 2026, 00:00:00"),
    (STRING, "26 Jul 2024", "29 Nov 2026"), (WITH_TOOLS, "", ""), (PLAIN, "", ""),
])  # fmt: skip
def test_the_date_is_ours_and_part_of_what_is_compared_where_it_is_told(
    monkeypatch, template, usual, other
):
    monkeypatch.setattr(chat_template_utils, "datetime", None)  # who looks at the clock fails
    found = []
    for date, day in ((TEMPLATE_DATE, usual), (OTHER, other)):
        monkeypatch.setattr(codecs, "TEMPLATE_DATE", date)
        tokenizer = tiny.make_tokenizer()
        tokenizer.chat_template = template
        codec = Codec(tokenizer)
        prompt = codec.tokenizer.decode(codec.chat([("Who?", False)]))
        assert f"Today: {day}" in prompt if day else "Today" not in prompt
        assert codec.told_date == ("" if template is PLAIN else date)
        cell, agent = Cell("a", "q", "0.0", 1), tiny.agent()
        row = settings_of_row(cell, agent, codec.told_date, Sampling(), 0, "m")
        found.append((codec.fingerprint, row))
    assert all((a != b) == (template is not PLAIN) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("day", [TEMPLATE_DATE, f"'{TEMPLATE_DATE}'"])
def test_an_older_file_that_names_the_date_is_read(day):
    said = yaml.safe_load(f"agent: {{template_date: {day}, chunk_tokens: 9}}")
    assert typed(said, "a.yaml", agent=ReadConfig)["agent"] == {"chunk_tokens": 9}
