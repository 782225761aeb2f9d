"""Several questions about one text: it is read once, as far as the agent's prompts allow."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import cli
from config.options import EMBEDDED
from tokens.codec import Codec

TEXT = " ".join(
    f"{one} joined {other}. {other} toured {place}."
    for one, other, place in zip(
        "Anna Clara Emil Dora Hugo Ida Otto".split(),
        "Boris Rosa Karl Lena Max Nina Paul".split(),
        "Oslo Lima Rome Paris Bern Prague Cairo".split(),
        strict=True,
    )
)
QUESTIONS = "Where is Anna?", "Where is Clara?", "Where is Ida?"
SMALL = "--model tiny --chunk-tokens 12 --memory-tokens 8 --final-tokens 12".split()


@pytest.fixture(autouse=True)
def notes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text(TEXT)


def ask(*words, code=0):
    done = CliRunner().invoke(cli.app, ["ask", *words])
    assert done.exit_code == code, done.output
    return done


def answers(agent, *questions, **more):
    """Return what --json prints; every question but the first comes by --also."""
    first, *others = questions
    also = [word for other in others for word in ("--also", other)]
    flags = [word for name, value in more.items() for word in (f"--{name}", value)]
    done = ask("notes.txt", first, *also, *SMALL, "--agent", agent, "--json", *flags)
    return json.loads(done.stdout)


def turns(name):
    lines = Path("runs", name, "turns.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("agent", ["memagent", "full"])
def test_a_further_question_reads_no_section_anew(agent):
    found = answers(agent, *QUESTIONS, name="a")
    alone = [answers(agent, question, name=f"b{k}")[0] for k, question in enumerate(QUESTIONS)]
    own = ("question", "answer", "stands", "agent", "prompt_tokens", "written_tokens")
    assert [[a[n] for n in own] for a in found] == [[a[n] for n in own] for a in alone]
    for k, name in enumerate(("a", "a-2", "a-3")):  # the very tokens of a reading of its own
        assert [t["response_ids"] for t in turns(name)] == [
            t["response_ids"] for t in turns(f"b{k}")
        ]
    text = len(Codec.load(EMBEDDED).encode(TEXT))
    for answer in found[1:]:
        read = answer["prompt_tokens"] - answer["reused_tokens"]
        assert read < (found[0]["prompt_tokens"] - found[0]["reused_tokens"]) / 2
        assert answer["reused_tokens"] >= text  # every section, or all of the document


def test_the_text_is_cut_into_tokens_once(monkeypatch):
    calls, ids = [], Codec.ids

    def counted(self, text):
        calls.extend([1] if len(text) >= len(TEXT) else [])
        return ids(self, text)

    monkeypatch.setattr(Codec, "ids", counted)
    answers("memagent", QUESTIONS[0])
    once = len(calls)
    answers("memagent", *QUESTIONS)
    assert len(calls) == 2 * once


def test_each_question_says_what_it_cost_and_is_a_reading_of_its_own():
    said = ask("notes.txt", QUESTIONS[0], "--also", QUESTIONS[1], *SMALL, "--name", "n").output
    assert "question 1 of 2: Where is Anna?" in said and "question 2 of 2: Where is Clara?" in said
    assert said.count("tokens read anew") == 2 and said.count("The whole trace: runs/n") == 2
    assert json.loads(Path("runs/n-2/document.json").read_text())["question"] == QUESTIONS[1]
    rows = Path("runs/n-2/turns.jsonl")
    before = rows.read_text()
    rows.write_text("".join(before.splitlines(keepends=True)[:2]))  # it was stopped there
    ask("--resume", "--name", "n-2")
    assert [json.loads(line)["response_ids"] for line in before.splitlines()] == [
        t["response_ids"] for t in turns("n-2")
    ]


def test_json_is_all_of_standard_output():
    done = ask("notes.txt", QUESTIONS[0], *SMALL, "--json")
    (answer,) = json.loads(done.stdout)
    assert answer["question"] == QUESTIONS[0] and "The whole trace" in done.stderr
    assert Path(answer["report"]).exists()
    said = ask("notes.txt", QUESTIONS[0], *SMALL)  # and the console is what it was
    assert "The whole trace" in said.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["notes.txt", "Where?", "--also", " "], "The question is empty"),
        (["--resume", "--name", "x", "--also", "Where?"], "leave --also out"),
        (["notes.txt", "Where?", "--also", "Who?", "--name", "y"], "runs/y-2 holds a reading"),
    ],
)
def test_a_mistake_is_one_sentence(words, said):
    Path("runs/y-2").mkdir(parents=True)
    Path("runs/y-2/document.json").touch()
    done = ask(*words, *([] if "--resume" in words else SMALL), code=2)
    assert said in done.output and done.output.count("\n") == 1
