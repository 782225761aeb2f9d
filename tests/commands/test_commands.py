"""Evaluations over files and servers, run folders, readings on the screen, what was trained on."""

import gzip
import json
import re
import shutil
from dataclasses import replace

import pytest
import yaml
from conftest import asked_of
from run_folders import HOSTILE, record
from test_endpoint import Server
from typer.testing import CliRunner

import cli
import eval
import suites
from agents import find
from commands import data, export, show, train
from config import terminal
from config.errors import UserError
from config.options import EMBEDDED, EvalConfig, RunConfig
from data import Task
from embedded import tiny
from engines import open
from models import load
from report import records
from report.folder import read_run
from tasks import readers, seen

QUICK = EvalConfig(agents=("memagent",), temperatures=(0.0,), n=2, in_flight=8)


def eval_json(path, *sizes, **other):
    """Write three questions among so many documents each."""
    items = [
        {"context": f"{name} reached Lima.", "input": f"Where is {name}?", "answers": ["Lima"]}
        | {"num_docs": sizes[i % len(sizes)], "index": i}
        | other
        for i, name in enumerate(("Anna", "Boris", "Clara"))
    ]
    path.write_text(json.dumps(items))
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


def test_files_are_cells_by_their_length_their_task_and_their_name(tmp_path):
    files = [eval_json(tmp_path / f"eval_{n}.json", n) for n in (50, 200)]
    assert cells(*files, n=3) == ("documents", [("questions", 50, 3), ("questions", 200, 3)])
    (tmp_path / "b").mkdir()
    a, b, other = [eval_json(tmp_path / name, 50) for name in ("a.json", "b.json", "b/a.json")]
    here = tmp_path.name
    for pair, names in (((a, b), (f"{here}/a", f"{here}/b")), ((a, other), (f"{here}/a", "b/a"))):
        labels = [f"questions, {name}.json" for name in names]
        assert cells(*pair) == ("documents", [(label, 50, 2) for label in labels])
    with pytest.raises(UserError, match="rename one"):
        cells(a, a)
    mixed = eval_json(tmp_path / "mixed.json", 2, 10)
    assert cells(mixed, n=9) == ("documents", [("questions, 2 to 10 documents", 10, 3)])
    columns = [("vt", 8192, 1), ("vt", 16384, 1), ("niah_single_1", 8192, 1)]
    ruler = [tmp_path / f"eval_{kind}_{size}.json" for kind, size, _ in columns]
    item = {"index": 0, "input": "Which?", "context": "One is 12.", "outputs": ("12", "34")}
    for path in ruler:
        path.write_text(json.dumps([item | {"answer_prefix": "", "length": 5}]))
    assert cells(*map(str, ruler)) == ("tokens", columns)
    with pytest.raises(UserError, match="apart"):
        cells(str(ruler[0]), files[0])


# ---------------------------------------------------------------- evaluations and their folders


def test_an_evaluation_over_two_files_keeps_both(tmp_path):
    """A label of a file is no markup of the progress bar's, and cannot steer the terminal."""
    label = dict(dataset="\x1b[31m[/] red")
    files = tuple(eval_json(tmp_path / f"eval_{n}.json", n, **label) for n in (50, 200))
    folder = run_suite(replace(QUICK, runs=str(tmp_path), name="e", data=files, n=3))
    made = json.loads((folder / "summary.json").read_text())["cells"]
    found = [(cell["question"], cell["length"], cell["n"]) for cell in made]
    assert found == [("\ufffd[31m[/] red", n, 3) for n in (50, 200)]
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


def test_rows_belong_to_one_policy_and_one_type_of_numbers(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    known = {open.fingerprint(str(model), f"torch.{dtype}") for dtype in ("float32", "bfloat16")}
    names = "tokenizer.json config.json chat_template.jinja tokenizer_config.json model.safetensors"
    for name in names.split():
        with (model / name).open("ab") as file:
            file.write(b" ")
        known.add(found := open.fingerprint(str(model), "torch.float32"))
        assert found == open.fingerprint(str(model), "torch.float32")
    assert len(known) == 2 + 5


def test_an_evaluation_over_servers_of_no_known_tokenizer(tmp_path, monkeypatch, codec):
    """Two replicas share it, and a third one that serves the same model goes on with it. They are
    sent text in sections of a usual size: nothing of the embedded policy is in it, neither its
    sections of 24 tokens nor its tokens."""
    monkeypatch.chdir(tmp_path)
    servers = [Server(codec, ids=False) for _ in range(3)]
    file = eval_json(tmp_path / "eval_50.json", 50)
    words = f"--data {file} --agents memagent,full,bm25 --temperatures 0 --name"

    def run(some, words):
        urls = ",".join(server.url for server in some)
        return CliRunner().invoke(cli.app, ["eval", "--endpoint", urls, *words.split()])

    assert [run(some, f"{words} e").exit_code for some in (servers[:2], servers[2:])] == [0, 0]
    folder = tmp_path / "runs" / "e"
    rows, settings = rows_of(folder), yaml.safe_load((folder / "config.yaml").read_text())
    assert len(rows) == 9 and not any(row["error"] for row in rows)
    assert settings["agent"]["chunk_tokens"] == 2048
    assert [bool(server.bodies) for server in servers] == [True, True, False]  # none is asked twice
    bodies = [body for server in servers for body in server.bodies]
    assert {body["max_tokens"] for body in bodies} == {512, 256}
    assert not any("prompt" in body for body in bodies)
    for other, said in (
        ("--suite ruler --ruler-tasks vt", "--model"),
        (f"{words} f --served-as other", "Name the model"),
    ):
        refused = run(servers[:1], other)
        assert refused.exit_code == 2 and said in refused.stderr
    assert [*folder.parent.iterdir()] == [folder]
    for server in servers:
        server.stop()


# ---------------------------------------------------------------- models


@pytest.mark.parametrize(("change", "reason"), [
    ({"vocab_size": "x"}, "vocab_size"), ({"hidden_size": 96}, "do not fit"),
    ({"num_hidden_layers": 5}, "do not fit"), ({"model_type": "no"}, "no"),
])  # fmt: skip
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
    shown = printed(data.show_tasks, str(path), 3)
    # and the id, clipped in its rule
    assert "".join(shown.split()).count("[bold]\ufffd[31m\ufffd") == 5
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


def trajectories(path, *lines):
    content = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


def test_a_line_that_is_no_trajectory_is_named(tmp_path):
    broken = ({"turns": []}, record() | {"turns": [5]}, record() | {"turns": [{"final": True}]})
    for bad in (*broken, "5", "[]", "{", "9" * 5000, "[" * 100_000):
        for name in ("t.jsonl", "t.jsonl.gz"):
            with pytest.raises(UserError, match="line 2"):
                records.read_records(trajectories(tmp_path / name, record(), bad, record()))


ALL = dict(step=None, task="", wrong=False, n=3)
MIXED = [record(step=step, reward=reward) for step, reward in ((0, 0.0), (7, 1.0), (7, 0.0))]
ASKED = [record(answers=[], kind="asked", reward=0.0)]  # which has no right answer


@pytest.mark.parametrize(("lines", "flags", "steps"), [
    (MIXED, {}, [7, 7, 0]), (MIXED, {"wrong": True}, [7, 0]), (MIXED, {"step": 0}, [0]),
    (MIXED, {"n": 1}, [7]), (ASKED, {}, []), (ASKED, {"wrong": True}, None),
    (MIXED, {"task": "nowhere"}, None), (MIXED, {"step": 3}, None), ([record()], {"step": 3}, None),
])  # fmt: skip
def test_the_last_steps_come_first_and_the_wrong_ones_apart(tmp_path, lines, flags, steps, capsys):
    path = trajectories(tmp_path / "t.jsonl", *lines)
    if steps is None:
        with pytest.raises(UserError, match="matches"):
            show.show(path, **ALL | flags)
        return
    shown = printed(lambda: show.show(path, **ALL | flags))
    assert [int(step) for step in re.findall(r"training step (\d)", shown)] == steps
    assert ("--wrong" in capsys.readouterr().err) is (lines is MIXED and "wrong" not in flags)


def test_damaged_and_unfinished_trajectory_files(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    noise = [record(question=f"{i * 7919 % 104729}" * 9, id=str(i)) for i in range(300)]
    raw = trajectories(path, *noise).read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    assert 0 < len(records.read_records(path)) < 300  # being written, or killed: what is whole
    for name, content in {
        path.name: raw + raw[:10] + b"\xff" * 99,  # a second member, damaged
        "noise.gz": b"no gzip",
        "plain": json.dumps(record()).encode() + b"\n\xff\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}, line \d+ cannot be read"):
            records.read_records(tmp_path / name)


# ---------------------------------------------------------------- questions trained on


def questions_of(path, *people, ask="Where is {}?"):
    rows = [
        {"id": f"{path.stem}-{p}", "question": ask.format(p)}
        | {"answer": "Lima", "context": f"{p} reached Lima."}
        for p in people
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def train_again(tmp_path_factory):
    """Train adapters with settings of a user's own, two steps on two of four questions."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "own").mkdir()
    (folder / "own" / "final.txt").write_text("{prompt} {memory}")
    file = questions_of(folder / "train.jsonl", "Anna", "Boris", "Clara", "Dora")
    run = RunConfig(name="mine", runs=str(folder), data=file, save_every=1, keep_checkpoints=2)
    fields = dict(steps=2, tasks_per_step=(1,), group_size=2, lora_rank=2, outcome="sub_em")
    config = find.resolve("demo", EMBEDDED, fields, {})[0]
    agent = tiny.agent(form="plain", templates=str(folder / "own"), max_sections=8)
    return lambda resume=False, **other: train.train(replace(run, **other), config, agent, resume)


@pytest.fixture(scope="module")
def trained(train_again):
    return train_again()


def test_a_run_and_its_exports_remember_the_questions_that_were_used(trained, tmp_path):
    run = seen.trained_on(trained)
    asked = {record["id"]: record["step"] for record in records.read_records(trained)}
    assert len(asked) == 2 and {name: step for step, name in run.values()} == asked
    tasks = {task.id: task.question_digest for task in readers.read(trained.parent / "train.jsonl")}
    assert {*run} == {tasks[name] for name in asked} and all(len(digest) == 16 for digest in run)
    for exported in (trained / "model", trained / "adapter"):
        assert {*seen.trained_on(exported)} == {*run}
    early = export.export(trained, step=1, out=tmp_path / "early")
    assert {*seen.trained_on(early)} == {tasks[name] for name, step in asked.items() if step == 0}


def test_an_export_brings_its_form_and_its_templates_and_leaves_the_cap_behind(trained, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    for exported in (folder / "model", folder / "adapter"):
        settings = yaml.safe_load((exported / "agent.yaml").read_text())
        assert settings["agent"]["max_sections"] is None
        _, agent = find.resolve("default", exported, {}, {})
        assert agent.template("final") == (("problem", False), (" ", True), ("memory", False))
        assert (agent.config.form, agent.config.max_sections) == ("plain", None)
        assert find.make("full", find.of_model(exported)).config.form == "plain"  # other agents too
    (folder / "adapter" / "templates" / "update.txt").write_text("of an earlier export")
    (folder / "trained_on.csv").unlink()
    export.export(folder)
    assert not seen.trained_on(folder / "adapter")
    assert not (folder / "adapter/templates/update.txt").exists()
    with pytest.raises(UserError, match="is there already"):
        export.export(folder, out=folder / "model")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("/own\n", "/gone\n"))
    with pytest.raises(UserError, match="There are no templates"):
        export.export(folder)


def test_a_resumed_run_remembers_what_it_would_have_remembered(trained, train_again, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(trained, folder)
    # killed in the second step, after it had written this
    shutil.rmtree(folder / "checkpoints" / "step-2")
    train_again(runs=str(tmp_path), resume=True)
    assert (folder / "trained_on.csv").read_text() == (trained / "trained_on.csv").read_text()


@pytest.mark.parametrize("agent", ["memagent", "memagent@untrained"])
def test_an_evaluation_warns_of_questions_that_were_trained_on(trained, tmp_path, agent):
    model, known = str(trained / "model"), seen.trained_on(trained)
    names = [name.partition("-")[2] for _, name in known.values()]
    # other ids, other spelling, and one that is in no training file
    file = questions_of(tmp_path / "asked.jsonl", *names, "Hugo", ask="where is  {} ")
    config = replace(QUICK, runs=str(tmp_path), name="e", data=(file,), n=9, model=model)
    if agent != "memagent":
        config = replace(config, agents=("memagent", agent), model="", untrained=model)
    out = " ".join(printed(run_suite, config).split())
    assert out.count("Warning: 2 of the 3 questions") == 2  # before it begins, and below the table
    summary = json.loads((tmp_path / "e" / "summary.json").read_text())
    found = {"policy": model, "agents": [agent], "known": 2}
    assert summary["trained_on"] == [found | {"questions": {"questions": {"asked": 3, "seen": 2}}}]
    for page in ("report.html", "table.md"):
        assert "Warning: 2 of the 3" in (tmp_path / "e" / page).read_text()
    rows = read_run(tmp_path / "e").rows
    assert len({row["id"] for row in rows if row["asked"] in known}) == 2
    clean = questions_of(tmp_path / "clean.jsonl", "Hugo", "Ida")
    assert "Warning" not in printed(run_suite, replace(config, name="c", data=(clean,)))
    if agent == "memagent":  # of the same words as any training's on such files
        run_suite(replace(config, name="w", data=("world",), lengths=(1,)), kinds=("one_fact",))
        assert json.loads((tmp_path / "w" / "summary.json").read_text())["trained_on"] == []


def test_a_question_is_known_by_its_words_and_rulers_own_by_their_answers_too():
    def digest(question, answers=("a",), dataset=""):
        return Task("1", question, answers, text="x", dataset=dataset, kind="vt").question_digest

    assert digest("Who is the Man?") == digest("who is  man", ("b",)) != digest("Who is the woman?")
    assert digest("?") != digest("!")
    assert digest("Which?", ("a",), "ruler") != digest("Which?", ("b",), "ruler")
