"""Whether running sequences share the keys and values of a common beginning, which then lie in
several buffers.

Where attention is composed (on a CPU), it takes the buffers as they are. A fused kernel wants one
buffer, so all would be copied together in every step: three times the memory traffic of the
attention itself. There sequences share while they are parked, and each is joined into a buffer of
its own once, when it begins to run.
"""

from __future__ import annotations

from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.views import StepContext


def choose_sharing(runner: Runner, *, composes_attention: bool | None = None) -> None:
    """Have the runner's layers share or not, and add to its reason why.

    composes_attention: whether attention takes parts as they are; None: as the device has it.
    """
    takes_parts = (
        StepContext().composes_attention if composes_attention is None else composes_attention
    )
    if not any(leaf.can_share for layer in runner.fresh_layers() for leaf in layer.leaves()):
        return
    if not runner.attends_to_parts:
        runner.shares, why = False, "attention outside the seam takes one buffer"
    elif takes_parts:
        runner.shares, why = True, "attention takes several buffers as they are"
    else:
        runner.shares, why = False, "fused attention takes one buffer"
    held = "held once" if runner.shares else "held once while parked, and copied while they run"
    runner.reason += f"; common beginnings are {held}: {why}"
