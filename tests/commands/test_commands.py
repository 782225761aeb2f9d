"""What the commands do beside calling one function.

Evaluations over files, run folders, trajectories on the screen.
"""

import gzip
import html
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from conftest import asked_of, cell_of, random_policy
from test_endpoint import Server
from test_page import HOSTILE, record
from typer.testing import CliRunner

import cli
import eval
import suites
from agents import find
from commands import export, show, taskfiles, train
from config import files as config_files
from config import terminal
from config.errors import UserError
from config.options import EMBEDDED, EvalConfig, GRPOConfig, RunConfig
from data import Pool, Task
from dev import reader
from embedded import tiny
from engines import open
from engines.scripted import ScriptedEngine
from models import load
from models.checkpoints import save_checkpoint
from report import records
from report.folder import read_run
from tasks import readers, seen, writers
from tasks.hqa import make_tasks as build_ruler_hqa

QUICK = EvalConfig(agents=("memagent",), temperatures=(0.0,), n=2, in_flight=8)


def eval_json(path, n, texts=("Anna", "Boris", "Clara"), **other):
    items = [
        {"context": f"{name} reached Lima.", "input": f"Where is {name}?", "answers": ["Lima"]}
        | {"num_docs": n, "index": i}
        | other
        for i, name in enumerate(texts)
    ]
    path.write_text(json.dumps(items))
    return str(path)


def ruler_json(path, answers=("12", "34")):
    item = {"index": 0, "input": "Which?", "context": "One is 12.", "outputs": answers}
    path.write_text(json.dumps([item | {"answer_prefix": "", "length": 5}]))
    return str(path)


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def run_suite(config, **settings):
    """Evaluate agents that read as the embedded policy does."""
    names = {name.partition("@")[0] for name in config.agents}
    suite = suites.from_config(config, settings)
    return eval.run_suite(config, {name: tiny.agent(name) for name in names}, suite)


def cells(*files, **other):
    settings = {"n": 2, "data": files} | other
    unit, asked = asked_of(lambda: pytest.fail("no tokenizer is needed"), **settings)
    return unit, [(column.question, column.length, len(column.make())) for column in asked]


# ---------------------------------------------------------------- evaluations of files


def test_files_are_cells_by_their_number_of_documents_and_apart(tmp_path):
    files = [eval_json(tmp_path / f"eval_{n}.json", n) for n in (50, 200)]
    assert cells(*files, n=3) == ("documents", [("questions", 50, 3), ("questions", 200, 3)])
    a, b = (eval_json(tmp_path / f"{name}.json", 50) for name in "ab")
    labels = [f"questions, {tmp_path.name}/{name}.json" for name in "ab"]
    assert cells(a, b) == ("documents", [(label, 50, 2) for label in labels])
    (tmp_path / "other").mkdir()
    other = eval_json(tmp_path / "other" / "a.json", 50)
    found = [question for question, _, _ in cells(a, other)[1]]
    assert found == [labels[0], "questions, other/a.json"]
    with pytest.raises(UserError, match="rename one"):
        cells(a, a)


def test_a_file_of_several_lengths_is_one_cell_that_says_so(tmp_path):
    tasks = []
    for n in (2, 10):
        pools = [Pool([f"{n}{i}{k}" for k in range(n)], ["x"] * n) for i in range(2)]
        order = tuple(range(n))
        source = [
            Task(f"{n}-{i}", "q?", ("a",), pool=pool, order=order) for i, pool in enumerate(pools)
        ]
        tasks += build_ruler_hqa(source, n)
    path = tmp_path / "mixed.json"
    writers.write_eval_json(path, tasks)
    assert cells(str(path), n=9) == ("documents", [("questions, 2 to 10 documents", 10, 4)])


def test_rulers_sets_are_cells_by_task_and_tokens(tmp_path):
    sizes = {"vt_8192": 8192, "vt_16384": 16384, "niah_single_1_8192": 8192}
    files = [ruler_json(tmp_path / f"eval_{name}.json") for name in sizes]
    columns = [(name.rpartition("_")[0], size, 1) for name, size in sizes.items()]
    assert cells(*files) == ("tokens", columns)
    with pytest.raises(UserError, match="apart"):
        cells(files[0], eval_json(tmp_path / "eval_50.json", 50))


def test_a_label_of_a_file_cannot_steer_the_terminal(tmp_path):
    _, ((question, _, _),) = cells(eval_json(tmp_path / "a.json", 50, dataset="\x1b[31m[/] red"))
    assert question == "\ufffd[31m[/] red"
    config = replace(QUICK, runs=str(tmp_path), name="e", data=(str(tmp_path / "a.json"),), n=1)
    assert run_suite(config) == tmp_path / "e"  # and is no markup of the progress bar's


# ---------------------------------------------------------------- evaluations and their folders


def test_an_evaluation_over_two_files_keeps_both(tmp_path):
    files = tuple(eval_json(tmp_path / f"eval_{n}.json", n) for n in (50, 200))
    folder = run_suite(replace(QUICK, runs=str(tmp_path), name="e", data=files, n=3))
    summary = json.loads((folder / "summary.json").read_text())
    found = [cell_of(summary, "memagent", "questions", "0.0", n)["n"] for n in (50, 200)]
    assert found == [3, 3]
    kept = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    assert {(record["form"], record["temperature"]) for record in kept} == {("boxed", 0.0)}


def test_an_evaluation_never_touches_the_folder_of_something_else(tmp_path):
    run = tmp_path / "m"
    run.mkdir()
    for content in ("run: {name: m}\nagent: {}\n", "", "{", "\x00"):
        (run / "config.yaml").write_text(content)
        with pytest.raises(UserError, match="no evaluation"):
            run_suite(replace(QUICK, runs=str(tmp_path), name="m"))
        assert (run / "config.yaml").read_text() == content and len([*run.iterdir()]) == 1
    (tmp_path / "file").touch()
    for runs, name in (("", ""), ("", "."), ("", "../other"), ("file", "e")):
        with pytest.raises(UserError):
            run_suite(replace(QUICK, runs=str(tmp_path / runs), name=name, lengths=(1,)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "m"]


PARTS = "tokenizer.json config.json chat_template.jinja tokenizer_config.json model.safetensors"


@pytest.mark.parametrize("part", PARTS.split())
def test_rows_belong_to_one_policy_and_one_type_of_numbers(tmp_path, part):
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    before = [open.fingerprint(str(model), f"torch.{dtype}") for dtype in ("float32", "bfloat16")]
    assert before[0] == open.fingerprint(str(model), "torch.float32") != before[1]
    with (model / part).open("ab") as file:
        file.write(b" ")
    assert open.fingerprint(str(model), "torch.float32") not in before


def test_an_evaluation_over_servers(tmp_path, codec):
    """Two replicas share an evaluation, and a third one that serves the same model goes on with
    it."""
    replicas = [Server(codec), Server(codec)]
    file = eval_json(tmp_path / "eval_50.json", 50)
    urls = tuple(server.url for server in replicas)
    config = replace(QUICK, data=(file,), n=3, runs=str(tmp_path), name="e", served_as="m")
    config = replace(config, endpoint=urls, model=str(EMBEDDED))
    rows = rows_of(run_suite(config))
    assert len(rows) == 3 and not any(row["error"] for row in rows)
    asked = [len(server.bodies) for server in replicas]
    assert min(asked) > 0 and sum(asked) >= 2 * len(rows)
    replicas.append(Server(codec))
    run_suite(replace(config, endpoint=(replicas[2].url,), n=2))
    assert not replicas[2].bodies  # nothing is asked twice
    with pytest.raises(UserError, match="does not serve the model 'other'"):
        run_suite(replace(config, served_as="other", name="f"))
    assert not (tmp_path / "f").exists()
    for server in replicas:
        server.stop()


def test_a_server_of_no_known_tokenizer_is_sent_text_in_sections_of_a_usual_size(
    tmp_path, monkeypatch, codec
):
    """Nothing of the embedded policy is in it, neither its sections of 24 tokens nor its tokens."""
    monkeypatch.chdir(tmp_path)
    server = Server(codec, ids=False)
    file = eval_json(tmp_path / "eval_50.json", 50)

    def run(words):
        words = ["eval", "--endpoint", server.url, *words.split()]
        return CliRunner().invoke(cli.app, words)

    run(f"--data {file} --agents memagent,full,bm25 --temperatures 0 --name e")
    folder = tmp_path / "runs" / "e"
    rows, settings = rows_of(folder), yaml.safe_load((folder / "config.yaml").read_text())
    assert len(rows) == 9 and not any(row["error"] for row in rows)
    assert settings["agent"]["chunk_tokens"] == 2048
    assert {body["max_tokens"] for body in server.bodies} == {512, 256}
    assert not any("prompt" in body for body in server.bodies)
    refused = run("--suite ruler --ruler-tasks vt")
    assert refused.exit_code == 2 and "say by --model" in refused.stderr
    server.stop()


# ---------------------------------------------------------------- models


def test_an_export_brings_its_templates_and_leaves_the_cap_behind(tmp_path, codec):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "final.txt").write_text("{prompt} {memory}")
    agent = tiny.agent(templates=str(tmp_path / "mine"), max_sections=8)
    policy = random_policy(codec)
    policy.save_pretrained(tmp_path / "base")
    codec.tokenizer.save_pretrained(tmp_path / "base")
    config_files.dump(
        tmp_path / "config.yaml",
        run=RunConfig(model=str(tmp_path / "base")),
        grpo=GRPOConfig(),
        agent=agent.config,
    )
    save_checkpoint(
        tmp_path / "checkpoints" / "step-3",
        policy,
        torch.optim.AdamW(policy.parameters()),
        {"done_steps": 3, "position": 0, "dtype": "float32"},
    )
    assert export.export(tmp_path, out=tmp_path / "model") == tmp_path / "model"
    with pytest.raises(UserError, match="is there already"):
        export.export(tmp_path, out=tmp_path / "model")
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UserError, match="There are no templates"):
        export.export(tmp_path)
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    settings = yaml.safe_load((tmp_path / "elsewhere" / "agent.yaml").read_text())
    assert settings["agent"]["max_sections"] is None
    _, agent = find.resolve("default", tmp_path / "elsewhere", {}, {})
    assert agent.template("final") == (("problem", False), (" ", True), ("memory", False))
    assert agent.config.max_sections is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": "x"}, "vocab_size"),
        ({"hidden_size": 96}, "do not fit"),
        ({"num_hidden_layers": 5}, "do not fit"),
        ({"model_type": "no"}, "no"),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_one_sentence(tmp_path, capfd, change, reason):
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=reason) as error:
        load.load_model(model, device="cpu")
    assert "\n" not in str(error.value) and capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- on the screen


def printed(function, *arguments):
    """What a command prints, as a terminal would get it, but for colours and the cursor."""
    with terminal.console.capture() as capture:
        function(*arguments)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capture.get())


def test_nothing_in_a_file_steers_the_terminal(tmp_path):
    text = HOSTILE.replace("\ud83d", "")
    path = tmp_path / "own.jsonl"
    fields = dict.fromkeys(("question", "context", "kind", "id"), text)
    path.write_text(json.dumps(fields | {"answers": [text]}))
    shown = printed(taskfiles.show_tasks, str(path), None, 3, "one_fact", 1)
    # and the id, clipped in its rule
    assert "".join(shown.split()).count("[bold]\ufffd[31m\ufffd") == 5
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


def trajectories(path, *lines):
    content = "".join(
        (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
    ).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("bad", [
    "5", "[]", '{"turns": []}', json.dumps(record() | {"turns": [5]}),
    json.dumps(record() | {"turns": [{"final": True}]}), "{", "9" * 5000, "[" * 100_000,
], ids=range(8))  # fmt: skip
def test_a_line_that_is_no_trajectory_is_named(tmp_path, bad):
    for name in ("t.jsonl", "t.jsonl.gz"):
        with pytest.raises(UserError, match="line 2"):
            records.read_records(trajectories(tmp_path / name, record(), bad, record()))


def test_a_step_that_was_not_kept_is_answered_with_those_that_were(tmp_path):
    path = trajectories(tmp_path / "t.jsonl", *(record(step=step) for step in range(0, 106, 5)))
    kept = r"no readings of step 39; kept are those of 0, 5, 10, 15, …, 100, 105\.$"
    with pytest.raises(UserError, match=kept):
        show.show(path, 39, "", False, 3)
    assert "training step 35" in printed(show.show, path, 35, "", False, 3)
    with pytest.raises(UserError, match="None of the 22 readings"):
        show.show(path, 35, "nowhere", False, 3)
    with pytest.raises(UserError, match="of an evaluation, which has no steps"):
        show.show(trajectories(tmp_path / "e.jsonl", record()), 3, "", False, 3)


@pytest.mark.parametrize(
    ("flags", "steps", "then"),
    [
        ({}, [7, 7, 0], "--wrong"),
        ({"wrong": True}, [7, 0], ""),
        ({"right": True}, [7], "--wrong"),
        ({"step": 0}, [0], "--wrong"),
    ],
)
def test_the_last_steps_come_first_and_right_and_wrong_apart(tmp_path, flags, steps, then, capsys):
    rewards = {0: [0.0], 7: [1.0, 0.0]}
    lines = [record(step=s, reward=r) for s, each in rewards.items() for r in each]
    path = trajectories(tmp_path / "t.jsonl", *lines)
    given = dict(step=None, task="", wrong=False, n=9) | flags
    shown = printed(lambda: show.show(path, **given))
    assert [int(step) for step in re.findall(r"training step (\d)", shown)] == steps
    assert then in (err := capsys.readouterr().err) and bool(err) == bool(then)


def test_what_was_asked_without_a_right_answer_is_not_wrong(tmp_path, capsys):
    path = trajectories(tmp_path / "t.jsonl", record(answers=[], kind="asked", reward=0.0))
    assert "answered" in printed(show.show, path, None, "", False, 3)
    assert "--wrong" not in capsys.readouterr().err
    with pytest.raises(UserError, match="None of the 1 readings"):
        show.show(path, None, "", True, 3)


def test_damaged_and_unfinished_trajectory_files(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    noise = [record(question=f"{i * 7919 % 104729}" * 9, id=str(i)) for i in range(300)]
    raw = trajectories(path, *noise).read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    assert 0 < len(records.read_records(path)) < 300  # being written, or killed: what is whole
    path.write_bytes(raw + raw[:10] + b"\xff" * 99)  # a second member, damaged
    with pytest.raises(UserError, match=r"t\.jsonl\.gz cannot be read past line \d+: Error -3"):
        records.read_records(path)
    path.write_bytes(b"no gzip")
    with pytest.raises(UserError, match="cannot be read past line 0"):
        records.read_records(path)
    plain = tmp_path / "t.jsonl"
    plain.write_bytes(json.dumps(record()).encode() + b"\n\xff\n")
    with pytest.raises(UserError, match="cannot be read past line"):
        records.read_records(plain)


# ---------------------------------------------------------------- questions trained on


def questions_of(path, *people, ask="Where is {}?"):
    rows = [
        {"id": f"{path.stem}-{p}", "question": ask.format(p)}
        | {"answer": "Lima", "context": f"{p} reached Lima."}
        for p in people
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def short(**changes):
    """Return the settings of a training of a step."""
    fields = {"steps": 1, "tasks_per_step": (1,), "group_size": 2} | changes
    return find.resolve("demo", EMBEDDED, fields, {})[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps on two of three questions."""
    folder = tmp_path_factory.mktemp("runs")
    file = questions_of(folder / "train.jsonl", "Anna", "Boris", "Clara", "Dora")
    run = RunConfig(name="mine", runs=str(folder), data=file, save_every=1, keep_checkpoints=2)
    return train.train(run, short(steps=2), tiny.agent())


def test_a_run_and_its_exports_remember_the_questions_that_were_used(trained, tmp_path):
    run = seen.trained_on(trained)
    asked = {record["id"]: record["step"] for record in records.read_records(trained)}
    assert len(asked) == 2 and {name: step for step, name in run.values()} == asked
    tasks = {task.id: task.question_digest for task in readers.read(trained.parent / "train.jsonl")}
    assert {*run} == {tasks[name] for name in asked} and all(len(digest) == 16 for digest in run)
    assert {*seen.trained_on(trained / "model")} == {*run}
    early = export.export(trained, step=1, out=tmp_path / "early")
    assert {*seen.trained_on(early)} == {tasks[name] for name, step in asked.items() if step == 0}


def test_an_exported_model_and_its_adapter_know_their_form_and_their_questions(tmp_path):
    file = questions_of(tmp_path / "train.jsonl", "Anna", "Boris")
    config = short(tasks_per_step=(2,), lora_rank=2, outcome="sub_em")
    run = RunConfig(name="plain", runs=str(tmp_path), data=file)
    folder = train.train(run, config, tiny.agent(form="plain"))
    own = {*seen.trained_on(folder)}
    assert len(own) == 2 and {r["form"] for r in records.read_records(folder)} == {"plain"}
    for exported in (folder / "model", folder / "adapter"):
        assert find.of_model(exported)["form"] == "plain"
        assert find.make("full", find.of_model(exported)).config.form == "plain"  # other agents too
        assert {*seen.trained_on(exported)} == own
    (folder / "adapter" / "templates").mkdir()
    (folder / "adapter" / "templates" / "update.txt").write_text("of an earlier export")
    (folder / "trained_on.csv").unlink()
    export.export(folder)
    assert not seen.trained_on(folder / "adapter") and not (folder / "adapter/templates").exists()


def test_an_evaluation_reads_the_form_of_the_model(trained, tmp_path, monkeypatch, codec):
    """A policy that says "**Lima**." is right in the plain form, and unformed in the boxed one."""
    model = tmp_path / "model"
    shutil.copytree(trained / "model", model)
    settings = yaml.safe_load((model / "agent.yaml").read_text())
    settings["agent"]["form"] = "plain"
    (model / "agent.yaml").write_text(yaml.safe_dump(settings))
    engine = ScriptedEngine(codec, lambda prompt: "**Lima**.")
    monkeypatch.setattr(eval, "open_reader", lambda *args, **kwargs: engine)
    monkeypatch.setattr(eval, "engine_fingerprint", lambda *args, **kwargs: "scripted")
    file = questions_of(tmp_path / "asked.jsonl", "Hugo", "Ida")
    for form, (reward, prediction) in {"plain": (1.0, "Lima"), "boxed": (0.0, None)}.items():
        own = find.of_model(model) | ({} if form == "plain" else {"form": form})
        config = replace(QUICK, runs=str(tmp_path), name=form, data=(file,), model=str(model))
        eval.run_suite(config, {"memagent": find.make("memagent", own)})
        rows = rows_of(tmp_path / form)
        assert [(row["reward"], row["prediction"]) for row in rows] == [(reward, prediction)] * 2
        assert {row["response"].strip() for row in rows} == {"**Lima**."}  # whatever was made of it
        page = (tmp_path / form / "report.html").read_text()
        assert "**Lima**." in page and "(none)" not in page
        assert ("not in the form asked for" in page) == (form == "boxed")


def test_a_resumed_run_remembers_what_it_would_have_remembered(trained, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(trained, folder)
    rows = (folder / "trained_on.csv").read_text()
    # killed in the second step, after it had written this
    shutil.rmtree(folder / "checkpoints" / "step-2")
    stored = find.begun(folder)
    run, config = RunConfig(**stored["run"] | {"runs": str(tmp_path)}), GRPOConfig(**stored["grpo"])
    train.train(run, config, tiny.agent(), resume=True)
    assert (folder / "trained_on.csv").read_text() == rows
    # generated English: the split of its facts keeps them apart
    world = train.train(replace(run, name="w", data="world"), short(), tiny.agent())
    assert not seen.trained_on(world / "model") and not (world / "trained_on.csv").exists()


@pytest.mark.parametrize("source", ["model", "untrained"])
def test_an_evaluation_warns_of_questions_that_were_trained_on(trained, tmp_path, source):
    names = {name.partition("-")[2] for _, name in seen.trained_on(trained).values()}
    other = "Hugo"  # in no training file
    # other ids, other spelling
    file = questions_of(tmp_path / "asked.jsonl", *sorted(names), other, ask="where is  {} ")
    model = trained / "model"
    config = replace(QUICK, runs=str(tmp_path), name="e", data=(file,), n=9)
    if source == "untrained":
        config = replace(config, agents=("memagent", "memagent@untrained"), untrained=str(model))
    else:
        config = replace(config, model=str(model))
    out = " ".join(printed(run_suite, config).split())
    agents = "memagent@untrained" if source == "untrained" else "memagent"
    sentence = (
        "Warning: 2 of the 3 questions 'questions' are among those that "
        f"{model} ({agents}) was trained on."
    )
    assert out.count("Warning: 2 of the 3 questions") == 2  # before it begins, and below the table
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    expected = {
        "policy": str(model),
        "agents": [agents],
        "known": 2,
        "questions": {"questions": {"asked": 3, "seen": 2}},
    }
    assert summary["trained_on"] == [expected]
    assert len(reader.met(read_run(tmp_path / "e").rows, seen.trained_on(model))) == 2
    page = (tmp_path / "e" / "report.html").read_text()
    assert sentence in html.unescape(page) and sentence in (tmp_path / "e" / "table.md").read_text()
    clean_file = questions_of(tmp_path / "clean.jsonl", "Hugo", "Ida")
    out = printed(run_suite, replace(config, name="c", data=(clean_file,)))
    clean_page = (tmp_path / "c" / "report.html").read_text()
    assert "Warning" not in out and "None of the 2 questions is among the 2 that" in clean_page
    assert not reader.met(read_run(tmp_path / "c").rows, seen.trained_on(model))
    if source == "model":  # of the same words as any training's on such files
        world = replace(config, name="w", data=("world",), lengths=(1,))
        run_suite(world, kinds=("one_fact",))
        assert json.loads((tmp_path / "w" / "summary.json").read_text())["trained_on"] == []


def test_a_damaged_list_of_questions_is_named(tmp_path):
    assert seen.trained_on(tmp_path / "nowhere") == {}
    (tmp_path / "trained_on.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=r"trained_on\.csv cannot be read"):
        seen.trained_on(tmp_path)
    (tmp_path / "trained_on.csv").write_bytes(b"digest\n\xff\n")
    with pytest.raises(UserError, match=r"trained_on\.csv cannot be read"):
        seen.trained_on(tmp_path)


def test_a_question_is_known_by_its_words_and_rulers_own_by_their_answers_too():
    def digest(question, answers=("a",), dataset=""):
        return Task("1", question, answers, text="x", dataset=dataset, kind="vt").question_digest

    assert digest("Who is the Man?") == digest("who is  man", ("b",)) != digest("Who is the woman?")
    assert digest("?") != digest("!")
    ruler = [digest("Which?", (answer,), "ruler") for answer in "ab"]
    assert ruler[0] != ruler[1]
