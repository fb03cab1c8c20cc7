"""The one Typer app, and the edge of every command: names -> "module:app", resolved when used.

`kvctl`, `kvtop`, `kvdoctor`, `kvd` and `kvgate` are the groups ctl, top, doctor, d and gate of `kvtools`. A group's module
is imported when that group runs, so `kvctl list` never pays for the dashboard. `run` is the only place that turns an
error into a line on stderr and an exit status:

    kvctl: error: no segment named VLLM_MODEL_2
    hint: did you mean VLLM_MODEL_1?

Each app is made by `new_app`, so that --help, --version, --debug and the plain style are the same everywhere.
"""

import errno
import gc
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

# What is imported lives for ever; looking for garbage among it costs a tenth of the whole start.
gc.disable()

import typer  # noqa: E402
from typer._click.core import Command, Context  # noqa: E402
from typer._click.exceptions import (  # noqa: E402
    ClickException,
    MissingParameter,
    NoArgsIsHelpError,
    NoSuchOption,
    UsageError,
)
from typer._click.shell_completion import CompletionItem  # noqa: E402
from typer._click.types import FloatParamType, FloatRange, IntParamType  # noqa: E402
from typer.core import TyperGroup  # noqa: E402
from typer.main import get_command  # noqa: E402
from typer.models import TyperPath  # noqa: E402

from kvtools import __version__  # noqa: E402
from kvtools.errors import KvError, hint_for  # noqa: E402
from kvtools.exits import Exit  # noqa: E402
from kvtools.output import printable  # noqa: E402

gc.enable()

COMMANDS: dict[str, tuple[str, str, str]] = {
    "ctl": ("kvctl", "kvtools.ctl.app:app", "Who holds the KV memory of each engine, and what may it hold?"),
    "top": ("kvtop", "kvtop.app:app", "Segments, tiers and hit rates, live on one screen."),
    "doctor": ("kvdoctor", "kvdoctor.app:app", "Can this host do GPU-direct, and if not, which gate is shut?"),
    "d": ("kvd", "kvd.app:app", "The KV offload daemon: serve it, look into it, empty it."),
    "gate": ("kvgate", "kvgate.app:app", "One front for several models that share a GPU and sleep when idle."),
    "demo": ("", "kvd.demo.app:app", "The daemon, its restart, a pool segment and the dashboard, on this machine, in a minute."),
    "config": ("", "kvtools.settings:app", "What the environment sets for every command, and where each value came from."),
    "completion": ("", "kvtools.completion:app", "A shell's completion script for all commands."),
}
"""Name -> (console script where there is one, where its Typer app lives, one line of help)."""

_debug = False


def _set_debug(value: bool) -> None:
    global _debug
    _debug = _debug or value


def _show_version(value: bool) -> None:
    if value:
        sys.stdout.write(f"kvtools {__version__}\n")
        raise typer.Exit(0)


DebugOption = Annotated[bool, typer.Option("--debug", callback=_set_debug, is_eager=True, help="Show a traceback with an error.")]
VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON (bytes are integers).")]


def new_app(help: str, *, callback: bool = True, **options: Any) -> typer.Typer:  # noqa: A002 - Typer's own word
    """A Typer app in the house style: plain text, -h, --debug and --version, no completion flags of its own.

    With `callback=False` the module declares its own callback, with DebugOption and VersionOption among its parameters.
    """
    app = typer.Typer(
        help=help,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        suggest_commands=False,
        no_args_is_help=options.pop("no_args_is_help", False),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **options,
    )
    if callback:

        @app.callback()
        def common(debug: DebugOption = False, version: VersionOption = False) -> None:
            pass

        common.__doc__ = help
    return app


def refuse_options_before(context: Context) -> None:
    """For the callback of a group that is a command by itself, too: its options mean nothing to the sub-command that follows.

    Raises KvError where one was given: what looks obeyed and is not would be about another host, or another file.
    """
    from kvtools.errors import UsageError as Refused

    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name in ("debug", "version") or source is None or source.name != "COMMANDLINE":
            continue
        below, option = context.invoked_subcommand or "", max(param.opts, key=len)
        group = context.command
        command = group.get_command(context, below) if isinstance(group, TyperGroup) else None
        known = command is not None and any(option in mine.opts for mine in command.params)
        hint = (
            f"it belongs after it: {context.command_path} {below} {option}"
            if known
            else f"{below} has no such option: leave it out"
        )
        raise Refused(f"{option} before {below} is not passed on to it", hint=f"{hint} ({context.command_path} {below} --help)")


class Finite(FloatRange):
    """A number option's type: what lies in its range. `nan` compares false with both ends of one, so it needs asking for.

    An option without an upper end of its own ends at LARGEST: above it clocks and timeouts of the system overflow.
    """

    name = "number"
    LARGEST = 1e12

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        number = super().convert(value, param, ctx)
        if not abs(number) <= self.LARGEST:
            self.fail(f"{value!r} is no number that can be meant", param, ctx)
        return number

    def _describe_range(self) -> str:
        return "" if self.min is None and self.max is None else super()._describe_range()


class PathName(TyperPath):
    """A path as it was typed. The stock type asks stat about each, which on a dead mount never returns, before any deadline
    of ours begins; what is there is for the command to find out. An empty one is an unset variable of a shell."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not os.fspath(value):
            self.fail("an empty path names nothing", param, ctx)
        return value


def _mended(command: Command) -> Command:
    """`command` and all below it, with every float option refusing what is no number, and every path taken as a name."""
    for param in command.params:
        if isinstance(param.type, TyperPath) and not param.type.exists:
            param.type = PathName()
        if isinstance(param.type, FloatParamType) and not isinstance(param.type, Finite):
            bounds = param.type if isinstance(param.type, FloatRange) else FloatRange()
            param.type = Finite(bounds.min, bounds.max, bounds.min_open, bounds.max_open, bounds.clamp)
        if isinstance(param.type, IntParamType):
            param.type.name = "whole number"  # the stock name of a range, "int range", is nobody's word
    for below in getattr(command, "commands", {}).values():
        _mended(below)
    return command


def load(target: str) -> Command:
    """The command behind "module:attribute", with the house style of `new_app`."""
    module, _, attribute = target.partition(":")
    return _mended(get_command(getattr(importlib.import_module(module), attribute)))


class LazyGroup(TyperGroup):
    """The root group: a sub-group's module is imported only when that sub-group is used."""

    def list_commands(self, ctx: Context) -> list[str]:
        return [*COMMANDS, *super().list_commands(ctx)]

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        if cmd_name in COMMANDS:
            command = load(COMMANDS[cmd_name][1])
            command.name = cmd_name
            return command
        return super().get_command(ctx, cmd_name)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        """Names from COMMANDS: completing one must not load them all."""
        names = [CompletionItem(name, help=text) for name, (_, _, text) in COMMANDS.items() if name.startswith(incomplete)]
        return names or super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: Context, formatter: Any) -> None:
        rows = [(name, f"{text} (also: {script})" if script else text) for name, (script, _, text) in COMMANDS.items()]
        for name in super().list_commands(ctx):
            command = super().get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(80)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def run(prog: str, target: str, args: list[str] | None = None) -> NoReturn:
    """Run the app behind `target` as `prog` and exit. Every error becomes one line, a hint and a status here."""
    words = sys.argv[1:] if args is None else args
    sys.exit(_run(prog, target, words))


def run_words(prog: str, target: str, words: list[str]) -> int:
    """As `run`, but return the exit status and keep stdout: for a shell, whose every line is a command."""
    _mend_streams()
    stdout = sys.stdout
    try:
        return _run(prog, target, words)
    finally:
        if sys.stdout is not stdout:
            sys.stdout.close()  # an interrupted command left it pointing nowhere, for an exit that does not come here
            sys.stdout = stdout


def _run(prog: str, target: str, words: list[str]) -> int:
    global _debug
    _debug = bool(os.environ.get("KVTOOLS_DEBUG"))
    _mend_streams()
    try:
        gc.disable()  # as above: the command's own modules
        try:
            command = load(target)
        finally:
            gc.enable()
        if os.environ.get("KVTOOLS_COMPLETE"):
            from kvtools.completion import answer

            answer(command, prog, words)
            return _flush(prog, Exit.OK)
        with command.make_context(prog, list(words)) as context:
            value = command.invoke(context)
        return _flush(prog, int(value) if isinstance(value, int) else Exit.OK)
    except typer.Exit as stop:
        return _flush(prog, stop.exit_code)
    except KvError as error:
        return _fail(prog, error.message, error.hint, error.exit_code)
    except UsageError as error:
        return _fail_usage(prog, error)
    except ClickException as error:
        return _fail(prog, error.format_message(), "", error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _quiet_stdout()
        return Exit.INTERRUPTED
    except BrokenPipeError:
        if _debug:
            raise
        _quiet_stdout()
        return Exit.PIPE
    except ModuleNotFoundError as error:
        if _debug:
            raise
        return _fail(
            prog, f"the Python package {error.name!r} is not installed", "install kvtools with the extra that brings it", Exit.USAGE
        )
    except LostOutput as error:
        return _fail_output(prog, error)
    except OSError as error:
        # The process edge: an operating-system error nobody nearer could explain still gets one line.
        if _debug:
            raise
        where = f" ({error.filename})" if error.filename else ""
        hint = hint_for(error, "run again with --debug for the traceback")
        return _fail(prog, f"{error.strerror or error}{where}", hint, Exit.FAILED)


class LostOutput(OSError):
    """Data for stdout reached nobody. A command may meet other operating-system errors: this one is told apart by its class."""


class Stdout(io.TextIOWrapper):
    """stdout whose own errors are `LostOutput`."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LostOutput(error.errno, error.strerror) from None

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LostOutput(error.errno, error.strerror) from None


class ClosedStdout(io.TextIOBase):
    """What stands in for a stdout that was closed before the start: whoever has data for it is told so, nobody else."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        if text:
            raise LostOutput(errno.EBADF, "it is closed")
        return 0

    def writable(self) -> bool:
        return True


def _fail_output(prog: str, error: LostOutput) -> int:
    """Data that reached nobody is a failure, however well the work went."""
    _quiet_stdout()
    told = {
        errno.EBADF: "leave it open, or send it to /dev/null",
        errno.EFBIG: "the file has reached the largest size it may have (ulimit -f)",
    }
    hint = told.get(error.errno or 0) or hint_for(error, "send it elsewhere")
    return _fail(prog, f"cannot write to standard output: {error.strerror or error}", hint, Exit.FAILED)


def _flush(prog: str, code: int) -> int:
    """Write out what stdout still holds: `code`, or where that is OK the status of an output that cannot be written."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _quiet_stdout()
        return Exit.PIPE
    except LostOutput as error:
        if code == Exit.OK:
            return _fail_output(prog, error)
        _quiet_stdout()  # what went wrong before is the more telling
    return code


def _mend_streams() -> None:
    """Every stream is there, and what its encoding lacks is written as an escape instead of raising.

    A closed one is /dev/null from here on, so that no file opened later gets its number; data for a closed stdout is an error.
    """
    while (low := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(low, True)
    os.close(low)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115, PTH123 - lives until the process ends
    out = sys.stdout
    if out is None:
        sys.stdout = ClosedStdout()
    elif type(out) is io.TextIOWrapper:
        sys.stdout = Stdout(
            out.buffer, out.encoding, "backslashreplace", line_buffering=out.line_buffering, write_through=out.write_through
        )
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives until the process ends
    elif isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def _fail(prog: str, message: str, hint: str, code: int) -> int:
    if _debug and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    _flush(prog, code)
    # What a message quotes came from a command line or a file system: it must not move the cursor.
    try:
        sys.stderr.write(f"{prog}: error: {printable(message)}\n")
        if hint:
            sys.stderr.write(f"hint: {printable(hint)}\n")
        sys.stderr.flush()
    except OSError:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - the status says it all the same, also at the interpreter's end
    return code


def usage(context: Context) -> int:
    """A command that was given no word, and needs one: its help, as a remark and not as data, and status 2."""
    sys.stderr.write(context.get_help() + "\n")
    return Exit.USAGE


def _fail_usage(prog: str, error: UsageError) -> int:
    if isinstance(error, NoArgsIsHelpError) and error.ctx is not None:
        return usage(error.ctx)
    message, hint = _explain(error)
    path = error.ctx.command_path if error.ctx is not None else prog
    return _fail(prog, message, hint or f"{path} --help lists what there is", Exit.USAGE)


def _explain(error: UsageError) -> tuple[str, str]:
    """The line and, where there is a better one than "see --help", the hint for a usage error."""
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    context = error.ctx
    if isinstance(error, MissingParameter) and error.param is not None and context is not None:
        named = error.param.make_metavar(context).upper() if error.param.param_type_name == "argument" else error.param.opts[0]
        return f"missing {error.param.param_type_name} {named}", ""
    if context is None:
        return message, ""
    if isinstance(error, NoSuchOption):
        if re.match(r"-\d", error.option_name):
            return (
                f"unexpected {error.option_name}",
                "no number here is negative; -- goes before a name that begins with a dash",
            )
        known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        return f"no such option: {error.option_name}", _did_you_mean(error.option_name, known)
    if (typed := re.fullmatch(r"no such command '(.*)'", message)) and isinstance(context.command, TyperGroup):
        return message, _did_you_mean(typed[1], context.command.list_commands(context))
    if typed := re.fullmatch(r"got unexpected extra argument(?:s|\(s\))? \((.*)\)", message):
        return f"unexpected argument: {typed[1]}", ""
    return message, ""


def _did_you_mean(typed: str, known: Sequence[str]) -> str:
    import difflib  # 6 ms that only a slip of the pen has to pay

    near = difflib.get_close_matches(typed, known, n=1)
    return f"did you mean {near[0]}?" if near else ""


def _quiet_stdout() -> None:
    """Point stdout at /dev/null, so that the interpreter's last flush cannot raise."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives until the process ends


app = new_app("The operator's toolkit for the KV cache of LLM inference hosts.", cls=LazyGroup, no_args_is_help=True)


def _entry(group: str) -> NoReturn:
    script, target, _ = COMMANDS[group]
    run(script, target)


def kvtools() -> NoReturn:
    """Console script: all groups under one name."""
    run("kvtools", "kvtools.cli:app")


def kvctl() -> NoReturn:
    """Console script kvctl."""
    _entry("ctl")


def kvtop() -> NoReturn:
    """Console script kvtop."""
    _entry("top")


def kvdoctor() -> NoReturn:
    """Console script kvdoctor."""
    _entry("doctor")


def kvd() -> NoReturn:
    """Console script kvd."""
    _entry("d")


def kvgate() -> NoReturn:
    """Console script kvgate."""
    _entry("gate")
