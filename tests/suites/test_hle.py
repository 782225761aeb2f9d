"""Humanity's Last Exam: its form, verdicts, a judge on a socket that fails, calibration."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import opened, streamed
from test_endpoint import SECRET, Server, serve, text_of  # noqa: F401
from test_stream import Acting

from agents.bank import Bank, BankConfig
from config.errors import ServerFailed, UserError
from report.summary import calibration, interval
from suites.hle import REQUEST, SCHEMA, Exam, ServedJudge, Verdict, confidence, read, verdict
from tasks import served

PNG = "data:image/png;base64,iVBORw0KGgo="
FIELDS = ("id", "question", "answer", "category", "answer_type", "image")
ROWS = [
    dict(zip(FIELDS, values, strict=True))
    for values in (
        ("a", "2 + 2?", "4", "Math", "exactMatch", ""),
        ("b", "Which? A. x B. y", "B", "Biology/Medicine", "multipleChoice", None),
        ("c", "What is shown?", "a cat", "Other", "exactMatch", PNG),
    )
]
GOOD = {"extracted_final_answer": "4", "reasoning": "Same.", "correct": "yes", "confidence": 80}


def jsonl(tmp_path, rows, name="hle.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def by_word(question: str, answer: str, response: str) -> Verdict:
    """A judge without a model: the response ends with the answer."""
    return Verdict(extracted_final_answer=response, correct=response.split()[-1] == answer)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_file_is_read_in_its_order(tmp_path, form):
    path = jsonl(tmp_path, ROWS)
    if form == "parquet":
        path = tmp_path / "hle.parquet"
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    assert [*read(path)] == ["a", "b", "c"]
    few, all_three = Exam(path, by_word), Exam(path, by_word, images=True)
    assert (few.skipped, all_three.skipped) == (1, 0)
    assert [(task.id, task.images) for task in few.tasks()] == [("a", ()), ("b", ())]
    assert [task.images for task in all_three.tasks()] == [(), (), (PNG,)]
    task = few.tasks()[1]
    assert task.question == task.intent == task.begin().observation == ROWS[1]["question"]
    assert (task.kind, task.solution, task.skills) == (ROWS[1]["category"], ("B",), (task.kind,))
    other = Exam(jsonl(tmp_path, [ROWS[0] | {"answer": "5"}, ROWS[1]]), by_word).tasks()
    assert [o.digest == t.digest for o, t in zip(other, few.tasks(), strict=True)] == [False, True]


@pytest.mark.parametrize("change", [
    {"question": None}, {"answer": " "}, {"answer": 4}, {"category": ["x"]},
    {"answer_type": "essay"}, {"image": "cat.png"}, {"image": 5}, {"id": "a"},
])  # fmt: skip
def test_another_form_is_named_by_file_record_and_field(tmp_path, change):
    path = jsonl(tmp_path, [ROWS[0], ROWS[1] | change])
    with pytest.raises(UserError) as error:
        Exam(path, by_word)
    told = str(error.value)
    assert told.startswith(f"{path}, line 2") and next(iter(change)) in told and "\n" not in told


def test_without_a_question_or_a_judge_there_is_no_exam(tmp_path):
    for rows in ([], [ROWS[2]]):
        with pytest.raises(UserError):
            Exam(jsonl(tmp_path, rows), by_word)
    with pytest.raises(UserError, match="--judge"):
        opened("hle")
    for spec in ("gpt-4o", "openai:http://127.0.0.1:9/v1", "openai:http://u:p@h/v1#m", "hf:f#m"):
        with pytest.raises(UserError, match="openai:URL#MODEL"):
            Exam("", spec)


def test_a_response_is_judged_and_the_right_answer_is_not_told():
    task, *others = Exam("", by_word).tasks()
    assert len({task.id, *(other.id for other in others)}) == 6
    assert task.digest == "af7dd98aa987b7e2"  # of all versions: a stored row is found again by it
    for said, reward, failure in (
        (f"Answer: {task.solution[0]}", 1.0, ""), ("Answer: 4711", -1.0, ""), (" \n", -1.0, "empty")
    ):  # fmt: skip
        step = task.begin().step(said)
        assert (step.done, step.reward, step.failure) == (True, reward, failure)
        assert task.solution[0] not in step.observation or reward > 0
    loud = Verdict(extracted_final_answer="\x1b[2J" + "x\n" * 9999, correct=True)
    observation = Exam("", lambda *_: loud).tasks()[0].begin().step("x").observation
    assert len(observation) < 500 and not {"\x1b", "\n"} & {*observation}


@pytest.mark.parametrize("response, sure", [
    ("Answer: 7\nConfidence: 85%", 85), ("Confidence: 100%", 100),
    ("**Confidence**: 7.5 %.", 7.5), ("confidence 0", 0),
    ("Confidence: 20%\nNo.\nConfidence: 30%", 30), ("I am certain.", None), ("", None),
    ("Confidence: 101%", None), ("Confidence: 1000%", None), ("Confidence: high, 3 of 4", None),
])  # fmt: skip
def test_a_confidence_is_read_from_a_response(response, sure):
    assert confidence(response) == sure


@pytest.mark.parametrize("text", [
    json.dumps(GOOD), f"```json\n{json.dumps(GOOD)}\n```", json.dumps(GOOD | {"more": 1}),
    f"<think>{{no}} hm</think> Here it is: {json.dumps(GOOD)}",
    json.dumps(GOOD | {"confidence": "80%", "correct": "Yes"}),
])  # fmt: skip
def test_a_verdict_is_read(text):
    assert verdict(text) == Verdict(extracted_final_answer="4", correct=True)


@pytest.mark.parametrize("text", [
    "", "yes", "} {", '{"correct": yes}', "{" * 5000 + "}", '{"correct": "yes"}',
    '{"extracted_final_answer": "4"}', json.dumps(GOOD | {"correct": "maybe"}),
    json.dumps(GOOD | {"correct": None}),
])  # fmt: skip
def test_what_is_no_verdict_is_known(text):
    with pytest.raises(ValueError):
        verdict(text)


def judged(body: dict) -> dict:
    """What a judge by word replies."""
    tags = ("<right_answer>\n", "<response>\n")
    right, said = (body["messages"][0]["content"].split(tag)[1].split("\n</")[0] for tag in tags)
    correct = "yes" if right in said else "no"
    return text_of(json.dumps(GOOD | {"extracted_final_answer": said, "correct": correct}))


@pytest.fixture
def server(serve, monkeypatch):  # noqa: F811
    monkeypatch.setattr(served, "count_retries", lambda patience_s: 2)
    server = serve()
    server.always, server.models = judged, (404, b"")
    server.spec = f"openai:{server.url}#a/judge"
    return server


def test_a_judge_is_asked_for_the_published_fields_with_a_schema(server):
    judge = ServedJudge(server.spec)
    assert judge("2 + 2?", "4", "Answer: 4").correct
    assert not judge("2 + 2?", "4", "Answer: 5").correct
    assert judge("{q}", "{0}", "it is {0} {answer}").correct  # braces are text
    request = REQUEST.format(question="2 + 2?", answer="4", response="Answer: 4")
    assert server.bodies[0] == {
        "model": "a/judge",
        "messages": [{"role": "user", "content": request}],
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
    }
    assert SCHEMA["strict"] and {*SCHEMA["schema"]["properties"]} == {*GOOD}
    assert all(f"\n{name}: " in REQUEST for name in GOOD)


def test_a_reply_that_is_no_verdict_is_repaired_once(server):
    server.faults = [text_of('{"correct": "perhaps"}')]
    environment = Exam("", server.spec)
    task = environment.tasks()[0]
    assert task.begin().step(task.solution[0]).reward == 1.0
    first, second = server.bodies
    assert second["messages"][:1] == first["messages"] and len(second["messages"]) == 3
    assert second["messages"][1] == {"role": "assistant", "content": '{"correct": "perhaps"}'}
    for replies in (["no", "nor this"], ["", ""]):
        server.faults = [text_of(reply) for reply in replies]
        with pytest.raises(ServerFailed):
            task.begin().step(task.solution[0])
    assert len(server.bodies) == 6
    environment.close()


@pytest.mark.parametrize("fault, says", [
    ((400, b"no such model"), "HTTP 400: no such model"), ((503, b""), "HTTP 503"),
    ((401, f"The key {SECRET} is wrong".encode()), r"The key \*\*\* is wrong"),
])  # fmt: skip
def test_a_judge_that_cannot_answer_is_refused(server, monkeypatch, fault, says):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    judge, server.always = ServedJudge(server.spec), fault
    with pytest.raises(UserError, match=says):
        judge("q", "4", "4")
    assert server.keys == {f"Bearer {SECRET}"}
    server.models = (401, b"")
    with pytest.raises(UserError, match="HTTP 401"):
        ServedJudge(server.spec)
    server.stop()
    with pytest.raises(UserError, match="start it first"):  # before the first question
        ServedJudge(server.spec)


class Sure(Acting):
    """It is 80 percent sure of each answer, but does not say it of one question."""

    def respond(self, prompt):
        said, asked = super().respond(prompt), prompt.text.rpartition("\n\nTask:\n")[2]
        return said if "semitones" in asked or "Steps:" in asked else f"{said}\nConfidence: 80%"


def of_questions(server, tmp_path, name):
    """A stream on our six questions: its folder, rows and bank."""
    folder = streamed(
        name=name, runs=str(tmp_path), suite="hle", judge=server.spec, epochs=2, batch=3,
        arms=("memrl",), temperature=1.0,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / "memrl.jsonl").read_text().splitlines()]
    return folder, rows, Bank(folder / "memrl.db", BankConfig(), frozen=True)


def test_a_judge_that_fails_changes_nothing_and_one_that_stays_away_fails_the_item(
    server, tmp_path, monkeypatch
):
    monkeypatch.setattr("commands.stream.RehearsedEngine", Sure)
    folder, rows, bank = of_questions(server, tmp_path, "whole")
    assert len(rows) == 12 and {row["reward"] for row in rows} == {-1.0, 1.0}
    assert {row["id"] for row in rows if row["confidence"] is None} == {"own-5"}
    for cell in json.loads((folder / "summary.json").read_text())["cells"]:
        mine = [row for row in rows if row["epoch"] == cell["epoch"] - 1]
        by_hand = calibration((row["confidence"], row["success"]) for row in mine)
        assert (cell["sr"], cell["low"], cell["high"]) == by_hand[:3] and cell["n"] == 6
        assert cell["calibration_error"] == by_hand.error is not None
    assert "calibration error" in (folder / "report.html").read_text()

    def down(body):  # for one question, as often as `left` says
        about = "divide 360" in body["messages"][0]["content"] and left[0] > 0
        left[0] -= about
        return (503, b"") if about else judged(body)

    server.always, left = down, [3]  # one response, with the tries that follow a first failure
    _, again, other = of_questions(server, tmp_path, "failing")
    assert left == [0] and (again, other.digest) == (rows, bank.digest)
    left = [10**6]
    _, rows, bank = of_questions(server, tmp_path, "away")
    failed = [row for row in rows if row["error"]]
    assert len(rows) == 12 and {row["id"] for row in failed} == {"own-1"}
    assert not any(row["success"] for row in failed)
    assert not bank.entries(task_id="own-1") and len(bank.entries()) == 12 - len(failed)


def test_pictures_go_to_a_model_that_sees_them_as_data_urls(server, tmp_path, capsys):
    path, seer = jsonl(tmp_path, ROWS), Server(None)
    seer.always = text_of("Answer: a cat\nConfidence: 60%")
    settings = dict(runs=str(tmp_path), suite="hle", path=str(path), judge=server.spec,
                    epochs=1, arms=("none",), endpoint=(seer.url,), chat=True)  # fmt: skip
    folder = streamed(name="seen", images=True, **settings)
    rows = [json.loads(line) for line in (folder / "none.jsonl").read_text().splitlines()]
    assert {row["id"]: row["success"] for row in rows} == {"a": False, "b": False, "c": True}
    contents = [body["messages"][0]["content"] for body in seer.bodies]
    (seen,) = [content for content in contents if not isinstance(content, str)]
    assert [part["type"] for part in seen] == ["text", "image_url"]
    assert ROWS[2]["question"] in seen[0]["text"] and PNG not in seen[0]["text"]
    assert seen[1] == {"type": "image_url", "image_url": {"url": PNG}}
    assert PNG not in (folder / "none.jsonl").read_text()
    folder = streamed(name="unseen", **settings)
    assert len((folder / "none.jsonl").read_text().splitlines()) == 2
    assert "1 tasks are left out" in capsys.readouterr().out
    for more in ({}, {"endpoint": (seer.url,)}, {"chat": True}):
        with pytest.raises(UserError, match="give --endpoint URL and --chat"):
            streamed(suite="hle", images=True, **more)
    seer.stop()


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
    # those alone who say how sure they are
    found = calibration([(100.0, True), (None, False)])
    assert (found.accuracy, found.error, found.n) == (0.5, 0.0, 2)
    assert calibration([(None, True)]).error is None
