"""The record of the questions that were trained on, as trainers and exports keep it."""

import pytest

from config.errors import UserError
from data import Task
from tasks import seen, worlds


def tasks(*questions, prefix=""):
    return [
        Task(f"{prefix}{k}", question, ("Lima",), text="x", dataset="own")
        for k, question in enumerate(questions)
    ]


def test_a_question_of_several_steps_and_files_is_listed_once(tmp_path):
    known = seen.trained_on(tmp_path)
    seen.add_trained_on(tmp_path, known, 0, seen.questions_of(tasks("Who?", "Where?")))
    other = tasks("where", "When?", prefix="other-")  # the same words in another file
    seen.add_trained_on(tmp_path, known, 1, seen.questions_of(other))
    assert [*known.values()] == [(0, "0"), (0, "1"), (1, "other-1")]
    assert seen.trained_on(tmp_path) == known
    assert [*seen.trained_on(tmp_path, before=1).values()] == [(0, "0"), (0, "1")]


def test_only_new_questions_that_are_not_generated_are_written(tmp_path):
    """Generated ones all say "Where is X?"; the split of the facts keeps them apart."""
    mixed = [worlds.make_task("w", 2, "one_fact"), *tasks("Who?")]
    assert [name for _, name in seen.questions_of(mixed)] == ["0"]
    known = {}
    for step in (0, 1):
        seen.add_trained_on(tmp_path, known, step, seen.questions_of(mixed))
        assert (tmp_path / seen.TRAINED_ON).exists() == (step == 0)
        (tmp_path / seen.TRAINED_ON).unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["a,b", 'a"b', "a\nb", "ä", "\ud83d"])
def test_any_id_can_be_written_and_read(tmp_path, name):
    question = [(digest, name) for digest, _ in seen.questions_of(tasks("Who?"))]
    seen.add_trained_on(tmp_path, {}, 0, question)
    (found,) = seen.trained_on(tmp_path).values()
    assert found == (0, "\\ud83d" if name == "\ud83d" else name)


def test_an_export_has_the_digests_of_all_that_led_to_it(tmp_path):
    run, before = tmp_path / "run", tmp_path / "before"
    run.mkdir(), before.mkdir()
    seen.add_trained_on(run, {}, 0, seen.questions_of(tasks("Who?", "Where?")))
    seen.add_trained_on(before, {}, 0, seen.questions_of(tasks("Where?", "When?")))
    seen.pass_on([seen.trained_on(run), seen.trained_on(before)], tmp_path)
    exported = seen.trained_on(tmp_path)
    assert {*exported} == {*seen.trained_on(run), *seen.trained_on(before)} and len(exported) == 3
    assert {*exported.values()} == {(0, "")}  # neither step nor id
    empty = tmp_path / "empty"
    empty.mkdir()
    seen.pass_on([{}, seen.trained_on(tmp_path / "nowhere")], empty)
    assert not [*empty.iterdir()]
    with pytest.raises(UserError, match=r"trained_on\.csv"):
        seen.pass_on([exported], tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"name,step\nx,1\n", b"digest,step\nx,one\n", b"\xff\n"])
def test_a_damaged_list_is_one_sentence_and_not_an_empty_one(tmp_path, content):
    (tmp_path / seen.TRAINED_ON).write_bytes(content)
    with pytest.raises(UserError, match=r"trained_on\.csv cannot be read"):
        seen.trained_on(tmp_path)
