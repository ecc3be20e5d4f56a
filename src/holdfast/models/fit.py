"""How many agents a memory holds beside the weights of a model, and in how many bits to take a
model for it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_WEIGHTS_SHARE = 0.75  # of memory that system and GPU share: what macOS lets a GPU use
_KV_SHARE = 0.6  # of what the weights leave, as a worker takes it (`device_memory`)
_GROUP_BITS = 32 / 64  # scale and bias of 16 bits each for 64 weights
BITS = (8, 6, 4)
_AIMS = ((4, 32768), (1, 32768), (4, 8192), (1, 8192), (1, 2048))  # agents, and tokens of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a model needs of memory."""

    weight_bytes: int
    bytes_per_token: int
    fixed_bytes: int  # of each agent

    def agents(self, tokens: int, *, memory_bytes: int) -> int:
        """How many agents of so many tokens each a memory has room for; 0 too where the weights do
        not fit.
        """
        room = int((memory_bytes - self.weight_bytes) * _KV_SHARE)
        return max(room, 0) // max(tokens * self.bytes_per_token + self.fixed_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """In which form a model is taken for a memory."""

    total_bytes: int
    form: str  # "as it is", "4 bits", … ; "none" when nothing fits
    need: Need
    agents: int
    tokens: int  # of each agent


def usable_of(total_bytes: int) -> int:
    """What weights and KV may take of a memory that system and GPU share."""
    return int(total_bytes * _WEIGHTS_SHARE)


def choice_for(total_bytes: int, need: Need, *, parameters: int, context_tokens: int) -> Choice:
    """The least packed form that reaches the first of the aims that any form reaches; "none" where
    none reaches any.

    need: of the model as it is stored. A form that is larger than that is none.
    """
    packed = {f"{bits} bits": int(parameters * (bits + _GROUP_BITS) / 8) for bits in BITS}
    forms = [("as it is", need)]
    forms += [
        (form, replace(need, weight_bytes=size))
        for form, size in packed.items()
        if size < need.weight_bytes
    ]
    usable = usable_of(total_bytes)
    for wanted, length in _AIMS:
        tokens = min(length, context_tokens)
        for form, own in forms:
            if (agents := own.agents(tokens, memory_bytes=usable)) >= wanted:
                return Choice(
                    total_bytes=total_bytes, form=form, need=own, agents=agents, tokens=tokens
                )
    return Choice(
        total_bytes=total_bytes,
        form="none",
        need=forms[-1][1],
        agents=0,
        tokens=min(_AIMS[-1][1], context_tokens),
    )
