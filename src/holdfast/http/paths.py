"""Paths that base URLs go wrong with: written in the one form that is served, and named where they cannot be."""

from __future__ import annotations

_VERSION = "v1"
_UNDER_VERSION = frozenset({"chat", "completions", "models", "sessions", "responses", "messages", "embeddings"})
_WITHOUT_VERSION = frozenset({"api", "health", "metrics", "openapi.json"})
_ENDINGS = ("chat/completions", "completions", "models", "sessions", "health", "metrics", "openapi.json")


def served_path(path: str) -> str:
    """The path that is meant: without doubled slashes, with one /v1 where it belongs. An unknown one loses only its slashes.

    Base URLs are given with and without /v1 and a slash at their end, so clients call /chat/completions and /v1/v1/models.
    """
    segments = [segment for segment in path.split("/") if segment]
    while segments[:1] == [_VERSION] and len(segments) > 1 and segments[1] in _WITHOUT_VERSION | {_VERSION}:
        del segments[0]
    if segments and segments[0] in _UNDER_VERSION:
        segments.insert(0, _VERSION)
    return "/" + "/".join(segments)


def meant_path(path: str) -> str | None:
    """The served path whose end an unknown path has, such as /v1/chat/completions for /openai/v2/chat/completions."""
    found = next((ending for ending in _ENDINGS if path.endswith("/" + ending)), None)
    return None if found is None else served_path(found)
