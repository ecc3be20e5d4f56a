"""One session: a name for what one agent, or one conversation, has read. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.prefix.branch import Branch

MOST_BRANCHES = 8  # an agent's side conversations must not push out its main one


@dataclass(slots=True, kw_only=True)
class Session:
    """A session of a tenant. Times are seconds since the epoch."""

    session_id: str
    tenant: str
    created_at: float
    last_used_at: float
    ttl_seconds: float | None  # since its last use; None: it never ends by itself
    pinned: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    forked_from: str = ""
    requests: int = 0
    branches: tuple[Branch, ...] = ()  # the last used first

    @property
    def expires_at(self) -> float | None:
        """When it ends if nobody uses it any more."""
        return None if self.ttl_seconds is None else self.last_used_at + self.ttl_seconds

    def use(self, branch: Branch, *, now: float) -> None:
        """A request of the session has ended, and this is where it has left its tokens.

        A chain that goes on from another one takes its place; what is only a beginning of another one adds nothing.
        """
        self.requests += 1
        self.last_used_at = now
        if not branch.steps:
            return
        others = [other for other in self.branches if not branch.goes_on_from(other)]
        longer = next((other for other in others if other.goes_on_from(branch)), None)
        if longer is not None:
            others.remove(longer)
        self.branches = (longer or branch, *others)[:MOST_BRANCHES]
