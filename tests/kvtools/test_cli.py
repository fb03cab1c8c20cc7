"""The edge of every command: each error becomes one line, a hint and its own status; a traceback only with --debug."""

import pickle
from typing import Any

import pytest

from kvtools import cli, errors
from kvtools.exits import Exit


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A one-command app whose body raises what it is given."""
    box: list[BaseException] = []
    app = cli.new_app("Fails.")

    @app.command()
    def fail() -> None:
        """Fail."""
        raise box[0]

    monkeypatch.setattr(cli, "app", app)

    def run(error: BaseException, *words: str) -> int:
        box[:] = [error]
        return cli.run_words("kvx", "kvtools.cli:app", [*words, "fail"])

    return run


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.KvError, 1),
        (errors.UsageError, 2),
        (errors.NotFound, 3),
        (errors.Unreachable, 4),
        (errors.Refused, 5),
        (errors.TimedOut, 6),
    ],
)
def test_each_error_has_its_status_and_two_lines(
    failing: Any, capsys: pytest.CaptureFixture[str], kind: type[errors.KvError], status: int
) -> None:
    assert failing(kind("it broke", hint="mend it")) == status
    assert capsys.readouterr() == ("", "kvx: error: it broke\nhint: mend it\n")
    assert failing(kind("it broke")) == status
    assert capsys.readouterr().err == "kvx: error: it broke\n"


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
        (ModuleNotFoundError("x", name="obstore"), 2, "the Python package 'obstore' is not installed"),
        (FileNotFoundError(2, "No such file or directory", "/x"), 1, "No such file or directory (/x)"),
    ],
)
def test_other_ends(failing: Any, capsys: pytest.CaptureFixture[str], error: BaseException, status: int, said: str) -> None:
    assert failing(error) == status
    assert said in capsys.readouterr().err


def test_a_traceback_only_with_debug(failing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failing(errors.KvError("it broke"), "--debug")
    assert "Traceback" in capsys.readouterr().err
    failing(errors.KvError("it broke"))
    assert "Traceback" not in capsys.readouterr().err


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(errors.Refused("no", hint="add --yes")))
    assert (type(error), error.message, error.hint, error.exit_code) == (errors.Refused, "no", "add --yes", Exit.REFUSED)


def test_exit_statuses_are_an_interface() -> None:
    assert {code.name: int(code) for code in Exit} == {
        "OK": 0, "FAILED": 1, "USAGE": 2, "NOT_FOUND": 3, "UNREACHABLE": 4, "REFUSED": 5, "TIMEOUT": 6, "UNDETERMINED": 7,
        "INTERRUPTED": 130, "PIPE": 141,
    }  # fmt: skip


def test_stdout_is_kept_when_a_command_in_a_shell_is_interrupted(failing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failing(KeyboardInterrupt())
    print("still here")
    assert capsys.readouterr().out == "still here\n"


def float_options(command: Any, words: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Every float option below a command: (the words that lead to its command, the option)."""
    found = [(words, param) for param in command.params if isinstance(param.type, cli.FloatParamType)]
    for name, below in getattr(command, "commands", {}).items():
        found += float_options(below, (*words, name))
    return found


@pytest.mark.parametrize("group", ["ctl", "top", "doctor", "d", "gate", "demo"])
@pytest.mark.parametrize("word", ["nan", "-nan", "inf", "-inf", "1e300", "-1", "1e999", "x"])
def test_no_command_takes_what_is_no_number(capsys: pytest.CaptureFixture[str], group: str, word: str) -> None:
    script, target, _ = cli.COMMANDS[group]
    for words, option in float_options(cli.load(target)):
        if option.type.min is None and word == "-1":
            continue  # the command's own text says why
        assert cli.run_words(script or group, target, [*words, f"{option.opts[0]}={word}"]) == Exit.USAGE
        error = capsys.readouterr().err
        assert error.startswith(f"{script or group}: error: invalid value for '{option.opts[0]}': "), error
        assert "Traceback" not in error


@pytest.mark.parametrize("group", ["ctl", "top", "doctor", "gate", "demo"])
def test_no_command_asks_about_a_path_while_its_words_are_read(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """A stat on a dead mount never returns, and no deadline of a command has begun by then."""

    def paths(command: Any) -> list[Any]:
        mine = [param for param in command.params if isinstance(param.type, cli.TyperPath)]
        return mine + [param for below in getattr(command, "commands", {}).values() for param in paths(below)]

    found = paths(cli.load(cli.COMMANDS[group][1]))
    assert found

    def asked(*words: Any, **more: Any) -> None:
        raise AssertionError("the system was asked")

    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "access"):
            patch.setattr(f"os.{name}", asked)
        assert {str(param.type.convert("/mnt/dead/x", param, None)) for param in found} == {"/mnt/dead/x"}
    for param in found:
        with pytest.raises(cli.ClickException, match="an empty path names nothing"):
            param.type.convert("", param, None)


def test_there_are_number_options_to_refuse_for() -> None:
    found = [option.opts[0] for _, target, _ in cli.COMMANDS.values() for _, option in float_options(cli.load(target))]
    assert {"--deadline", "--seconds", "--prefill-rate", "--l1-size-gb"} <= set(found)
