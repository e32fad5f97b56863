"""Command lines: arguments -> a dataclass, or one line that says what is wrong and what was expected."""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NoReturn, get_args, get_origin

from samestep.app.bounds import alternatives, from_word, kinds_of
from samestep.errors import ConfigError, one_line, shown

__all__ = ["Command", "parse"]


@dataclass(frozen=True)
class Command:
    """A command with subcommands.

    Attributes:
        help: one line that says what the command does.
        choices: the subcommands by name: dataclasses with the options as fields, or further commands.
        noun: what a subcommand is called in messages.
        others: what else than the listed names is a subcommand; for messages.
    """

    help: str
    choices: Mapping[str, type | Command]
    noun: str = "command"
    others: str = ""


def parse(program: str, command: Command, words: Sequence[str]) -> Any:
    """Return an instance of the dataclass that `words` name, with its fields set from the options.

    A field with a default is an option, and one without is a positional argument. The string below a field
    is its help. With `--help`, print the help and raise `SystemExit`.

    Raises:
        ConfigError: the words are wrong; the message is one line. Or the dataclass itself raises it.
    """
    reached: type | Command = command
    while isinstance(reached, Command):
        name = _choose(program, reached, words)
        program, reached, words = f"{program} {name}", reached.choices[name], words[1:]
    parser = _options(program, reached)
    given, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(_describe_unknown(unknown[0], reached))
    return reached(**vars(given))


class _Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises a `ConfigError` instead of printing the error and exiting."""

    def __init__(self, prog: str, arguments: str, description: str) -> None:
        super().__init__(
            prog,
            usage=_escape(f"{prog} {arguments}"),
            # argparse formats a description with % only if it has this in it
            description=_escape(description) if "%(prog)" in description else description,
            argument_default=argparse.SUPPRESS,  # the dataclass has the defaults
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{one_line(message)}; see {self.prog} --help")


def _choose(program: str, command: Command, words: Sequence[str]) -> str:
    """Return the first word if it names a subcommand; otherwise print the help or raise."""
    if not words or words[0] not in command.choices:
        _explain(_Parser(program, f"{command.noun.upper()} [OPTIONS]", command.help), command, words)
    return words[0]


def _explain(parser: _Parser, command: Command, words: Sequence[str]) -> NoReturn:
    """Print the help if the words ask for it, or raise a `ConfigError` that says what is wrong."""
    if words and words[0] in ("-h", "--help"):
        listed = parser.add_argument_group(f"{command.noun}s")
        for name, choice in command.choices.items():
            listed.add_argument(name, help=_escape(_summary(choice)))
        parser.print_help()
        parser.exit()
    found = f"unknown {command.noun} {shown(words[0])}" if words else f"a {command.noun} is missing"
    others = f", or {command.others}" if command.others else ""
    parser.error(f"{found}, expected one of {', '.join(command.choices)}{others}")


def _summary(choice: type | Command) -> str:
    text = choice.help if isinstance(choice, Command) else inspect.getdoc(choice) or ""
    return text.partition("\n\n")[0]


def _options(program: str, settings: type) -> _Parser:
    """Return the parser of a dataclass's fields."""
    positionals = [field.name.upper() for field in fields(settings) if _default(field) is MISSING]
    parser = _Parser(program, " ".join([*positionals, "[OPTIONS]"]), _summary(settings))
    kinds, helps = kinds_of(settings), dict(_field_docs(settings))
    for field in fields(settings):
        _add(parser, field, kinds[field.name], helps.get(field.name, ""))
    return parser


def _add(parser: _Parser, field: Field[Any], kind: Any, text: str) -> None:
    convert, default = partial(_convert, kind), _default(field)
    if default is MISSING:
        parser.add_argument(field.name, metavar=field.name.upper(), type=convert, help=_escape(text))
    elif kind is bool and default:  # also --no-x, which turns it off
        text += " (default: on)"
        parser.add_argument(_flag(field), action=argparse.BooleanOptionalAction, help=_escape(text))
    elif kind is bool:
        parser.add_argument(_flag(field), action="store_true", default=argparse.SUPPRESS, help=_escape(text))
    else:
        text += f" (default: {'none' if default is None else default})"
        parser.add_argument(_flag(field), metavar=_metavar(kind), type=convert, help=_escape(text))


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _flag(field: Field[Any]) -> str:
    return f"--{field.name.replace('_', '-')}"


def _escape(text: str) -> str:
    return text.replace("%", "%%")  # argparse formats usage and help texts with %


def _describe_unknown(word: str, settings: type) -> str:
    if not word.startswith("-"):
        return f"unexpected {shown(word)}, expected an option or nothing more"
    name = word.partition("=")[0][:80]
    close = difflib.get_close_matches(name, [_flag(field) for field in fields(settings)], n=1)
    return f"unknown option {name}" + "".join(f", the closest is {flag}" for flag in close)


def _field_docs(settings: type) -> Iterator[tuple[str, str]]:
    """Yield each field's name and the string below it, read from the source: Python does not keep them."""
    for kind in filter(is_dataclass, reversed(settings.__mro__)):
        try:
            source = inspect.getsource(kind)
        except OSError:  # defined at a prompt, so there is no source
            continue
        definition = ast.parse(textwrap.dedent(source)).body[0]
        assert isinstance(definition, ast.ClassDef)
        for above, below in pairwise(definition.body):
            match above, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(text))):
                    yield name, inspect.cleandoc(text)


def _convert(kind: Any, word: str) -> object:
    """Convert an argument to the field's type, with the error that argparse expects."""
    try:
        return from_word(kind, word)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"invalid value {shown(word)}, {error}") from None


def _metavar(kind: Any) -> str:
    return "|".join(
        "|".join(get_args(one)) if get_origin(one) is Literal else one.__name__.upper()
        for one, _ in alternatives(kind)
        if one is not type(None)
    )
