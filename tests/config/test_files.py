"""Files are whole or not there; settings of strangers cost little; a run stays in its folder."""

import json
from pathlib import Path

import bombs
import pytest
from child import refused, written
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import record, row
from typer.testing import CliRunner

import cli
from config import files
from config.errors import UserError

ROOT = Path(__file__).parents[2]
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@pytest.mark.parametrize("make", [files.replacing, files.replacing_output])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, make):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyError), make(path) as temporary:
        temporary.write_text("ne")
        raise KeyError
    assert path.read_text() == "old"
    with path.open() as reader:
        with make(path) as temporary:
            temporary.write_text("new")
        assert reader.read() == "old" and path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_appears_whole_and_over_nothing(tmp_path):
    for there in (False, True):
        try:
            with files.making_folder(tmp_path / "a") as temporary:
                (temporary / "x").touch()
                assert (tmp_path / "a").exists() is there
        except OSError:
            assert there
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_the_system_refuses_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        with files.replacing_output(tmp_path / "none" / "a") as temporary:
            temporary.touch()
    with pytest.raises(UserError, match="cannot be made"):
        files.make_folder(tmp_path / "file" / "a")
    with pytest.raises(UserError, match="cannot be read"):
        files.is_file("x" * 300)
    assert not any(map(files.is_file, ("nothing", "nothing/x", "a\0b"))) and not files.content("")


def test_a_digest_is_of_contents_and_names(tmp_path):
    folder, seen = tmp_path / "a", []
    folder.mkdir()
    for name, text in (("x", "1"), ("y", "1"), ("y", "2")):
        (folder / name).write_text(text)
        seen.append(files.content(folder))
        (folder / name).unlink()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("1")
    assert len({*seen}) == 3 and files.content(tmp_path / "b") == seen[0]


# ---------------------------------------------------------------- settings


def test_settings_that_cost_much_are_refused_before_they_do(tmp_path):
    found = refused(files.read_yaml, written(tmp_path, bombs.settings(), ".yaml"))
    for name in ("lists of lists", "maps of maps", "merged", "itself", "as a key"):
        assert "refer to" in found[name]
    for name in ("deep lists", "deep blocks"):
        assert f"at most {files.NESTED} lists" in found[name]
    assert all(f"{files.SETTINGS:,} bytes" in found[name] for name in ("long", "wide"))
    assert all("a number" in found[name] for name in ("large number", "large key", "base 60"))
    refused(files.read_yaml, {"endless": Path("/dev/zero")}, f"{files.SETTINGS:,} bytes")


@pytest.mark.parametrize(
    "text",
    [b"\xff", b'run: {a: "x\\0y"}', b"[1]", b"run", b"", b"{", b"? 9" + b"9" * 5000 + b"\n: 1"],
)
def test_what_holds_no_settings_is_a_sentence(tmp_path, text):
    (tmp_path / "c.yaml").write_bytes(text)
    with pytest.raises(UserError, match=r"c\.yaml [^\n]+\.$"):
        files.read_yaml(tmp_path / "c.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        files.read_yaml(tmp_path)


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
TEXTS = st.text("aé東1-:#'\"{}[]*&!|>%@`~,? .\u2028\u00a0\n\t")


@settings(max_examples=30)
@given(st.dictionaries(TEXTS, PLAIN | TEXTS | st.lists(PLAIN | TEXTS)))
def test_settings_come_back(tmp_path, values):
    files.dump(tmp_path / "c.yaml", run=values)
    assert files.read_yaml(tmp_path / "c.yaml") == {"run": values}


def test_one_module_reads_yaml():
    places = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py")]
    calls = [p for p in places if any(w in p.read_text() for w in ("yaml.load(", "yaml.safe_load"))]
    product = [path for path in calls if path.parent.name not in ("tests", "dev")]
    assert product == [ROOT / "config" / "files.py"]


# ---------------------------------------------------------------- the folder of a run


@settings(max_examples=50)
@given(NAMES)
def test_a_run_never_leaves_its_folder(tmp_path, name):
    try:
        found = files.run_path(str(tmp_path), name)
    except UserError:
        return
    assert tmp_path in found.resolve().parents


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../other", "a/../..", "/tmp", "link", "x\0y", "x" * 300, "loop/x"]
)
def test_a_name_that_leaves_it_or_cannot_be_is_refused(tmp_path, name):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    (tmp_path / "runs" / "loop").symlink_to("loop")
    for runs in ("runs", "none"):  # which is still to be made
        if runs == "runs" or name not in ("link", "loop/x"):
            with pytest.raises(UserError):
                files.run_path(str(tmp_path / runs), name)


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


def test_a_run_is_taken_by_its_name_and_by_its_folder(here):
    for line in ("show twice", "report runs/twice", f"report {here}/runs/twice models"):
        done = CliRunner().invoke(cli.app, line.split())
        assert done.exit_code == 0, done.output
    # a name is a run before it is a folder beside runs/
    assert files.found_run(Path("models")) == Path("runs/models")
    assert files.found_run(here / "models") == here / "models"
    run_path = files.run_path
    assert run_path("runs", "runs/a/b") == run_path("runs", "a/b") == Path("runs/a/b")
    with pytest.raises(UserError, match=r"There is no x{300}"):
        files.found_run(Path("x" * 300))


@pytest.mark.parametrize(
    ("words", "near"),
    [
        ("show twise", "mean runs/twice?"),
        ("report twice runs/twise", "mean runs/twice?"),
        ("export twise", "mean runs/twice?"),
        ("train --resume --name runs/twise", "mean runs/twice?"),
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
