"""Documents that are damaged, locked, endless or not what they seem: each is one sentence."""

import time
from pathlib import Path

import pytest

from tasks.documents import contents

ROOT = Path(__file__).parents[2]


# ---------------------------------------------------------------- HTML and other forms


def test_html_whose_head_does_not_end_is_read():
    found = contents(b"<html><head><title>T</title><meta charset=utf-8><body><p>Hello", "x")
    assert (found.title, found.pieces) == ("T", [("Hello", 0, "")])


@pytest.mark.parametrize(
    "markup",
    [
        "<p>Anna <b>left</b>.</p>" * 20_000,
        "<p>Anna <b>left</b>." * 20_000,  # each in the one before
        "<div>" * 20_000 + "Anna left.",
        "Anna left.<br>" * 20_000,
    ],
    ids=["paragraphs", "unclosed", "nested", "lines"],
)
def test_long_html_is_read_in_seconds(markup):
    began = time.process_time()
    ((text, _, _),) = contents(f"<html><body>{markup}".encode(), "x").pieces
    assert {*text.split("\n")} <= {"Anna left.", ""} and time.process_time() - began < 10
