"""The two places at which a worker catches whatever is raised, so that one request's fault is never
another one's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("holdfast.worker")


class DeviceFailed(Exception):
    """A model or the device raised something; the cause says what.

    Harms those only whose call it was.
    """


class DeviceBroken(Exception):
    """Nothing runs on the device any more; only a new process can help."""


@contextmanager
def device_call() -> Iterator[None]:
    """For what runs a model.

    Raises DeviceFailed for whatever that raises: it must not end the other requests.
    """
    try:
        yield
    except Exception as error:
        raise DeviceFailed(str(error)) from error


@contextmanager
def costing_no_answer(
    message: str, *names: str, otherwise: Callable[[Exception], None] = lambda error: None
) -> Iterator[None]:
    """Log whatever is raised, and do `otherwise`: nobody's answer depends on what is done in this
    context.
    """
    try:
        yield
    except Exception as error:
        logger.exception(message, *names)
        otherwise(error)
