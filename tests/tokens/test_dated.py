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
SMALL = "--chunk-tokens 24 --memory-tokens 6 --final-tokens 6 --device cpu".split()


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """Let a template fail that sees the clock."""
    monkeypatch.setattr(chat_template_utils, "datetime", None)


def codec_of(template: str, **kwargs) -> Codec:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = template
    return Codec(tokenizer, **kwargs)


def test_the_date_is_the_settings_and_part_of_the_fingerprint_where_it_is_told():
    for template, usual in ((CLOCK, "26 Jul 2024, 00:00:00"), (STRING, "26 Jul 2024")):
        codec = codec_of(template)
        prompt = codec.tokenizer.decode(codec.chat([("Who?", False)]))
        assert f"Today: {usual}" in prompt and codec.told_date == TEMPLATE_DATE
        other = codec_of(template, date="2026-11-29")
        prompt = other.tokenizer.decode(other.chat([("Who?", False)]))
        assert "29 Nov 2026" in prompt and other.told_date == "2026-11-29"
        assert other.fingerprint != codec.fingerprint == codec_of(template).fingerprint
    # only when there are tools
    late = "{% if tools %}" + CLOCK + "{% else %}" + PLAIN + "{% endif %}"
    assert codec_of(late).fingerprint != codec_of(late, date="2026-11-29").fingerprint
    assert codec_of(PLAIN).fingerprint == codec_of(PLAIN, date="2026-11-29").fingerprint
    assert codec_of(PLAIN, date="2026-11-29").told_date == ""


@pytest.mark.parametrize("day", ["26.7.2024", "20240726", "2024-13-01", "", "today"])
def test_a_date_that_is_none_is_refused(day):
    with pytest.raises(UserError, match="template_date must be a day such as 2024-07-26"):
        ReadConfig(template_date=day)


def run(*words, code=0) -> str:
    result = CliRunner().invoke(cli.app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_rows_of_two_dates_never_mix():
    def settings(template, date):
        told = codec_of(template, date=date).told_date
        return settings_of_row(Cell("a", "q", "0.0", 1), tiny.agent(), told, Sampling(), 0, "m")

    for template, n in ((CLOCK, 2), (PLAIN, 1)):
        assert len({settings(template, day) for day in (TEMPLATE_DATE, "2026-11-29")}) == n


def test_a_run_and_its_export_keep_the_date(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told, chat = [], Codec.chat
    monkeypatch.setattr(
        Codec, "chat", lambda self, *rest: told.append(self.told_date) or chat(self, *rest)
    )
    codec, day = codec_of(CLOCK), "2026-11-29"
    random_policy(codec).save_pretrained("m")
    codec.tokenizer.save_pretrained("m")
    few = ["--tasks-per-step", 1, "--group-size", 2, "--lengths", 1, "--steps", 1, *SMALL]
    for date in (day, TEMPLATE_DATE):  # which no flag sets
        Path(f"{date}.yaml").write_text(f"agent: {{template_date: {date}}}")
    run("train", "--name", "a", "--model", "m", *few, "--config", f"{day}.yaml")
    other = ["--config", f"{TEMPLATE_DATE}.yaml"]
    again = ["train", "--name", "a", "--resume", "--steps", 2, *other]
    assert "agent.template_date" in run(*again, code=2)
    Path("a.txt").write_text("Anna is in Lima.")
    run("ask", "a.txt", "Where is Anna?", "--model", "runs/a/model", "--name", "r")
    for file in ("runs/a/config.yaml", "runs/a/model/agent.yaml", "runs/r/config.yaml"):
        assert yaml.safe_load(Path(file).read_text())["agent"]["template_date"] == day
    assert set(told) == {day}


def test_a_date_in_a_file_of_settings_needs_no_quotes():
    for day in ("2026-11-29", "'2026-11-29'"):
        said = yaml.safe_load(f"agent: {{template_date: {day}}}")
        assert typed(said, "a.yaml", agent=ReadConfig)["agent"] == {"template_date": "2026-11-29"}
