"""What is asked: `ask` as a command, at a prompt in a terminal, and as a function.

No torch: how a document is read (commands/ask.py) is imported when the first line is out.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import typer
from rich.console import Console

from config.errors import UserError, alone, clean, clip
from config.options import AskConfig
from config.terminal import console, next_step, say
from data import NOT_FOUND

NAMED = 3  # files that the first line names, at most
COUNTS = ("prompt_tokens", "reused_tokens", "written_tokens")  # of an answer, which add up


@dataclass(frozen=True, slots=True)
class How:
    """Who reads, and how, as far as the user said."""

    agent: str = ""
    preset: str = "default"
    settings: dict = field(default_factory=dict)

    @property
    def given(self) -> dict[str, str]:
        """Return the flags that decide on the agent."""
        flags = {"agent": self.agent, "preset": self.preset}
        return {name: value for name, value in flags.items() if value not in ("", "default")}


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer and where the document has it: what `--json` prints, and what `ask` returns."""

    question: str
    answer: str
    found: bool | None  # in the document; None: nothing to look for, as in yes
    pages: list[int]  # where it is found, that of the quote first; [] of a text without pages
    quote: str  # the sentence
    where: str  # it is, in words: of chapters and several files too
    memory: str  # from which the answer was written; "" where the text was read at once
    remarks: list[str]
    agent: str
    seconds: float
    report: str = ""  # path of the page; "" if nothing was kept
    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompts, taken from the cache
    written_tokens: int = 0
    shared: bool = True  # whether the sentence has a word of the question
    first: str = ""  # the answer of the sections that match best; "" where one reading answers
    agrees: bool | None = None  # whether a second reading confirms it; None: there was none
    other: str = ""  # the answer of the second reading, where it is another

    @property
    def page(self) -> int | None:
        """The page of the quote; None: not found, or a text without pages."""
        return next(iter(self.pages), None)

    @property
    def nothing(self) -> bool:
        """Whether the answer is that there is none in what was read."""
        return self.answer.startswith(NOT_FOUND.rpartition("the ")[0])

    @property
    def grounded(self) -> bool:
        """Whether its sentence has a word of the question, or there is nothing to look for."""
        return self.found is not False and self.shared

    @property
    def doubtful(self) -> bool:
        """Whether it is not grounded, or another one may be right."""
        return not self.grounded or (self.agrees is False and not self.nothing)

    @property
    def line(self) -> str:
        """The answer as it is shown, and how sure two readings are of it."""
        name, other = "unsure" if self.first and self.doubtful else "answer", self.other
        return f"{name}: {self.answer}{self.aside}" + f", or: {other}" * bool(other)

    def without(self, words: str) -> Answer:
        """Return that nothing was found, in these words."""
        nowhere = dict(found=None, pages=[], quote="", where="", shared=True)
        return replace(self, answer=words, **nowhere)

    @property
    def aside(self) -> str:
        """What is said behind the answer."""
        return " (not found in the document)" if self.found is False else ""


def ask(
    documents: str | Path | Sequence[str | Path], question: str, name: str = "", **settings
) -> Answer:
    """Read documents and return the answer, as `cli.py ask` does, printing nothing but a bar on
    standard error where that is a terminal.

    settings: the flags of `cli.py ask` as they are called in Python: model, endpoint, agent,
    chunk_tokens, ... name: of the reading, kept in RUNS/NAME; without it nothing is kept.
    UserError: the sentence that the command prints.
    """
    paths = [documents] if isinstance(documents, str | Path) else documents
    paths = [*map(str, paths)]
    flags = {word: settings.pop(word) for word in ("agent", "preset") if word in settings}
    known = {f.name for f in fields(AskConfig)} & settings.keys()
    given = {word: settings.pop(word) for word in known}
    if isinstance(given.get("endpoint"), str):
        given["endpoint"] = (given["endpoint"],)
    _check(question)
    with alone():
        from commands.ask import Reader, prepare
        from commands.screen import Screen

    quiet = Screen(Console(stderr=True, force_jupyter=False), quiet=True)
    with nullcontext() if name else TemporaryDirectory() as aside:
        given |= {"name": name or "ask"} | ({"runs": aside} if aside else {})
        config, how = AskConfig(**given), How(**flags, settings=settings)
        with closing(Reader(*prepare(paths, config), config, how, quiet, paths)) as reader:
            answer = reader.ask(question)
    return replace(answer, report="") if aside else answer


def run(words: Sequence[str], config: AskConfig, how: How) -> None:
    """Read documents, showing the memory whenever it changes; end with the answer and its pages.

    words: files and folders, the question last. In a terminal more questions are asked for at a
    prompt, each a reading of its own, the first one too where no word is a question. UserError for
    what the user can mend; Ctrl-C leaves with 130.
    """
    to = Console(highlight=False, stderr=True) if config.json else console
    terminal = not config.json and all(s and s.isatty() for s in (sys.stdin, sys.stdout))
    try:
        paths, question = _split(words, terminal)
        more = f" and {len(paths) - NAMED:,} more" if len(paths) > NAMED else ""
        say(f"Reading {', '.join(paths[:NAMED])}{more} ...", to=to)
        from commands.ask import Reader, prepare
        from commands.screen import Screen

        document, who = prepare(paths, config)
        question = question or _prompt("Question (empty to end): ")
        if question:
            screen, answers = Screen(to), []
            for remark in document.remarks:
                screen.say(remark, "dim")
            screen.say(f"Opening {who.said} ...")
            with closing(Reader(document, who, config, how, screen, paths, terminal)) as reader:
                screen.say(f"{reader.way[0].upper()}{reader.way[1:]}.")
                while question:
                    answers.append(reader.ask(question))
                    question = terminal and _prompt("Another question (empty to end): ")
            if config.json:
                escaped = "utf" not in (sys.stdout.encoding or "").lower()  # no letter is lost
                plain = [asdict(answer) for answer in answers]
                typer.echo(json.dumps(plain, ensure_ascii=escaped, indent=1))
            folder = Path(answers[-1].report).parent
            next_step("see all of it in a browser", "report", folder, "--open")
    except KeyboardInterrupt:
        typer.echo("memagent: stopped; nothing of this reading is kept.", err=True)
        raise typer.Exit(130) from None


def _split(words: Sequence[str], terminal: bool) -> tuple[Sequence[str], str]:
    """Return what to read, and the question: "" for one that is still to be asked for."""
    *paths, question = words or [""]
    no_question = len(words) == 1
    with suppress(OSError):  # what the system takes for no name
        last = Path(question)
        is_path = last.is_dir() or bool(last.suffix and last.is_file())
        no_question |= bool(paths and question) and is_path
    if no_question and terminal:
        paths, question = words, ""  # it is asked for
    elif not paths:
        lacks = f"; {clip(clean(question), 60)!r} is all that was given" * bool(question)
        raise UserError(f'Name what to read, and ask: ask FILE... "QUESTION"{lacks}.')
    elif no_question:
        raise UserError(f"{question} is a file or folder: the question comes last.")
    else:
        _check(question)
    for path in paths:
        _check_there(path)
    return paths, question


def _check_there(path: str) -> None:
    """Raise a UserError for what is no file or folder."""
    if re.match(r"https?://", path):
        how = f'curl -s {shlex.quote(path)} | python cli.py ask - "QUESTION"'
        raise UserError(f"{clean(path)} is on the web: fetch it first, as in {how}.")
    if path == "-":
        return
    try:
        Path(path).stat()
        return
    except (OSError, ValueError) as error:  # a name with a NUL byte is a ValueError
        why = getattr(error, "strerror", None) or "it is no name of a file"
    if re.search(r"[/\\]|\.\w+$", path):
        raise UserError(f"{clip(clean(path), 200)} cannot be read: {why}.")
    how = 'ask FILE... "QUESTION"'
    raise UserError(
        f"No file at {clip(clean(path), 200)}: a question is put in quotes and comes last, as in "
        f"{how}."
    )


def _check(question: str) -> None:
    if not (question or "").strip():
        raise UserError("The question is empty: it comes last, after the files.")
    try:
        question.encode()
    except UnicodeEncodeError:  # half a character, which no tokenizer reads
        raise UserError(f"The question is not in UTF-8: {clip(clean(question), 200)}.") from None


def _prompt(prompt: str) -> str:
    """Return a question that is typed; "" for none, and at Ctrl-C and Ctrl-D."""
    with suppress(ImportError):
        import readline  # noqa: F401  a line can then be edited
    while True:
        try:
            if question := input(prompt).strip():
                _check(question)
            return question
        except UserError as error:
            say(str(error), "yellow")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return ""
