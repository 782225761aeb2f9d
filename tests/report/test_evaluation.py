"""A folder of an evaluation has one model and one suite; another one is refused in time."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import random_policy

import eval
import suites
from config.errors import UserError
from config.options import EvalConfig
from embedded import tiny
from report import evaluation
from report.folder import read_run
from report.rows import latest

ROOT = Path(__file__).parents[2]


def save(codec, folder, scale=1.0):
    policy = random_policy(codec)
    policy.model.norm.weight.data *= scale
    policy.save_pretrained(folder)
    codec.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory, codec):
    folder = tmp_path_factory.mktemp("models")
    return [save(codec, folder / name, scale) for name, scale in (("first", 1.0), ("second", 2.0))]


def config(runs, model, **other):
    small = dict(agents=("memagent",), lengths=(1,), n=2, temperatures=(0.0,))
    small |= {} if {"suite", "data"} & other.keys() else {"kinds": ("one_fact",)}
    fields = dict(name="e", runs=str(runs), model=model, device="cpu") | small | other
    return suites.chosen(EvalConfig, fields)


def ask(settings):
    evaluation, suite = settings
    agents = {name: tiny.agent(memory_tokens=4, final_tokens=4) for name in evaluation.agents}
    return eval.run_suite(evaluation, agents, suite)


@pytest.fixture(scope="module")
def asked(tmp_path_factory, models):
    runs = tmp_path_factory.mktemp("runs")
    ask(config(runs, models[0]))
    return runs


OTHERS = {
    "model": {"model": "second"}, "suite": {"suite": "locomo"}, "data": {"data": ("ledger",)},
    "split": {"split": "test"}, "seed": {"seed": 1}, "top_p": {"top_p": 0.5},
    "dtype": {"dtype": "bfloat16"}, "engine": {"engine": "vllm"},
    "served_as": {"served_as": "b", "endpoint": ("http://a",)},
}  # fmt: skip


@pytest.mark.parametrize("name", [*OTHERS, "weights"])
def test_another_model_or_suite_is_refused_before_anything_is_loaded(
    asked, models, codec, tmp_path, monkeypatch, name
):
    """Also where the weights at a path have changed since."""
    change = {"model": models[0]} | OTHERS.get(name, {})
    change |= {"model": models[1]} if name == "model" else {}
    if name == "weights":
        change["model"] = save(codec, tmp_path / "model")
        asked = ask(config(tmp_path, change["model"])).parent
        save(codec, tmp_path / "model", scale=2.0)
    else:
        monkeypatch.setattr(eval, "open_reader", lambda *_: pytest.fail("a model is loaded"))
    rows = (asked / "e" / "rows.jsonl").read_bytes()
    with pytest.raises(UserError, match=f"another model or suite .*{name}.*another --name"):
        ask(config(asked, **change))
    assert (asked / "e" / "rows.jsonl").read_bytes() == rows


def test_what_is_added_stands_beside_what_is_there(tmp_path, models, capsys, monkeypatch):
    """The table, the summary and the page are of all calls, and the leading agent stays."""
    folder = ask(config(tmp_path, models[0]))
    monkeypatch.chdir(Path(models[0]).parent)
    capsys.readouterr()
    ask(config(tmp_path, "first", agents=("full", "memagent"), kinds=("two_hop",), suite="world"))
    assert "one_fact memagent" in " ".join(capsys.readouterr().out.split())
    ask(config(tmp_path, models[0], lengths=(2,), temperatures=(1.0,), n=3, samples=2, in_flight=3))
    for _ in range(2):
        cells = json.loads((folder / "summary.json").read_text())["cells"]
        assert [(c["agent"], c["question"], c["length"], c["n"]) for c in cells] == [
            ("memagent", "one_fact", 1, 2), ("memagent", "two_hop", 1, 2),
            ("full", "two_hop", 1, 2), ("memagent", "one_fact", 2, 3),
        ]  # fmt: skip
        n = 2 + 2 * 2 + 3 * 2
        assert len(read_run(folder).rows) == n == (folder / "rows.jsonl").read_bytes().count(b"\n")
        assert read_run(folder).status == ""
        ask(config(tmp_path, models[0], n=1))  # less than there is


def test_a_file_that_has_changed_is_refused_if_it_is_the_suites_and_said_if_it_has_the_questions(
    tmp_path, models, capsys, monkeypatch
):
    suite, data = tmp_path / "mine.py", tmp_path / "d.jsonl"
    suite.write_text((ROOT / "tests" / "my_suite.py").read_text())

    def write(name):
        rows = ({"id": f"{name}{k}", "question": "Who?", "answer": "Ada", "context": "Ada."}
                for k in range(3))  # fmt: skip
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def again():  # as another process
        suites.find.cache_clear()
        monkeypatch.setattr(suites.FINDER, "loaded", {})
        return config(tmp_path, models[0], suite=str(suite), lengths=(2,), name="s")

    ask(again())
    ask(again())
    suite.write_text(suite.read_text().replace("k * 3", "k * 4"))
    with pytest.raises(UserError, match=r"suite: its file changed since.*another --name"):
        ask(again())
    for name, said in (("a", 0), ("a", 0), ("b", 3)):  # three questions are asked of each file
        write(name)
        folder = ask(config(tmp_path, models[0], data=(str(data),), lengths=(), name="d", n=3))
        output = " ".join(capsys.readouterr().out.split())
        assert (f"in cells that this one asks for: {said} answers" in output) is bool(said)
    assert len(read_run(folder).rows) == 6


def test_an_agent_with_other_settings_is_refused_before_anything_is_written(
    tmp_path, models, monkeypatch
):
    """At other lengths too, whose rows would stand beside those that are there."""
    folder = ask(config(tmp_path, models[0]))
    files = {path: path.read_bytes() for path in (folder / "config.yaml", folder / "rows.jsonl")}
    make = tiny.agent
    monkeypatch.setattr(tiny, "agent", lambda **given: make(**given | {"memory_tokens": 5}))
    other = r"memagent under other settings \(agent.memory_tokens 4, not 5\): .*--name"
    with pytest.raises(UserError, match=other):
        ask(config(tmp_path, models[0], lengths=(2,)))
    assert all(path.read_bytes() == content for path, content in files.items())
    ask(config(tmp_path, models[0], agents=("full",)))  # another agent may have its own


def test_a_question_whose_text_has_changed_counts_once():
    cell = dict(agent="a", question="q", temperature="0.0", length=1, settings="s")
    rows = [cell | {"id": k, "task": "old"} for k in "ab"] + [cell | {"id": "a", "task": "new"}]
    assert [(row["id"], row["task"]) for row in latest(rows)] == [("b", "old"), ("a", "new")]


def test_what_is_asked_comes_first_and_its_newest_text_alone_by_agents(tmp_path):
    def made(agent, id, task="new"):
        settings = dict(question="q", temperature="0.0", length=1, settings=f"s {agent}")
        return dict(agent=agent, id=id, sample=0, task=task) | settings

    rows = [made("full", "a"), made("mine", "a", "old"), made("mine", "b"), made("mine", "a"),
            made("mine", "c")]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = [("s mine", id, 0, "new") for id in "cad"]  # d is still to come
    found = evaluation.joined(tmp_path, wanted, ["mine"])
    assert [(row["agent"], row["id"], row["task"]) for row in found] == [
        ("mine", "c", "new"), ("mine", "a", "new"), ("mine", "b", "new"), ("full", "a", "new"),
    ]  # fmt: skip
    found = evaluation.joined(tmp_path, [("s mine", "a", 0, "old")])  # the text that is asked now
    assert [(row["agent"], row["id"], row["task"]) for row in found] == [
        ("mine", "a", "old"), ("mine", "b", "new"), ("mine", "c", "new"), ("full", "a", "new"),
    ]  # fmt: skip


def test_every_evaluation_that_a_page_tells_of_has_a_name_of_its_own():
    named = []
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *ROOT.glob("examples/*.py")):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for command in re.findall(r"cli\.py eval ([^`\n]+)", text):
            named += re.findall(r"--name (\S+)", command) or [command]
    assert named and len({*named}) == len(named)
    assert not [name for name in named if " " in name]


def test_its_settings_are_replayed(asked, models):
    from agents import find

    path = asked / "e" / "config.yaml"
    assert "weights:" in path.read_text()
    (now, suite), (then, same) = (
        suites.chosen(EvalConfig, find.stored_settings(path)["eval"]), config(asked, models[0])
    )  # fmt: skip
    assert now == replace(then, dtype="float32") and suite == same  # what auto has taken
    assert json.loads((asked / "e" / "summary.json").read_text())["cells"]


def test_cells_have_equal_room_for_transcripts_and_what_earlier_ones_left_over(
    tmp_path, models, monkeypatch
):
    rooms, fill = [], eval.evaluate

    def noted(*given):
        rooms.append(next(x for x in given if isinstance(x, eval.Conditions)).record_bytes)
        return fill(*given)

    monkeypatch.setattr(eval, "evaluate", noted)
    monkeypatch.setattr(eval, "TRANSCRIPTS", 800)
    ask(config(tmp_path, models[0], agents=("memagent", "none"), temperatures=(1.0, 0.0)))
    assert rooms == [200, 400, 600, 800]
