"""The command line: `hotshelf serve`, `doctor`, `demo init`, `sweep`."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from server.settings import ENVIRONMENT_PREFIX, NAME_TO_OPTION, YES, SettingsError, read_settings

WRONG_SETTING = 2
CANNOT_START = 1
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = ArgumentParser(prog="hotshelf", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_serve(commands.add_parser("serve", help="serve models over HTTP", allow_abbrev=False))
    _add_doctor(commands.add_parser("doctor", help="what this machine has", allow_abbrev=False))
    demo = commands.add_parser("demo", help="a repository to try things with")
    demo_commands = demo.add_subparsers(metavar="command", required=True)
    _add_load_test(demo_commands, arguments, ("demo", "init"), "write the demo repository")
    _add_load_test(commands, arguments, ("sweep",), "measure p99 latency against cache size")
    options = parser.parse_args(arguments)
    run: Callable[[Namespace], int] = options.run
    try:
        return run(options)
    except KeyboardInterrupt:
        return INTERRUPTED


def _add_serve(parser: ArgumentParser) -> None:
    parser.description = "Every option can also be given in the environment and in a config file."
    for name, option in NAME_TO_OPTION.items():
        default = f"; default {option.default_text}" if option.default_text else ""
        text = f"{option.help} ({option.allowed}{default})".replace("%", "%%")
        flag = f"--{name.replace('_', '-')}"
        if name == "model_file":
            parser.add_argument(name, nargs="?", metavar="MODEL", help=text)
        elif option.is_flag:
            parser.add_argument(flag, dest=name, action="store_const", const=YES, help=option.help)
        else:
            parser.add_argument(flag, dest=name, metavar="VALUE", help=text)
    parser.add_argument("--config", metavar="FILE", help="a YAML file with these options")
    parser.set_defaults(run=_serve)


def _serve(options: Namespace) -> int:
    given = {
        name: value
        for name, value in vars(options).items()
        if name in {*NAME_TO_OPTION, "config"} and value is not None
    }
    try:
        settings = read_settings(given, os.environ)
    except SettingsError as error:
        return _fail(str(error), WRONG_SETTING)
    # Importing the models and the cache takes seconds; wrong settings should not.
    from server.service import StartError, serve

    try:
        serve(settings)
    except StartError as error:
        return _fail(str(error), CANNOT_START)
    return 0


def _add_doctor(parser: ArgumentParser) -> None:
    parser.description = "Says what was found of what Hotshelf can use, and what to do."
    option = NAME_TO_OPTION["device"]
    parser.add_argument(
        "--device", metavar="VALUE",
        default=os.environ.get(f"{ENVIRONMENT_PREFIX}DEVICE", option.default_text),
        help=f"the device that must be usable ({option.allowed}; default auto: any)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_doctor)


def _doctor(options: Namespace) -> int:
    try:
        NAME_TO_OPTION["device"].parse(options.device)
    except ValueError:
        allowed = NAME_TO_OPTION["device"].allowed
        return _fail(f"device: expected {allowed}, got {options.device!r}", WRONG_SETTING)
    try:
        from server.doctor import Probes, examine
    except ImportError as error:
        fix = "in its folder: pip install -e '.[cpu]', or '.[gpu]'"
        return _fail(f"{error}; Hotshelf is not installed as a whole; {fix}", CANNOT_START)
    report = examine(options.device, Probes())
    print(report.as_json() if options.json else report.text())
    return 0 if report.can_serve else CANNOT_START


def _fail(text: str, exit_code: int) -> int:
    print(f"hotshelf: {text}", file=sys.stderr)
    return exit_code


def _add_load_test(
    commands: object, arguments: Sequence[str], path: tuple[str, ...], help: str
) -> None:
    """Adds a command of `loadtests`, which is imported only when the command is asked for."""
    parser: ArgumentParser = commands.add_parser(path[-1], help=help)  # type: ignore[attr-defined]
    if tuple(arguments[: len(path)]) != path:
        return
    if path[0] == "demo":
        from loadtests.demo import add_arguments, main
    else:
        from loadtests.sweep import add_arguments, main
    add_arguments(parser)
    parser.set_defaults(run=main)
