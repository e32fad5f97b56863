"""Command lines: words -> settings, or one line that says which word is wrong and what was expected."""

from __future__ import annotations

import contextlib
import difflib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from typing import Annotated, Any, Union

import tyro

# Private, but the only way to learn what is wrong other than reading it off the boxes that tyro draws:
# https://github.com/brentyi/tyro/blob/main/src/tyro/_errors.py
from tyro import _errors as tyro_errors

from samestep.errors import ConfigError

__all__ = ["Command", "parse"]

_KINDS = {"INT": "an integer", "FLOAT": "a number", "STR": "text", "PATH": "a path"}


@dataclass(frozen=True)
class Command:
    """A word of the command line that is followed by another command.

    Attributes:
        help: what the command does, in one line.
        choices: what may follow, by name: dataclasses whose fields are the options, or more commands.
        noun: what one of the choices is.
    """

    help: str
    choices: Mapping[str, type | Command]
    noun: str = "command"


def parse(program: str, command: Command, words: Sequence[str]) -> object:
    """Return the dataclass that `words` choose from `command`, with its fields set from the options.

    `--help` is printed by tyro, and leaves by `SystemExit`.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    reading = _Reading.of(program, command, words)
    if isinstance(reading.reached, Command) and not {"-h", "--help"}.intersection(reading.words):
        raise ConfigError(reading.line(_no_command(reading.reached, reading.words)))
    try:
        with contextlib.redirect_stderr(io.StringIO()), tyro_errors.on_parse_error(reading.refuse):
            return tyro.cli(
                _tyro_type(reading.reached),
                prog=reading.program,
                description=_help(reading.reached),
                args=reading.words,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
            )
    except SystemExit as leave:
        if not leave.code:
            raise
        raise ConfigError(reading.line("the command line is wrong")) from None


def _tyro_type(choice: type | Command) -> Any:
    if not isinstance(choice, Command):
        return choice
    if len(choice.choices) == 1:  # nothing to choose from: tyro shows the options at once
        return _tyro_type(*choice.choices.values())
    named = [
        Annotated[_tyro_type(below), tyro.conf.subcommand(name, description=_help(below))]
        for name, below in choice.choices.items()
    ]
    return Union[tuple(named)]  # noqa: UP007 - the types are known only when this runs


def _help(choice: type | Command) -> str | None:
    return choice.help if isinstance(choice, Command) else None


@dataclass(frozen=True)
class _Reading:
    """How far the words name commands, and what is left."""

    program: str  # with the commands: "samestep train digits"
    words: Sequence[str]  # after the commands
    reached: type | Command

    @classmethod
    def of(cls, program: str, reached: type | Command, words: Sequence[str]) -> _Reading:
        while words and isinstance(reached, Command) and words[0] in reached.choices:
            program, reached, words = f"{program} {words[0]}", reached.choices[words[0]], words[1:]
        return cls(program, words, reached)

    def line(self, problem: str) -> str:
        return f"{problem}; see {self.program} --help"

    def refuse(self, event: tyro_errors.ParseErrorEvent) -> None:
        problem = self._problem(event)
        if problem is not None:
            raise ConfigError(self.line(problem)) from None
        if isinstance(event, tyro_errors.InstantiationFailure):
            raise ConfigError(event.message) from None  # of the settings' own check, which names the remedy

    def _problem(self, event: tyro_errors.ParseErrorEvent) -> str | None:
        match event:
            case tyro_errors.UnrecognizedArgs(tokens=[word, *_]):
                return _no_option(word, self.reached)
            case tyro_errors.MissingArgs(unrecognized_tokens=[word, *_]):
                return _no_option(word, self.reached)
            case tyro_errors.MissingArgs(missing_arguments=[missing, *_]):
                return f"{_name(missing.arg)} is missing"
            case tyro_errors.BadValue(argument=argument) if argument.is_positional():
                return f"{_name(argument)} is missing"
            case tyro_errors.BadValue(argument=argument):
                return f"{_name(argument)}: its value is missing, expected {_expected(argument)}"
            case tyro_errors.InvalidChoice(argument=argument, value=value, choices=choices):
                return f"{_name(argument)}: invalid value {value!r}, expected one of {', '.join(choices)}"
            case tyro_errors.InstantiationFailure(argument=argument) if argument is not None:
                given = _given(self.words, argument.lowered.name_or_flags)
                return f"{_name(argument)}: invalid value {given!r}, expected {_expected(argument)}"
        return None


def _no_command(command: Command, words: Sequence[str]) -> str:
    found = f"unknown {command.noun} {words[0]!r}" if words else f"a {command.noun} is missing"
    return f"{found}, expected one of {', '.join(command.choices)}"


def _no_option(word: str, settings: Any) -> str:
    if not word.startswith("-"):
        return f"unexpected {word!r}, expected an option or nothing more"
    options = [f"--{field.name.replace('_', '-')}" for field in fields(settings)]
    close = difflib.get_close_matches(word, options, n=1)
    return f"{word}: no such option" + "".join(f", the closest is {option}" for option in close)


def _name(argument: Any) -> str:
    return str(argument.lowered.metavar if argument.is_positional() else argument.lowered.name_or_flags[-1])


def _expected(argument: Any) -> str:
    """Put tyro's "INT|{auto}" into words: "an integer or auto"."""
    kinds = str(argument.lowered.metavar).split("|")
    return " or ".join(_KINDS.get(kind, kind.strip("{}").replace(",", ", ")) for kind in kinds)


def _given(words: Sequence[str], flags: Sequence[str]) -> str:
    """Return what the command line says after the last of `flags`."""
    given = ""
    for position, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        if flag.replace("_", "-") in flags:
            following = takewhile(lambda word: not word.startswith("--"), words[position + 1 :])
            given = value if has_value else " ".join(following)
    return given
