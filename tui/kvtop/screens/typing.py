"""Keys one after another: each is handled to its end, with all that it sets off, before the next is looked at.

    terminal -> App.on_event -> waiting keys -> the focused widget -> ... -> App -> an action -> a dialog opens, a focus moves

Textual sends a key to whatever has the focus when it comes in. A burst (a paste, a script, a fast hand) comes in at once, so what
was meant for the line that `/` or `l` opens would reach the table behind it, where letters are commands. Here a key waits until the
one before it has come to rest: it went up from its widget to the app, so did what widgets told their screens because of it (a
changed or submitted line), and the screen that is then on top is ready with its focus.

Coming to rest is seen by an echo, a message that goes the key's own way behind it. Two echoes in a row that find the same screen
and focus mean that nothing is on its way any more. An echo whose screen closes under it never returns: a changed screen counts as
its return, and no key waits longer than `PATIENCE_S` whatever happens.

Concurrency: all on the app's event loop. A single key costs no delay: it is handled at once, and only those behind it wait.
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

from textual import events
from textual.app import App
from textual.message import Message

Answer = TypeVar("Answer")

PATIENCE_S = 2.0
_LOOK_S = 0.02
_ROUNDS = 8
"""Echoes for one key at most; a key that opens a dialog which closes into another needs five."""


class Echo(Message, bubble=True, verbose=True):
    """Goes up from a widget to the app behind a key."""

    def __init__(self, returned: "asyncio.Future[None]") -> None:
        super().__init__()
        self.returned = returned


class Typing(App[Answer], Generic[Answer]):
    """An app whose keys are never lost to what they open."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[events.Key | events.Paste] = deque()
        self._typist: asyncio.Task[None] | None = None

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.InputEvent | events.Paste) and not event.is_forwarded and not self.screen_stack:
            return  # behind the last key of a session; Textual would look for a screen
        if isinstance(event, events.Key) and event.key == "ctrl+j":
            # Enter that was typed before the terminal was ours: it made a line feed of it.
            event = events.Key("enter", "\r")
        if not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            await super().on_event(event)
        elif self._typist is not None and not self._typist.done():
            self._waiting.append(event)
        else:
            await super().on_event(event)
            self._typist = asyncio.create_task(self._type(), name="kvtop keys")

    async def _type(self) -> None:
        """Let the key that was just handled come to rest, then handle those that came in meanwhile."""
        await self._at_rest()
        while self._waiting and self.screen_stack:
            await super().on_event(self._waiting.popleft())
            await self._at_rest()
        self._waiting.clear()

    async def _at_rest(self) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        before = None
        for _ in range(_ROUNDS):
            if self.screen_stack:
                await self._echo(deadline)
            if not self.screen_stack:
                return
            now = (self.screen, self.screen.focused)
            if now == before:
                return
            before = now

    async def _echo(self, deadline: float) -> None:
        """Until a message that follows the last key is back, or can no longer come back."""
        loop = asyncio.get_running_loop()
        screen = self.screen
        returned: asyncio.Future[None] = loop.create_future()
        if not (screen.focused or screen).post_message(Echo(returned)):
            await asyncio.sleep(0)  # it is closing
            return
        while self.screen_stack and self.screen is screen and not returned.done():
            left = deadline - loop.time()
            if left <= 0:
                return
            await asyncio.wait([returned], timeout=min(left, _LOOK_S))

    def on_echo(self, message: Echo) -> None:
        if not message.returned.done():
            message.returned.set_result(None)
