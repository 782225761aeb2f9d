"""Humanity's Last Exam: its form, verdicts, a judge on a socket that fails, calibration."""

import base64
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import opened, streamed
from test_stream import Acting

from agents.bank import Bank, BankConfig
from config.errors import ServerFailed, UserError
from report.summary import calibration, interval
from suites import hle as module
from suites.hle import (
    INSTRUCTIONS,
    REQUEST,
    SCHEMA,
    Exam,
    ServedJudge,
    Verdict,
    confidence,
    read,
    verdict,
)
from tasks import served

PNG = "data:image/png;base64,iVBORw0KGgo="
ROWS = [
    {"id": "a", "question": "2 + 2?", "answer": "4", "category": "Math",
     "answer_type": "exactMatch", "image": ""},
    {"id": "b", "question": "Which? A. x B. y", "answer": "B", "category": "Biology/Medicine",
     "answer_type": "multipleChoice", "image": None},
    {"id": "c", "question": "What is shown?", "answer": "a cat", "category": "Other",
     "answer_type": "exactMatch", "image": PNG},
]  # fmt: skip


def by_word(question: str, answer: str, response: str) -> Verdict:
    """A judge without a model: the response ends with the answer."""
    return Verdict(answer=response, correct=response.split()[-1] == answer)


def jsonl(tmp_path, rows, name="hle.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("form", ["jsonl", "parquet", "bytes"])
def test_a_file_is_read_in_its_order(tmp_path, form):
    rows = [dict(row) for row in ROWS]
    if form == "jsonl":
        path = jsonl(tmp_path, rows)
    else:
        if form == "bytes":  # as the hub's viewer stores pictures
            raw = base64.b64decode(PNG.partition(",")[2])
            for row in rows:
                row["image"] = {"bytes": raw, "path": "x"} if row["image"] else None
        path = tmp_path / "hle.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    assert [*read(path)] == ["a", "b", "c"]
    environment = Exam(path, by_word)
    assert [task.id for task in environment.tasks()] == ["a", "b"]
    assert environment.skipped == 1 and not any(task.images for task in environment.tasks())
    task = environment.tasks()[1]
    assert (task.question, task.kind, task.solution) == (
        ROWS[1]["question"],
        ROWS[1]["category"],
        ("B",),
    )
    assert task.intent == task.question == task.begin().observation
    seen = Exam(path, by_word, images=True)
    assert len(seen.tasks()) == 3 and seen.skipped == 0
    assert [task.images for task in seen.tasks()] == [(), (), (PNG,)]


def test_a_task_with_another_answer_is_another_task(tmp_path):
    other = [ROWS[0] | {"answer": "5"}, ROWS[1]]
    one, two = (Exam(jsonl(tmp_path, rows), by_word).tasks() for rows in (ROWS, other))
    assert one[0].digest != two[0].digest and one[1].digest == two[1].digest


@pytest.mark.parametrize("change, field", [
    ({"question": None}, "line 2, question"), ({"answer": " "}, "line 2, answer"),
    ({"answer": 4}, "line 2, answer"), ({"category": ["x"]}, "line 2, category"),
    ({"answer_type": "essay"}, "line 2, answer_type"), ({"image": "cat.png"}, "line 2, image"),
    ({"image": 5}, "line 2, image"), ({"id": "a"}, "line 2: the id 'a'"),
])  # fmt: skip
def test_another_form_is_named_by_file_record_and_field(tmp_path, change, field):
    path = jsonl(tmp_path, [ROWS[0], ROWS[1] | change])
    with pytest.raises(UserError) as error:
        Exam(path, by_word)
    assert str(error.value).startswith(f"{path}, {field}") and "\n" not in str(error.value)


def test_what_is_no_file_of_questions_is_refused(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no more")
    for path, reason in [
        (tmp_path / "none.jsonl", "No file at"),
        (jsonl(tmp_path, [], "empty.jsonl"), "is empty"),
        (tmp_path / "broken.parquet", "may be damaged"),
        (jsonl(tmp_path, [ROWS[2]], "seen.jsonl"), "have a picture"),
    ]:
        with pytest.raises(UserError, match=reason):
            Exam(path, by_word)
    with pytest.raises(UserError, match="--judge openai:URL#MODEL"):
        opened("hle")


# ---------------------------------------------------------------- one response


def test_a_response_is_judged_and_the_right_answer_is_not_told():
    environment = Exam(judge=by_word)
    assert len({task.id for task in environment.tasks()}) == 6
    task = environment.tasks()[0]
    right, wrong = task.begin(), task.begin()
    step = right.step(f"Answer: {task.solution[0]}")
    assert (step.done, step.reward, step.failure) == (True, 1.0, "")
    step = wrong.step("Answer: 4711")
    assert (step.done, step.reward, step.failure) == (True, -1.0, "")
    assert step.observation == "The answer is wrong: Answer: 4711"  # no reasons: they may tell it

    def never(*_):
        raise AssertionError

    step = Exam(judge=never).tasks()[0].begin().step(" \n")
    assert (step.done, step.reward, step.failure) == (True, -1.0, "empty")
    judge = lambda *_: Verdict(answer="\x1b[2J" + "x\n" * 9999, correct=True)  # noqa: E731
    observation = Exam(judge=judge).tasks()[0].begin().step("x").observation
    assert len(observation) < 500 and "\x1b" not in observation and "\n" not in observation


@pytest.mark.parametrize("response, sure", [
    ("Answer: 7\nConfidence: 85%", 85), ("Confidence: 100%", 100),
    ("**Confidence**: 7.5 %.", 7.5), ("confidence 0", 0),
    ("Confidence: 20%\nNo.\nConfidence: 30%", 30), ("I am certain.", None), ("", None),
    ("Confidence: 101%", None), ("Confidence: 1000%", None), ("Confidence: high, 3 of 4", None),
])  # fmt: skip
def test_a_confidence_is_read_from_a_response(response, sure):
    assert confidence(response) == sure
    assert "Confidence:" in INSTRUCTIONS


# ---------------------------------------------------------------- verdicts

GOOD = {"extracted_final_answer": "4", "reasoning": "Same.", "correct": "yes", "confidence": 80}


@pytest.mark.parametrize("text", [
    json.dumps(GOOD), f"```json\n{json.dumps(GOOD)}\n```", json.dumps(GOOD | {"more": 1}),
    f"<think>{{no}} hm</think> Here it is: {json.dumps(GOOD)}",
    json.dumps(GOOD | {"confidence": "80%", "correct": "Yes"}),
])  # fmt: skip
def test_a_verdict_is_read(text):
    assert verdict(text) == Verdict(answer="4", correct=True)


@pytest.mark.parametrize("text, fault", [
    ("", "no JSON object"), ("yes", "no JSON object"), ("} {", "no JSON object"),
    ('{"correct": yes}', "Invalid JSON"), ("{" * 5000 + "}", "Invalid JSON"),
    (json.dumps({"correct": "yes"}), "'extracted_final_answer': "),
    (json.dumps({k: GOOD[k] for k in GOOD if k != "correct"}), "'correct': "),
    (json.dumps(GOOD | {"correct": "maybe"}), "'correct': "),
    (json.dumps(GOOD | {"correct": None}), "'correct': "),
])  # fmt: skip
def test_what_is_no_verdict_is_named(text, fault):
    with pytest.raises(ValueError, match=fault):
        verdict(text)


# ---------------------------------------------------------------- a judge on a socket

SECRET = "key-very-secret-0123456789"


class Server:
    """A judge by word. `replies` holds what it says next, texts or (status, raw)."""

    def __init__(self):
        self.asked, self.keys, self.replies, self.down = [], [], [], False
        self.models = 404

    def answer(self, h: BaseHTTPRequestHandler) -> None:
        self.keys.append(h.headers.get("Authorization"))
        if h.command == "GET":
            return self.send(h, self.models, b"{}")
        body = json.loads(h.rfile.read(int(h.headers["Content-Length"])))
        assert h.path == "/v1/chat/completions"
        self.asked.append(body)
        if self.down:
            return self.send(h, 503, b"")
        said = self.replies.pop(0) if self.replies else self.judged(body)
        if isinstance(said, tuple):
            return self.send(h, *said)
        message = {"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}
        self.send(h, 200, json.dumps(message).encode())

    @staticmethod
    def judged(body: dict) -> str:
        text = body["messages"][0]["content"]
        right, response = (
            text.split(f"<{tag}>\n")[1].split(f"\n</{tag}>")[0]
            for tag in ("right_answer", "response")
        )
        correct = "yes" if right in response else "no"
        return json.dumps(GOOD | {"extracted_final_answer": response, "correct": correct})

    @staticmethod
    def send(h, status: int, raw: bytes) -> None:
        h.send_response(status)
        h.send_header("Content-Length", str(len(raw)))
        h.end_headers()
        h.wfile.write(raw)


@contextmanager
def serving(answer):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            answer(self)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(served, "count_retries", lambda patience_s: 2)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = Server()
    with serving(server.answer) as server.url:
        server.spec = f"openai:{server.url}#a/judge"
        yield server


def test_a_judge_is_asked_for_the_published_fields_with_a_schema(server, monkeypatch):
    for proxy in ("HTTP_PROXY", "ALL_PROXY"):  # none hears of it
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    judge = ServedJudge(server.spec)
    assert judge("2 + 2?", "4", "Answer: 4") == Verdict(answer="Answer: 4", correct=True)
    assert not judge("2 + 2?", "4", "Answer: 5").correct
    assert judge("{q}", "{0}", "it is {0} {answer}").correct  # braces are text
    body, *_ = server.asked
    assert body["model"] == "a/judge" and body["temperature"] == 0
    assert body["response_format"] == SCHEMA and SCHEMA["type"] == "json_schema"
    fields = {"extracted_final_answer", "reasoning", "correct", "confidence"}
    assert {*SCHEMA["json_schema"]["schema"]["properties"]} == fields
    (message,) = body["messages"]
    assert message["content"] == REQUEST.format(
        question="2 + 2?", answer="4", response="Answer: 4"
    ) and all(f"{name}: " in REQUEST for name in fields)
    assert {*server.keys} == {None}


def test_a_reply_that_is_no_verdict_is_repaired_once(server):
    server.replies = ['{"correct": "perhaps"}']
    environment = Exam(judge=server.spec)
    task = environment.tasks()[0]
    assert task.begin().step(task.solution[0]).reward == 1.0
    first, second = server.asked
    assert second["messages"][:1] == first["messages"] and len(second["messages"]) == 3
    assert second["messages"][1] == {"role": "assistant", "content": '{"correct": "perhaps"}'}
    assert "'extracted_final_answer': Field required" in second["messages"][2]["content"]
    for replies in (["no", "nor this"], [None, None]):  # the latter without content
        server.replies = replies
        with pytest.raises(ServerFailed, match="gave no verdict: there is no JSON object"):
            task.begin().step(task.solution[0])
    assert len(server.asked) == 6
    environment.close()
    environment.close()


def test_what_the_server_cannot_do_is_left_out_tried_again_or_refused(server):
    judge = ServedJudge(server.spec)
    server.replies = [(400, b"response_format is not supported")]
    assert judge("q", "4", "4").correct and judge("q", "4", "4").correct
    assert [("response_format" in b, "temperature" in b) for b in server.asked] == [
        (True, True), (False, True), (False, True),
    ]  # fmt: skip
    for replies, refusal in (
        ([(400, b"no such model")], "HTTP 400: no such model"),
        ([(status, b"") for status in (503, 500, 429)], "after 3 tries in .*: HTTP 429"),
    ):
        server.replies = replies
        with pytest.raises(UserError, match=refusal):
            judge("q", "4", "4")


def test_the_key_is_sent_and_never_told(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    judge = ServedJudge(server.spec)
    told = []
    for reply, reason in [
        ((401, f"The key {SECRET} is\n wrong".encode()), r"HTTP 401: The key \*\*\* is wrong \("),
        ((200, f'{{"error": "{SECRET}"}}'.encode()), r"protocol: \*\*\*"),
    ]:
        server.replies = [reply]
        with pytest.raises(UserError, match=reason) as refused:
            judge("q", "4", "4")
        told.append(f"{refused.value!r} {refused.value.__cause__!r} {refused.getrepr()}")
    assert {*server.keys} == {f"Bearer {SECRET}"}
    assert SECRET not in " ".join([*told, repr(judge)])
    server.models = 401
    with pytest.raises(UserError, match="HTTP 401"):
        ServedJudge(server.spec)


@pytest.mark.parametrize("spec", [
    "gpt-4o", "openai:", "openai:#m", "openai:http://127.0.0.1:9/v1",
    "openai:http://127.0.0.1:x/v1#m", "openai:ftp://host#m",
    "openai:http://user:pass@host/v1#m", "openai:http://host/v1?key=secret#m", "hf:folder#m",
])  # fmt: skip
def test_a_name_that_is_none_is_refused(spec):
    with pytest.raises(UserError, match="openai:URL#MODEL, as in"):
        Exam(judge=spec)


def test_a_judge_that_is_down_is_refused_before_the_first_question(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0)
    with serving(lambda h: None) as url:
        pass
    with pytest.raises(UserError, match=f"The judge at {url} cannot be used: .*start it first"):
        Exam(judge=f"openai:{url}#m")


# ---------------------------------------------------------------- with a memory


def of_questions(server, tmp_path, name, refuse=lambda body: False):
    """The folder of a stream on our six questions. refuse: requests that the judge fails at."""
    judged = server.judged
    server.replies, server.judged = [], lambda b: (503, b"") if refuse(b) else judged(b)
    try:
        folder = streamed(
            name=name, runs=str(tmp_path), suite="hle", judge=server.spec, epochs=2, batch=3,
            arms=("memrl",), temperature=1.0,
        )  # fmt: skip
    finally:
        server.judged = judged
    rows = [json.loads(line) for line in (folder / "memrl.jsonl").read_text().splitlines()]
    return rows, Bank(folder / "memrl.db", BankConfig(), frozen=True)


def test_a_judge_that_fails_changes_nothing_and_one_that_stays_away_fails_the_item(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr("commands.stream.RehearsedEngine", Acting)

    def about(body):
        return "divide 360" in body["messages"][0]["content"]

    rows, bank = of_questions(server, tmp_path, "whole")
    assert len(rows) == 12 and {row["reward"] for row in rows} == {-1.0, 1.0}
    left = [3 * 1]  # one response, with the tries that follow a first failure

    def refuse(body):
        down = about(body) and left[0] > 0
        left[0] -= down
        return down

    again, other = of_questions(server, tmp_path, "failing", refuse)
    assert left == [0] and (again, other.digest) == (rows, bank.digest)
    rows, bank = of_questions(server, tmp_path, "s", about)
    failed = [row for row in rows if row["error"]]
    assert len(rows) == 12 and {row["id"] for row in failed} == {"own-1"}
    assert all(row["success"] is False and "HTTP 503" in row["error"] for row in failed)
    assert "own-1" not in {event[1] for event in bank.events()}
    assert not bank.entries(task_id="own-1")
    assert len(bank.entries()) == 12 - len(failed) and bank._value("PRAGMA integrity_check") == "ok"


# ---------------------------------------------------------------- accuracy and calibration


class Sure(Acting):
    """It is 80 percent sure of each answer, but does not say it of one question."""

    def respond(self, prompt):
        said, asked = super().respond(prompt), prompt.text.rpartition("\n\nTask:\n")[2]
        return said if "semitones" in asked or "Steps:" in asked else f"{said}\nConfidence: 80%"


def test_the_report_of_a_stream_has_accuracy_and_calibration(server, tmp_path, monkeypatch):
    monkeypatch.setattr("commands.stream.RehearsedEngine", Sure)
    folder = streamed(
        name="s", runs=str(tmp_path), suite="hle", judge=server.spec, epochs=2,
        arms=("memrl",),
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "memrl.jsonl").read_text().splitlines()]
    assert {row["confidence"] for row in rows} == {80.0, None}
    assert {row["id"] for row in rows if row["confidence"] is None} == {"own-5"}
    for cell in json.loads((folder / "summary.json").read_text())["cells"]:
        mine = [row for row in rows if row["epoch"] == cell["epoch"] - 1]
        by_hand = calibration((row["confidence"], row["success"]) for row in mine)
        assert (cell["sr"], cell["low"], cell["high"]) == by_hand[:3] and cell["n"] == 6
        assert cell["calibration_error"] == by_hand.error is not None
    assert "calibration error" in (folder / "report.html").read_text()


def test_pictures_go_to_a_model_that_sees_them_as_data_urls(server, tmp_path, capsys):
    """One server is model and judge; without --images the question is left out and counted."""
    path, asked = jsonl(tmp_path, ROWS), []

    def answer(h):
        if h.command == "GET":
            return server.send(h, 200, b'{"data": [{"id": "seer"}]}')
        body = json.loads(h.rfile.read(int(h.headers["Content-Length"])))
        asked.append(body["messages"])
        choice = {"message": {"content": "Answer: a cat\nConfidence: 60%"}, "finish_reason": "stop"}
        server.send(h, 200, json.dumps({"choices": [choice]}).encode())

    with serving(answer) as url:
        settings = dict(runs=str(tmp_path), suite="hle", path=str(path), judge=server.spec,
                        epochs=1, arms=("none",), endpoint=(url,), chat=True)  # fmt: skip
        folder = streamed(name="seen", images=True, **settings)
        rows = [json.loads(line) for line in (folder / "none.jsonl").read_text().splitlines()]
        assert {row["id"]: row["success"] for row in rows} == {"a": False, "b": False, "c": True}
        contents = [message["content"] for (message,) in asked]
        (seen,) = [content for content in contents if not isinstance(content, str)]
        assert [part["type"] for part in seen] == ["text", "image_url"]
        assert ROWS[2]["question"] in seen[0]["text"] and PNG not in seen[0]["text"]
        assert seen[1] == {"type": "image_url", "image_url": {"url": PNG}}
        assert PNG not in (folder / "none.jsonl").read_text()
        capsys.readouterr()
        folder = streamed(name="unseen", **settings)
        assert len((folder / "none.jsonl").read_text().splitlines()) == 2
        assert "1 tasks are left out, which have a picture" in capsys.readouterr().out
        assert all(isinstance(m["content"], str) for messages in asked[3:] for m in messages)
    with pytest.raises(UserError, match="give --endpoint URL and --chat"):
        streamed(suite="hle", images=True)


def test_calibration_by_hand():
    rows = [(90.0, True), (10.0, False), (70.0, False), (30.0, False)]
    # bins (.1, .3) and (.7, .9): |.2 - 0| and |.8 - .5|; sqrt((.04 + .09) / 2)
    found = calibration(rows, size=2)
    assert found.error == pytest.approx(0.065**0.5) and found.accuracy == 0.25 and found.n == 4
    assert (found.low, found.high) == interval([1, 0, 0, 0])
    # one bin: .5 - .25
    assert calibration(rows).error == calibration(rows, size=3).error == pytest.approx(0.25)
    # the fifth joins the last bin: (.1, .3) and (.7, .9, 1): (2 * .04 + 3 * (2.6/3 - 2/3)**2) / 5
    found = calibration([*rows, (100.0, True)], size=2)
    assert found.error == pytest.approx(((2 * 0.04 + 3 * 0.04) / 5) ** 0.5)


def test_calibration_knows_only_those_who_say_how_sure_they_are():
    found = calibration([(100.0, True), (None, False)])
    assert (found.accuracy, found.error, found.n) == (0.5, 0.0, 2)
    assert calibration([(None, True)]).error is None
    with pytest.raises(ValueError):
        calibration([])
