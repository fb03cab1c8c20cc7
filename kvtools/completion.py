"""Tab completion: one script a shell for all commands, and the answers those scripts ask for.

    eval "$(kvtools completion bash)"

A script runs the command itself with the words before the cursor as arguments and KVTOOLS_COMPLETE set; `answer` then
prints what may stand there, one `value<TAB>description` a line, or `*files` where the shell's own file names belong.
Words travel as arguments, never through a string that would have to be split again. Nothing but the command's own module
is loaded, so a completion costs what `--help` costs.
"""

from typing import Annotated

import typer
from typer._click.core import Command
from typer._click.exceptions import ClickException
from typer._click.shell_completion import CompletionItem, _resolve_context, _resolve_incomplete
from typer.models import TyperPath

from kvtools.cli import COMMANDS, DebugOption, VersionOption, new_app
from kvtools.errors import UsageError
from kvtools.output import emit, printable

VARIABLE = "KVTOOLS_COMPLETE"
FILES = "*files"

_BASH = """\
_kvtools_complete() {{
    local line lines
    COMPREPLY=()
    lines=$({variable}=1 "$1" "${{COMP_WORDS[@]:1:COMP_CWORD}}" 2>/dev/null) || return 0
    while IFS= read -r line; do
        if [ "$line" = '{files}' ]; then compopt -o default; elif [ -n "$line" ]; then COMPREPLY+=("${{line%%$'\\t'*}}"); fi
    done <<<"$lines"
}}
complete -F _kvtools_complete {commands}
"""

_ZSH = """\
#compdef {commands}
_kvtools_complete() {{
    local line tab=$'\\t'
    local -a found
    for line in "${{(@f)$({variable}=1 "${{words[1]}}" "${{(@)words[2,CURRENT]}}" 2>/dev/null)}}"; do
        if [[ "$line" == '{files}' ]]; then _files; return; fi
        [[ -n "$line" ]] && found+=("${{${{line%%$tab*}}//:/\\\\:}}:${{line#*$tab}}")
    done
    (( $#found )) && _describe -V value found
}}
compdef _kvtools_complete {commands}
"""

_FISH = """\
function __kvtools_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found (env {variable}=1 $words[1] $words[2..-1] 2>/dev/null)
    if test "$found[1]" = '{files}'
        __fish_complete_path (commandline -ct)
    else
        printf '%s\\n' $found
    end
end
for name in {commands}
    complete --command $name --no-files --arguments '(__kvtools_complete)'
end
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}

app = new_app("Print a shell's completion script for all commands.", callback=False)


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", autocompletion=lambda: list(SCRIPTS))],
    debug: DebugOption = False,
    version: VersionOption = False,
) -> None:
    """Print a shell's completion script for all commands.

    bash: eval "$(kvtools completion bash)" in ~/.bashrc. zsh: the same with zsh, after compinit, in ~/.zshrc.
    fish: kvtools completion fish > ~/.config/fish/conf.d/kvtools.fish
    """
    if shell not in SCRIPTS:
        raise UsageError(f"no completion for {printable(shell)!r}", hint="one of " + ", ".join(SCRIPTS))
    commands = " ".join(["kvtools", *(script for script, _, _ in COMMANDS.values() if script)])
    emit(SCRIPTS[shell].format(variable=VARIABLE, files=FILES, commands=commands).rstrip())


def answer(command: Command, prog: str, words: list[str]) -> None:
    """Print what may stand in place of the last of `words`: the line so far, cut at the cursor."""
    *before, typed = words or [""]
    items = items_for(command, prog, before, typed)
    if any(item.type in {"file", "dir"} for item in items):
        emit(FILES)
        return
    for item in items:
        emit(f"{printable(item.value)}\t{printable((item.help or '').replace(chr(10), ' '))}")


def items_for(command: Command, prog: str, before: list[str], typed: str) -> list[CompletionItem]:
    """What may stand in place of `typed` after the words `before`; nothing where the line is wrong already."""
    try:
        context = _resolve_context(command, {}, prog, before)
        thing, typed = _resolve_incomplete(context, before, typed)
        items: list[CompletionItem] = thing.shell_complete(context, typed)
    except ClickException:
        return []
    if not items and isinstance(getattr(thing, "type", None), TyperPath):
        return [CompletionItem(typed, type="file")]  # Typer leaves paths to the shell and says so to nobody
    return items
