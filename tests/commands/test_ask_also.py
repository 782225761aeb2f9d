"""Several questions about one text: it is read once, as far as the agent's prompts allow."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from config.options import EMBEDDED
from tokens.codec import Codec

TEXT = " ".join(
    f"{name} joined {other}. {other} toured {place}."
    for name, other, place in zip(
        "Anna Clara Emil Dora Hugo Ida Otto".split(),
        "Boris Rosa Karl Lena Max Nina Paul".split(),
        "Oslo Lima Rome Paris Bern Prague Cairo".split(),
        strict=True,
    )
)
pytestmark = pytest.mark.usefixtures("read_here")
QUESTIONS = "Where is Anna?", "Where is Clara?", "Where is Ida?"
SMALL = "--model tiny --chunk-tokens 12 --memory-tokens 8 --final-tokens 12".split()


def ask(*words):
    done = CliRunner().invoke(cli.app, ["ask", *words])
    assert done.exit_code == 0, done.output
    return done


def answers(agent, *questions, **more):
    """Return what --json prints; every question but the first comes by --also."""
    first, *others = questions
    also = [word for other in others for word in ("--also", other)]
    flags = [word for name, value in more.items() for word in (f"--{name}", value)]
    done = ask("notes.txt", first, *also, *SMALL, "--agent", agent, "--json", *flags)
    assert "The whole trace" in done.stderr
    return json.loads(done.stdout)


def tokens(name):
    lines = Path("runs", name, "turns.jsonl").read_text().splitlines()
    return [json.loads(line)["response_ids"] for line in lines]


@pytest.mark.parametrize("agent", ["memagent", "full"])
def test_a_further_question_reads_no_section_anew(tmp_path, monkeypatch, agent):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text(TEXT)
    cut, ids = [], Codec.ids

    def counted(self, text):
        cut.extend([1] if len(text) >= len(TEXT) else [])
        return ids(self, text)

    monkeypatch.setattr(Codec, "ids", counted)
    found = answers(agent, *QUESTIONS, name="a")
    n = len(cut)
    alone = [answers(agent, question, name=f"b{k}")[0] for k, question in enumerate(QUESTIONS)]
    # the text is cut into tokens once, however many ask; `full` asks the codec once a question
    assert agent == "full" or len(cut) == 4 * n
    same = ("question", "answer", "quote", "agent", "prompt_tokens", "written_tokens")
    assert [[a[n] for n in same] for a in found] == [[a[n] for n in same] for a in alone]
    for k, name in enumerate(("a", "a-2", "a-3")):  # the very tokens of a reading of its own
        assert tokens(name) == tokens(f"b{k}")
    for answer in found[1:]:
        read = answer["prompt_tokens"] - answer["reused_tokens"]
        assert read < (found[0]["prompt_tokens"] - found[0]["reused_tokens"]) / 2
        # every section, or all of the document
        assert answer["reused_tokens"] >= len(Codec.load(EMBEDDED).encode(TEXT))


def test_each_question_says_what_it_cost_and_is_a_reading_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text(TEXT)
    printed = ask("notes.txt", QUESTIONS[0], "--also", QUESTIONS[1], *SMALL, "--name", "n").stdout
    assert "question 1 of 2: Where is Anna?" in printed
    assert printed.count("tokens computed") == 2 and printed.count("The whole trace: runs/n") == 2
    assert json.loads(Path("runs/n-2/document.json").read_text())["question"] == QUESTIONS[1]
    rows, whole = Path("runs/n-2/turns.jsonl"), tokens("n-2")
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:2]))  # stopped there
    ask("--resume", "--name", "n-2")
    assert tokens("n-2") == whole
