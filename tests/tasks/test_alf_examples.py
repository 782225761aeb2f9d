"""Examples for ALFWorld: the file's form, what a task is shown. No package is needed."""

import json

import pytest

from config.errors import UserError
from tasks.alf_examples import KINDS, TITLE, read_examples, shown_examples

ROOM = "You are in the middle of a room. Looking quickly around you, you see a desk 1."
TASK = "Your task is to: put a mug on desk."


def dialogue(first=f"{ROOM}\n{TASK}", *rest):
    rest = rest or ("go to desk 1", "On the desk 1, you see a mug 1.")
    roles = ("user", "assistant")
    return [{"role": roles[k % 2], "content": text} for k, text in enumerate((first, *rest))]


def written(tmp_path, items):
    path = tmp_path / "few.json"
    path.write_text(items if isinstance(items, str) else json.dumps(items))
    return path


def test_dialogues_are_read_by_kind_in_their_order(tmp_path):
    clean = KINDS["clean"]
    path = written(tmp_path, [
        {"kind": clean, "game": "g1", "dialogue": dialogue("one")},
        {"task": "puttwo", "example": dialogue("two")},  # as others name them
        {"kind": clean, "dialogue": dialogue(" three\n")},
    ])  # fmt: skip
    rest = ("go to desk 1", "On the desk 1, you see a mug 1.")
    assert read_examples(path) == {
        clean: [("one", *rest), ("three", *rest)],
        "pick_two_obj_and_place": [("two", *rest)],
    }
    assert read_examples(str(path)) == read_examples(path)


PUT = {"kind": "put", "dialogue": dialogue()}


@pytest.mark.parametrize("items, field", [
    ("{", "JSON"), ([], "item"), ({}, "list"), ([5], "0"), ([PUT | {"kind": "fly"}], "0.kind"),
    ([{"kind": "put"}], "0.example"), ([PUT | {"dialogue": "text"}], "0.dialogue"),
    ([PUT | {"dialogue": dialogue()[:1]}], "0.dialogue"),
    ([PUT | {"dialogue": dialogue()[1:]}], "0.dialogue"),
    ([PUT | {"dialogue": dialogue(" ")}], "0.dialogue.0.content"),
    ([PUT, PUT | {"dialogue": [5, 5]}], "1.dialogue.0"),
])  # fmt: skip
def test_another_form_is_named_by_file_and_place(tmp_path, items, field):
    path = written(tmp_path, items)
    with pytest.raises(UserError) as error:
        read_examples(path)
    assert str(path) in str(error.value) and field in str(error.value)
    assert "\n" not in str(error.value)


def test_answers_stand_behind_a_mark_and_what_the_game_says_does_not():
    shown = shown_examples([("a room", "look", "a desk"), ("b", "c\nd")], "another room")
    assert shown == f"{TITLE}\na room\n> look\na desk\n\n{TITLE}\nb\n> c\nd"
    assert shown_examples([], "x") == ""


def test_a_task_is_not_shown_its_own_solution():
    own = (f"{ROOM}\n\n{TASK}", "go to desk 1")  # lines apart as another file has them
    other = ("Another room.", "look")
    assert "go to desk 1" not in shown_examples([own, other], f"{ROOM}\n{TASK}")
    assert "look" in shown_examples([own, other], f"{ROOM}\n{TASK}")
    assert "go to desk 1" in shown_examples([own, other], f"{ROOM}\nYour task is to: look.")
