"""No code is run, and no address asked, because settings that came with data say so."""

from pathlib import Path

import door
import pytest
from typer.testing import CliRunner

import cli
from agents import find
from engines import local

KEY = "sk-of-the-user"
ASK = ("ask", "a.txt", "Where is Anna?")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch, read_here):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(local.HOST, "127.0.0.1:1")
    monkeypatch.delenv(local.BASE_URL, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    Path("a.txt").write_text("Anna reached Lima.")
    find.find.cache_clear()  # of files of earlier tests, in other folders by the same name


NAMES = ("notes.py", "m/notes.py", "bm25@/notes.py")


def codes() -> list[Path]:
    """Write code wherever a name may find it; return the marks that it leaves."""
    return [door.code(Path(name)) for name in NAMES]


def said(*words, code=2):
    result = CliRunner().invoke(cli.app, [*map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


# ---------------------------------------------------------------- code

READ = [
    (*ASK, "--model", "m"),
    *(line.split() for line in (
        "serve --model m --help", "eval --model m --lengths 2 --n 1", "train --model m --dry-run",
        "train --model m --help", "sft --model m --steps 1 --tasks-per-step 1 --lengths 2",
        "plan --model m",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("words", "name"), [
    *((words, "m/notes.py") for words in READ),
    *((READ[0], name) for name in (*NAMES, "{here}/m/notes.py")),
])  # fmt: skip
def test_a_models_folder_runs_no_code(words, name, tmp_path):
    name = name.format(here=tmp_path)
    door.model(Path("m"), run={"agent": name})
    marks = codes()
    out = said(*words)
    flag = "agents" if words[0] == "eval" else "agent"
    assert f"names code, {flag} {name}," in out and f"unless you give --{flag} {name} or" in out
    assert not any(mark.exists() for mark in marks)


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        (("--agent", "full"), False),  # another agent: what the folder says of its own is not used
        (("--agent", "m/notes.py"), True),
        (("--trust-remote-code",), True),
    ],
)
def test_the_code_that_is_named_in_the_call_runs(words, runs):
    door.model(Path("m"), run={"agent": "m/notes.py"}, agent={"nobody_knows_it": 3})
    mark = door.code(Path("m/notes.py"))
    if runs:  # the setting is then one of the agent's, which has none of this name
        assert "no setting 'nobody_knows_it'" in said(*ASK, "--model", "m", *words)
        text = Path("m/agent.yaml").read_text()
        Path("m/agent.yaml").write_text(text.replace("nobody_knows_it: 3", ""))
    assert "answer" in said(*ASK, "--model", "m", *words, code=0)
    assert mark.exists() == runs


FIELDS = [
    ("run", "agent", "m/notes.py"), ("run", "reward", "m/notes.py:reward"),
    ("run", "data", "m/notes.py:tasks"), ("run", "data", "world=1,m/notes.py:tasks=2"),
    ("run", "validation", "m/notes.py:tasks"), ("run", "logger", ["m/notes.py:Logger"]),
    ("run", "logger", ["m.notes.Logger"]), ("run", "trust_remote_code", True),
    ("sft", "also", ["m/notes.py=0.2"]), ("sft", "also", ["full", "m/notes.py"]),
    ("sft", "also", ["notes.py=0.2"]), ("eval", "agents", ["bm25", "m/notes.py"]),
    ("eval", "agents", ["m/notes.py@untrained"]), ("eval", "agents", ["notes.py@untrained"]),
    ("eval", "agents", ["bm25@/notes.py"]), ("eval", "data", ["world", "m/notes.py:tasks"]),
    ("eval", "filler", ["m/notes.py:tasks"]), ("eval", "interpreter", "m/notes.py"),
    ("eval", "trust_remote_code", True),
]  # fmt: skip
WAYS = [(way, *field) for field in FIELDS for way in ("--config", "--resume")]


@pytest.mark.parametrize(
    ("way", "section", "name", "value"),
    [way for way in WAYS if way[:2] != ("--resume", "eval")],  # which goes on without it
)
def test_the_settings_of_a_run_run_no_code(way, section, name, value):
    command = {"run": "train", "sft": "sft", "eval": "eval"}[section]
    small = {"steps": 1, "tasks_per_step": [1]}
    training = {"sft": small} if section == "sft" else {"grpo": small | {"group_size": 2}}
    sections = {"eval": {"n": 1, "lengths": [2]}} if section == "eval" else {"run": {}} | training
    sections[section] = sections[section] | {name: value}
    door.run(Path("runs/x"), **sections, agent={})
    marks = codes()
    words = ("--config", "runs/x/config.yaml", "--name", "y")
    words = ("--resume", "--name", "x") if way == "--resume" else words
    out = said(command, *words)
    assert "config.yaml names code, " in out and "--trust-remote-code." in out
    assert not any(mark.exists() for mark in marks) and not Path("runs/y").exists()


def test_adapters_run_no_code():
    door.model(Path("m"), run={"agent": "m/notes.py"})
    mark = door.code(Path("m/notes.py"))
    small = ("--steps", 1, "--tasks-per-step", 1, "--lengths", 2, "--name", "y")
    assert "names code, agent" in said("train", "--adapter", "m", *small) and not mark.exists()
    # neither is there, and its code may run
    assert "no LoRA adapters" in said("sft", "--adapter", "m", *small, "--trust-remote-code")
    assert mark.exists()


@pytest.mark.parametrize(
    "fields", [{"agent": "m/notes.py"}, {"trust_remote_code": True, "model": "m"}]
)
def test_the_export_of_a_run_runs_no_code(fields):
    door.run(Path("runs/x"), run=fields, grpo={}, agent={})
    mark = door.code(Path("m/notes.py"))
    assert "unless you give " in said("export", "runs/x") and not mark.exists()
    out = said("export", "runs/x", "--trust-remote-code")  # whose checkpoint is empty
    assert "names code" not in out and mark.exists() == ("agent" in fields)


# ---------------------------------------------------------------- addresses

SEARCHED = {"run": {"agent": "facts"}}


@pytest.mark.parametrize("words", [(), ("--agent", "facts"), ("--agent", "memrl")], ids=" ".join)
@pytest.mark.parametrize("command", [ASK, ("eval", "--n", 1, "--lengths", 2, "--name", "e")])
def test_a_models_folder_has_no_address_asked(words, command):
    if command[0] == "eval":
        words = [word.replace("--agent", "--agents") for word in words]
    with door.listener() as (url, keys):
        spec = f"openai:{url}#m"
        door.model(Path("m"), **SEARCHED, agent={"embedder": spec, "search": "dense"})
        out = said(*command, "--model", "m", *words)
        assert (
            "names an address, embedder" in out and f"unless you give --embedder '{spec}'." in out
        )
        assert keys == []
        said(*command, "--model", "m", *words, "--embedder", spec)  # it answers 404
        assert keys and {*keys} == {f"Bearer {KEY}"}


def test_an_address_that_nobody_needs_is_none():
    with door.listener() as (url, keys):
        door.model(Path("m"), agent={"embedder": f"openai:{url}#m"})
        assert "answer" in said(*ASK, "--model", "m", "--agent", "full", code=0)
        assert keys == []


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("eval", {"endpoint": ["{url}"]}),
        ("eval", {"suite": "hle", "judge": "openai:{url}#m"}),
        ("agent", {"embedder": "openai:{url}#m", "search": "dense"}),
    ],
)
def test_the_settings_of_a_run_have_no_address_asked(section, fields):
    with door.listener() as (url, keys):
        form = {"{url}": url}
        fields = {
            name: [form.get(v, v) for v in value] if isinstance(value, list)
            else value.replace("{url}", url)
            for name, value in fields.items()
        }  # fmt: skip
        door.run(Path("runs/x"), **{section: fields})
        agent = ("--agent", "facts") if section == "agent" else ()
        command = "eval" if section == "eval" else "train"
        words = (command, "--config", "runs/x/config.yaml", "--name", "y", *agent)
        for trust in ((), ("--trust-remote-code",)):  # in code, which is none in addresses
            out = said(*words, *trust)
            assert "names an address, " in out and "may have come with data" in out and keys == []
            assert "secret" not in out


def test_a_bank_of_a_models_folder_is_not_written():
    door.model(Path("m"), run={"agent": "memrl"}, agent={"retrieve": "bm25", "bank": "b.db"})
    out = said("train", "--model", "m", "--steps", 1, "--name", "y")
    assert "names a file to write to, bank b.db" in out and not Path("b.db").exists()


# ---------------------------------------------------------------- templates


@pytest.mark.parametrize(
    "where", ["../secret", "/", "..", "link", "files", "templates/../../secret"]
)
def test_templates_lie_in_the_models_folder(where):
    door.model(Path("m"), agent={"templates": where})
    for folder in ("secret", "m/templates"):
        Path(folder).mkdir()
        Path(folder, "final.txt").write_text("The key is 1234. {problem} {memory}")
    Path("m/link").symlink_to("../secret")
    Path("m/files").mkdir()
    Path("m/files/final.txt").symlink_to("../../secret/final.txt")
    out = said(*ASK, "--model", "m")
    assert "names templates outside the model's folder" in out and "1234" not in out


def test_templates_of_a_folder_in_the_hubs_cache_are_links_to_blobs():
    folder, blob = Path("models--a--b/snapshots/c0ffee"), Path("models--a--b/blobs/1234")
    door.model(folder, agent={"templates": "templates"})
    for place in (blob.parent, folder / "templates"):
        place.mkdir()
    blob.write_text("{problem} {memory}")
    (folder / "templates/final.txt").symlink_to("../../../blobs/1234")
    assert find.of_model(folder)["templates"] == str(folder / "templates")


def test_the_command_that_goes_on_with_a_training_repeats_what_no_file_may_name(tmp_path):
    from commands import train
    from config.options import GRPOConfig, RunConfig

    Path("my agent.py").write_text("from memagent import MemAgent\nclass Mine(MemAgent): pass\n")
    agent = find.make("my agent.py", {})
    run = RunConfig(name="a", agent="my agent.py", reward="r.py:f", data="d.py:t,e.jsonl")
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").touch()
    command = train._whole(run, GRPOConfig(), agent).partition("go on with: ")[2]
    assert command.endswith(
        "train --resume --name a --data d.py:t,e.jsonl --agent 'my agent.py' --reward r.py:f"
    )
