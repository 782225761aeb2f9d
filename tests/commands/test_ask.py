"""`ask`: pages, the estimate, who answers, which agent reads, stop and go on."""

import contextlib
import json
import re
import shutil
import threading
from dataclasses import asdict
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.color import ColorSystem
from test_documents import pdf
from test_endpoint import SECRET, Server
from typer.testing import CliRunner

import cli
from agents import find
from commands import ask as commands_ask
from commands.ask import How
from config.errors import UserError
from config.locks import writing
from config.options import EMBEDDED, READER, READER_TITLE, AskConfig, EvalConfig
from config.terminal import bar
from embedded import tiny
from engines import endpoint, local
from engines.local import answerer
from engines.open import open_reader
from engines.replay import Replay
from engines.scripted import ScriptedEngine
from memagent import NO_MEMORY, Finish, Prompt, Turn
from tokens.codec import Characters

NOBODY = "127.0.0.1:1"  # where no Ollama listens


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """In a folder of its own, where neither a server nor an Ollama is at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(local.HOST, NOBODY)
    monkeypatch.delenv(local.BASE_URL, raising=False)
    monkeypatch.delenv(local.CONTEXT, raising=False)


def run(*words, code=0, **more):
    result = CliRunner().invoke(cli.app, ["ask", *map(str, words)], **more)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    # what no terminal shows has no colours, no bar and no cursor that moves
    assert not re.search("[\0-\x08\x0b-\x1f\x7f]", result.output)
    return result.output


def scripted(monkeypatch, codec, script, window=None):
    """Answer every prompt but those on trial by a function, whoever is to answer."""

    def opened(config, agents, **_):
        engine = ScriptedEngine(codec, lambda p: script(p) if p.section or p.final else "x")
        engine.window = window
        return engine

    monkeypatch.setattr(commands_ask, "open_reader", opened)


def turns_of(name):
    lines = Path("runs", name, "turns.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# ---------------------------------------------------------------- a reading


def test_pages_of_the_memory_and_of_the_answer(monkeypatch, codec):
    people = ["Anna left.", "Boris met Ida.", "Clara reached Lima.", "", "Emil met Otto."]
    Path("report.pdf").write_bytes(pdf(*people, title="Travels"))

    def script(prompt):
        if prompt.final:
            return "\\boxed{Lima}"
        return "Clara reached Lima." if "Lima" in prompt.section + prompt.memory else "nothing"

    scripted(monkeypatch, codec, script)
    small = "--model tiny --agent memagent --chunk-tokens 6 --memory-tokens 99 --final-tokens 99"
    said = run("report.pdf", "Where is Clara?", *small.split(), "--name", "r")
    lines = said.splitlines()
    assert lines[0] == "report.pdf: of 5 pages 1 has no text (empty, or a picture)."
    assert "as --agent says" in lines[1] and "the embedded policy on this machine" in lines[1]
    (size,) = [line for line in lines if line.startswith("5 pages, ")]
    n = len(turns_of("r")) - 1
    assert re.fullmatch(rf"5 pages, \d+ tokens, {n} sections, about \d+ seconds?", size)
    changes = [line for line in lines if line.startswith("section ")]
    assert changes[0] == f"section 1, page 1: [-{NO_MEMORY}-] {{+nothing+}}"
    (found,) = [line for line in changes if "Lima" in line]
    where = turns_of("r")[int(found.split(",")[0].split()[1]) - 1]["where"]
    assert "3" in where and where in found
    assert lines.index(size) < lines.index(changes[0])  # before the memory changes
    assert lines[-3:] == [
        "answer: Lima", "Its words stand on page 3.", "The whole trace: runs/r/report.html",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("empty", "shown"), [("keep", ["1"]), ("placeholder", ["1", "2"]), ("empty", ["1", "2"])]
)
def test_a_section_that_leaves_the_memory_alone_shows_nothing(monkeypatch, codec, empty, shown):
    """The first section is noted; nothing is said to the others, but thoughts to the last."""
    Path("a.txt").write_text("Anna reached Lima. Boris met Ida. Emil met Otto.")

    def script(prompt):
        if prompt.final:
            return "\\boxed{Lima}"
        if "Emil" in prompt.section:
            return "<think>Emil?</think>"
        return "Anna reached Lima." if "Anna" in prompt.section else ""

    scripted(monkeypatch, codec, script)
    small = "--agent memagent --chunk-tokens 4 --memory-tokens 99 --final-tokens 99".split()
    said = run("a.txt", "Where?", "--model", "tiny", *small, "--empty", empty, "--name", "r")
    responses = [turn["response"].strip() for turn in turns_of("r")]
    assert responses[1:3] == ["", "<think>Emil?</think>"]
    changes = [line for line in said.splitlines() if line.startswith("section ")]
    assert [line.partition(":")[0] for line in changes] == [f"section {n}" for n in shown]
    if empty == "keep":
        assert turns_of("r")[-1]["memory"].strip() == "Anna reached Lima."


def test_the_page_and_show_have_the_whole_trace(monkeypatch, codec):
    Path("a.txt").write_text("Anna reached Lima. <b>" * 40)
    scripted(monkeypatch, codec, lambda p: "\\boxed{<i>Lima</i>}" if p.final else "same")
    how = How("memagent", settings=dict(chunk_tokens=8, memory_tokens=99, final_tokens=99))
    commands_ask.ask(["a.txt", "Where is <Anna>?"], AskConfig(model="tiny", name="r"), how)
    page = Path("runs/r/report.html").read_text()
    n = len(turns_of("r")) - 1
    assert n > 24 and page.count("<h3>Section ") == n and "left out" not in page
    assert "Where is &lt;Anna&gt;?" in page and "&lt;i&gt;Lima" in page
    assert "graded" not in page and ">wrong<" not in page and ">gold<" not in page
    shown = CliRunner().invoke(cli.app, ["show", "runs/r"]).output
    assert "section 1 of" in shown and "reward" not in shown


def test_an_answer_whose_words_the_document_does_not_hold_is_marked(monkeypatch, codec):
    Path("a.txt").write_text("Anna reached Lima.")
    for answer, words in (
        ("Kyoto", "stand nowhere in the text"),
        ("yes", ""),
        ("Lima was reached", "Its rarest words stand near each other in the text."),
    ):
        scripted(monkeypatch, codec, lambda p, answer=answer: f"\\boxed{{{answer}}}")
        said = run("a.txt", "Where?", "--model", "tiny", "--final-tokens", 99)
        assert words in said and ("words stand" in said) == bool(words)


def test_a_change_is_marked_where_no_colours_are_shown(monkeypatch, codec):
    prompt = Prompt((), 9, section="x", memory="Anna met Otto. It rained.")
    turn = Turn(prompt, [], [], [], Finish.STOP, codec.text("Anna met Boris. It rained."))
    agent = tiny.agent()
    for colours, words in (
        (None, "Anna met [-Otto.-] {+Boris.+} It rained."),
        (ColorSystem.STANDARD, "Anna met Otto. Boris. It rained."),
    ):
        monkeypatch.setattr(commands_ask.console, "_color_system", colours)
        (line,) = commands_ask._lines(turn, agent, 7, "page 3")
        assert line.plain.rstrip() == f"section 7, page 3: {words}"


def test_names_in_a_file_are_no_markup_in_a_terminal(monkeypatch, codec):
    Path("d/[").mkdir(parents=True)
    Path("d/[/sources] \x1b[31m.txt").write_text("Anna reached Lima.")
    Path("d/b.txt").write_text("Anna reached Lima.")
    for name, value in (("_force_terminal", True), ("is_interactive", True), ("_width", 160)):
        monkeypatch.setattr(commands_ask.console, name, value)
    monkeypatch.setenv("TERM", "xterm")
    bars = []
    monkeypatch.setattr(commands_ask, "bar", lambda unit: bars.append(bar(unit)) or bars[-1])

    def script(prompt):
        bars[0].refresh()  # as it does by itself twice a second
        return "Lima"

    scripted(monkeypatch, codec, script)
    asking = "--model tiny --agent memagent --chunk-tokens 4 --memory-tokens 99 --final-tokens 99"
    result = CliRunner().invoke(cli.app, ["ask", "d", "Where?", *asking.split()])
    assert result.exit_code == 0 and "read: [/sources] \ufffd[31m.txt" in result.output, result
    assert "\x1b[31m." not in result.output


def test_standard_input_is_a_document(monkeypatch, codec):
    scripted(monkeypatch, codec, lambda p: "\\boxed{Lima}")
    asking = ("Where?", "--model", "tiny", "--final-tokens", 99)
    said = run("-", *asking, input="Anna reached Lima.")
    assert "answer: Lima" in said
    assert "2 pages, " in run("-", *asking, input=pdf("Anna.", "Lima."))
    assert "binary" in run("-", *asking, input=b"\0\1\2", code=2)


def test_a_long_question_is_no_name_of_a_file(monkeypatch, codec):
    Path("a.txt").write_text("Anna reached Lima.")
    scripted(monkeypatch, codec, lambda p: "\\boxed{Lima}")
    question = "Anna has left. " * 30 + "Where is she?"
    for words in (question, question.replace("Anna", "x/Anna"), "Where? " + "\u00e9" * 200 + ".x"):
        assert "answer: Lima" in run("a.txt", words, "--model", "tiny", "--final-tokens", 99)


def test_a_folder_and_a_file_are_one_document(monkeypatch, codec):
    scripted(monkeypatch, codec, lambda p: "\\boxed{Lima}")
    Path("d").mkdir()
    Path("d/2.txt").write_text("Anna.")
    Path("d/10.txt").write_text("She reached Lima.")
    Path("e.md").write_text("Boris.")
    said = run("d", "e.md", "Where?", "--model", "tiny", "--final-tokens", 99)
    assert "3 files, " in said and "Its words stand in 10.txt." in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "ask FILE"),
        (("a.txt",), "ask FILE"),
        (("a.txt", " "), "question is empty"),
        (("Where?", "a.txt"), "the question comes last"),
        (("a.txt", "Where is the caf\udce9?"), "is not in UTF-8 (Where is the caf\ufffd?): "),
        (("a.txt", "Where is the .caf\ud800?"), "is not in UTF-8"),
        (("b.bin", "Where?"), "b.bin is a binary file"),
        (("empty.txt", "Where?"), "empty.txt is empty"),
        (("scan.pdf", "Where?"), "as scans do"),
        (("a.txt", "Where?", "--name", ".."), "--name"),
        (("a.txt", "Where?", "--name", "other"), "another run"),
        (("a.txt", "Where?", "--temperature", "-1"), "temperature"),
        (("a.txt", "Where?", "--served-as", "llama3"), "--served-as is about a server, and there"),
        (("a.txt", "Where?", "--chat"), "--chat is about a server, and there is none"),
        (
            ("a.txt", "Where?", "--model", "tiny", "--served-as", "m"),
            "and --model answers on this machine",
        ),
        (("--resume",), "--name"),
        (("--resume", "--name", "nothing"), "no reading to go on with"),
        (("a.txt", "Where?", "--resume", "--name", "x"), "leave a.txt out"),
        (("--resume", "--name", "x", "--agent", "full"), "leave --agent out"),
        (("--resume", "--name", "x", "--model", "tiny"), "leave --model out"),
        (("--resume", "--name", "x", "--chunk-tokens", "9"), "leave --chunk-tokens out"),
    ],
)
def test_a_mistake_is_one_sentence_and_leaves_nothing(words, said):
    Path("a.txt").write_text("Anna reached Lima.")
    Path("b.bin").write_bytes(b"\0\1")
    Path("empty.txt").write_text("")
    Path("scan.pdf").write_bytes(pdf(""))
    Path("runs/other").mkdir(parents=True)
    Path("runs/other/config.yaml").write_text("run: {}\n")
    before = sorted(Path().rglob("*"))
    out = run(*words, code=2).strip()
    assert out.startswith("memagent: ") and "\n" not in out and said in out
    assert sorted(Path().rglob("*")) == before


# ---------------------------------------------------------------- stop and go on

READ = "Clara joined Otto. Anna reached Lima. Emil met Ida. Hugo toured Nice. Max met Vera. " * 4
SLOW = "--model tiny --agent memagent --chunk-tokens 12 --temperature 1".split()


def interrupted(monkeypatch, after, error=KeyboardInterrupt):
    """Let the policy make so many turns, then stop as Ctrl-C does."""

    def opened(config, agents, **more):
        engine = open_reader(config, agents, **more)
        step, made = engine.step, []

        def stop():
            done = step()
            made.extend(turn for _, turn in done if turn.prompt.section or turn.prompt.final)
            if len(made) > after:
                raise error
            return done

        engine.step = stop
        return engine

    monkeypatch.setattr(commands_ask, "open_reader", opened)


def test_what_was_stopped_goes_on_to_the_same_tokens(monkeypatch):
    """Sampled at temperature 1, with the seed of every turn."""
    Path("a.txt").write_text(READ)
    run("a.txt", "Where is Anna?", *SLOW, "--name", "whole")
    whole = turns_of("whole")
    assert len(whole) > 6
    with monkeypatch.context() as patch:
        interrupted(patch, 3)
        said = run("a.txt", "Where is Anna?", *SLOW, "--name", "cut", code=130)
    last = said.strip().splitlines()[-1]
    assert last == (
        f"memagent: stopped, read 3 of {len(whole) - 1} sections; "
        "go on with: ask --resume --name cut"
    )
    assert len(turns_of("cut")) == 3 and not Path("runs/cut/report.html").exists()
    assert "go on with it by --resume" in run("a.txt", "Where?", "--name", "cut", code=2)
    Path("a.txt").unlink()  # what is read is kept with the reading
    torn = Path("runs/cut/turns.jsonl").open("a")
    with torn:
        torn.write('{"final": fal')  # as a process leaves it that was killed
    said = run("--resume", "--name", "cut")
    assert "3 sections were read before." in said and " left" in said
    assert "section 3: " not in said  # it was shown before
    again = turns_of("cut")
    for name in ("prompt_ids", "response_ids", "response", "memory", "where", "finish"):
        assert [turn[name] for turn in again] == [turn[name] for turn in whole], name
    answer = [line for line in said.splitlines() if line.startswith(("answer: ", "The resp"))]
    assert answer and Path("runs/cut/report.html").exists()
    finished = run("--resume", "--name", "cut")  # nothing is asked twice
    assert turns_of("cut") == again and answer[0] in finished


def test_what_is_said_of_a_reading_that_is_stopped_while_its_model_loads(monkeypatch):
    """Nothing is kept of a new one; what was read before of one that was gone on with."""
    Path("a.txt").write_text(READ)

    def opened(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commands_ask, "open_reader", opened)
        said = run("a.txt", "Where?", *SLOW, "--name", "x", code=130)
    assert said.strip() == "memagent: stopped; nothing was read" and not Path("runs").exists()
    with monkeypatch.context() as patch:
        interrupted(patch, 1)
        run("a.txt", "Where?", *SLOW, "--name", "x", code=130)
    with monkeypatch.context() as patch:
        patch.setattr(commands_ask, "open_reader", opened)
        said = run("--resume", "--name", "x", code=130)
    assert said.strip() == "memagent: stopped; go on with: ask --resume --name x"
    assert "1 section was read before." in run("--resume", "--name", "x").splitlines()


def test_a_killed_reading_is_told_by_its_own_words_where_runs_lie_elsewhere(monkeypatch):
    Path("a.txt").write_text(READ)
    interrupted(monkeypatch, 2)
    said = run("a.txt", "Where?", *SLOW, "--name", "x", "--runs", "elsewhere", code=130)
    assert said.strip().endswith("go on with: ask --resume --name x --runs elsewhere")


def test_a_server_that_went_away_keeps_what_was_read(monkeypatch):
    Path("a.txt").write_text(READ)
    with monkeypatch.context() as patch:
        interrupted(patch, 2, UserError("The server is gone."))
        said = run("a.txt", "Where?", *SLOW, "--name", "x", code=2)
    assert "The server is gone. 2 of " in said and "--resume --name x" in said
    run("--resume", "--name", "x")


def test_another_model_cannot_go_on(monkeypatch, codec):
    Path("a.txt").write_text(READ)
    with monkeypatch.context() as patch:
        interrupted(patch, 2)
        run("a.txt", "Where?", *SLOW, "--name", "x", code=130)
    config = Path("runs/x/config.yaml")
    config.write_text(config.read_text().replace("chunk_tokens: 12", "chunk_tokens: 11"))
    assert "cannot be gone on with" in run("--resume", "--name", "x", code=2)
    turns = Path("runs/x/turns.jsonl")
    turns.write_text(turns.read_text() + '{"final": false}\n')
    assert "line 3 is no turn" in run("--resume", "--name", "x", code=2)
    config.write_text("agent: {}\n")
    assert "names no agent" in run("--resume", "--name", "x", code=2)
    Path("runs/x/document.json").write_text("{")
    assert "damaged" in run("--resume", "--name", "x", code=2)


def test_a_reading_is_read_by_one_process_at_a_time(monkeypatch, codec):
    Path("a.txt").write_text(READ)
    with monkeypatch.context() as patch:
        interrupted(patch, 2)
        run("a.txt", "Where?", *SLOW, "--name", "x", code=130)
    with writing(Path("runs/x"), "It"):
        assert "reading runs/x is being written by" in run("--resume", "--name", "x", code=2)


def during_the_opening(patch, action):
    """Do something when a reading opens its engine: after its name was looked at."""

    def opened(config, agents, **more):
        patch.undo()
        action()
        return open_reader(config, agents, **more)

    patch.setattr(commands_ask, "open_reader", opened)


def kept(name):
    return {path.name: path.read_bytes() for path in sorted(Path("runs", name).glob("*"))}


def test_two_readings_that_take_one_name_leave_each_other_whole(monkeypatch):
    Path("a.txt").write_text(READ)
    Path("b.txt").write_text("Ida reached Nice.")
    whole = {}
    with pytest.MonkeyPatch.context() as patch:

        def first():
            with pytest.MonkeyPatch.context() as inner:
                interrupted(inner, 2)
                run("a.txt", "Where is Anna?", *SLOW, "--name", "x", code=130)
            whole.update(kept("x"))

        during_the_opening(patch, first)
        said = run("b.txt", "Where is Ida?", "--model", "tiny", "--name", "x", code=2)
    assert "holds a reading" in said and kept("x") == whole
    assert "answer: " in run("--resume", "--name", "x")
    with writing(Path("runs/y"), "It"):  # it still reads
        assert "is being written by" in run("b.txt", "Where?", *SLOW, "--name", "y", code=2)
    assert kept("y") == {}


def test_readings_of_one_second_have_folders_of_their_own(monkeypatch, codec):
    Path("a.txt").write_text("Anna reached Lima.")
    scripted(monkeypatch, codec, lambda p: "\\boxed{Lima}")
    exists = Path.exists  # as for a process that looks before the other one has made its folder
    monkeypatch.setattr(
        Path, "exists", lambda path: not path.name.startswith("ask-") and exists(path)
    )

    class Clock:
        @staticmethod
        def now():
            return datetime(2026, 11, 23)

    monkeypatch.setattr(commands_ask, "datetime", Clock)
    for question in ("Where?", "Who?"):
        run("a.txt", question, "--model", "tiny", "--final-tokens", 99)
    folders = sorted(Path("runs").iterdir())
    assert [folder.name for folder in folders] == ["ask-20261123-000000", "ask-20261123-000000-2"]
    asked = [json.loads((folder / "document.json").read_text())["question"] for folder in folders]
    assert asked == ["Where?", "Who?"]


def test_a_replay_gives_the_recorded_tokens_and_then_asks(codec):
    agent = tiny.agent(memory_tokens=99).on(codec)
    engine = ScriptedEngine(codec, lambda p: "Lima")
    task = commands_ask.Reading(
        AskConfig(), commands_ask.Document("Anna. " * 40, (), "a"), "Where?", "", None
    ).task
    from report.records import record_turn
    from rollout import Sampling, follow

    first = [record_turn(turn) for turn in follow(engine, agent, task, Sampling(0.0))]
    asked = engine.generated_tokens
    replay = Replay(engine, first[:2])
    second = [record_turn(turn) for turn in follow(replay, agent, task, Sampling(0.0))]
    assert second == first and len(first) > 3
    assert engine.generated_tokens == asked + sum(len(t["response_ids"]) for t in first[2:])
    other = ScriptedEngine(Characters(), lambda p: "x")
    with pytest.raises(UserError, match="cannot be gone on with"):
        list(follow(Replay(other, first), agent, task, Sampling(0.0)))


# ---------------------------------------------------------------- who answers


@contextlib.contextmanager
def ollama(monkeypatch, tags, loaded=()):
    """Run what answers as an Ollama with these models does."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            cards = {"/api/tags": tags, "/api/ps": loaded}.get(self.path, ())
            body = json.dumps({"models": list(cards)}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv(local.HOST, f"127.0.0.1:{server.server_port}")
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        monkeypatch.setenv(local.HOST, NOBODY)


SMALL = {"name": "small:1b", "size": 10}
LARGE = {"name": "large:7b", "size": 70, "details": {"family": "llama"}}
VECTORS = {"name": "nomic-embed-text", "size": 99, "details": {"family": "nomic-bert"}}
CLOUD = {"name": "huge:cloud", "size": 300, "remote_host": "https://example.com"}


def test_the_order_in_which_a_model_to_answer_is_looked_for(monkeypatch):
    with ollama(monkeypatch, [SMALL, LARGE, VECTORS, CLOUD]) as url:
        found = answerer(AskConfig())
        assert (found.endpoint, found.served_as, found.model) == ((url,), "large:7b", "")
        assert found.said == (
            "large:7b of the Ollama on this machine (the largest of 2; "
            "no --endpoint, no OPENAI_BASE_URL)"
        )
        monkeypatch.setenv(local.BASE_URL, "http://127.0.0.1:9/v1")
        found = answerer(AskConfig(served_as="m"))
        assert (found.endpoint, found.served_as) == (("http://127.0.0.1:9/v1",), "m")
        assert "OPENAI_BASE_URL" in found.said
        found = answerer(AskConfig(model="tiny"))
        assert (found.model, found.endpoint) == (str(EMBEDDED), ())
        found = answerer(AskConfig(model="m", endpoint=("http://127.0.0.1:8/v1",)))
        assert (found.model, found.endpoint) == ("m", ("http://127.0.0.1:8/v1",))
    monkeypatch.delenv(local.BASE_URL)
    found = answerer(AskConfig())
    assert (found.model, found.endpoint) == (READER, ())
    assert found.said == (
        f"{READER_TITLE} on this machine (no --endpoint, no OPENAI_BASE_URL, no Ollama)"
    )


def test_which_model_of_an_ollama_and_its_window(monkeypatch):
    loaded = SMALL | {"context_length": 16384}
    with ollama(monkeypatch, [LARGE, SMALL], [VECTORS, loaded]):
        found = answerer(AskConfig())
        assert (found.served_as, found.window) == ("small:1b", 16384) and "loaded" in found.said
        assert answerer(AskConfig(served_as="large:7b")).served_as == "large:7b"
    with ollama(monkeypatch, [SMALL]):
        assert answerer(AskConfig()).window == local.WINDOW
        monkeypatch.setenv(local.CONTEXT, "8192")
        assert answerer(AskConfig()).window == 8192
    for nothing in ([], [VECTORS], [CLOUD], [{"no": "name"}], ["x"]):
        with ollama(monkeypatch, nothing):
            assert answerer(AskConfig()).model == READER


def test_an_ollama_is_asked_in_sections_that_fit_its_window(monkeypatch, codec):
    server = Server(codec, name="m", ids=False)
    Path("a.txt").write_text("Anna reached Lima. " * 4000)
    monkeypatch.setattr(
        local,
        "_ollama",
        lambda name: local.Answerer("m of the Ollama", "", (server.url,), "m", 4096),
    )
    said = run("a.txt", "Where is Anna?")
    assert "in sections of 1,024 tokens for its window of 3,072" in said
    sent = [body["messages"][0]["content"] for body in server.bodies]
    assert len(sent) > 18 and max(len(text) for text in sent) < 4 * 1024 + 2000
    server.stop()


def test_a_server_that_fails_is_told_of_at_once_and_not_waited_for_long(monkeypatch, codec):
    monkeypatch.setattr(endpoint, "BACKOFF_S", (0.02, 0.1))
    monkeypatch.setattr(commands_ask, "PATIENCE_S", 0.5)
    server = Server(codec, ids=False)
    Path("a.txt").write_text("Anna reached Lima. " * 900)
    monkeypatch.setenv(local.HOST, server.url.split("/")[2])
    asking = ("a.txt", "Where?", "--agent", "memagent", "--name")
    busy, few = (500, {"error": "model is loading"}), "requires more system memory (5.6 GiB)"
    server.faults = ["", busy, busy]
    said = run(*asking, "a")
    assert said.count("HTTP 500: model is loading; trying again.") == 1 and "answer: " in said
    short = (500, {"error": f"model {few} than is there"})
    server.faults, before = ["", "", short], len(server.bodies)  # the first is on trial
    said = run(*asking, "b", code=2).splitlines()[-1]
    assert len(server.bodies) == before + 3 and "trying" not in said
    assert few in said and "ask --resume --name b; to ask a smaller model anew" in said
    assert said.endswith("name it by --served-as.")
    server.always = busy
    said = run(*asking, "c", code=2)
    assert "trying again." in said and re.search(r"after \d+ tries in \d+ s: HTTP 500", said)
    Path("a.txt").write_text("Anna reached Lima. " * 1200)
    server.always = short
    before = len(server.bodies)  # the trial alone
    said = run("a.txt", "Where?", "--agent", "full", code=2)
    assert "on trial" in said and "by --served-as." in said and len(server.bodies) == before + 1
    server.stop()


def test_a_server_that_was_named_is_asked_nothing_on_trial(monkeypatch, codec):
    """It may bill for it. An Ollama is warmed up, so that loading is no part of the estimate."""
    server = Server(codec, name="m", ids=False)
    Path("a.txt").write_text("Anna reached Lima. " * 1200)
    for way, asked in (("full", 1), ("memagent", 4)):
        before = len(server.bodies)
        run("a.txt", "Where?", "--agent", way, "--endpoint", server.url)
        assert len(server.bodies) == before + asked
        before = len(server.bodies)
        found = local.Answerer("m of the Ollama", "", (server.url,), "m", 32_768)
        with monkeypatch.context() as patch:
            patch.setattr(local, "_ollama", lambda name, found=found: found)
            said = run("a.txt", "Where?", "--agent", way)
        assert len(server.bodies) > before + asked and " tokens, " in said
        content = [body["messages"][0]["content"] for body in server.bodies[before:]]
        assert all(len(words) < 4 * 512 + 64 for words in content[:-asked])
    server.stop()


def test_what_does_not_fit_a_window_is_asked_anew_in_smaller_sections(monkeypatch, codec):
    server = Server(codec, ids=False)
    Path("a.txt").write_text("Anna reached Lima. " * 1200)
    asking = ("Where?", "--endpoint", server.url, "--name")
    full = (400, {"error": {"message": "This model's maximum context length is 4096 tokens."}})
    server.faults = ["", full]
    said = run("a.txt", *asking, "x", "--agent", "memagent", code=2).splitlines()[-1]
    assert "context length is 4096" in said and "--resume" not in said
    assert said.endswith("such as 1024, and under another --name.")
    server.faults = [full]
    said = run("--resume", "--name", "x", *asking[1:3], code=2)
    assert "a smaller --chunk-tokens, such as 1024" in said
    server.always = full
    said = run("a.txt", *asking, "y", "--agent", "full", code=2)
    assert "Ask anew with --agent memagent, which reads section by section" in said
    server.always = ""
    smaller = ("--agent", "memagent", "--chunk-tokens", 1024)
    assert "answer: " in run("a.txt", *asking, "z", *smaller)
    server.stop()


def test_the_key_is_sent_to_a_server_that_was_named_and_to_no_other(monkeypatch, codec):
    server = Server(codec, ids=False)
    Path("a.txt").write_text("Anna reached Lima. " * 900)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv(local.HOST, server.url.split("/")[2])
    asking, keys = ("a.txt", "Where?", "--agent", "memagent", "--name"), server.keys
    for named, words in ((False, ()), (True, ("--endpoint", server.url)), (True, ())):
        name = f"r{len(list(Path('runs').glob('*')))}"
        if named and not words:
            monkeypatch.setenv(local.BASE_URL, server.url)
        expected, _ = {f"Bearer {SECRET}" if named else None}, keys.clear()
        with monkeypatch.context() as patch:
            interrupted(patch, 2)
            said = run(*asking, name, *words, code=130).strip()
        assert said.endswith(" ".join(["ask --resume --name", name, *words]))
        assert keys == expected and len(turns_of(name)) == 2
        keys.clear()
        path = Path("runs", name, "document.json")  # as earlier versions wrote it; it may be forged
        path.write_text(json.dumps(json.loads(path.read_text()) | {"keyed": True}))
        run("--resume", "--name", name, *words)
        assert keys == expected
    keys.clear()
    monkeypatch.setenv(local.BASE_URL, "http://127.0.0.1:9/v1")
    monkeypatch.delenv(local.HOST)
    for name in ("r0", "r1", "r2"):  # of servers that nothing names any more
        said = run("--resume", "--name", name, code=2)
        assert f"unless you give --endpoint {server.url}." in said and not keys
    server.stop()


def test_the_embedded_policys_settings_are_never_used_with_an_endpoint(monkeypatch, codec):
    """Neither with --endpoint nor with OPENAI_BASE_URL: sections are cut by characters."""
    server = Server(codec, ids=False)
    Path("a.txt").write_text("Anna reached Lima. " * 1200)
    monkeypatch.setenv(local.BASE_URL, server.url)
    for name, words in (("e", ("--endpoint", server.url)), ("b", ())):
        said = run("a.txt", "Where?", "--agent", "memagent", "--name", name, *words)
        stored = find.stored_settings(Path("runs", name, "config.yaml"), None)
        defaults = asdict(find.make("memagent", {}).config)
        assert stored["agent"] == defaults | {"empty": "keep"}
        assert "embedded" not in said and "estimated" in said and "about 5,700 tokens" in said
    assert all("prompt" not in body for body in server.bodies)
    server.stop()


def test_a_model_that_thinks_for_too_long_loses_nothing_that_was_noted(monkeypatch, codec):
    server = Server(codec, ids=False)
    Path("a.txt").write_text("Anna reached Lima. " * 900)
    silent = {"message": {"content": "", "reasoning": "hm"}, "finish_reason": "length"}
    asking = ("a.txt", "Where?", "--endpoint", server.url)
    memories = {}
    for name, more in (
        ("agent", ("--agent", "memagent")),
        ("preset", ("--preset", "paper")),
        ("said", ("--agent", "memagent", "--empty", "placeholder")),
    ):
        server.faults = ["", {"choices": [silent]}]
        run(*asking, *more, "--name", name, "--chunk-tokens", 2048)
        assert [turn["response"] for turn in turns_of(name)][1] == ""
        memories[name] = turns_of(name)[2]["memory"]
    assert "Anna joined" in memories["agent"]
    assert memories["said"] == memories["preset"] == NO_MEMORY
    run(*asking, "--agent", "full")  # has no such setting
    server.stop()


# ---------------------------------------------------------------- which agent reads


def chosen(monkeypatch, codec, tokens, window=None, **config):
    """Return the agent that reads a document of so many tokens, and what is said about it."""
    scripted(monkeypatch, codec, lambda p: "\\boxed{x}" if p.final else "x", window)
    text = "Anna reached Lima. " * (tokens // 4)
    Path("a.txt").write_text(text)
    said = run("a.txt", "Where?", *[w for k, v in config.items() for w in (f"--{k}", v)])
    (reading,) = Path("runs").iterdir()
    shutil.rmtree("runs")
    del reading
    (line,) = [line for line in said.splitlines() if ", reading " in line]
    return line.partition(", reading ")[2]


def test_a_document_of_more_than_half_a_window_is_read_by_section(monkeypatch, codec):
    at_once, by_section = (chosen(monkeypatch, codec, n, 1600, model="tiny") for n in (400, 4000))
    assert at_once == "all at once with full, since it fits half a window; nothing was measured"
    assert by_section.startswith("section by section with memagent, since it is longer")


def test_of_the_agents_that_were_measured_the_best_for_the_length_reads(monkeypatch, codec):
    shutil.copytree(EMBEDDED, "m")
    settings = Path("m/agent.yaml").read_text()
    Path("m/agent.yaml").write_text(settings + "ask: {best: [[4000, bm25], [200, full]]}\n")
    said = [chosen(monkeypatch, codec, n, model="m") for n in (100, 2000, 9000)]
    assert said == [
        "all at once with full, best at this length where it was measured",
        "with bm25, best at this length where it was measured",
        "with bm25, best at 4,000 tokens, the longest that was measured",
    ]
    assert chosen(monkeypatch, codec, 100, model="m", agent="none") == "with none, as --agent says"
    for wrong in ("[[x, full]]", "[full]", "[[5, nobody]]", "3"):
        Path("m/agent.yaml").write_text(settings + f"ask: {{best: {wrong}}}\n")
        assert "memagent: " in run("a.txt", "Where?", "--model", "m", code=2)


def test_a_model_that_was_trained_reads_with_its_own_agent(monkeypatch, codec):
    shutil.copytree(EMBEDDED, "m")
    with Path("m/agent.yaml").open("a") as file:
        file.write("run: {agent: memagent}\n")
    said = chosen(monkeypatch, codec, 100, model="m")
    assert said == "section by section with memagent, the agent that the model was trained with"


# ---------------------------------------------------------------- the estimate


def test_the_estimate_is_measured_and_rounded():
    assert commands_ask._rounded(131_234) == "131,000" and commands_ask._rounded(999) == "999"
    seconds = (0.2, 44, 89, 100, 840, 9000)
    assert [commands_ask.duration(s) for s in seconds] == [
        "1 second", "44 seconds", "89 seconds", "2 minutes", "14 minutes", "2.5 hours",
    ]  # fmt: skip
    agent = tiny.agent().on(Characters())
    reading = commands_ask.Reading(
        AskConfig(), commands_ask.Document("x" * 80, (), ""), "", "", None
    )
    clock = commands_ask.Clock(reading, agent, 131_234, 59, [])
    assert clock.estimate() == "about 131,000 tokens, 59 sections"
    assert clock.add(14.0) and not clock.add(14.0)
    assert clock.estimate() == "about 131,000 tokens, 59 sections, about 14 minutes"
    later = commands_ask.Clock(reading, agent, 131_234, 59, [14.0] * 30)
    assert not later.add(14.0) and later.estimate().endswith("about 7 minutes left")


class Seconds:
    """A clock that goes when it is told to."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


def tried(monkeypatch, codec, n, rate, agent="full"):
    """Return the estimate for a document of n sentences, and the tokens and seconds of its trial.

    rate: tokens that the model reads in a second; a second more passes before its first answer.
    """
    clock, asked = Seconds(), []
    monkeypatch.setattr(commands_ask, "time", clock)

    def script(prompt):
        asked.append(len(prompt.ids(codec)))
        clock.now += asked[-1] / rate + (len(asked) == 1)
        return "x"

    engine = ScriptedEngine(codec, script)
    document = commands_ask.Document("Anna reached Lima. " * n, (), "a")
    task = commands_ask.Reading(AskConfig(), document, "Where?", "", None).task
    agent = tiny.agent(agent, **({"window": 0} if agent == "full" else {})).on(codec)
    estimate = commands_ask._trial(engine, agent, task, agent.sections(task).ids)
    return estimate, asked, clock.now - 1


def test_one_prompt_is_estimated_from_its_end_in_less_than_a_second(monkeypatch, codec):
    """Short or long; what the first answer takes longer than the others is no part of it."""
    for n, rate in ((3000, 200), (3000, 1000), (3000, 1e6), (50, 200), (2, 200)):
        estimate, asked, seconds = tried(monkeypatch, codec, n, rate)
        tokens = 4 * n
        assert 0.95 * tokens / rate <= estimate <= 1.3 * tokens / rate + 24 / rate
        assert 2 <= len(asked) <= 7 and asked == sorted(asked) and max(asked) < 560
        assert seconds < max(1.0, 0.02 * estimate)
    estimate, asked, _ = tried(monkeypatch, codec, 3000, 200, "memagent")
    assert estimate is None and len(asked) == 1


@pytest.mark.parametrize("way", ["memagent", "full", "bm25"])
def test_loading_and_warming_up_are_no_part_of_the_estimate(monkeypatch, codec, way):
    Path("a.txt").write_text("Anna reached Lima. " * 60)
    clock = Seconds()
    monkeypatch.setattr(commands_ask, "time", clock)

    class Cold(ScriptedEngine):
        def step(self):
            clock.now += 0.1 if self.generated_tokens else 60
            return super().step()

    monkeypatch.setattr(commands_ask, "open_reader", lambda *_, **__: Cold(codec, lambda p: "x"))
    said = run("a.txt", "Where?", *"--model tiny --chunk-tokens 8".split(), "--agent", way)
    (line,) = [line for line in said.splitlines() if " tokens, " in line]
    assert re.search(r", about [1-4] seconds?$", line), line


def test_a_turn_that_fails_is_not_recorded(monkeypatch, codec):
    Path("a.txt").write_text(READ)

    class Failing(ScriptedEngine):
        def step(self):
            ((key, turn),) = super().step()
            if turn.prompt.final:
                turn = Turn(turn.prompt, turn.prompt_ids, [], [], Finish.ERROR, codec.response([]))
                turn.error = "it broke"
            return [(key, turn)]

    monkeypatch.setattr(
        commands_ask, "open_reader", lambda *a, **k: Failing(codec, lambda p: "x", per_step=1)
    )
    said = run("a.txt", "Where?", *SLOW, "--name", "x", code=2)
    assert "it broke" in said and "--resume --name x" in said
    assert not any(turn["final"] for turn in turns_of("x"))


def test_ask_uses_the_settings_of_an_evaluation_with_one_task():
    config = AskConfig(model="m", device="cpu", endpoint=("http://127.0.0.1:1/v1",))
    made = commands_ask.evaluation_of(config, name="ask", in_flight=1)
    assert isinstance(made, EvalConfig) and made.in_flight == 1
    assert (made.model, made.device, made.endpoint) == ("m", "cpu", config.endpoint)
