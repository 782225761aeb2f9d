"""`ask` at a prompt in a terminal, and as a function of Python."""

import json
import os
import pty
import select
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from test_ask import alone, run, scripted, told, turns_of  # noqa: F401

import cli
from commands import questions
from commands.ask import Reader, prepare
from commands.screen import Screen
from config.errors import UserError
from config.options import EMBEDDED, AskConfig
from memagent import ask
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
QUESTIONS = "Where is Anna?", "Where is Clara?", "Where is Ida?"
SMALL = "--model tiny --agent memagent --chunk-tokens 12 --memory-tokens 8 --final-tokens 12"
PROMPT = "(empty to end): "


@pytest.fixture(autouse=True)
def notes(alone):  # noqa: F811
    Path("a.txt").write_text(TEXT)
    Path("b.txt").write_text("It rained.")


def lima(prompt):
    return "\\boxed{Lima}" if prompt.final else "Clara reached Lima."


def typed(words: str, *keys: str) -> tuple[int, str]:
    """Run `ask` in a forked child on a terminal; type each of `keys` when a prompt is shown.

    Returns its exit status and all that the terminal showed.
    """
    child, terminal = pty.fork()
    if not child:
        status = 1
        try:
            sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
            os.environ["TERM"] = "dumb"  # no colours, and no cursor that moves
            cli.app(["ask", *words.split("|"), *SMALL.split()])
        except SystemExit as end:
            status = end.code or 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    said, left, last = b"", [*keys], b""
    try:
        while True:
            # what is typed in the instant between prompt and waiting can be lost, Ctrl-C is
            if not select.select([terminal], [], [], 5)[0] and said.endswith(PROMPT.encode()):
                os.write(terminal, last)
                continue
            if not (piece := os.read(terminal, 1 << 16)):
                break
            said += piece
            if said.endswith(PROMPT.encode()):
                last = left.pop(0).encode()
                os.write(terminal, last)
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    os.close(terminal)
    assert not left, said
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.decode()


def asked() -> dict[str, str]:
    """Return the question of each reading that is kept."""
    paths = sorted(Path("runs").glob("*/transcripts.jsonl"))
    return {path.parent.name: json.loads(path.read_text())["question"] for path in paths}


def test_further_questions_at_a_prompt_are_readings_of_their_own():
    Path("runs/r-2").mkdir(parents=True)  # a name that is taken
    status, said = typed(
        "a.txt|Where is Anna?|--name|r", "Where is Clara?\n", "Where is Ida?\n", "\x04"
    )
    assert status == 0 and "Traceback" not in said and "memagent:" not in said
    assert asked() == {"r": "Where is Anna?", "r-3": "Where is Clara?", "r-4": "Where is Ida?"}
    assert said.count("Opening ") == 1 and said.count("The whole trace: ") == 3


def answers(name, agent, *asked):
    """Return the answers to questions, as they are asked at a prompt."""
    config = AskConfig(model="tiny", name=name)
    how = questions.How(agent, settings=dict(chunk_tokens=12, memory_tokens=8, final_tokens=12))
    screen, known = Screen(Console(quiet=True)), prepare(["a.txt"], config)
    with closing(Reader(*known, config, how, screen, again=len(asked) > 1)) as reader:
        return [reader.ask(question) for question in asked]


@pytest.mark.parametrize("agent", ["memagent", "full"])
def test_a_further_question_reads_no_section_anew(monkeypatch, agent):
    cut, ids = [], Codec.ids

    def counted(self, text):
        cut.extend([1] if len(text) >= len(TEXT) else [])
        return ids(self, text)

    monkeypatch.setattr(Codec, "ids", counted)
    found, n = answers("a", agent, *QUESTIONS), len(cut)
    single = [answers(f"b{k}", agent, question)[0] for k, question in enumerate(QUESTIONS)]
    # the text is cut into tokens once, however many ask; `full` asks the codec once a question
    assert agent == "full" or len(cut) == 4 * n
    same = ("question", "answer", "quote", "agent", "prompt_tokens", "written_tokens")
    for k, (one, other) in enumerate(zip(found, single, strict=True)):
        assert [getattr(one, name) for name in same] == [getattr(other, name) for name in same]
        made, own = turns_of(f"a-{k + 1}" if k else "a"), turns_of(f"b{k}")
        assert [t["response_ids"] for t in made] == [t["response_ids"] for t in own]
    for answer in found[1:]:  # every section, or all of the document, is in the cache
        assert answer.reused_tokens >= len(Codec.load(EMBEDDED).encode(TEXT))


def test_without_a_question_the_first_is_asked_for_too():
    status, said = typed("a.txt|b.txt|--name|r", "Where is Anna?\n", "\n")
    assert status == 0 and asked() == {"r": "Where is Anna?"}
    assert said.index("Reading a.txt, b.txt ...") < said.index(PROMPT) < said.index("Opening ")
    for end in ("\x04", "\x03"):  # Ctrl-D, Ctrl-C
        status, said = typed("a.txt|--name|s", end)
        assert status == 0 and "Opening" not in said and not Path("runs/s").exists()
    assert typed("nothing.txt")[0] == 2


@pytest.mark.parametrize(("stdin", "stdout", "more"), [
    (False, True, ()), (True, False, ()), (True, True, ("--json",)),
])  # fmt: skip
def test_there_is_a_prompt_in_a_terminal_alone(monkeypatch, codec, stdin, stdout, more):
    scripted(monkeypatch, codec, lima)
    ends = [SimpleNamespace(isatty=lambda x=x: x, encoding="utf-8") for x in (stdin, stdout)]
    monkeypatch.setattr(questions, "sys", SimpleNamespace(stdin=ends[0], stdout=ends[1]))
    monkeypatch.setattr(questions, "_prompt", lambda prompt: pytest.fail("a prompt is shown"))
    assert "Lima" in run("a.txt", "Where is Clara?", *SMALL.split(), *more)
    for words in (["a.txt"], ["a.txt", "b.txt"], ["a.txt", ""]):
        run(*words, *SMALL.split(), *more, code=2)


HOW = 'QUESTION".'


@pytest.mark.parametrize(("words", "named", "how"), [
    ("a.txt|Where is Anna?|Who left?", "No file at Where is Anna?", HOW),
    ("a.txt|Where?|Who?", "No file at Where?", HOW),
    ("a.txt|Where|is|Anna?", "No file at Where", HOW),
    ("Where is Anna?|README", "No file at Where is Anna?", HOW),
    ("Where is Anna?|a.txt", "a.txt is a file or folder", "comes last."),
    ("b.pdf|Where?", "b.pdf cannot be read", "directory."),  # no question by its looks
    ("x/y|Where?", "x/y cannot be read", "directory."),
    ("https://b.org/c.pdf|Who?", "https://b.org/c.pdf is on the web", 'cli.py ask - "QUESTION".'),
])  # fmt: skip
def test_a_question_among_the_files_is_told_from_a_file_that_is_not_there(words, named, how):
    *_, last = run(*words.split("|"), code=2).strip().splitlines()
    assert last.startswith(f"memagent: {named}") and last.endswith(how)


# ---------------------------------------------------------------- a function of Python


def test_four_lines_of_python(monkeypatch, codec, capsys):
    scripted(monkeypatch, codec, lima)
    how = dict(model="tiny", agent="memagent", memory_tokens=99, final_tokens=99)
    for documents in ("a.txt", Path("a.txt"), [Path("b.txt"), "a.txt"]):
        reading = ask(documents, "Where is Clara?", **how)
        assert reading.answer == "Lima" and reading.page is None
        assert reading.memory == "Clara reached Lima." and reading.quote == "Rosa toured Lima."
    assert reading.where == "a.txt" and reading.found
    assert capsys.readouterr() == ("", "") and not Path("runs").exists() and not reading.report
    kept = ask("a.txt", "Where is Clara?", name="r", **how)
    assert Path(kept.report) == Path("runs/r/report.html") and Path(kept.report).exists()
    flags = "--model tiny --agent memagent --memory-tokens 99 --final-tokens 99".split()
    (plain,) = told("a.txt", "Where is Clara?", *flags)
    same = plain.keys() - {"report", "seconds"}
    assert {name: plain[name] for name in same} == {name: getattr(kept, name) for name in same}


@pytest.mark.parametrize(("documents", "question", "settings", "words"), [
    ("nothing.txt", "Where?", {}, ""),
    ("a.txt", " ", {}, ""),
    ("a.txt", "", {}, ""),
    ("a.txt", "Where?", {"temperature": -1.0}, "--temperature -1"),
    ("a.txt", "Where?", {"served_as": "m"}, "--served-as m"),
    ("a.txt", "Where?", {"model": "tiny", "agent": "nobody"}, "--model tiny --agent nobody"),
])  # fmt: skip
def test_a_mistake_is_the_sentence_of_the_command(documents, question, settings, words):
    *_, last = run(documents, question, *words.split(), code=2).strip().splitlines()
    with pytest.raises(UserError) as error:
        ask(documents, question, **settings)
    assert last == f"memagent: {error.value}"


def test_a_setting_that_nobody_has_is_named():
    with pytest.raises(UserError, match="chunk_token"):
        ask("a.txt", "Where?", model="tiny", agent="memagent", chunk_token=9)


FIRST = """
import sys
from memagent import ask
import commands.questions as questions, cli
def shown(line, to):
    print(line, {"torch", "tokenizers", "commands.ask"} & sys.modules.keys())
    sys.exit()
questions.say = shown
cli.app(["ask", "a.txt", "b.txt", "a.txt", "b.txt", "Where?"])
"""


def test_the_first_line_waits_for_no_library():
    root = {"PYTHONPATH": str(Path(cli.__file__).parent)}
    command = [sys.executable, "-c", FIRST]
    said = subprocess.run(command, env=os.environ | root, capture_output=True, text=True)
    assert said.stdout == "Reading a.txt, b.txt, a.txt and 1 more ... set()\n", said
