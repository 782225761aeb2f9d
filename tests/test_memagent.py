from collections import Counter
from typing import get_args, get_type_hints

import pytest

from agents import find
from agents.baselines import AtOnceConfig
from config.errors import UserError
from data import ANSWER_FORMS, Task, grade
from embedded import tiny
from memagent import NO_MEMORY, Finish, MemAgent, MemAgentConfig, Turn, split_template
from memory import overwrite
from report.records import record_turn
from tasks import worlds
from tokens.templates import ANSWER_REQUESTS

MEMAGENT, FULL, BM25 = (tiny.agent(name) for name in ("memagent", "full", "bm25"))


def drive(agent, task, codec, answers):
    """Run an agent on scripted responses; returns its prompts."""
    steps, prompts = agent.on(codec).run(task), []
    prompt = next(steps)
    for answer in answers:
        prompts.append(prompt)
        text = codec.text(answer)
        try:
            prompt = steps.send(Turn(prompt, [], list(text.ids), [], Finish.STOP, text))
        except StopIteration:
            return prompts
    raise AssertionError("the agent wants more turns than there are answers")


@pytest.mark.parametrize(("empty", "writes"), [("keep", 2), ("empty", 3), ("placeholder", 3)])
def test_a_write_is_a_turn_that_leaves_another_memory(codec, empty, writes):
    """Notes, the same again, nothing, other notes after thinking; the answer is none of them."""
    task = worlds.make_task(0, 4, "one_fact")
    agent = MEMAGENT.with_settings(empty=empty)
    said = ["Anna joined Boris.", "Anna joined Boris.", "", "<think>Who?</think>Otto.", "Oslo"]
    prompts = drive(agent, task, codec, said)
    count: Counter[str] = Counter()
    for prompt, text in zip(prompts, said, strict=True):
        count.update(agent.count(task, Turn(prompt, [], [], [], Finish.STOP, codec.text(text))))
    assert count == {"updates": 4, "writes": writes}
    # what is shown of a recorded turn is what the next prompt has
    for prompt, text, following in zip(prompts, said, prompts[1:], strict=False):
        turn = record_turn(Turn(prompt, [], [], [], Finish.STOP, codec.text(text)))
        assert agent.memory_after(turn) == following.memory


def test_memagent_reads_each_section_once_and_answers_once(codec):
    task = worlds.make_task(0, 3, "two_hop")
    notes = ["Anna joined Boris.", "Clara met Otto.", "Emil reached Oslo."]
    prompts = drive(MEMAGENT, task, codec, [*notes, "\\boxed{ Oslo}"])
    assert [p.final for p in prompts] == [False, False, False, True]
    assert " ".join(p.section.strip() for p in prompts[:3]) == task.document
    assert [p.memory.strip() for p in prompts] == [NO_MEMORY, *notes]
    assert all(task.question in p.text for p in prompts)
    assert [p.max_tokens for p in prompts] == [13, 13, 13, 24]


@pytest.mark.parametrize(("layout", "order"), [
    # the members of a group share all before the memory: here the whole section
    ("shared", ("{section}", "<problem>", "{memory}")),
    ("paper", ("<problem>", "{memory}", "{section}")),
])  # fmt: skip
def test_layouts(layout, order):
    template = MEMAGENT.wording("update").text(layout, "boxed")
    assert sorted(order, key=template.index) == list(order)


@pytest.mark.parametrize(("turn", "content"), [
    ("update", "P: {problem} \nM: {memory}{section} {other} \\boxed{}\n\n"),
    ("update", "{section}"),
    ("final", "no slot"),
    ("final", "\ufeff{memory} "),
])  # fmt: skip
def test_a_template_file_is_kept_byte_for_byte(tmp_path, turn, content, codec):
    (tmp_path / f"{turn}.txt").write_bytes(content.encode())
    agent = MemAgent(MemAgentConfig(templates=str(tmp_path))).on(codec)
    slots = {"problem": "why?", "memory": "mem {problem}", "section": "sec\r\n"}
    text = agent.prompt(turn, 5, **slots).text
    expected = content
    for name in slots:  # they are filled once: what they contain is not looked at
        expected = expected.replace(f"{{{name}}}", f"\0{name}\0")
    for name, value in slots.items():
        expected = expected.replace(f"\0{name}\0", value)
    assert text == expected
    other = "final" if turn == "update" else "update"  # what is absent is our own
    assert agent.template(other) == MemAgent().template(other)
    wording = agent.wording(other)
    assert agent.template(other) == split_template(wording.text("shared", "boxed"), wording.slots)


def test_a_template_may_use_the_published_names_of_the_slots(tmp_path, codec):
    (tmp_path / "update.txt").write_text("<problem> \n{prompt}\n</problem>\n{memory}|{chunk}|")
    (tmp_path / "final.txt").write_text("{prompt} {memory} \\boxed{}")
    agent = MemAgent(MemAgentConfig(templates=str(tmp_path))).on(codec)
    text = agent.prompt("update", 5, problem="why {chunk}?", memory="m", section="s").text
    assert text == "<problem> \nwhy {chunk}?\n</problem>\nm|s|"
    assert agent.prompt("final", 5, problem="why?", memory="m").text == "why? m \\boxed{}"


@pytest.mark.parametrize(("name", "files", "reason"), [
    ("memagent", None, "no templates"),
    ("full", {}, "no templates"),
    ("memagent", {"updates.txt": b"{section}"}, "no templates"),
    ("memagent", {"update.txt": b"{problem} {memory}"}, "section"),
    ("full", {"full.txt": b"{problem}"}, "section"),
    ("memagent", {"final.txt": b"{memory} {chunk}"}, "section"),
    ("full", {"full.txt": b"{memory} {section}"}, "memory"),
    ("memagent", {"update.txt": b"\xff{section}"}, "UTF-8"),
])  # fmt: skip
def test_templates_that_cannot_be_used_are_refused_at_once(tmp_path, name, files, reason):
    folder = tmp_path / "templates"
    if files is not None:
        folder.mkdir()
    for file, content in (files or {}).items():
        (folder / file).write_bytes(content)
    with pytest.raises(UserError, match=reason):
        find.make(name, {"templates": str(folder)})


def test_a_models_agent_yaml_brings_its_templates_but_no_cap(tmp_path, monkeypatch):
    model = tmp_path / "model"
    (model / "templates").mkdir(parents=True)
    (model / "templates" / "final.txt").write_text("{problem} {memory}")
    (model / "agent.yaml").write_text(
        "agent: {chunk_tokens: 7, max_sections: 8, over: head, templates: templates}\n"
    )
    monkeypatch.chdir(tmp_path)
    for path in (model, "model"):
        agent = find.resolve("default", path, {}, {})[1]
        assert (agent.config.chunk_tokens, agent.config.max_sections) == (7, None)
        assert agent.template("final")[0] == ("problem", False)
    # a flag does cut, and so does a preset
    assert find.resolve("default", model, {}, {"max_sections": 3})[1].config.max_sections == 3
    assert find.resolve("paper", model, {}, {})[1].config.max_sections == 8


@pytest.mark.parametrize(
    ("rule", "expected"), [("placeholder", "none"), ("keep", "old"), ("empty", " ")]
)
def test_empty_memory(rule, expected):
    assert overwrite("old", " ", "none", rule) == expected
    assert overwrite("old", "new", "none", rule) == "new"


def test_full_context_cuts_the_middle_and_never_the_question(codec):
    task = worlds.make_task(2, 16, "one_fact")
    (whole,) = drive(FULL, task, codec, ["x"])
    assert whole.section.strip() == task.document
    window = 200
    (cut,) = drive(tiny.agent("full", window=window), task, codec, ["x"])
    assert len(codec.chat(cut.pieces)) + cut.max_tokens == window
    ids = codec.encode(task.document)
    n = len(codec.encode(cut.section))
    assert cut.section.ids == ids[: n - n // 2] + ids[len(ids) - n // 2 :]
    assert task.question in cut.text
    with pytest.raises(UserError, match="does not fit"):
        drive(tiny.agent("full", window=30), task, codec, ["x"])


@pytest.mark.parametrize("document", ["...", "a", "Anna joined Boris."])
def test_bm25_where_there_is_no_word_to_match(codec, document):
    (prompt,) = drive(BM25, Task("a", "?", ("b",), text=document), codec, ["x"])
    assert prompt.section.strip() == document


def test_what_is_cut_off_is_counted(codec):
    task = worlds.make_task(2, 8, "one_fact")  # 8 sections of 24 tokens
    for cap, n, cut in ((None, 8, 0), (0, 8, 0), (8, 8, 0), (3, 3, 5 * 24)):
        prompts = drive(tiny.agent(max_sections=cap), task, codec, ["m"] * n + ["a"])
        assert len(prompts) == n + 1 and {p.cut for p in prompts} == {cut}
    (whole,) = drive(tiny.agent("bm25", top_k=2), task, codec, ["x"])
    assert whole.cut == 0  # it reads what it chooses
    (capped,) = drive(tiny.agent("bm25", top_k=2, max_sections=6), task, codec, ["x"])
    assert capped.cut == 2 * 24


def test_bm25_keeps_the_best_sections_where_the_window_is_small(codec):
    filler = (  # 24 tokens
        "Otto met Emil. Anna met Otto. Ida met Otto. Max met Vera. Otto met Max. Vera met Ida. "
    )
    evidence = (
        "Anna met Max. Anna reached Lima. Anna met Ida. "
        "Anna met Vera. Anna met Emil. Anna met Otto. "
    )
    task = Task("a", "Where is Anna?", ("Lima",), text=(filler * 9 + evidence + filler * 9).strip())
    reader = tiny.agent("bm25", top_k=9, window=None)
    (whole,) = drive(reader, task, codec, ["x"])
    assert len(codec.encode(whole.section)) == 9 * 24 and evidence.strip() in whole.section
    fixed = len(codec.chat(whole.pieces)) - 9 * 24 + whole.max_tokens
    for room in (24, 60, 215):
        (prompt,) = drive(reader.with_settings(window=fixed + room), task, codec, ["x"])
        assert len(codec.chat(prompt.pieces)) + prompt.max_tokens == fixed + room
        assert prompt.cut == 9 * 24 - room
        assert evidence.strip() in prompt.section and task.question in prompt.text
    with pytest.raises(UserError, match="does not fit"):
        drive(reader.with_settings(window=20), task, codec, ["x"])


def test_a_document_shorter_than_a_section_and_an_empty_one(codec):
    short, empty = (Task("a", "q?", ("b",), text=text) for text in ("Anna", ""))
    assert len(drive(MEMAGENT, short, codec, ["m", "a"])) == 2
    assert [p.final for p in drive(MEMAGENT, empty, codec, ["a"])] == [True]


@pytest.mark.parametrize(("kind", "wrong"), [
    (MemAgentConfig, {"layout": "x"}),
    (MemAgentConfig, {"over": "tail"}),
    (MemAgentConfig, {"form": "b"}),
    (MemAgentConfig, {"empty": "e"}),
    (MemAgentConfig, {"chunk_tokens": 0}),
    (MemAgentConfig, {"max_sections": -1}),
    (AtOnceConfig, {"window": -1}),
])  # fmt: skip
def test_settings_that_cannot_be(kind, wrong):
    with pytest.raises(UserError):
        kind(**wrong)


@pytest.mark.parametrize("form", get_args(get_type_hints(MemAgentConfig)["form"]))
@pytest.mark.parametrize("name", sorted({*find.names()} - {"gold"}))  # which asks for no answer
def test_every_form_of_the_answer_is_asked_for_graded_and_named(codec, name, form):
    agent = find.make(name, {"form": form, "embedder": "hash:8"})  # which some of them need
    asked = [agent.wording(prompt).text("shared", form) for prompt in agent.prompts]
    assert sum(ANSWER_REQUESTS[form] in text for text in asked) == 1
    assert not any("{answer}" in text for text in asked)
    assert form in ANSWER_FORMS and grade("Lima", ["Lima"], form).em == (form == "plain")
