"""The record of the questions that were trained on, as trainers and exports keep it."""

import json

import pytest

from config.errors import UserError
from data import Task
from dev import untrained
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


def test_the_list_is_written_only_where_there_is_something_new(tmp_path):
    known = {}
    seen.add_trained_on(tmp_path, known, 0, seen.questions_of(tasks("Who?")))
    (tmp_path / seen.TRAINED_ON).unlink()
    seen.add_trained_on(tmp_path, known, 1, seen.questions_of(tasks("Who?")))
    assert not (tmp_path / seen.TRAINED_ON).exists()


def test_questions_of_generated_english_are_not_listed():
    """They all say "Where is X?"; the split of the facts keeps them apart."""
    mixed = [worlds.make_task("w", 2, "one_fact"), *tasks("Who?")]
    assert [name for _, name in seen.questions_of(mixed)] == ["0"]


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


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"trained_on\.csv"):
        seen.pass_on([{"a" * 16: None}], tmp_path / "nowhere")


def evaluated(folder, asked):
    """Write the rows of an evaluation, as `row_of` names a question."""
    folder.mkdir(exist_ok=True)
    rows = [{"id": task.id, "asked": task.question_digest} for task in asked]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, *rows])  # of two agents
    (folder / "rows.jsonl").write_text(text)
    return folder


def test_untrained_tells_by_the_words_which_questions_were_trained_on(tmp_path, capsys):
    policies = [tmp_path / "a", tmp_path / "b"]
    for policy, questions in zip(policies, [("Who?", "Where?"), ("When?",)], strict=True):
        policy.mkdir()
        seen.add_trained_on(policy, {}, 0, seen.questions_of(tasks(*questions)))
    apart = evaluated(tmp_path / "apart", tasks("Why?", "How?"))
    assert untrained.main([str(apart), *map(str, policies)]) == 0
    assert capsys.readouterr().out.count("both: none") == 2
    same = evaluated(tmp_path / "same", tasks("Why?", "where", "when?", prefix="x"))
    assert untrained.main([str(same), *map(str, policies)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].endswith("3 questions asked, 2 trained on; both: 1 of the rows' ids: x1")
    assert out[1].endswith("3 questions asked, 1 trained on; both: 1 of the rows' ids: x2")
    assert untrained.main([str(same), str(policies[1])]) == 1


def test_untrained_says_nothing_of_what_it_cannot_know(tmp_path, capsys):
    rows = evaluated(tmp_path / "rows", tasks("Who?"))
    (tmp_path / "plain").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "rows.jsonl").write_text('{"id": "a"}\n')
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "rows.jsonl").write_text("")
    for folder, said in (
        (rows, "what it was trained on is unknown"),
        (tmp_path / "nowhere", "cannot be read"),
        (tmp_path / "old", "line 1: no question is named"),
        (tmp_path / "none", "nothing was asked"),
    ):
        assert untrained.main([str(folder), str(tmp_path / "plain")]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
