"""Runs that were never made: rows, records and folders as a run leaves them, and a parsed page."""

import base64
import json
import re
from hashlib import sha256
from html.parser import HTMLParser

from data import Task
from memagent import Finish, Prompt, Trajectory, Turn
from report.summary import METRICS, summarise, write_summary
from tokens.codec import Text

# for HTML, for matplotlib, for rich, for the terminal, for UTF-8
HOSTILE = (
    "$x_{$ <script>alert('&\"')</script><img src=x onerror=alert(1)> "
    "[bold] \x1b[31m\x00 \ud83d \u202e --> ]]> \\1 </style></pre>{{ 7 * 7 }}"
)
TRAINING = "run:\n  data: world\n  lengths: [4, 8]\ngrpo:\n  steps: 50\n"
EVALUATION = {
    "suite": "", "data": ["world"], "lengths": [4, 8], "kinds": ["one_fact"], "n": 16,
    "agents": ["memagent", "full"], "temperatures": [1.0, 0.0], "samples": 2,
}  # fmt: skip


class Page(HTMLParser):
    """Parse a page; check that elements nest, ids are unique and nothing runs or is fetched but the
    script whose digest the policy names."""

    VOID = frozenset({"meta", "input"})
    ALLOWED = frozenset(
        "html head meta title style body main footer h1 h2 h3 p section div figure table caption "
        "thead tbody tr th td b small details summary span strong ins del mark dl dt dd pre svg "
        "defs g path use text clippath rect tspan script input label select option output".split()
    )

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.html = text
        self.open, self.tags, self.ids, self.refs = [], [], [], []
        self.words, self.scripts = [], []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids)) and set(self.refs) <= set(self.ids)
        assert set(self.tags) <= self.ALLOWED, {*self.tags} - self.ALLOWED
        (policy,) = re.findall('Content-Security-Policy" content="([^"]*)"', text)
        (script,) = self.scripts
        digest = base64.b64encode(sha256(script.encode()).digest()).decode()
        assert policy == (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        )
        assert "://" not in text and "url(#" not in re.sub(r"url\(#[\w-]+\)", "", text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        assert tag != "script" or not attributes
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            assert not name.startswith("on") and name not in ("src", "srcset", "action")
            self.ids += [value] if name == "id" else []
            self.refs += [value[1:]] if name == "href" else []
            self.refs += re.findall(r"url\(#([^)]+)\)", value or "")
            assert name != "href" or value.startswith("#")

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)
        elif self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def shown(path):
    return Page(path.read_text(encoding="utf-8"))


def row(
    agent="trained", question="one_fact", temperature="1.0", length=4, id="a", reward=1.0, **other
):
    cell = dict(agent=agent, question=question, temperature=temperature, length=length)
    graded = dict(reward=reward, sub_em=reward, prediction="x", error="")
    origin = dict(id=id, sample=0, settings="s", task="t")
    return dict.fromkeys(METRICS, 0.0) | cell | graded | origin | other


def record(
    memories=("none", "Anna met Otto.", "Anna met Otto."),
    answer="\\boxed{Lima}",
    reward=1.0,
    **other,
):
    """Return a trajectory that reads `section 1`, `section 2`, ...

    memories: before each section, and before the answer.
    """
    sections = [*(f"section {k}." for k in range(1, len(memories))), ""]
    responses = *memories[1:], answer
    turns = [
        {"final": not section, "section": section, "memory": memory, "response": response}
        | {"finish": "stop"}
        for section, memory, response in zip(sections, memories, responses, strict=True)
    ]
    return {
        "id": "a", "step": None, "sample": 0, "question": "Where is Anna?", "answers": ["Lima"],
        "kind": "one_fact", "reward": reward, "answer": answer, "error": "", "seconds": 0.1,
        "turns": turns,
    } | other  # fmt: skip


def trajectory(step, sample, reward=0.5):
    """Return a trajectory of a training, of one section and an answer."""
    task = Task(f"task {step}", "Where is Anna?", ("Lima",), text="Anna is in Lima.")
    prompts = (
        Prompt((("x", True),), 9, section="Anna is in Lima.", memory="none"),
        Prompt((("x", True),), 9, memory="Lima", final=True),
    )
    turns = [
        Turn(prompt, [1], [2], [-0.5], Finish.STOP, Text(text, (2,)))
        for prompt, text in zip(prompts, ("Lima", "\\boxed{Lima}"), strict=True)
    ]
    return Trajectory(task, turns, sample=sample, reward=reward)


def lines(records):
    return "".join(json.dumps(each) + "\n" for each in records)


def folder_of(path, rows, unit="sections", records=(), metrics="", config=""):
    path.mkdir(exist_ok=True)
    write_summary(path / "summary.json", summarise(rows, unit))
    (path / "rows.jsonl").write_text(lines(rows))
    files = {"transcripts.jsonl": lines(records), "metrics.csv": metrics, "config.yaml": config}
    for name, text in files.items():
        if text:
            (path / name).write_text(text)
    return path


def step(k, **other):
    return {
        "step": k, "level": 0, "reward": 0.5 + k / 64, "reward_se": 0.05,
        "groups_without_signal": 0.25, "memory_tokens": 40, "read_tokens": 1000,
        "written_tokens": 200, "computed_tokens": 500, "mismatch": 1e-3, "mismatch_mean": 1e-5,
        "rollout_s": 1.5, "switch_s": 0, "update_s": 0.5, "step_s": 2,
    } | other  # fmt: skip


def training(folder, steps=12, **other):
    """Make the folder of a training of so many steps; other: further columns."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(TRAINING)
    rows = [step(k, **other).values() for k in range(steps)]
    text = [",".join(map(str, row)) + "\n" for row in [step(0, **other), *rows]]
    (folder / "metrics.csv").write_text("".join(text))
    return folder


def evaluation(folder, rows, **other):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(json.dumps({"eval": EVALUATION | other}))
    (folder / "rows.jsonl").write_text(lines(rows))
    return folder
