"""--fix: the commands that mend root causes, as a shell script on stdout. It is printed and never run."""

from collections.abc import Iterable

from kvdoctor.results import Report
from kvtools.output import printable


def script(report: Report) -> Iterable[str]:
    """Lines of the script: comments say what each block mends; what needs a person's hands stays a comment."""
    yield "#!/bin/sh"
    yield "# Printed by kvdoctor --fix; nothing of this was run. Read it, keep what you mean, run it as root."
    causes = [item for check_id in report.roots for item in report.by_id(check_id) if item.bad and not item.caused_by]
    causes = [item for item in causes if item.fix or item.commands]
    if not causes:
        unknown = [item.id for item in report.results if item.status == "unknown"]
        told = ", ".join(dict.fromkeys(unknown))
        yield f"# Nothing that is known to be wrong; not known: {told}." if unknown else "# Nothing to mend."
        return
    reboot, notes = False, list[str]()
    later: list[str] = []
    for number, item in enumerate(causes, 1):
        booted = False
        yield ""
        where = "" if item.scope == "host" else f" ({printable(item.scope)})"
        yield f"# {number}. {item.id}{where}, {item.status}: {printable(item.observed)}"
        if item.fix:
            yield f"#    {printable(item.fix)}"
        for follower in dict.fromkeys(other.id for other in report.results if other.caused_by == item.id):
            yield f"#    follows from it: {follower}"
        for command in item.commands:
            # A name with a newline in it would go on as a command of its own; one that ends in a newline sh cannot write.
            plain = command.isprintable() and "$'" not in command
            if command.split()[:1] == ["reboot"]:
                reboot = booted = True
                notes.append(command.partition("#")[2].strip())
                continue
            if booted:
                later.append(command)
                continue
            yield command if plain else f"# {printable(command)}    # holds control characters: type it yourself"
    if reboot:
        yield ""
        yield "# Last: what was mended above takes effect with a reboot."
        yield from (f"# {note}" for note in dict.fromkeys(notes) if note)
        yield from (f"# after it: {printable(command)}" for command in later)
        yield "reboot"
    if not any(item.commands for item in causes):
        yield ""
        yield "# No command mends these: each needs a person's hands, as said above."
