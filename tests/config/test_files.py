"""Files are whole or not there; settings of strangers cost little; a run stays in its folder."""

import json
from pathlib import Path

import bombs
import pytest
from child import refused, written
from hypothesis import given
from hypothesis import strategies as st
from run_folders import record, row
from typer.testing import CliRunner

import cli
from config import files
from config.errors import UserError

ROOT = Path(__file__).parents[2]
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


# ---------------------------------------------------------------- written whole


@pytest.mark.parametrize("make", [files.replacing, files.replacing_output])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, make):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError), make(path) as temporary:
        temporary.write_text("ne")
        raise KeyError
    assert path.read_text() == "old"
    with make(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and [*tmp_path.iterdir()] == [path]


def test_a_folder_appears_whole_and_over_nothing(tmp_path):
    for there in (False, True):
        try:
            with files.making_folder(tmp_path / "a") as temporary:
                (temporary / "x").touch()
                assert (tmp_path / "a").exists() is there
        except OSError:
            assert there
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        with files.replacing_output(tmp_path / "none" / "a") as temporary:
            temporary.touch()
    with pytest.raises(UserError, match="cannot be made"):
        files.make_folder(tmp_path / "file" / "a")


@pytest.mark.parametrize("path", ["x" * 300, "a\0b", "loop/x"])
def test_a_path_that_the_system_rejects_is_a_sentence(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("loop").symlink_to("loop")
    with pytest.raises(UserError, match="cannot be read"):
        files.is_file(path)
    assert (
        not files.is_file("nothing") and not files.is_file("nothing/x") and files.content("") == ""
    )


def test_a_digest_is_of_contents_and_names(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("1")
    before = files.content(tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert files.content(tmp_path / "b") == before
    (tmp_path / "b" / "x").rename(tmp_path / "b" / "y")
    renamed = files.content(tmp_path / "b")
    (tmp_path / "b" / "y").write_text("2")
    assert len({before, renamed, files.content(tmp_path / "b")}) == 3


# ---------------------------------------------------------------- settings


def test_settings_that_cost_much_are_refused_before_they_do(tmp_path):
    found = refused(files.read_yaml, written(tmp_path, bombs.settings(), ".yaml"))
    for name in ("lists of lists", "maps of maps", "merged", "itself", "as a key"):
        assert "may not refer to other settings" in found[name]
    for name in ("deep lists", "deep blocks"):
        assert f"at most {files.NESTED} lists" in found[name]
    assert all(f"{files.SETTINGS:,} bytes" in found[name] for name in ("long", "wide"))
    assert "64 bits" in found["large number"] and "64 bits" in found["large key"]
    refused(files.read_yaml, {"endless": Path("/dev/zero")}, f"{files.SETTINGS:,} bytes")


@pytest.mark.parametrize("text", [b"\xff", b'run: {a: "x\\0y"}', b"[1]", b"run", b"", b"{"])
def test_what_holds_no_settings_is_a_sentence(tmp_path, text):
    (tmp_path / "c.yaml").write_bytes(text)
    with pytest.raises(UserError, match=r"c\.yaml [^\n]+\.$"):
        files.read_yaml(tmp_path / "c.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        files.read_yaml(tmp_path)


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
TEXTS = st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]))


@given(st.dictionaries(TEXTS, PLAIN | TEXTS | st.lists(PLAIN | TEXTS)))
def test_settings_come_back(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("a") / "c.yaml"
    files.dump(path, run=values)
    assert files.read_yaml(path) == {"run": values}


def test_one_module_reads_yaml():
    places = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
    calls = [
        p for p in places if "yaml.load(" in p.read_text() or "yaml.safe_load" in p.read_text()
    ]
    product = [path for path in calls if path.parent.name not in ("tests", "dev")]
    assert product == [ROOT / "config" / "files.py"]


# ---------------------------------------------------------------- the folder of a run


@given(NAMES)
def test_a_run_never_leaves_its_folder(tmp_path_factory, name):
    runs = tmp_path_factory.mktemp("runs")
    try:
        found = files.run_path(str(runs), name)
    except UserError:
        return
    assert runs in found.resolve().parents


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/../..", "/tmp", "link", "x\0y"])
def test_a_name_that_leaves_it_is_refused(tmp_path, name):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    with pytest.raises(UserError):
        files.run_path(str(tmp_path / "runs"), name)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with two runs, one of which is called as a folder beside runs/ is."""
    monkeypatch.chdir(tmp_path)
    for name in ("twice", "models"):
        folder = Path("runs", name)
        (folder / "model").mkdir(parents=True)
        (folder / "config.yaml").write_text("eval: {suite: own}\n")
        (folder / "rows.jsonl").write_text(json.dumps(row()) + "\n")
        (folder / "metrics.csv").touch()
        (folder / "transcripts.jsonl").write_text(json.dumps(record()) + "\n")
    Path("models").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "words", ["show {}", "report {}", "report {} models", "report runs/models {}"]
)
def test_a_run_is_taken_by_its_name_and_by_its_folder(here, words):
    for name in ("twice", "runs/twice", here / "runs" / "twice"):
        done = CliRunner().invoke(cli.app, words.format(name).split())
        assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("show twise", "Did you mean runs/twice?"),
        ("report runs/twise", "Did you mean runs/twice?"),
        ("report twice twise", "Did you mean runs/twice?"),
        ("export twise", "Did you mean runs/twice?"),
        ("train --resume --name runs/twise", "Did you mean runs/twice?"),
        ("export twice", "no run with a checkpoint"),
        ("show nix", "no run of this name"),
        ("eval --model twice", "runs/twice/model"),
        ("train --name runs/twice", "is there already"),
    ],
)
def test_what_is_no_run_is_told_with_the_nearest_one(here, words, near):
    done = CliRunner().invoke(cli.app, words.split())
    assert done.exit_code == 2 and near in " ".join(done.output.split()), done.output
    assert done.output.count("memagent: ") == 1


def test_a_name_is_a_run_before_it_is_a_folder_beside_runs(here):
    assert files.found_run(Path("models")) == Path("runs/models")
    assert files.found_run(here / "models") == here / "models"
    run_path = files.run_path
    assert run_path("runs", "runs/a/b") == run_path("runs", "a/b") == Path("runs/a/b")
    with pytest.raises(UserError, match=r"There is no x{300}"):
        files.found_run(Path("x" * 300))
