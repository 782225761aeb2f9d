"""Chat templates that tell the date are told the setting, and nothing looks at the clock."""

from pathlib import Path

import pytest
import yaml
from conftest import random_policy
from transformers.utils import chat_template_utils
from typer.testing import CliRunner

import cli
from config.errors import UserError
from config.files import typed
from config.options import TEMPLATE_DATE
from embedded import tiny
from memagent import ReadConfig
from report.reading import settings_of_row
from report.rows import Cell
from rollout import Sampling
from tokens.codec import Codec

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CLOCK = "Today: {{ strftime_now('%d %b %Y, %H:%M:%S') }}\n" + PLAIN  # Llama 3.2, Granite, SmolLM3
STRING = "Today: {{ date_string if date_string is defined else 'any day' }}\n" + PLAIN  # Llama 3.1
WITH_TOOLS = "{% if tools %}" + CLOCK + "{% else %}" + PLAIN + "{% endif %}"
OTHER = "2026-11-29"


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Let a template fail that sees the clock."""
    monkeypatch.setattr(chat_template_utils, "datetime", None)


def codec_of(template: str, **kwargs) -> Codec:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = template
    return Codec(tokenizer, **kwargs)


@pytest.mark.parametrize(("template", "usual", "other"), [
    (CLOCK, "26 Jul 2024, 00:00:00", "29 Nov 2026, 00:00:00"),
    (STRING, "26 Jul 2024", "29 Nov 2026"), (WITH_TOOLS, "", ""), (PLAIN, "", ""),
])  # fmt: skip
def test_the_date_is_the_settings_and_part_of_what_is_compared_where_it_is_told(
    template, usual, other
):
    found = []
    for date, day in ((TEMPLATE_DATE, usual), (OTHER, other)):
        codec = codec_of(template, date=date)
        prompt = codec.tokenizer.decode(codec.chat([("Who?", False)]))
        assert f"Today: {day}" in prompt if day else "Today" not in prompt
        assert codec.told_date == ("" if template is PLAIN else date)
        cell, agent = Cell("a", "q", "0.0", 1), tiny.agent()
        row = settings_of_row(cell, agent, codec.told_date, Sampling(), 0, "m")
        found.append((codec.fingerprint, row))
    assert all((a != b) == (template is not PLAIN) for a, b in zip(*found, strict=True))
    assert codec_of(template).fingerprint == found[0][0]


@pytest.mark.parametrize("day", ["26.7.2024", "20240726", "2024-13-01", "", "today"])
def test_a_date_that_is_none_is_refused(day):
    with pytest.raises(UserError):
        ReadConfig(template_date=day)


def test_a_run_and_its_export_keep_the_date(tmp_path, monkeypatch):
    def run(words: str) -> None:
        result = CliRunner().invoke(cli.app, words.split(), catch_exceptions=False)
        assert result.exit_code == 0, result.output

    monkeypatch.chdir(tmp_path)
    told, chat = [], Codec.chat
    monkeypatch.setattr(
        Codec, "chat", lambda self, *rest: told.append(self.told_date) or chat(self, *rest)
    )
    codec = codec_of(CLOCK)
    random_policy(codec).save_pretrained("m")
    codec.tokenizer.save_pretrained("m")
    Path("day.yaml").write_text(f"agent: {{template_date: {OTHER}}}")
    few = "--tasks-per-step 1 --group-size 2 --lengths 1 --steps 1 --chunk-tokens 24"
    small = "--memory-tokens 6 --final-tokens 6 --device cpu"
    run(f"train --name a --model m {few} {small} --config day.yaml")
    Path("a.txt").write_text("Anna is in Lima.")
    run("ask a.txt Anna? --model runs/a/model --name r")
    for file in ("runs/a/config.yaml", "runs/a/model/agent.yaml", "runs/r/config.yaml"):
        assert yaml.safe_load(Path(file).read_text())["agent"]["template_date"] == OTHER
    assert set(told) == {OTHER}


def test_a_date_in_a_file_of_settings_needs_no_quotes():
    for day in (OTHER, f"'{OTHER}'"):
        said = yaml.safe_load(f"agent: {{template_date: {day}}}")
        assert typed(said, "a.yaml", agent=ReadConfig)["agent"] == {"template_date": OTHER}
