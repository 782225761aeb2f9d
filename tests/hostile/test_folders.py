"""Model folders and data sets of strangers: what costs much is one sentence, nothing is asked for.

Each kind is met in a process of its own with limits of memory and processor time.
"""

from types import SimpleNamespace

import folders
import pytest
from child import HEAVY, LIGHT, a_second, imported, in_child, refused, sentences  # noqa: F401
from test_bombs import FLOOD, ROOT, tasks_of
from typer.testing import CliRunner

import cli
from agents.find import of_model
from config.errors import UserError
from config.foreign import PART
from models.embedder import embedder_of
from models.load import load_model
from tokens.codec import Codec

PIPE = "is a pipe or a device and no file"


@pytest.mark.usefixtures("a_second")
def test_a_tokenizer_that_costs_much_is_a_sentence(tmp_path):
    kinds = folders.tokenizers()
    paths = {name: folders.model(tmp_path / name, **parts) for name, parts in kinds.items()}
    refused(Codec.load, paths, "or fails: give another --model", HEAVY, 120)


def test_a_tokenizer_as_models_have_it_is_taken(tmp_path):
    paths = {
        name: folders.model(tmp_path / name, pre_tokenizer=folders._split(pattern))
        for name, pattern in folders.OF_MODELS.items()
    }
    assert {*sentences(Codec.load, paths, HEAVY, 120).values()} == {"taken"}


def test_a_tokenizer_that_gives_up_on_a_text_is_a_sentence():
    panic = type("PanicException", (BaseException,), {})

    def encode(*_, **__):
        raise panic("Onig: retry-limit-in-match over\nmore")

    codec = Codec.__new__(Codec)
    codec._inner = SimpleNamespace(encode=encode)
    with pytest.raises(UserError, match=r"gives up on a text \(Onig: retry-limit-in-match over\)"):
        codec.encode("a")


def test_a_part_of_a_model_that_is_too_large_is_a_sentence(tmp_path):
    path = folders.model(tmp_path / "model")
    with (path / "tokenizer.json").open("r+b") as file:
        file.truncate(PART + 1)
    refused(Codec.load, {"large": path}, "more than 64 MiB", HEAVY)


def test_a_table_that_unpacks_to_a_flood_is_a_sentence(tmp_path):
    paths = folders.tables(tmp_path)
    assert sum(path.stat().st_size for path in paths.values()) < 1 << 17
    refused(tasks_of, paths, FLOOD, 2 * LIGHT)


def test_weights_that_declare_more_than_they_hold_are_a_sentence(tmp_path):
    load = lambda path: load_model(path, "float32", "cpu")  # noqa: E731
    refused(load, folders.weights(tmp_path), "cannot be loaded", HEAVY)


def test_a_pipe_in_a_model_folder_is_a_sentence_and_ends_ask_at_once(tmp_path):
    paths = folders.pipes(tmp_path)
    embedder = lambda path: embedder_of(f"hf:{path}")  # noqa: E731
    for reader in (of_model, Codec.load, load_model, embedder):
        refused(reader, paths, PIPE, HEAVY)
    words = ["ask", str(ROOT / "README.md"), "Who?", "--model", str(paths["config.json"])]
    result = in_child(lambda: CliRunner().invoke(cli.app, words).stderr, HEAVY)
    assert result.startswith("memagent: ") and PIPE in result
