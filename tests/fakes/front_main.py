"""A front without HTTP over one worker with a fake engine: prints the worker's id, and after a line
whether it answers.
"""

from __future__ import annotations

import asyncio
import sys

from holdfast.wire.events import Finished, FinishReason
from tests.fakes.fake_models import OneModel
from tests.fakes.fake_worker import IMPATIENT, a_request, fake_settings


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def main() -> None:
    residency = OneModel(fake_settings(residency=IMPATIENT))
    await residency.start()
    await residency.wait_ready()
    say(residency.statuses()[0].pid)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.sleep(2 * IMPATIENT.hang_seconds)  # long enough for a wrong verdict
    *_, last = [event async for event in (await residency.client("m")).submit(a_request())]
    assert isinstance(last, Finished)
    said = "answers" if last.reason is FinishReason.LENGTH else last.error
    say(residency.statuses()[0].pid, said)
    await residency.stop()


if __name__ == "__main__":
    asyncio.run(main())
