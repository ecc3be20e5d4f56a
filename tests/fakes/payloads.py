"""Payloads that only have a weight."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    nbytes: int
    name: object = ""
