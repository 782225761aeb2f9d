"""`ask`: pages, the estimate, who answers, which agent reads, readings that are stopped."""

import io
import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from test_documents import pdf
from test_endpoint import SECRET, Server
from typer.testing import CliRunner

import cli
from agents import find
from commands import ask as commands_ask
from commands import screen
from commands.ask import ALL, FIRST_TOKENS, Reading, Step
from commands.questions import Answer
from config.errors import UserError
from config.options import EMBEDDED
from config.terminal import bar, console
from data import NOT_FOUND, Task
from embedded import tiny
from engines import local
from engines.scripted import ScriptedEngine
from memagent import NO_MEMORY, Finish, Prompt, Turn
from tasks import served
from tasks.documents import Document, Part
from tokens.codec import Characters

NOBODY = "127.0.0.1:1"  # where no Ollama listens
TEXT = "Anna reached Lima. "
ROOM = "--memory-tokens 99 --final-tokens 99".split()
SMALL = "--model tiny --agent memagent --chunk-tokens 6".split()


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch, read_here):
    """In a folder of its own, where neither a server nor an Ollama is at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(local.HOST, NOBODY)
    monkeypatch.delenv(local.BASE_URL, raising=False)
    monkeypatch.delenv(local.CONTEXT, raising=False)


@pytest.fixture
def server(codec):
    """A server that takes text alone."""
    server = Server(codec, ids=False)
    yield server
    server.stop()


def run(*words, code=0, **more):
    result = CliRunner().invoke(cli.app, ["ask", *map(str, words)], **more)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    # what no terminal shows has no colours, no bar and no cursor that moves
    assert not re.search("[\0-\x08\x0b-\x1f\x7f]", result.output)
    return result.output


def told(*words) -> list[dict]:
    return json.loads(CliRunner().invoke(cli.app, ["ask", *map(str, words), "--json"]).stdout)


def scripted(monkeypatch, codec, script, window=None):
    """Answer every prompt by a function, whoever is to answer."""

    def opened(config, agents, **_):
        engine = ScriptedEngine(codec, script)
        engine.window = window
        return engine

    monkeypatch.setattr(commands_ask, "open_reader", opened)


def lima(prompt):
    return "\\boxed{Lima}"


def turns_of(name):
    (line,) = Path("runs", name, "transcripts.jsonl").read_text().splitlines()
    return json.loads(line)["turns"]


def text(n=1, name="a.txt"):
    Path(name).write_text(TEXT * n)


# ---------------------------------------------------------------- a reading


def test_pages_of_the_memory_and_of_the_answer(monkeypatch, codec):
    people = ["Anna left.", "Boris met Ida.", "Clara reached Lima.", "", "Emil met Otto."]
    Path("report.pdf").write_bytes(pdf(*people, title="Travels"))

    def script(prompt):
        if prompt.final:
            return "\\boxed{<i>Lima</i>}"
        return "Clara reached Lima." if "Lima" in prompt.section + prompt.memory else "nothing"

    scripted(monkeypatch, codec, script)
    lines = run("report.pdf", "Where is <Clara>?", *SMALL, *ROOM, "--name", "r").splitlines()
    assert sum("page 4 has no text" in line for line in lines) == 2  # and once more at the end
    turns = turns_of("r")
    (size,) = [line for line in lines if line.startswith("5 pages, ")]
    assert re.fullmatch(
        rf"5 pages, \d+ tokens, {len(turns) - 1} sections, about \d+ seconds?", size
    )
    changes = [line for line in lines if line.startswith("section ")]
    assert changes[0] == "section 1, page 1: {+nothing+}" and lines.index(size) < lines.index(
        changes[0]
    )
    (found,) = [line for line in changes if "Lima" in line]
    where = turns[int(found.split(",")[0].split()[1]) - 1]["where"]
    assert "3" in where and where in found
    page = Path("runs/r/report.html").read_text()
    assert page.count("<h3>section ") == len(turns) - 1
    places = [
        page.find(words)
        for words in (
            "<h1>Where is &lt;Clara&gt;?</h1>",
            "Answer: &lt;i&gt;Lima&lt;/i&gt; (not found in the document)",
            "report.pdf (5 pages): page 4 has no text",
            "cli.py ask report.pdf QUESTION",
            "<ins>nothing</ins>",
        )
    ]
    assert -1 not in places and places == sorted(places)
    shown = CliRunner().invoke(cli.app, ["show", "runs/r"]).output
    assert "section 1 of" in shown and "reward" not in shown


def test_what_is_said_of_a_reading_is_what_its_first_step_and_its_end_say(codec):
    """The time is the first step's for each section and the answer."""
    agent, to = tiny.agent(chunk_tokens=6).on(codec), Console(file=io.StringIO(), width=200)
    document = Document(TEXT * 3, (Part(0, "a", "file", 0),), "a")
    task = Task("a", "Where?", (), document.text)
    shown, sections = screen.Screen(to), agent.sections(task)
    turn = Turn(Prompt((), 9), [1], [2], [0.0], Finish.STOP, "x")
    with shown.reading(document, agent, sections) as show:
        for number in (1, 2):
            show(Step(turn, "", 600.0, number))
    end = replace(turn, prompt=Prompt((), 9, final=True, cut=7), response="Why: \\boxed{Lima}")
    answer, steps = Answer("Where?", "Lima", *8 * [""]), [Step(end, "", 1.0, 2)]
    shown.answer(Reading(task, agent, steps, answer, "", ALL), ())
    printed = to.file.getvalue()
    assert printed.count(f"about {10 * (len(sections) + 1)} minutes") == 1
    assert "7 tokens of the text were not read" in printed and "Why: \\boxed{Lima}" in printed


@pytest.mark.parametrize(
    ("empty", "shown"), [("keep", ["1"]), ("placeholder", ["1", "2"]), ("empty", ["1", "2"])]
)
def test_a_section_that_leaves_the_memory_alone_shows_nothing(monkeypatch, codec, empty, shown):
    """The first section is noted; nothing is said to the others, but thoughts to the last."""
    Path("a.txt").write_text("Anna reached Lima. Boris met Ida. Emil met Otto.")

    def script(prompt):
        if prompt.final:
            return lima(prompt)
        if "Emil" in prompt.section:
            return "<think>Emil?</think>"
        return "Anna reached Lima." if "Anna" in prompt.section else ""

    scripted(monkeypatch, codec, script)
    small = "--model tiny --agent memagent --chunk-tokens 4".split()
    printed = run("a.txt", "Where?", *small, *ROOM, "--empty", empty, "--name", "r")
    assert [t["response"].strip() for t in turns_of("r")][1:3] == ["", "<think>Emil?</think>"]
    changes = [line for line in printed.splitlines() if line.startswith("section ")]
    assert [line.partition(":")[0] for line in changes] == [f"section {n}" for n in shown]
    if empty == "keep":
        assert turns_of("r")[-1]["memory"].strip() == "Anna reached Lima."


@pytest.mark.parametrize("form", ["boxed", "plain"])
def test_what_nothing_was_noted_of_is_not_found_and_no_model_guesses(monkeypatch, codec, form):
    text()
    scripted(monkeypatch, codec, lambda p: "Oslo" if p.final else "")
    flags = ["a.txt", "Where?", *SMALL, *ROOM, "--empty", "keep", "--form", form]
    (answer,) = told(*flags, "--name", "r")
    assert answer["answer"] == NOT_FOUND and answer["found"] is None and not answer["quote"]
    assert f"Answer: {NOT_FOUND}" in Path("runs/r/report.html").read_text()
    printed = run(*flags).splitlines()
    assert printed.count(f"answer: {NOT_FOUND}") == 1
    assert not any("Found" in line or "boxed" in line for line in printed)
    assert "answer: Oslo" in run(*flags, "--not-found", "guess")


@pytest.mark.parametrize("answer, lines", [
    ("Lima", ["answer: Lima", "Found in the text: 'Anna reached Lima.'"]),
    ("Kyoto", ["answer: Kyoto (not found in the document)"]),
    ("yes", ["answer: yes"]),
])  # fmt: skip
def test_where_the_words_of_an_answer_stand(monkeypatch, codec, answer, lines):
    text()
    scripted(monkeypatch, codec, lambda p: f"\\boxed{{{answer}}}")
    flags = "a.txt", "Where is Anna?", "--model", "tiny", "--final-tokens", 99
    assert "\n".join(lines) in run(*flags)
    (found,) = told(*flags, "--name", "r")
    page = Path("runs/r/report.html").read_text()
    assert all(line.removeprefix("answer: ").replace("'", "&#39;") in page for line in lines)
    assert found["found"] == {"Lima": True, "yes": None}.get(answer, False)
    assert found["quote"] == ("Anna reached Lima." if found["found"] else "")
    assert found["pages"] == [] and found["where"] == ""  # a text has none


def test_what_no_word_of_the_question_is_in_is_said_once(monkeypatch, codec):
    Path("a.txt").write_text("Anna reached Lima. Boris met Ida. Emil met Otto. " * 9)
    scripted(monkeypatch, codec, lima)
    flags = *"--model tiny --agent bm25 --chunk-tokens 9 --top-k 2".split(), *ROOM
    for question, n in (("Warum?", 1), ("Where is Otto?", 0)):
        assert run("a.txt", question, *flags).count("No word of the question") == n
        (found,) = told("a.txt", question, *flags)
        assert len(found["remarks"]) == n


@pytest.mark.parametrize("response, last", [
    ("It is Lima.", "answer: It is Lima."),
    ("\\boxed{Lima}", "answer: Lima"),
    ("\x1b[31m\\boxed{Lima\x07}", "answer: Lima\ufffd"),
    ("", "No answer: the model wrote none. Try another --agent or --model."),
])  # fmt: skip
def test_an_answer_is_shown_once_and_steers_no_terminal(monkeypatch, codec, response, last):
    text()
    scripted(monkeypatch, codec, lambda prompt: response)
    printed = run("a.txt", "Where?", "--model", "tiny", "--agent", "none", *ROOM)
    assert last in printed and "no answer" not in printed
    unboxed = "boxed" not in response and bool(response)
    assert ("not in the form that was asked for, \\boxed{...}" in printed) == unboxed
    assert printed.count("It is Lima.") == unboxed  # once


def test_of_the_embedded_policy_is_said_what_it_cannot_read(monkeypatch, codec):
    scripted(monkeypatch, codec, lima)
    for words, noted in (("Anna reached Lima.\n", False), ("The contract was signed.", True)):
        Path("a.txt").write_text(words)
        assert ("embedded policy knows" in run("a.txt", "Where?", *SMALL, *ROOM)) == noted


def test_what_an_agent_shows_of_its_turns_stands_between_the_changes(monkeypatch, codec):
    responses = iter((
        "<update>Otto.</update><recall>Ida</recall>",
        "<update>Rosa.</update><recall>who was Otto?</recall>",
        "<recall>Otto",
        "\\boxed{Lima}",
    ))  # fmt: skip
    scripted(monkeypatch, codec, lambda prompt: next(responses))
    Path("a.txt").write_text("Anna reached Lima. Otto reached Rome. Ida met Emil.")
    small = "--model tiny --agent rememr1 --step-tokens 99 --query-tokens 99 --chunk-tokens 4"
    shown = " ".join(run("a.txt", "Where?", *small.split(), "--final-tokens", 99).split())
    words = "1: {+Otto.+}", "looks for Ida", "2: [-Otto.-] {+Rosa.+}", "recalled Otto.", "answer:"
    places = [shown.find(each) for each in words]
    assert -1 not in places and places == sorted(places), shown
    assert "section 3" not in shown  # the memory stayed as it was


@pytest.mark.parametrize(("colours", "words"), [
    (False, "Anna met [-Otto.-] {+Boris.+} It rained."), (True, "Anna met Otto. Boris. It rained."),
])  # fmt: skip
def test_a_change_is_marked_where_no_colours_are_shown(codec, colours, words):
    prompt = Prompt((), 9, section="x", memory="Anna met Otto. It rained.")
    turn = Turn(prompt, [], [], [], Finish.STOP, codec.text("Anna met Boris. It rained."))
    (line,) = screen.changes(Step(turn, "page 3", 0.1, 7), tiny.agent(), colours)
    assert line.plain.rstrip() == f"section 7, page 3: {words}"


def test_names_in_a_file_are_no_markup_in_a_terminal(monkeypatch, codec):
    Path("d/[").mkdir(parents=True)
    text(name="d/[/sources] \x1b[31m.txt")
    text(name="d/b.txt")
    for name, value in (("_force_terminal", True), ("is_interactive", True), ("_width", 160)):
        monkeypatch.setattr(console, name, value)
    monkeypatch.setenv("TERM", "xterm")
    bars = []
    monkeypatch.setattr(screen, "bar", lambda *how: bars.append(bar(*how)) or bars[-1])

    def script(prompt):
        bars[0].refresh()  # as it does by itself twice a second
        return "Lima"

    scripted(monkeypatch, codec, script)
    small = "--model tiny --agent memagent --chunk-tokens 4".split()
    result = CliRunner().invoke(cli.app, ["ask", "d", "Where?", *small, *ROOM])
    assert result.exit_code == 0 and "read: [/sources] \ufffd[31m.txt" in result.output, result
    assert "\x1b[31m." not in result.output


def test_files_folders_and_standard_input_are_one_document(monkeypatch, codec):
    scripted(monkeypatch, codec, lima)
    tiny_model = ("--model", "tiny", "--final-tokens", 99)
    assert "answer: Lima" in run("-", "Where?", *tiny_model, input=TEXT)
    assert "2 pages, " in run("-", "Where?", *tiny_model, input=pdf("Anna.", "Lima."))
    run("-", "Where?", *tiny_model, input=b"\0\1\2", code=2)
    Path("d").mkdir()
    Path("d/2.txt").write_text("Anna.")
    Path("d/10.txt").write_text("She reached Lima.")
    Path("e.md").write_text("Boris.")
    printed = run("d", "e.md", "Where?", *tiny_model)
    assert "3 files, " in printed and "Found in 10.txt: 'She reached Lima.'" in printed
    question = "Anna has left. " * 30 + "Where is she?"  # what is too long for a name is none
    for words in (question, question.replace("Anna", "x/Anna"), "Where? " + "\u00e9" * 200 + ".x"):
        assert "answer: Lima" in run("d", words, *tiny_model)


@pytest.mark.parametrize("words", [
    "", "a.txt", "a.txt| ", "Where?|a.txt",
    "a.txt|Where is the caf\udce9?", "a.txt|Where is the .caf\ud800?", "b.bin|Where?",
    "empty.txt|Where?", "scan.pdf|Where?", "a.txt|Where?|--name|..",
    "a.txt|Where?|--name|other",
    "a.txt|Where?|--temperature|-1", "a.txt|Where?|--served-as|llama3", "a.txt|Where?|--chat",
    "a.txt|Where?|--model|tiny|--served-as|m",
])  # fmt: skip
def test_a_mistake_is_one_sentence_and_leaves_nothing(words):
    text()
    Path("b.bin").write_bytes(b"\0\1")
    Path("empty.txt").write_text("")
    Path("scan.pdf").write_bytes(pdf(""))
    Path("runs/other").mkdir(parents=True)
    Path("runs/other/config.yaml").write_text("run: {}\n")
    before = sorted(Path().rglob("*"))
    *first, out = run(*filter(None, words.split("|")), code=2).strip().splitlines()
    assert out.startswith("memagent: ") and first in ([], [f"Reading {words.split('|')[0]} ..."])
    assert sorted(Path().rglob("*")) == before


# ---------------------------------------------------------------- stopped


@pytest.mark.parametrize(("error", "code"), [
    (KeyboardInterrupt, 130), (UserError("The server is gone."), 2),
])  # fmt: skip
def test_a_reading_that_is_stopped_leaves_nothing_and_can_be_asked_anew(
    monkeypatch, codec, error, code
):
    text(9)
    asking, turns = ("a.txt", "Where is Anna?", *SMALL, *ROOM, "--name", "x"), []

    def script(prompt):
        turns.append(prompt)
        if len(turns) == 3:
            raise error
        return lima(prompt)

    scripted(monkeypatch, codec, script)
    printed = run(*asking, code=code)
    assert ("stopped; nothing of this reading is kept" in printed) == (code == 130)
    assert [*Path("runs").iterdir()] == []
    run(*asking)
    assert len(turns_of("x")) == len(turns) - 3


def test_readings_that_take_one_name_leave_each_other_whole(monkeypatch, codec):
    text()
    names = ["Where is Ida?", "Where is Anna?"]

    def script(prompt):
        if names:  # another process begins and ends after the name was looked at
            run("a.txt", names.pop(), *asking)
        return lima(prompt)

    scripted(monkeypatch, codec, script)
    asking = ("--model", "tiny", "--final-tokens", 99, "--name", "x")
    run("a.txt", names.pop(), *asking)
    kept = {path.parent.name: path for path in Path("runs").glob("*/transcripts.jsonl")}
    assert {*kept} == {"x", "x-2"}
    asked = [json.loads(path.read_text())["question"] for path in kept.values()]
    assert len({*asked}) == 2 and run("a.txt", "Where?", *asking, code=2)


# ---------------------------------------------------------------- who answers


def as_ollama(monkeypatch, server, window):
    found = local.Answerer("m of the Ollama", "", (server.url,), "m", window)
    monkeypatch.setattr(local, "_ollama", lambda name: found)


def contents(server, first=0):
    return [body["messages"][0]["content"] for body in server.bodies[first:]]


def test_an_ollama_is_asked_in_sections_that_fit_its_window(monkeypatch, server):
    text(4000)
    as_ollama(monkeypatch, server, 4096)
    printed = run("a.txt", "Where is Anna?")
    assert "in sections of 1,024 tokens for its window of 3,072" in printed
    first, *sent = contents(server)
    assert len(sent) > 18 and max(map(len, sent)) < 4 * 1024 + 2000
    assert len(first) < 4 * 4 * FIRST_TOKENS + 1000  # four shorter ones that match best


def test_a_server_is_asked_before_a_document_is_read(monkeypatch):
    monkeypatch.setattr(commands_ask.documents, "read", None)
    text(900)
    assert "127.0.0.1:1" in run("a.txt", "Where?", "--endpoint", "http://127.0.0.1:1/v1", code=2)


def test_a_server_that_fails_is_told_of_at_once_and_not_waited_for_long(monkeypatch, server):
    monkeypatch.setattr(served, "count_retries", lambda patience_s: 2)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    text(900)
    monkeypatch.setenv(local.HOST, server.url.split("/")[2])
    asking = ("a.txt", "Where?", "--agent", "memagent")
    busy, few = (500, {"error": "model is loading"}), "requires more system memory (5.6 GiB)"
    server.faults = [busy, busy]
    assert run(*asking).count("HTTP 500: model is loading; trying again.") == 1
    server.faults, before = ["", (500, {"error": few})], len(server.bodies)
    printed = run(*asking, code=2).splitlines()[-1]
    assert len(server.bodies) == before + 2 and "trying" not in printed  # nobody waits for memory
    assert few in printed and "--served-as" in printed
    server.always = busy
    assert re.search(r"trying again.*after \d+ tries", run(*asking, code=2), re.DOTALL)


def test_what_does_not_fit_a_window_is_asked_anew_in_smaller_sections(server):
    text(1200)
    asking = ("a.txt", "Where?", "--endpoint", server.url)
    full = (400, {"error": {"message": "This model's maximum context length is 4096 tokens."}})
    server.faults = ["", full]
    assert "--chunk-tokens, such as 1024" in run(*asking, "--agent", "memagent", code=2)
    server.faults = [full]
    assert "--agent memagent" in run(*asking, "--agent", "full", code=2)


def test_the_key_is_sent_to_a_server_that_was_named_and_to_no_other(monkeypatch, server):
    text(900)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv(local.HOST, server.url.split("/")[2])
    asking, keys = ("a.txt", "Where?", "--agent", "memagent"), server.keys
    for named, words in ((False, ()), (True, ("--endpoint", server.url)), (True, ())):
        if named and not words:
            monkeypatch.setenv(local.BASE_URL, server.url)
        keys.clear()
        run(*asking, *words)
        assert keys == {f"Bearer {SECRET}" if named else None}


def test_the_embedded_policys_settings_are_never_used_with_an_endpoint(monkeypatch, server):
    """Neither with --endpoint nor with OPENAI_BASE_URL: sections are cut by characters."""
    text(1200)
    monkeypatch.setenv(local.BASE_URL, server.url)
    for name, words in (("e", ("--endpoint", server.url)), ("b", ())):
        printed = run("a.txt", "Where?", "--agent", "memagent", "--name", name, *words)
        stored = find.stored_settings(Path("runs", name, "config.yaml"), None)
        defaults = asdict(find.make("memagent", {}).config)
        assert stored["agent"] == defaults | {"empty": "keep", "not_found": "say"}
        assert "about 5,700 tokens" in printed
    assert all("prompt" not in body for body in server.bodies)


def test_a_model_that_thinks_for_too_long_loses_nothing_that_was_noted(server):
    text(900)
    silent = {"message": {"content": "", "reasoning": "hm"}, "finish_reason": "length"}
    asking = ("a.txt", "Where?", "--endpoint", server.url)
    memories = {}
    for name, more in (
        ("agent", ("--agent", "memagent")),
        ("preset", ("--preset", "paper")),
        ("given", ("--agent", "memagent", "--empty", "placeholder")),
    ):
        server.faults = ["", {"choices": [silent]}]
        run(*asking, *more, "--name", name, "--chunk-tokens", 2048)
        assert [turn["response"] for turn in turns_of(name)][1] == ""
        memories[name] = turns_of(name)[2]["memory"]
    assert "Anna joined" in memories["agent"]
    assert memories["given"] == memories["preset"] == NO_MEMORY
    run(*asking, "--agent", "full")  # has no such setting


# ---------------------------------------------------------------- which agent reads


def chosen(monkeypatch, codec, tokens, window=None, model="tiny", **config):
    """Return what is said about the agent that reads a document of so many tokens."""
    scripted(monkeypatch, codec, lambda p: "\\boxed{x}" if p.final else "x", window)
    text(tokens // 4)
    flags = {"model": model} | config
    printed = run("a.txt", "Where?", *[w for k, v in flags.items() for w in (f"--{k}", v)])
    (line,) = [line for line in printed.splitlines() if re.match("Reading .*with ", line)]
    return line.removeprefix("Reading ").removesuffix(".")


def test_the_length_of_a_document_decides_which_agent_reads(monkeypatch, codec):
    short, at_once, by_section = (chosen(monkeypatch, codec, n, 1600) for n in (90, 400, 4000))
    first = "first the sections that match best, then "
    assert short.startswith("all at once with full, since it fits half the window")
    assert at_once == f"{first}{short}"
    assert by_section.startswith(f"{first}section by section with memagent, since it is longer")
    shutil.copytree(EMBEDDED, "m")
    assert chosen(monkeypatch, codec, 100, model="m", agent="none") == "with none, as --agent says"
    with Path("m/agent.yaml").open("a") as file:
        file.write("run: {agent: memagent}\n")
    line = chosen(monkeypatch, codec, 100, model="m")
    assert line == (
        f"{first}section by section with memagent, the agent that the model was trained with"
    )


# ---------------------------------------------------------------- the estimate


@pytest.mark.parametrize(("parts", "tokens", "seconds", "words"), [
    ([("file", 0)], 131_234, None, "about 131,000 tokens, 59 sections"),
    ([("page", 1), ("page", 2)], 999, 840, "2 pages, about 999 tokens, 59 sections, about 14 min"),
    ([("file", 0)], 1, 89, "about 1 token, 59 sections, about 89 seconds"),
])  # fmt: skip
def test_the_estimate_is_measured_and_rounded(parts, tokens, seconds, words):
    document = Document("xx", tuple(Part(0, "a", *part) for part in parts), "a")
    sections = type("S", (), {"ids": range(tokens), "left_out": 0, "__len__": lambda s: 59})()
    agent = tiny.agent().on(Characters())
    assert screen.estimate(document, agent, sections, seconds).startswith(words)
