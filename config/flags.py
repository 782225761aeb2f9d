"""A flag is a field: a command takes those of its settings, and of the agent and suite it names.

`--help` shows the everyday ones, `--help-all` every one; `--debug`, anywhere, shows the traceback
behind an error's sentence.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from config import errors
from config.errors import Stopped, UserError, clean, clip, first_line
from config.plugins import told
from config.settings import checked, docs, hints_of, item, plain, unflagged

AgentName = Annotated[
    str,
    typer.Option(
        "--agent", help="a name in agents/, or a file; default: the preset's, else the model's"
    ),
]
Config = Annotated[
    Path | None, typer.Option(help="replay a run's config.yaml; other flags go on top")
]
Preset = Annotated[
    str, typer.Option(help="several settings at once: demo, or one of an agent's: paper, vime, ...")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="go on with the run of this --name, as it began")
]
Given = Mapping[str, object]  # flags of a command line that are given -> their texts
HELP = {"-h", "--help", "--help-all"}
OTHERS = "All other settings"  # the title of their panel


class Group(TyperGroup):
    """The commands; --debug may stand anywhere."""

    def parse_args(self, ctx, args):
        errors.debugging = "--debug" in args
        return super().parse_args(ctx, [word for word in args if word != "--debug"])


class Command(TyperCommand):
    """A command with an option for each field of its settings, whose values are `ctx.obj`.

    Which agent and suite its arguments name, and so `more` settings, is read from them beforehand.
    """

    def __init__(self, *args, classes, everyday, more, usual, without, **kwargs):
        super().__init__(*args, **kwargs)
        self.classes, self.more, self.usual = classes, more, usual
        self.everyday, self.without = everyday.split(), without.split()

    def parse_args(self, ctx, args):
        with errors_shown():
            if any("\0" in word for word in args):  # the system would cut it there
                raise UserError("An argument holds a NUL byte.")
            kinds = self._declare(ctx, args)
            args = ["--help" if word == "--help-all" else word for word in args]
            rest = super().parse_args(ctx, args)
            values = {name: ctx.params.pop(name) for name in kinds}
            ctx.obj = {
                name: value_of(name, kinds[name], value)
                for name, value in values.items()
                if value not in (None, (), [])
            }
        return rest

    def get_params(self, ctx):
        return [*ctx.meta.get("options", ()), *super().get_params(ctx)]

    def invoke(self, ctx):
        with errors_shown():
            return super().invoke(ctx)

    def _declare(self, ctx, args: Sequence[str]) -> dict[str, object]:
        """Make the options of all settings, everyday ones first; return the fields' types."""
        if not self.classes:
            return {}
        given, asked = given_in(args), HELP & {*args}
        usual = self.usual(given) if asked else {}
        taken = {*self.without, *(p.name for p in self.params)}
        kinds: dict[str, object] = {}
        declared = []
        for cls in (*self.classes, *self.more(given)):
            helps = docs(cls) if asked else {}  # which takes time
            for field in fields(cls):
                name = field.name
                if name in kinds or name in taken:
                    if not issubclass(cls, self.classes):
                        what = f"{cls.__name__} has a setting {name}, as the command or an agent"
                        raise UserError(f"{what} has: give it another name.")
                elif name not in unflagged(cls):
                    kinds[name] = hints_of(cls)[name]
                    default = usual.get(name, "" if field.default is MISSING else field.default)
                    hidden = name not in self.everyday and "--help-all" not in asked
                    panel = None if name in self.everyday else OTHERS
                    how = dict(hidden=hidden, rich_help_panel=panel, show_default=False)
                    declared.append(_option(name, kinds[name], default, helps.get(name, ""), how))
        order = {name: k for k, name in enumerate(self.everyday)}
        declared.sort(key=lambda p: order.get(p.name, len(order)))
        ctx.meta["options"] = _made(declared)
        return kinds


def given_in(arguments: Sequence[str]) -> dict[str, str]:
    """Map the flags of a command line to their texts, before it is known which there are."""
    given: dict[str, str] = {}
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            value = value if equals else next(iter(arguments[at + 1 : at + 2]), "")
            given[name[2:].replace("-", "_")] = value
    return given


def command(
    app: typer.Typer,
    *classes: type,
    everyday: str = "",
    more: Callable[[Given], Sequence[type]] = lambda given: (),
    usual: Callable[[Given], Given] = lambda given: {},
    without: str = "",
    examples: str = "",
    **how,
) -> Callable:
    """Register a command whose flags are its own parameters and the fields of settings.

    everyday: the fields that --help shows. more: returns further classes of settings from the flags
    that are given. usual: returns the values that the help shows, where they are not the classes'
    own. without: fields that are no flags here. examples: lines behind `cli.py`. how: as of
    `typer.Typer.command`.
    """
    lines = ["Examples:", *(f"python cli.py {line}" for line in examples.strip().splitlines())]
    if classes:
        lines += ["", "--help-all lists all other settings. Defaults go by the model."]
    kind = partial(
        Command, classes=classes, everyday=everyday, more=more, usual=usual, without=without
    )
    return app.command(cls=kind, epilog="\n".join(lines), **how)


def _option(name: str, kind: object, default: object, text: str, how: dict) -> inspect.Parameter:
    """Declare the flag of a field; several values are given as one text, with commas."""
    several, kind = typing.get_origin(plain(kind)) is tuple, item(kind)
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    if any(choice not in text for choice in choices):
        text = f"{text}: {', '.join(choices)}"
    default = ",".join(map(str, default)) if isinstance(default, tuple) else default
    text += f" (default: {default})" if default not in ("", None) else ""
    flag = f"--{name.replace('_', '-')}"
    flag = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    # a value of several in full is so wide that in 80 columns the names of the flags are cut
    metavar = "<choice>" if choices else "<str>" if several else None
    option = typer.Option(flag, help=text, metavar=metavar, **how)
    kind = Annotated[(list[str] if several else kind) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _made(parameters: Sequence[inspect.Parameter]) -> list:
    """Have typer make its options of what is declared."""

    def declared():
        pass

    declared.__signature__ = inspect.Signature(parameters)
    declared.__annotations__ = {p.name: p.annotation for p in parameters}
    app = typer.Typer(add_completion=False)
    app.command()(declared)
    return typer.main.get_command(app).params


@contextmanager
def errors_shown() -> Iterator[None]:
    """Print a user's mistake as one sentence, without a traceback, and exit with its status."""
    try:
        with told():
            yield
    except UserError as error:
        _end(error, error.status)
    except Stopped as stop:
        _end(stop, 128 + stop.number)
    except KeyboardInterrupt:
        _end("stopped; what is finished is kept: the same command goes on (train: --resume).", 130)
    except BrokenPipeError:  # what reads the output has ended: typer's
        raise
    except OSError as error:
        _end(f"{first_line(error) or type(error).__name__}.", 2)


def _end(sentence: object, status: int) -> None:
    """Exit with a sentence, which may quote a foreign file."""
    errors.show_traceback()
    typer.echo(f"memagent: {clip(clean(sentence), 2000)}", err=True)
    raise typer.Exit(status) from None


def value_of(name: str, kind: object, value: object) -> object:
    """Convert the text of a flag with several values: 4,8,16, or 50,...,6400 for doubled ones."""
    if not isinstance(value, list):
        return value
    words = [word for word in ",".join(value).split(",") if word]
    return checked(tuple(_doubled(words)), kind, name)


def _doubled(words: list[str]) -> Iterator[str]:
    """Expand 50,...,6400 to 50,100,200,... up to 6400, each number twice the one before."""
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        numbers = [int(n) for n in (before, after) if n.isdecimal()]
        if word != "..." or len(numbers) < 2 or not 0 < numbers[0] < numbers[1]:
            yield word
            continue
        number, last = numbers
        while (number := 2 * number) < last:
            yield str(number)
