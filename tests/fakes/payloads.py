"""Payloads that only weigh something."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    nbytes: int
    name: object = ""
