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
from commands import ask as commands_ask
from commands import export, show, taskfiles, train
from commands.ask import How
from config import files as config_files
from config import terminal
from config.errors import UserError
from config.options import EMBEDDED, AskConfig, EvalConfig, GRPOConfig, RunConfig
from data import Pool, Task
from dev import untrained
from embedded import tiny
from engines import open
from models import load
from models.checkpoints import save_checkpoint
from report import records
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
    suite = suites.of(config, settings)
    return eval.run_suite(config, {name: tiny.agent(name) for name in names}, suite)


def cells(*files, **other):
    settings = {"n": 2, "data": files} | other
    unit, asked = asked_of(lambda: pytest.fail("no tokenizer is needed"), **settings)
    return unit, [(column.question, column.length, len(column.make())) for column in asked]


# ---------------------------------------------------------------- evaluations of files


def test_published_files_are_cells_by_their_number_of_documents(tmp_path):
    files = [eval_json(tmp_path / f"eval_{n}.json", n) for n in (50, 200)]
    assert cells(*files, n=3) == ("documents", [("questions", 50, 3), ("questions", 200, 3)])


def test_files_of_one_length_stay_apart(tmp_path):
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
    for name in ("", ".", "..", "../other", str(tmp_path.parent)):
        with pytest.raises(UserError, match="--name"):
            run_suite(replace(QUICK, runs=str(tmp_path), name=name))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        run_suite(replace(QUICK, runs=str(tmp_path / "file"), name="e", lengths=(1,)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "m"]


@pytest.mark.parametrize(
    "change",
    [None, "dtype", "tokenizer.json", "config.json", "chat_template.jinja"]
    + ["tokenizer_config.json", "model.safetensors"],
)
def test_rows_belong_to_one_policy_and_one_type_of_numbers(tmp_path, change):
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    before = open.fingerprint(str(model), "torch.float32")
    if change and change != "dtype":
        with (model / change).open("ab") as file:
            file.write(b" ")
    after = open.fingerprint(str(model), "torch.bfloat16" if change == "dtype" else "torch.float32")
    assert (before == after) == (change is None)
    assert open.fingerprint("a/b", "x") != open.fingerprint("a/b", "y")


def test_answers_in_bfloat16_are_asked_anew(tmp_path):
    config = replace(QUICK, runs=str(tmp_path), name="e", lengths=(1,))
    settings_of = []
    for name, dtype in (("e", "float32"), ("f", "bfloat16"), ("e", "float32")):
        folder = run_suite(replace(config, dtype=dtype, name=name), kinds=("one_fact",))
        settings_of += json.loads((folder / "summary.json").read_text())["settings"]
    assert len(settings_of) == 3 and len(set(settings_of)) == 2 and settings_of[0] == settings_of[2]
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 2
    with pytest.raises(UserError, match=r"dtype 'float32', not 'bfloat16'.*another --name"):
        run_suite(replace(config, dtype="bfloat16"))


def test_an_evaluation_and_a_question_over_servers(tmp_path, codec, capsys):
    """Two replicas share an evaluation, and a third one that serves the same model goes on with it.

    A question goes to one of them.
    """
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
    (tmp_path / "doc.txt").write_text("Clara joined Otto. Anna reached Lima.")
    url = replicas[0].url
    asking = AskConfig(model="tiny", endpoint=(url,), served_as="m", runs=str(tmp_path))
    words = [str(tmp_path / "doc.txt"), "Where is Anna?"]
    commands_ask.ask(words, asking, How("memagent"))
    assert len(replicas[0].bodies) == asked[0] + 2 and ", 1 section, " in capsys.readouterr().out
    with pytest.raises(UserError, match="does not serve the model 'other'"):
        run_suite(replace(config, served_as="other", name="f"))
    assert not (tmp_path / "f").exists()
    for server in replicas:
        server.stop()


def test_a_server_of_no_known_tokenizer_is_sent_text_in_sections_of_a_usual_size(
    tmp_path, monkeypatch, codec
):
    """Nothing of the embedded policy is in it.

    Neither its sections of 24 tokens nor its tokens nor a word about it.
    """
    monkeypatch.chdir(tmp_path)
    server = Server(codec, ids=False)
    text = "".join(f"Sentence {n}, né à Zürich. " for n in range(900))
    (tmp_path / "page.txt").write_text(text)

    def run(words):
        words = [*words.split(), "--endpoint", server.url]
        return printed(lambda: CliRunner().invoke(cli.app, words, catch_exceptions=False))

    shown, bodies = run("ask page.txt Where? --agent memagent"), server.bodies
    n_sections = -(-len(text.encode()) // (4 * 2048))
    assert n_sections <= 4 and len(bodies) == n_sections + 1
    sent = [
        body["messages"][0]["content"].partition("<section>\n")[2].partition("\n</section>")[0]
        for body in bodies
    ]
    assert "".join(sent) == text and max(len(part.encode()) for part in sent) <= 4 * 2048
    assert [body["max_tokens"] for body in bodies] == [512] * n_sections + [256]
    assert "embedded" not in shown and "estimated" in shown
    assert f"tokens, {n_sections} sections, about" in shown
    file = eval_json(tmp_path / "eval_50.json", 50)
    run(f"eval --data {file} --agents memagent,full,bm25 --temperatures 0 --name e")
    folder = tmp_path / "runs" / "e"
    rows, settings = rows_of(folder), yaml.safe_load((folder / "config.yaml").read_text())
    assert len(rows) == 9 and not any(row["error"] for row in rows)
    assert settings["agent"]["chunk_tokens"] == 2048
    assert {body["max_tokens"] for body in bodies} == {512, 256}
    assert not any("prompt" in body for body in bodies)
    words = ["eval", "--endpoint", server.url, "--suite", "ruler", "--ruler-tasks", "vt"]
    refused = CliRunner().invoke(cli.app, words)
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


def asked(file, agent, **settings):
    """What `ask` prints about a file."""
    config = AskConfig(model="tiny", device="cpu", runs=str(file.parent / "runs"))
    how = How(agent, settings=settings)
    return printed(commands_ask.ask, [str(file), "Where?"], config, how)


def test_nothing_in_a_file_steers_the_terminal(tmp_path):
    text = HOSTILE.replace("\ud83d", "")
    path = tmp_path / "own.jsonl"
    fields = dict.fromkeys(("question", "context", "kind", "id"), text)
    path.write_text(json.dumps(fields | {"answers": [text]}))
    shown = printed(taskfiles.show_tasks, str(path), None, None, 3, "one_fact", 1)
    # and the id, clipped in its rule
    assert "".join(shown.split()).count("[bold]\ufffd[31m\ufffd") == 5
    assert not re.search("[\0-\x08\x0b-\x1f\x7f-\x9f\u202e]", shown)


@pytest.fixture
def scripted(monkeypatch, codec):
    """Let a function of the prompt answer instead of a model."""
    from engines.scripted import ScriptedEngine

    def give(answer, module=commands_ask):
        engine = ScriptedEngine(codec, answer)
        monkeypatch.setattr(module, "open_reader", lambda *args, **kwargs: engine)

    return give


def test_an_answer_does_not_steer_the_terminal(tmp_path, scripted):
    scripted(lambda prompt: "\x1b[31m\\boxed{Lima\x07}")
    (tmp_path / "doc.txt").write_text("Anna reached Lima.")
    own = dict(memory_tokens=99, final_tokens=99, chunk_tokens=2, max_sections=1)
    shown = asked(tmp_path / "doc.txt", "memagent", **own)
    assert shown.count("\ufffd[31m") == 2 and "Lima\ufffd" in shown
    assert "2 tokens of the text were not read" in shown and not re.search("[\x07\x1b]", shown)


@pytest.mark.parametrize(
    ("said", "last"),
    [
        ("It is Lima.", "answer: It is Lima."),
        ("\\boxed{Lima}", "answer: Lima"),
        ("", "The response is empty."),
    ],
)
def test_an_answer_without_a_box_is_shown_as_the_answer(tmp_path, scripted, said, last):
    scripted(lambda prompt: said)
    (tmp_path / "doc.txt").write_text("Anna reached Lima.")
    shown, unboxed = asked(tmp_path / "doc.txt", "none", memory_tokens=99, final_tokens=99), "It is"
    assert last in shown and "no answer" not in shown
    assert ("not in the form that was asked for, \\boxed{...}" in shown) == (unboxed in said)
    assert shown.count("It is Lima.") == (unboxed in said)  # once


def test_asking_shows_what_is_looked_for_and_what_comes_back(tmp_path, scripted):
    said = iter(
        (
            "<update>Otto.</update><recall>Ida</recall>",
            "<update>Rosa.</update><recall>who was Otto?</recall>",
            "<recall>Otto",
            "\\boxed{Lima}",
        )
    )
    # the prompt that warms the engine up is no turn
    scripted(lambda prompt: next(said) if prompt.max_tokens > 1 else "")
    (tmp_path / "doc.txt").write_text("Anna reached Lima. Otto reached Rome. Ida met Emil.")
    own = dict(step_tokens=99, query_tokens=99, final_tokens=99, chunk_tokens=4)
    shown = " ".join(asked(tmp_path / "doc.txt", "rememr1", **own).split())
    places = [
        shown.find(words)
        for words in (
            "section 1: [-No previous memory-] {+Otto.+}",
            "looks for Ida",
            "recalled nothing found for 'Ida'",
            "section 2: [-Otto.-] {+Rosa.+}",
            "looks for who was Otto?",
            "recalled Otto. written after section 1, found for 'who was Otto?'",
            "form no update, unclosed recall",
            "answer: Lima",
        )
    ]
    assert -1 not in places and places == sorted(places), shown
    assert "section 3" not in shown  # the memory stayed as it was


def trajectories(path, *lines):
    content = "".join(
        (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
    ).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize(
    "bad",
    [
        "5",
        "null",
        "[]",
        '{"turns": []}',
        json.dumps(record() | {"turns": [5]}),
        json.dumps(record() | {"turns": [{"final": True}]}),
        "{",
        "9" * 5000,
        "[" * 100_000,
    ],
    ids=range(9),
)
def test_a_line_that_is_no_trajectory_is_named(tmp_path, bad):
    for name in ("t.jsonl", "t.jsonl.gz"):
        with pytest.raises(UserError, match="line 2"):
            records.read_records(trajectories(tmp_path / name, record(), bad, record()))


def test_a_step_that_was_not_kept_is_answered_with_those_that_were(tmp_path):
    path = trajectories(tmp_path / "t.jsonl", *(record(step=step) for step in range(0, 106, 5)))
    kept = r"no trajectories of step 39; kept are those of 0, 5, 10, 15, …, 100, 105\.$"
    with pytest.raises(UserError, match=kept):
        show.show(path, 39, "", False, 3)
    assert "training step 35" in printed(show.show, path, 35, "", False, 3)
    with pytest.raises(UserError, match="None of the 22 trajectories"):
        show.show(path, 35, "nowhere", False, 3)
    with pytest.raises(UserError, match="of an evaluation, which has no steps"):
        show.show(trajectories(tmp_path / "e.jsonl", record()), 3, "", False, 3)


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


def test_documents_of_no_section_are_refused():
    with pytest.raises(UserError, match="at least 1 section"):
        taskfiles.show_tasks("world", None, None, 1, "one_fact", 0)


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
    other = questions_of(tmp_path / "other.jsonl", "Emil")
    run = RunConfig(name="second", runs=str(tmp_path), data=other, model=str(early))
    second = train.train(run, short(), tiny.agent())
    both = {*seen.trained_on(early), *seen.trained_on(second)}
    assert {*seen.trained_on(second / "model")} == both and len(both) == 2


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


def test_an_evaluation_reads_the_form_of_the_model(trained, tmp_path, monkeypatch, scripted):
    """A policy that says "**Lima**." is right in the plain form, and unformed in the boxed one."""
    model = tmp_path / "model"
    shutil.copytree(trained / "model", model)
    settings = yaml.safe_load((model / "agent.yaml").read_text())
    settings["agent"]["form"] = "plain"
    (model / "agent.yaml").write_text(yaml.safe_dump(settings))
    scripted(lambda prompt: "**Lima**.", eval)
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


@pytest.mark.parametrize("source", ["model", "out", "untrained"])
def test_an_evaluation_warns_of_questions_that_were_trained_on(trained, tmp_path, source):
    names = {name.partition("-")[2] for _, name in seen.trained_on(trained).values()}
    other = "Hugo"  # in no training file
    # other ids, other spelling
    file = questions_of(tmp_path / "asked.jsonl", *sorted(names), other, ask="where is  {} ")
    out = source == "out"
    model = export.export(trained, out=tmp_path / "policy") if out else trained / "model"
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
    assert untrained.main([str(tmp_path / "e"), str(model)]) == 1
    page = (tmp_path / "e" / "report.html").read_text()
    assert sentence in html.unescape(page) and sentence in (tmp_path / "e" / "table.md").read_text()
    clean_file = questions_of(tmp_path / "clean.jsonl", "Hugo", "Ida")
    out = printed(run_suite, replace(config, name="c", data=(clean_file,)))
    clean_page = (tmp_path / "c" / "report.html").read_text()
    assert "Warning" not in out and "None of the 2 questions is among the 2 that" in clean_page
    assert untrained.main([str(tmp_path / "c"), str(model)]) == 0
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
