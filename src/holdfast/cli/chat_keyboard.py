"""What a person types in a chat: one message at a time, of one line or several; a paste is one
message.

prompt_toolkit reads the keys, because Python's own `input` takes every line of a paste for a
message of its own: GNU readline's bracketed paste is switched off by Python, and libedit, which
Python has on macOS, knows none.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from holdfast.cli.chat_terminal import mark_pastes

PROMPT, CONTINUATION = FormattedText([("fg:ansigreen bold", "> ")]), "… "
LEAVE_HINT = "(Ctrl-C again, Ctrl-D or /exit leaves)"


def typed_messages() -> Iterator[str]:
    """Message after message, until Ctrl-D at an empty prompt, or Ctrl-C twice.

    While a message is being answered, what is typed is not shown; it stands at the next prompt
    (chat_terminal.py).
    """
    # a terminal that does not answer where its cursor is gets no warning
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")
    keyboard: PromptSession[str] = PromptSession(
        multiline=True,
        enable_suspend=True,
        key_bindings=_keys(),
        prompt_continuation=CONTINUATION,
        output=None if sys.stdout.isatty() else create_output(always_prefer_tty=True),
    )
    # At the prompt Ctrl-C is a key, during an answer it is the answer's; as a signal between the
    # two it is nobody's.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield from _prompted(keyboard)
    finally:
        signal.signal(signal.SIGINT, before)


def _prompted(keyboard: PromptSession[str]) -> Iterator[str]:
    about_to_leave = False
    while True:
        try:
            message = keyboard.prompt(PROMPT, handle_sigint=False)
        except EOFError:
            return
        except KeyboardInterrupt:
            if about_to_leave:
                return
            # a line that is given up is no wish to leave
            about_to_leave = not keyboard.default_buffer.text
            if about_to_leave:
                print(LEAVE_HINT, flush=True)  # noqa: T201 - to the person, as the prompt is
            continue
        about_to_leave = False
        mark_pastes()  # the prompt, which has ended, has switched it off
        yield message


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter, or Enter behind a backslash, begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if (
            buffer.document.text_before_cursor.endswith("\\")
            and not buffer.document.text_after_cursor
        ):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys
