"""Flags from settings: every field of a dataclass is a flag of a command, its docstring the help.

Holds: `command`, `lazy`, `AgentGroup`, `AgentName`, `given_in`, `value_of`. Leaves out: the
commands (cli.py), the settings (config/options.py), examples and other names (config/help.yaml).
Exercise it: `python cli.py train --help`. Read next: cli.py.

A command's own parameters come first, then the fields of its settings classes: everyday ones in
the first panel, which is all that --help shows, the others in panels with a title (--help-all). The
fields of agents depend on the agent named on the command line: such a command is built again once
its arguments are known. --debug, anywhere, shows the traceback behind an error's sentence.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer._click.exceptions import NoSuchOption
from typer.core import TyperCommand, TyperGroup

from config import errors, options, settings
from config.errors import Stopped, UserError, clean, clip, first_line
from config.files import read_yaml
from config.plugins import told

# (title, settings class, into which of a command's dicts its fields go: 0 the first, -1 the last)
Panels = Sequence[tuple[str, type, int]]
# stands in the help for a value of several: in full they are so wide that in 80 columns the
# names of the flags beside them are cut
CHOICE = "<choice>"
AgentName = Annotated[
    str,
    typer.Option(
        "--agent",
        help="a name in agents/, or a file such as my_agent.py; default: the preset's, else the "
        "model's",
    ),
]
Config = Annotated[
    Path | None, typer.Option(help="replay a run's config.yaml; other flags go on top")
]
Preset = Annotated[
    str,
    typer.Option(
        help="several settings at once: default, demo, or one of an agent's: paper, vime, ..."
    ),
]
RESUME = "go on with the run of this --name, with the settings it began with; --steps may be more"
DRY_RUN = "try the whole run on a tiny random model: two steps, an export"
# command -> function that builds it from its arguments
BUILDERS: dict[str, Callable[[list[str]], TyperCommand]] = {}


NEAR = 0.75  # likeness of a flag that is offered for another, of 1
everything = {"shown": False}  # whether this command line has --help-all


@functools.cache
def help_data() -> dict:
    """Return the examples of commands, and what others call our flags."""
    return read_yaml(Path(__file__).with_name("help.yaml"))


def _examples(ctx: typer.Context) -> str:
    """Return what stands below a command's help: lines that can be pasted."""
    lines = help_data()["examples"].get(ctx.command_path.partition(" ")[2], ())
    return "\n".join(
        ["Examples:", *(f"python cli.py {escape(line)}" for line in lines)] * bool(lines)
    )


class Command(TyperCommand):
    """A command whose help is short: its everyday flags and examples."""

    def parse_args(self, ctx, args):
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            ours = {name for p in self.params for name in p.opts if name.startswith("--")}
            other = help_data()["names"].get(error.option_name, "").split()
            guess = [name for name in other if name in ours]
            bare = {name.removeprefix("--"): name for name in ours}
            near = get_close_matches(error.option_name.removeprefix("--"), bare, n=2, cutoff=NEAR)
            guess = guess or [bare[name] for name in near]
            error.possibilities = None
            error.message += f". Did you mean {' or '.join(guess)}?" if guess else "."
            raise

    def format_help(self, ctx, formatter):
        parts = [_examples(ctx)]
        more = [p for p in self.params if getattr(p, "rich_help_panel", None)]
        if more and not everything["shown"]:
            for parameter in self.params:
                parameter.hidden = parameter in more
                parameter.help = _brief(parameter.help or "")
            parts.append(f"--help-all lists {len(more)} more flags.")
        if {"model", "chunk_tokens"} <= {p.name for p in self.params}:
            parts.append("Defaults go by the model: with --model NAME, --help shows that one's.")
        self.epilog = "\n\n".join(filter(None, parts))
        super().format_help(ctx, formatter)


def _brief(text: str) -> str:
    """Return the first clause of a help text, and its default.

    >>> _brief("G; a list has one per length (default: 16)")
    'G (default: 16)'
    """
    default = re.search(r" \(default: [^()]*\)$", text)
    first = text.removesuffix(default[0] if default else "").partition(";")[0]
    return first + (default[0] if default else "")


class AgentGroup(TyperGroup):
    """Group of commands whose flags may depend on the arguments."""

    def parse_args(self, ctx, args):
        if ctx.parent is None:
            ctx.help_option_names = ["-h", "--help"]
            errors.debugging, everything["shown"] = "--debug" in args, "--help-all" in args
            args = [{"--help-all": "--help"}.get(word, word) for word in args if word != "--debug"]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx):
        """List commands by panels, of the list of all commands."""
        panels = help_data()["panels"] if ctx.parent is None else {}
        for title, words in panels.items():
            for name in words.split():
                self.commands[name].rich_help_panel = title
        ordered = [name for words in panels.values() for name in words.split()]
        return [*ordered, *(name for name in super().list_commands(ctx) if name not in ordered)]

    def format_help(self, ctx, formatter):
        self.epilog = _examples(ctx) + "\n\nCOMMAND --help explains one." * (ctx.parent is None)
        super().format_help(ctx, formatter)

    def resolve_command(self, ctx, args):
        name, resolved, rest = super().resolve_command(ctx, args)
        if resolved is not None and name in BUILDERS:
            asks = ["--help"] if ctx.resilient_parsing else []  # a shell shows helps, too
            with errors_shown():
                resolved = BUILDERS[name]([*rest, *asks])
        return name, resolved, rest


def command(
    parent: typer.Typer,
    *classes: type,
    name: str | None = None,
    more: Callable[[list[str]], Panels] | None = None,
    unused: Sequence[str] | Callable[[list[str]], Sequence[str]] = (),
    in_force: Callable[[list[str]], dict] = lambda arguments: {},
) -> Callable:
    """Register a command whose flags are its own parameters and all fields of the settings classes.

    The function's last parameters are one dict per class: the fields that the user gave.
    more: returns further settings classes from the arguments. unused: parameters and fields that
    are no flags here, or what returns them from the arguments. in_force: returns from the arguments
    the values that the help shows, of those that are not the classes' own. A UserError becomes one
    sentence and exit code 2.
    """

    def register(function: Callable) -> Callable:
        label = name or function.__name__.strip("_").replace("_", "-")
        everyday = (
            options.EVERYDAY[label].split() if label in options.EVERYDAY and classes else None
        )
        if not more:
            runner = _runner(function, classes, everyday, (), unused, {})
            return parent.command(name=label, cls=Command)(runner)

        def build(arguments: list[str]) -> TyperCommand:
            app = typer.Typer(add_completion=False)
            without = unused(arguments) if callable(unused) else unused
            values = in_force(arguments) if {"-h", "--help"} & {*arguments} else None
            runner = _runner(function, classes, everyday, more(arguments), without, values)
            app.command(name=label, cls=Command)(runner)
            return typer.main.get_command(app)

        return _listed(parent, label, function.__doc__, build)

    return register


def lazy(parent: typer.Typer, name: str, help_text: str, place: str) -> None:
    """Register a command, or a group of them, whose module is imported when it is called.

    place: the group's app, or what adds the command to an app, as module:name.
    """

    def build(arguments: list[str]) -> TyperCommand:
        module, _, attribute = place.partition(":")
        found = getattr(importlib.import_module(module), attribute)
        if isinstance(found, typer.Typer):
            return typer.main.get_group(found)
        app = typer.Typer(add_completion=False)
        found(app)
        return typer.main.get_command(app)

    _listed(parent, name, help_text, build)


def _listed(
    parent: typer.Typer,
    name: str,
    help_text: str | None,
    build: Callable[[list[str]], TyperCommand],
) -> Callable:
    """Register a command of which the list of commands alone is known; `build` makes it."""

    def listed():
        pass

    BUILDERS[name] = build
    return parent.command(name=name, help=help_text)(listed)


def _runner(
    function: Callable,
    classes: Sequence[type],
    everyday: Sequence[str] | None,
    more: Panels,
    unused: Sequence[str],
    in_force: dict | None,
) -> Callable:
    """Wrap the function in one whose signature has a flag for each field. in_force: None: nobody
    asks for help."""
    declared = list(inspect.signature(function).parameters.values())
    named, dicts = declared[: -len(classes) or None], declared[len(declared) - len(classes) :]
    named = [p for p in named if p.name not in unused]
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = [p.replace(annotation=hints[p.name], kind=p.KEYWORD_ONLY) for p in named]
    names = {p.name for p in named}  # of all flags; a field that comes again adds none
    sections = [dict[str, object]() for _ in classes]  # per dict of the function: field -> type
    for title, cls, at in [*((None, cls, k) for k, cls in enumerate(classes)), *more]:
        help_texts = {} if in_force is None else settings.docs(cls)  # which takes time
        kinds = typing.get_type_hints(cls)
        without = settings.unflagged(cls)
        for field in fields(cls):
            kind = kinds[field.name]
            if field.name in without:
                continue
            if field.name in names or field.name in unused:
                if title and at == 0:  # of a suite, and not an agent's that others have too
                    taken = f"{title} has a setting {field.name}, as the command or an agent has"
                    raise UserError(f"{taken}: give it another name.")
                continue
            names.add(field.name)
            sections[at][field.name] = kind
            first = everyday is None or field.name in everyday
            panel = None if first else title or options.panel_of(field.name)
            default = field.default if field.default is not MISSING else ""
            default = (in_force or {}).get(field.name, default)
            parameters.append(
                _flag(field.name, kind, default, help_texts.get(field.name, ""), panel)
            )
    order = {name: k for k, name in enumerate(everyday or ())}
    parameters.sort(key=lambda p: order.get(p.name, len(order)))

    @functools.wraps(function)
    def run(**values):
        with errors_shown():
            _check_whole(values)
            sets = zip(dicts, sections, strict=True)
            given = {p.name: _given(kinds, values) for p, kinds in sets}
            return function(**{p.name: values[p.name] for p in named}, **given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    del run.__wrapped__  # typer would look through it and see the dicts
    return run


def given_in(arguments: Sequence[str]) -> dict[str, str]:
    """Map the flags of a command line to their values, before it is known which there are."""
    given: dict[str, str] = {}
    for at, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            value = value if equals else next(iter(arguments[at + 1 : at + 2]), "")
            given[name[2:].replace("-", "_")] = value
    return given


def _given(kinds: dict[str, object], values: dict) -> dict[str, object]:
    """Return the fields that the user gave, converted to their types."""
    return {
        name: value_of(name, kind, values[name])
        for name, kind in kinds.items()
        if values.get(name) is not None
    }


@contextmanager
def errors_shown() -> Iterator[None]:
    """Print a user's mistake as one sentence, without a traceback, and exit with its status."""
    try:
        with told():
            yield
    except UserError as error:
        errors.show_traceback()
        typer.echo(f"memagent: {clip(clean(error), 2000)}", err=True)  # it may quote a foreign file
        raise typer.Exit(error.status) from None
    except Stopped as stop:
        typer.echo(f"memagent: {clean(stop)}", err=True)
        raise typer.Exit(128 + stop.number) from None
    except KeyboardInterrupt:
        typer.echo(
            "memagent: stopped. Finished work is kept: the same command goes on "
            "(train with --resume).",
            err=True,
        )
        raise typer.Exit(130) from None
    except BrokenPipeError:  # what reads the output has ended: typer's
        raise
    except OSError as error:
        errors.show_traceback()
        why = first_line(error) or type(error).__name__
        typer.echo(f"memagent: {clip(clean(why), 2000)}.", err=True)
        raise typer.Exit(2) from None


def _check_whole(values: dict) -> None:
    """Reject arguments with a NUL byte, at which system calls would cut them off."""
    for name, value in values.items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str | Path) and "\0" in str(text):
                flag = name.upper().replace("_", "-")
                raise UserError(f"{flag} holds a NUL byte: {clip(str(text), 200)}.")


def _flag(
    name: str, kind: object, default: object, doc: str, panel: str | None
) -> inspect.Parameter:
    """Make one field an optional flag; several values are given as one comma-separated text."""
    several = typing.get_origin(kind) is tuple
    optional = typing.get_origin(kind) is not typing.Literal and typing.get_args(kind)
    plain = next((t for t in optional or () if t is not type(None)), kind)
    plain = list[str] if several else plain  # also one flag for each
    text = ",".join(map(str, default)) if isinstance(default, tuple) else default
    choices = typing.get_args(plain) if typing.get_origin(plain) is typing.Literal else ()
    if any(choice not in doc for choice in choices):
        doc = f"{doc}: {', '.join(choices)}"
    help_text = f"{doc} (default: {text})" if text not in ("", None) else doc
    flag = f"--{name.replace('_', '-')}"
    if plain is bool:
        flag += f"/--no-{name.replace('_', '-')}"
    metavar = CHOICE if choices else "<str>" if several else None
    option = typer.Option(
        flag, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=False
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[plain | None, option],
    )


def value_of(name: str, kind: object, value: object) -> object:
    """Convert the text of a flag with several values: 4,8,16, or 50,...,6400 for doubled ones."""
    if typing.get_origin(kind) is not tuple:
        return value
    value = ",".join(value) if isinstance(value, list) else value
    item = typing.get_args(kind)[0]
    if choices := typing.get_origin(item) is typing.Literal and typing.get_args(item):
        chosen = tuple(filter(None, str(value).split(",")))
        if unknown := [text for text in chosen if text not in choices]:
            names = ", ".join(choices)
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} takes one or several of {names}, not {unknown[0]!r}.")
        return chosen
    try:
        return tuple(_doubled([v if v == "..." else item(v) for v in str(value).split(",") if v]))
    except (ValueError, TypeError):
        raise UserError(
            f"--{name.replace('_', '-')} takes values of the form 4,8,16, not {value!r}."
        ) from None


def _doubled(values: list) -> list:
    """Expand 50,...,6400 to 50,100,200,... up to 6400, each number twice the one before."""
    out = []
    for value, following in zip(values, [*values[1:], None], strict=False):
        if value != "...":
            out.append(value)
            continue
        if not out or not isinstance(following, int) or not 0 < out[-1] < following:
            raise ValueError
        while out[-1] * 2 < following:
            out.append(out[-1] * 2)
    return out
