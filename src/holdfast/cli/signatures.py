"""Signatures that are put together from several sources; Typer reads a command's options from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def option(name: str, annotation: Any) -> inspect.Parameter:
    """A parameter that is None where it is not given. annotation: as Typer takes it."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def own_parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    """A command's parameters but the first, by keyword."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]


def with_parameters(
    run: Callable[..., None], parameters: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """The function, which takes keywords, with these as its signature."""
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
