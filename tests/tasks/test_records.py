"""JSON, notebooks, chats, subtitles: what a person sees is read, pictures are counted."""

import base64
import json
import random

import pytest

from tasks.forms import contents

BYTES = random.Random(0).randbytes(60_000)
PICTURE = base64.b64encode(BYTES).decode()
URL = f"data:image/png;base64,{PICTURE}"


def read(text: str, name: str = "x") -> tuple[str, str]:
    """Return a file's text and the remark on it, as they come out of all that reads files."""
    found = contents(text.encode(), name)
    ((shown, number, _),) = found.pieces
    assert number == (found.kind == "conversation")
    return shown, found.remark


@pytest.mark.parametrize(("text", "shown"), [
    (r'{"a": "J\u00fcrgen M\u00FCller"}', '{"a": "Jürgen Müller"}'),
    (r'["\ud83d\ude00", "a\/b", "10\u00a0km"]', '["😀", "a/b", "10\xa0km"]'),
    (r'{"a": "two\r\nlines\tand \"C:\\t\" and \u0022q\u0022"}',
     '{"a": "two\nlines\tand \\"C:\\\\t\\" and \\"q\\""}'),
    # what is no letter stays an escape, colours of terminals go
    (r'["\u0000a\ud800", "\u001b[31mred\u001b[0m"]', '["\\u0000a\\ud800", "red"]'),
    # numbers, fields that stand twice and their order stay as they are
    (r'{"a": 1.10, "b": [1e400, -0, 123456789012345678901], "a": "\u00fc", "c": NaN}',
     '{"a": 1.10, "b": [1e400, -0, 123456789012345678901], "a": "ü", "c": NaN}'),
    ('{"n": %s, "a": "\\u00fc"}' % ("9" * 5000), '{"n": %s, "a": "ü"}' % ("9" * 5000)),
    ('{\n  "a": ["\\u00fc", "x"], "b": "c"\n}', '{\n  "a": ["ü", "x"], "b": "c"\n}'),
    # each line that is JSON is decoded, also beside one that was cut
    ('{"a":"\\u00fc"}\n\n{"b":"\\u00f6"}\n{"c":"\\u00e4", "d',
     '{"a":"ü"}\n\n{"b":"ö"}\n{"c":"\\u00e4", "d'),
    # what is no JSON stays
    *[(text, text) for text in (
        '{"a": "\\u00fc", // why\n"b": 1}', '{"a": "\\u00fc",}', '{"a": "\\u00fc"',
        'Write "\\u00fc" so:\n{"a": "\\u00fc"}',
        "31.12.23, 21:41 - Ann: I am in Malmö.\n31.12.23, 21:42 - Bo: late,\nsorry\n",
    )],
    ('{"nbformat": 4, "a": "\\u00fc"}', '{"nbformat": 4, "a": "ü"}'),
    ('{"date": "2023-12-31", "from": "Ann", "text": "Malm\\u00f6"}',
     '{"date": "2023-12-31", "from": "Ann", "text": "Malmö"}'),
], ids=lambda text: text[:30])  # fmt: skip
def test_json_is_decoded_in_place_and_text_stays(text, shown):
    assert read(text, "x.json") == (shown, "")


@pytest.mark.parametrize(("text", "shown"), [
    (f"Go ![chart]({URL}) on", "Go ![chart](picture left out) on"),
    (f"a {{ b: url({URL}); c: d }}", "a { b: url(picture left out); c: d }"),
    (f"[a]: {URL[:90]}\n{URL[90:]}\nThe end", "[a]: picture left out\nThe end"),
    (json.dumps({"a": f"![]({URL})"}).replace("/", "\\/"), '{"a": "![](picture left out)"}'),
    (f'{{"a": "{URL}", // JSON with comments\n}}',
     '{"a": "picture left out", // JSON with comments\n}'),
    (f"data:;base64,{PICTURE}", "block of data left out"),
    (f"data:image/png;name=a.png;base64,{PICTURE}", "picture left out"),
    # base64 that is not said to be such
    (f'{{"b64_json": "iVBORw0KGgo{PICTURE}", "b": 1}}',
     '{"b64_json": "block of data left out", "b": 1}'),
    (json.dumps([base64.encodebytes(BYTES).decode()]), '["block of data left out"]'),
    (json.dumps([base64.urlsafe_b64encode(BYTES).decode()]), '["block of data left out"]'),
], ids=lambda text: text[:24])  # fmt: skip
def test_pictures_and_other_data_are_left_out_and_counted(text, shown):
    what = "picture" if "picture" in shown else "block of data"
    assert read(text) == (shown, f"x: left out: 1 {what}.")
    twice = contents(f"{URL} {URL} data:;base64,{PICTURE}".encode(), "x").remark
    assert twice == "x: left out: 2 pictures, 1 block of data."


@pytest.mark.parametrize("text", [
    "Use data:image/png;base64,iVBORw0KGgo... or data:text/plain,Hello%20world or data:,x",
    "a url(data:image/svg+xml,%3Csvg%3E) b", json.dumps({"sequence": "ACGT" * 2000}),
    json.dumps({"hash": "0af9" * 2000}),
    json.dumps({"script": "function(a,b){return a+B1}" * 200}),
    json.dumps({"key": PICTURE[:800]}), json.dumps({"words": f"Anna Lindt {PICTURE}"}),
    json.dumps({"unspaced": "日本語A1b" * 500}, ensure_ascii=False),
], ids=lambda text: text[:24])  # fmt: skip
def test_what_only_looks_like_it_stays(text):
    assert read(text) == (text, "")


def cell(kind: str, source, **more) -> dict:
    return {"cell_type": kind, "metadata": {"tags": ["hidden"]}, "source": source} | more


def shows(data: dict) -> dict:
    return {"output_type": "display_data", "metadata": {}, "data": data}


def notebook(*cells: dict, **more) -> str:
    head = {"metadata": {"kernelspec": {"name": "hidden"}}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(head | {"cells": cells} | more)


def test_a_notebook_is_its_cells_and_what_they_print_whatever_its_name():
    text = notebook(
        cell("markdown", ["# Sales of M\u00fcller\n", "Led by Anna."]),
        cell("code", "plot()", execution_count=1, outputs=[
            {"output_type": "stream", "text": ["one\n", "\u001b[1mtwo\u001b[0m\n"]},
            shows({"image/png": PICTURE, "text/plain": "<Figure size 640x480 with 1 Axes>"}),
            shows({"text/plain": ["   a\n", "0  1"], "text/html": "<table>0 1</table>"}),
            {"output_type": "error", "ename": "KeyError", "evalue": "'b'",
             "traceback": ["\u001b[0;31mKeyError\u001b[0m", "line 3: 'b'"]},
        ]),
        cell("raw", ""),
        cell("markdown", "![a](attachment:a.png)", attachments={"a.png": {"image/png": PICTURE}}),
    )  # fmt: skip
    shown, remark = read(text, "study.txt")
    assert shown == (
        "# Sales of Müller\nLed by Anna.\n\n```\nplot()\n```\n\none\ntwo\n\n[picture left out]\n\n"
        "   a\n0  1\n\nKeyError\nline 3: 'b'\n\n![a](attachment:a.png)\n\n[picture left out]"
    )
    assert remark == "study.txt: left out: 2 pictures."


@pytest.mark.parametrize(("data", "shown", "left_out"), [
    ({"text/plain": "<HTML object>", "text/html": ["<b>Anna</b>"]}, "Anna", ""),
    ({"text/plain": "<JSON object>", "application/json": {"a": "ü"}}, '{"a": "ü"}', ""),
    ({"text/latex": "$x^2$"}, "$x^2$", ""), ({"text/plain": "<b>"}, "<b>", ""),
    ({"application/pdf": PICTURE}, "[block of data left out]", "1 block of data"),
    ({"application/x": {"x": [1]}, "text/html": "<script>1</script>"},
     "[block of data left out]", "1 block of data"),
    ({"text/markdown": f"![]({URL})"}, "![](picture left out)", "1 picture"),
])  # fmt: skip
def test_of_each_output_what_a_person_sees(data, shown, left_out):
    remark = f"x: left out: {left_out}." if left_out else ""
    assert read(notebook(cell("code", "", outputs=[shows(data)]))) == (shown, remark)


@pytest.mark.parametrize(
    "damage",
    [{"cells": 3}, {"cells": [3]}, {"cells": [{"source": "Anna"}]}, {"cells": []},
     {"cells": [cell("code", "Anna", outputs=3)]}],
)  # fmt: skip
def test_a_damaged_notebook_is_read_as_json(damage):
    text = notebook(cell("markdown", "Anna"), **damage)
    shown, remark = read(text)
    assert json.loads(shown) == json.loads(text) and remark == ""
    assert read(text[:-9])[0].startswith('{"metadata"')


def node(parent: str | None, role: str = "", *parts: object, **more: object) -> dict:
    message = {"author": {"role": role}, "content": {"parts": [*parts]}, **more} if role else None
    return {"parent": parent, "message": message}


TREE = {
    "r": node(None),
    "s": node("r", "system", "Be kind."),
    "q0": node("s", "user", "(dropped) Who?"),
    "q": node("s", "user", "Who signed?", {"asset_pointer": "file"}),
    "h": node("q", "tool", "hidden", metadata={"is_visually_hidden_from_conversation": True}),
    "a": node("h", "assistant", "Anna Lindt."),
}


def test_of_chatgpts_export_the_branch_that_was_kept_is_read():
    chat = {"title": "Bridge", "create_time": 1714723200.0, "current_node": "a", "mapping": TREE}
    found = contents(json.dumps([chat, chat]).encode(), "conversations.json")
    said = "2024-05-03\n\nUser: Who signed?\n[picture]\n\nAssistant: Anna Lindt."
    assert found.kind == "conversation"
    assert found.pieces == [(said, 1, "Bridge"), (said, 2, "Bridge")]
    assert found.remark == "conversations.json: left out: 2 messages of another branch."
    for broken in ({"current_node": "x"}, {"mapping": []}, {"mapping": {"a": 3}}):
        text, remark = read(json.dumps([chat | broken]))
        assert json.loads(text) == [chat | broken] and remark == ""
    loop = TREE | {"r": node("a")}
    assert read(json.dumps(chat | {"mapping": loop}))[0] == said


SRT = "1\n00:00:01,000 --> 00:00:02,000\nThe contract was\n\n2\n00:00:02,000 --> 00:00:04,500\n"


@pytest.mark.parametrize(("text", "shown"), [
    (f"{SRT}signed by <i>Anna</i>\n{{\\an8}}Lindt.\n\n"
     "3\n00:02:05,000 --> 00:02:06,000\nIn Bern.",
     "[0:00:01] The contract was signed by Anna Lindt.\n[0:02:05] In Bern."),
    (f"{SRT}signed by Anna\n\n3\n00:02:05,000 --> 00:02:06,000\nLindt in Bern.\n",
     "[0:00:01] The contract was signed by Anna Lindt in Bern."),
    ("WEBVTT\n\nNOTE no\n\nid\n00:01.000 --> 00:02.000 align:start\n<v Anna>A &amp; B\n\n"
     "00:02.000 --> 00:03.000\n<v Anna>go.\n\n00:03.000 --> 00:04.000\n<v.loud Bo>No.",
     "[0:00:01] Anna: A & B go.\nBo: No."),
    # a line that scrolls is shown twice
    ("WEBVTT\n\n00:01.000 --> 00:02.000\nin<00:01.500><c> the</c>\n\n"
     "00:02.000 --> 00:03.000\nin the\ntown\n", "[0:00:01] in the town"),
    # a text about subtitles is none
    ("A cue has a time:\n\n1\n00:00:01,000 --> 00:00:02,000\nThe words\n",
     "A cue has a time:\n\n1\n00:00:01,000 --> 00:00:02,000\nThe words\n"),
])  # fmt: skip
def test_of_subtitles_the_words_are_joined(text, shown):
    assert read(text) == (shown, "")
    assert read(text.replace("\n", "\r\n"))[0] == shown
