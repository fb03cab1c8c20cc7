"""The two questions that change something outside kvtop: a new limit, and a deletion.

    limit    type a size -> see what it would mean -> Enter -> y writes it; Enter, n and Esc do not
    delete   type the segment's whole name -> Enter deletes; anything else does not

A question stands for as long as a person thinks, and the host goes on: each tick the dialog follows its segment, and one that got
another owner meanwhile has to be answered anew. What counts is checked once more where it is done, by kvtools.segments on a worker
thread: a limit that somebody changed is not overwritten (`expected`), and a segment whose owner is not the one the dialog named
(`holder`) is neither limited nor deleted. Previews are plain functions of a segment and a text.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from textual.binding import Binding
from textual.widgets import Input

from kvtools.errors import KvError
from kvtools.segments import owner, pool
from kvtools.units import format_size, parse_size
from kvtop.events import limit_text
from kvtop.screens.dialogs import SCROLLING, Answer, Dialog
from kvtop.snapshot import DEAD, LIVE, Segment
from kvtop.text import Glyphs, Line, Span, bar, pairs, safe, span
from kvtop.widgets.canvas import Styles


def limit_preview(segment: Segment, text: str, width: int, glyphs: Glyphs) -> tuple[int | None, list[Line]]:
    """The limit that `text` means (None when none), and what setting it would do."""
    if not text.strip():
        return None, [span("a size such as 4G, 512MiB or 1.5T (1024-based)", "dim")]
    try:
        wanted = pool.check_limit(parse_size(text))
    except KvError as error:
        return None, [span(error.message, "bad"), span(error.hint, "dim")]
    change = wanted - segment.limit_bytes
    lines: list[Line] = [
        pairs(
            [
                ("now", span(format_size(segment.limit_bytes))),
                ("then", span(format_size(wanted), "bold")),
                ("", span(f"({'+' if change >= 0 else ''}{format_size(change)})", "dim")),
            ]
        ),
    ]
    over = segment.held_bytes - wanted
    if segment.owner == DEAD:
        lines.append(span("its engine is gone: nothing will act on this limit", "warn"))
    elif over > 0:
        lines.append(span(f"the engine holds {format_size(over)} more than that and has to give it back first", "warn"))
    if segment.capacity_bytes and wanted > segment.capacity_bytes:
        lines.append(
            span(f"above what it reserved at start ({format_size(segment.capacity_bytes)}): it cannot use the rest", "warn")
        )
    if segment.page_bytes and wanted % segment.page_bytes:
        whole = wanted - wanted % segment.page_bytes
        lines.append(span(f"the engine uses whole pages: {format_size(whole)} of it", "dim"))
    # After the warnings: where there is no room for all, it is the picture that goes.
    lines.append(bar(min(width, 48), [(segment.used_bytes, "used"), (segment.prealloc_bytes, "prealloc")], wanted, glyphs))
    if segment.owner not in (LIVE, DEAD):
        lines.append(span("no owner file: written as asked, the engine takes it up when it next allocates", "dim"))
    return wanted, lines


class Question(Dialog[Answer]):
    """A dialog about one segment, which it follows while it stands."""

    segment: Segment
    asks = True

    def __init__(self, looks: Styles, title: str, segment: Segment) -> None:
        super().__init__(looks, title)
        self.segment = segment
        self.gone = False
        self.complaint = ""

    def follow(self, segments: Sequence[Segment]) -> None:
        """One tick: what was typed about a segment of another state is no answer to this one."""
        now = next((one for one in segments if one.name == self.segment.name), None)
        gone = now is None
        if now is not None:
            if self._said(now) != self._said(self.segment):
                self._ask_again()
            self.segment = now
        if gone != self.gone and not gone:
            self._ask_again()
        self.gone = gone
        self.fill()

    def _said(self, segment: Segment) -> object:
        """What of the segment the answer hangs on."""
        return holder_of(segment)

    def _ask_again(self) -> None:
        self.complaint = "it changed just now: read again what is said above"
        self.field.value = ""

    def told(self) -> list[Line]:
        """What stands above everything else."""
        return [span("it is gone by now", "warn")] if self.gone else []

    def on_input_changed(self) -> None:
        if self.field.value:
            self.complaint = ""
        self.fill()


class LimitDialog(Question[tuple[Segment, int]]):
    """Answers with the segment as it was last shown, and the new limit in bytes."""

    BINDINGS = [  # noqa: RUF012 - Textual's own way
        *SCROLLING,
        Binding("y,Y", "yes", show=False),
        Binding("n,N,enter", "no", show=False),
    ]

    def __init__(self, looks: Styles, segment: Segment, glyphs: Glyphs) -> None:
        super().__init__(looks, f" limit of {safe(segment.name)} ", segment)
        self.glyphs = glyphs
        self.wanted: int | None = None
        self.sure = False

    def lines(self, width: int) -> list[Line]:
        self.wanted, lines = limit_preview(self.segment, self.field.value, width, self.glyphs)
        return [*self.told(), *lines]

    def _said(self, segment: Segment) -> object:
        return holder_of(segment), segment.limit_bytes

    def _ask_again(self) -> None:
        super()._ask_again()
        if self.sure:
            self.sure = False
            self.field.disabled = False
            self.set_focus(self.field)

    def question(self) -> Line:
        if self.complaint:
            return span(self.complaint, "warn")
        if self.sure:
            return (Span("write it?  ", "bold"), Span("y", "key"), Span(" yes   "), Span("N", "key"), Span(" no"))
        return span("Enter goes on, Esc closes" if self.wanted is not None else "Esc closes", "dim")

    def on_input_submitted(self) -> None:
        if self.wanted is not None and not self.gone:
            # Without the focus on the field, the next key is an answer and not a letter.
            self.sure = True
            self.field.disabled = True
            self.set_focus(None)
            self.fill()

    def action_yes(self) -> None:
        if self.sure and self.wanted is not None:
            self.dismiss((self.segment, self.wanted))

    def action_no(self) -> None:
        if self.sure:
            self.dismiss(None)


def delete_lines(segment: Segment) -> list[Line]:
    """What deleting this segment would do."""
    lines: list[Line] = []
    if segment.owner == LIVE:
        lines.append(span(f"its engine is alive ({segment.story or f'pid {segment.pid}'})", "bad"))
        lines.append(span("without its segment it cannot be limited or seen, and engines of kvcached up to 0.1.5 crash"))
    elif segment.owner == DEAD:
        lines.append(span("its engine is gone: the numbers are of the past", "dim"))
    else:
        lines.append(span("nobody says whether its engine lives; one that does may crash without it", "warn"))
    lines.append(pairs([("limit", span(format_size(segment.limit_bytes))), ("used", span(format_size(segment.used_bytes)))]))
    return lines


class DeleteDialog(Question[Segment]):
    """Answers with the segment as it was last shown, when its whole name was typed."""

    BINDINGS = SCROLLING

    def __init__(self, looks: Styles, segment: Segment) -> None:
        super().__init__(looks, f" delete {safe(segment.name)} ", segment)

    def lines(self, width: int) -> list[Line]:
        return [*self.told(), *delete_lines(self.segment)]

    def question(self) -> Line:
        if self.complaint:
            return span(self.complaint, "warn")
        return (Span("type its name to delete it: "), Span(safe(self.segment.name), "bold"), Span("  (Esc closes)", "dim"))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value == self.segment.name and not self.gone:
            self.dismiss(self.segment)
            return
        self.complaint = "it is gone by now" if self.gone else "that is not its name: nothing was deleted"
        self.fill()


def holder_of(segment: Segment) -> owner.Holder:
    """Whom the screen named as the segment's owner."""
    if segment.owner == LIVE:
        return owner.Holder("live", segment.pid)
    return owner.Holder("stale" if segment.owner == DEAD else "unknown")


def write_limit(segment: Segment, limit_bytes: int, root: Path) -> str:
    """Write the limit; the sentence for the log. Raises KvError, also when somebody else changed it meanwhile."""
    change = owner.change_limit(
        segment.name, limit_bytes, by=f"kvtop, uid {os.getuid()}", expected=segment.limit_bytes, holder=holder_of(segment),
        root=root, timeout_s=1.0,
    )  # fmt: skip
    return f"{limit_text(change.before.limit_bytes, change.after.limit_bytes)} written"


def delete(segment: Segment, root: Path) -> str:
    """Delete the segment, and its owner file when nobody owns it; the sentence for the log. Raises KvError.

    Refused, as `kvctl delete` is, when its owner is not the one that was shown.
    """
    last = owner.remove_pool(segment.name, holder_of(segment), root=root, timeout_s=1.0)
    return f"deleted, it had {format_size(last.used_bytes)} of {format_size(last.limit_bytes)} in use"
