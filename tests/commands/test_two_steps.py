"""`ask` in two steps: an answer from the sections that match best, and what reading all says of
it."""

import io
import json
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from test_ask import ROOM, alone, run, told  # noqa: F401
from test_ask import scripted as scripted_with
from typer.testing import CliRunner

import cli
from commands import ask as commands_ask
from commands.ask import ALL, Reading
from commands.questions import Answer
from commands.report import report
from commands.screen import Screen
from config.errors import UserError
from config.options import EMBEDDED
from data import NOT_FOUND
from memagent import ask
from tasks.worlds import PEOPLE

FLAGS = ("--model", "tiny", "--chunk-tokens", 12, *ROOM, "--empty", "keep", "--top-k", 2)
BEFORE, AFTER = (" ".join(f"Boris met {name}." for name in PEOPLE[k : k + 27]) for k in (5, 32))
QUESTION = "Where is Anna?"


@pytest.fixture(autouse=True)
def town():
    Path("a.txt").write_text(f"{BEFORE} Anna reached Lima. {AFTER}")


def scripted(monkeypatch, codec, script, window=400):
    """Half of this window is shorter than the text, which is therefore read by section."""
    scripted_with(monkeypatch, codec, script, window)


def answers(first: str, second: str, note: str = "Anna reached Lima."):
    """Answer at once, by section from the memory, and note what one section has."""

    def script(prompt):
        script.prompts.append(prompt)
        if not prompt.final:
            return note if "Anna" in prompt.section else ""
        return f"\\boxed{{{second if prompt.memory else first}}}"

    script.prompts = []
    return script


def test_an_answer_that_both_readings_give_is_confirmed(monkeypatch, codec):
    scripted(monkeypatch, codec, script := answers("Lima", "in Lima"))
    (found,) = told("a.txt", QUESTION, *FLAGS, "--name", "r")
    assert (found["answer"], found["first"], found["other"]) == ("Lima", "Lima", "")
    assert found["agrees"] is True and found["quote"] == "Anna reached Lima."
    assert found["memory"].strip() == "Anna reached Lima." and found["agent"] == "bm25, memagent"
    first, *second = script.prompts
    assert "Anna" in first.section and first.section.count(".") < 12  # of some 55 sentences
    records = [
        json.loads(line) for line in Path("runs/r/transcripts.jsonl").read_text().split("\n")[:-1]
    ]
    assert [len(each["turns"]) for each in records] == [1, len(second)]
    assert [each["answer"] for each in records] == ["\\boxed{ Lima}", "\\boxed{ in Lima}"]
    assert yaml.safe_load(Path("runs/r/config.yaml").read_text())["run"] == {"agent": "memagent"}
    (quick,) = told("a.txt", QUESTION, *FLAGS, "--quick")
    assert found["prompt_tokens"] > 2 * quick["prompt_tokens"] > 0
    page = Path("runs/r/report.html").read_text()
    assert "Answer: Lima" in page and "Reading all of it agrees" in page
    assert "Lima, from the 2 sections that match best" in page
    Path("runs/r/report.html").unlink()  # it can be made anew
    assert report(Path("runs/r")).read_text().count("<h3>section ") == len(second) - 1
    shown = CliRunner().invoke(cli.app, ["show", "runs/r", "--n", "2"]).output
    assert shown.count(QUESTION) == 2
    printed = run("a.txt", QUESTION, *FLAGS).splitlines()
    assert sum(" tokens, " in line for line in printed) == 1
    n = next(i for i, line in enumerate(printed) if line.startswith("first answer, from the 2 sec"))
    assert (
        printed[n].endswith(f"of {len(second) - 1}: Lima") and "Found in the text" in printed[n + 1]
    )
    (line,) = [line for line in printed if line.startswith("Reading all of it agrees")]
    assert "'Anna reached Lima.'" in line and printed.count("answer: Lima") == 1


def test_the_note_is_named_with_its_page(monkeypatch, codec):
    from test_documents import pdf

    Path("b.pdf").write_bytes(pdf(*f"{BEFORE} Anna reached Lima. {AFTER}".split(". ")))
    scripted(monkeypatch, codec, answers("Lima", "Lima"))
    printed = run("b.pdf", QUESTION, *FLAGS, "--chunk-tokens", 50)
    assert "it noted 'Anna reached Lima.' (page" in printed


def test_two_answers_are_both_shown_and_none_is_sure(monkeypatch, codec):
    scripted(monkeypatch, codec, answers("Karin", "Lima"))
    (found,) = told("a.txt", QUESTION, *FLAGS, "--name", "r")
    assert (found["answer"], found["first"], found["other"]) == ("Karin", "Karin", "Lima")
    assert "Unsure: Karin, or: Lima" in Path("runs/r/report.html").read_text()
    assert found["agrees"] is False
    printed = run("a.txt", QUESTION, *FLAGS)
    assert "unsure: Karin, or: Lima" in printed and "\nanswer: " not in printed
    assert "another answer: Lima. Found in the text: 'Anna reached Lima.'" in printed


def test_where_reading_all_notes_nothing_the_first_answer_is_crossed_out(monkeypatch, codec):
    scripted(monkeypatch, codec, answers("Lima", "Lima", note=""))
    (found,) = told("a.txt", QUESTION, *FLAGS)
    assert (found["answer"], found["first"], found["agrees"]) == (NOT_FOUND, "Lima", False)
    assert found["found"] is None and found["quote"] == "" and found["pages"] == []
    printed = run("a.txt", QUESTION, *FLAGS)
    assert "first answer: [-Lima-]" in printed and f"\nanswer: {NOT_FOUND}" in printed


@pytest.mark.parametrize("note", ["Anna reached Lima.", ""])
def test_of_what_is_too_long_the_best_sections_are_read(monkeypatch, codec, note):
    monkeypatch.setattr(commands_ask, "LONGEST_S", 0)
    scripted(monkeypatch, codec, script := answers("Lima", "Lima", note))
    (found,) = told("a.txt", QUESTION, *FLAGS)
    updates = [prompt for prompt in script.prompts if not prompt.final]
    assert len(updates) == 2 + 4  # two told how long reading all would take
    places = [Path("a.txt").read_text().find(prompt.section.strip()) for prompt in updates[2:]]
    assert places == sorted(places) and any("Anna" in prompt.section for prompt in updates[2:])
    assert any("--agent memagent" in remark for remark in found["remarks"])
    assert found["agrees"] is bool(note)
    if not note:
        assert found["answer"].startswith("not found in the 4 sections that match best, of ")


@pytest.mark.parametrize("error", [KeyboardInterrupt, UserError("The server is gone.")])
def test_the_first_answer_outlives_the_second_reading(monkeypatch, codec, error):
    script = answers("Lima", "Lima")

    def stopped(prompt):
        if len(script.prompts) == 3:
            raise error
        return script(prompt)

    scripted(monkeypatch, codec, stopped)
    (found,) = told("a.txt", QUESTION, *FLAGS)
    assert (found["answer"], found["first"], found["agrees"]) == ("Lima", "Lima", None)
    assert any("stopped" in each or "server is gone" in each for each in found["remarks"])
    script.prompts.clear()
    settings = dict(model="tiny", chunk_tokens=12, memory_tokens=99, final_tokens=99)
    if error is KeyboardInterrupt:  # a program that calls it is stopped
        with pytest.raises(KeyboardInterrupt):
            ask("a.txt", QUESTION, **settings)
    else:
        assert ask("a.txt", QUESTION, **settings).first == "Lima"


def test_quick_is_the_first_answer_alone(monkeypatch, codec):
    scripted(monkeypatch, codec, script := answers("Lima", "Lima"))
    (found,) = told("a.txt", QUESTION, *FLAGS, "--quick")
    assert len(script.prompts) == 1
    assert (found["answer"], found["agrees"], found["agent"]) == ("Lima", None, "bm25")
    assert "answer, from the 2 sections that match best" in run(
        "a.txt", QUESTION, *FLAGS, "--quick"
    )
    words = ("--model", "tiny", "--quick", "--agent", "full")
    assert "--quick and --agent" in run("a.txt", QUESTION, *words, code=2)


def test_no_answer_is_sure_whose_sentence_has_no_word_of_the_question(monkeypatch, codec):
    scripted(monkeypatch, codec, answers("Karin", "Karin"))
    printed = run("a.txt", QUESTION, *FLAGS)
    assert "unsure: Karin\n" in printed and told("a.txt", QUESTION, *FLAGS)[0]["agrees"] is False
    scripted(monkeypatch, codec, script := answers("Karin", "Karin"))
    (found,) = told("a.txt", "Warum?", *FLAGS, "--quick")  # no word of it is in the text
    assert len(script.prompts) == 1 and found["answer"].startswith("not found in the 2 sections")


def test_an_answer_that_stands_nowhere_by_its_nature_can_be_sure(monkeypatch, codec):
    scripted(monkeypatch, codec, answers("yes", "Yes"))
    (found,) = told("a.txt", QUESTION, *FLAGS)
    assert found["agrees"] is True and found["found"] is None
    assert "\nanswer: yes\n" in run("a.txt", QUESTION, *FLAGS)


@pytest.mark.parametrize("agent", ["bm25", "full", "none"])
def test_a_model_that_was_trained_to_read_at_once(monkeypatch, codec, agent):
    shutil.copytree(EMBEDDED, "m")
    with Path("m/agent.yaml").open("a") as file:
        file.write(f"run: {{agent: {agent}}}\nask: {{best: [[10, full]]}}\n")  # best: older ones
    scripted(monkeypatch, codec, answers("Lima", "Oslo"))
    flags = ("--model", "m", "--chunk-tokens", 12, *ROOM)
    (found,) = told("a.txt", QUESTION, *flags)
    assert (found["answer"], found["agrees"]) == ("Lima", None if agent == "bm25" else True)
    assert found["agent"] == {"bm25": "bm25"}.get(agent, f"bm25, {agent}")
    printed = run("a.txt", QUESTION, *flags)
    assert "noted" not in printed and ("agrees." in printed) == (agent != "bm25")


def test_a_first_answer_that_is_empty_is_nothing_found(monkeypatch, codec):
    script = answers("", "Lima")
    scripted(monkeypatch, codec, lambda p: script(p) if p.memory or not p.final else "")
    (found,) = told("a.txt", QUESTION, *FLAGS)
    assert found["first"].startswith("not found in the 2 sections") and found["other"] == "Lima"
    assert "No answer" not in run("a.txt", QUESTION, *FLAGS)


def test_an_answer_that_stands_nowhere_is_not_sure(monkeypatch, codec):
    scripted(monkeypatch, codec, answers("Kyoto", "Kyoto"))
    assert told("a.txt", QUESTION, *FLAGS)[0]["agrees"] is False
    assert "unsure: Kyoto (not found in the document)\n" in run("a.txt", QUESTION, *FLAGS)


@pytest.mark.parametrize("shared", [True, False])
def test_only_what_is_grounded_is_bold(shared):
    to = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    answer = Answer(QUESTION, "Lima", True, [], "He did.", "", "", [], "bm25", 0.0, shared=shared)
    Screen(to).first(Reading(None, None, [], answer, "", ALL), alone=True)
    assert ("\x1b[1m" in to.file.getvalue()) == shared


def test_remarks_of_both_readings_are_told_once(monkeypatch, codec):
    scripted(monkeypatch, codec, answers("Lima", "Lima"))
    monkeypatch.setattr(commands_ask, "remarks_on", lambda agent, turn: ["both", agent.label])
    assert told("a.txt", QUESTION, *FLAGS)[0]["remarks"] == ["both", "bm25", "memagent"]


def test_what_fits_at_once_and_is_short_is_read_once(monkeypatch, codec):
    scripted(monkeypatch, codec, script := answers("Lima", "Lima"), 4096)
    small = ("--model", "tiny", *ROOM, "--chunk-tokens", 200)
    (found,) = told("a.txt", QUESTION, *small)
    assert len(script.prompts) == 1 and (found["agent"], found["first"]) == ("full", "")
