"""What must be true when a request is refused or fails: the reason that its client is given."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.front.fleet.slot import State
from tests.simulation.actions import Turn
from tests.simulation.agents import Heard, expected
from tests.simulation.checks_part import Part
from tests.simulation.device import tokenizer
from tests.simulation.excuses import LONGEST_SILENCE
from tests.simulation.pictures import as_tokens
from tests.simulation.vision import ImageFault
from tests.simulation.worker import DEATHS_OF_AN_IMAGE

if TYPE_CHECKING:
    from tests.simulation.checks_links import Asked
    from tests.simulation.front import SimulatedFront

LEAST_DEATHS = 5  # of workers: three, and two while the request ran alone
LEAST_FAILED_STARTS = 3  # in a row, until open requests end
LONGEST_IMAGE_SECONDS = 60.0  # until an image has had both its attempts
LONGEST_TICK = 5.0  # of a sleep, so many seconds may count
# troubles after which it is known which conversations have killed workers
_KNOWN_DEATHS = {"a conversation kills", "a step computes a conversation that kills its process"}
# the errors of a request with an image that the model cannot use
_OF_AN_IMAGE = {"invalid_value", "invalid_prompt", "invalid_request_error", "unsupported_content"}
_ENDS_OF_SERVER = ("server is shutting down", "the server stopped", "the server cancelled")
_FAILURES = ("the model failed on this request", "the request failed; the server's log")


@dataclass(frozen=True)
class _Refusal:
    """A request that was refused, or failed. prompts: the texts of which the model had to read one.
    said: all that its client heard, for messages.
    """

    request_id: str
    turn: Turn
    heard: Heard
    prompts: Set[str]
    began: float
    front: SimulatedFront
    said: str

    def mentions(self, *texts: str) -> bool:
        return any(text in f"{self.heard.error} {self.heard.message}" for text in texts)


class RefusalChecks(Part):
    """The reasons of requests that were refused or have failed."""

    def refused(
        self,
        request_id: str,
        turn: Turn,
        heard: Heard,
        *,
        prompts: Set[str],
        began: float,
        front: SimulatedFront,
    ) -> None:
        """A request was refused or failed: for a reason that is true."""
        said = f"{request_id} got {heard.status} {heard.error}: {heard.message}"
        refusal = _Refusal(request_id, turn, heard, prompts, began, front, said)
        if "internal" in heard.error or (heard.status == 500 and "unexpected" in heard.message):
            self._violation("no 500", said)
        wrong = self._contradicts_time(refusal) or self._contradiction(refusal)
        if wrong is not None:
            if wrong:
                self._violation("true refusals", f"{wrong}, but {said}")
            return
        if not prompts and heard.error in _OF_AN_IMAGE:
            return
        if heard.status in (400, 401, 403, 404, 422):
            self._violation("true refusals", said)
        if self.simulation.options["max_loaded"] == 1:
            return  # there may be no place for a model
        if not self.checks.excuses.has_excuse(turn.model, began):
            self._violation("true refusals", f"nothing has gone wrong, but {said}")

    def gave_up(self, state: State, error: HoldfastError) -> None:
        """The server gives up a model: only while it is still being loaded."""
        if state in (State.READY, State.RESTARTING, State.DRAINING):
            self._violation("it recovers", f"a model that was served is given up: {error}")

    def _contradiction(self, refusal: _Refusal) -> str | None:
        """What contradicts the reason of a refusal; "": nothing; None: the reason is another one,
        which needs an excuse.
        """
        if "failing" not in self.simulation.options:  # a sweep lets anything fail
            if refusal.mentions(*_ENDS_OF_SERVER):
                return "the server runs" if refusal.front.is_running else ""
            if refusal.mentions("cannot be started again", "does not start"):
                return self._contradicts_starts(refusal)
            if refusal.mentions("the worker cannot be started: "):
                return self._contradicts_first_start(refusal)
            if refusal.mentions(*_FAILURES):
                return self._contradicts_steps(refusal)
        if (wrong := self._contradicts_images(refusal)) is not None:
            return wrong
        if refusal.mentions("stored responses cannot be used"):
            return "" if self.checks.excuses.disk_has_failed() else "the disk is good"
        if refusal.mentions("killed the worker process", "ran alone"):
            return self._contradicts_deaths(refusal)
        if refusal.heard.status == 429 or refusal.mentions("exceed the limit of"):
            return self.checks.limits.contradiction(refusal.request_id, refusal.heard)
        if refusal.mentions("empty_summary"):
            return self._contradicts_empty_summary(refusal)
        if refusal.mentions("invalid_compaction"):
            return self._contradicts_lost_seal(refusal)
        if refusal.mentions("context", "too long"):
            return self._contradicts_length(refusal)
        if refusal.mentions("is still loading", "is still restarting"):
            return self._contradicts_loading(refusal)
        if refusal.mentions("longer than its limit"):
            return "no time limit is set" if refusal.turn.timeout_seconds is None else ""
        if refusal.mentions("queue", "already waiting"):
            return self._contradicts_queue(refusal)
        if refusal.heard.status == 404 and not self.checks.answers.has_model(refusal.turn):
            return ""
        return None

    def _contradicts_images(self, refusal: _Refusal) -> str | None:
        """What contradicts a reason that is about images; None: the reason is another one."""
        excuses, model = self.checks.excuses, refusal.turn.model
        since = refusal.began - LONGEST_IMAGE_SECONDS
        if refusal.mentions("the image process failed", "crashes the decoder"):
            kinds = (ImageFault.DIES, ImageFault.HANGS, ImageFault.SPINS)
            if refusal.mentions("crashes the decoder"):
                most = max(self.simulation.machine.image_faults_of.values(), default=0)
                return "" if most >= DEATHS_OF_AN_IMAGE else f"an image has had {most} failures"
            failed = excuses.image_faults(model, *kinds, since=since)
            if excuses.disk_has_failed():
                return ""
            return "" if failed >= 2 else f"the image process has failed {failed} times"
        if refusal.mentions("image process did not start"):
            failed = excuses.image_faults(model, ImageFault.NO_START, since=since)
            return "" if failed else "all image processes have started"
        if refusal.mentions("vision tower failed"):
            failed = excuses.image_faults(model, ImageFault.NO_FEATURES, since=since)
            return "" if failed >= 2 else f"the vision tower has failed {failed} times"
        if refusal.mentions("an image cannot be processed"):
            could_fail = any(each.kind == "no image process starts" for each in excuses.all)
            return "" if could_fail or excuses.disk_has_failed() else "nothing has failed"
        if refusal.mentions("images cannot be kept", "file of an image", "processed image cannot"):
            return "" if excuses.disk_has_failed() else "the disk is good"
        return None

    def _contradicts_starts(self, refusal: _Refusal) -> str:
        """A worker could not be started, three times in a row."""
        model = refusal.turn.model
        failed = self.simulation.machine.most_failed_starts(model)
        if failed >= LEAST_FAILED_STARTS or self.checks.excuses.disk_has_failed():
            return ""
        return f"only {failed} starts of {model} have failed in a row"

    def _contradicts_first_start(self, refusal: _Refusal) -> str:
        """The first process of a load could not be started. Later ones are tried again."""
        excuses = self.checks.excuses
        if "[Errno 28]" in refusal.heard.message:
            return "" if excuses.disk_was_full(refusal.began) else "the disk is not full"
        if refusal.front.failed_first_starts or excuses.disk_has_failed():
            return ""
        return "the first process of each load was started"

    def _contradicts_steps(self, refusal: _Refusal) -> str:
        """The device failed on a request: twice, with other requests and alone, or with a NaN."""
        began = [each.sent_at for each in self._same(refusal)]
        failed = self.checks.excuses.failed_steps(
            refusal.turn.model, since=min([refusal.began, *began])
        )
        return "" if failed else "no two steps have failed"

    def _contradicts_deaths(self, refusal: _Refusal) -> str:
        """Workers died while they had this request, or another one with the same prompt."""
        sendings = max((each.sendings for each in self._same(refusal)), default=0)
        if sendings < LEAST_DEATHS:
            return f"it was sent {sendings} times"
        deadly = self.simulation.machine.deadly
        are_known = all(each.kind in _KNOWN_DEATHS for each in self.checks.excuses.all)
        if are_known and not any(
            deadly.is_hit(each.request.prompt_token_ids) for each in self._same(refusal)
        ):
            return "other conversations have killed the workers"
        return ""

    def _same(self, refusal: _Refusal) -> list[Asked]:
        """All requests with the same prompt that workers have got."""
        asked = self.checks.links.asked.values()
        return [each for each in asked if each.prompt in refusal.prompts]

    def _contradicts_empty_summary(self, refusal: _Refusal) -> str:
        """The model wrote no summary."""
        texts = [expected(each.right()).text for each in self._same(refusal)]
        return "" if any(not text.strip() for text in texts) else f"it wrote {texts}"

    def _contradicts_lost_seal(self, refusal: _Refusal) -> str:
        """The summary was made for another caller, or the server has lost its key in a restart."""
        answers = self.checks.answers
        same = [turn for prompt in refusal.prompts for turn in answers.turns[prompt]]
        if len({answers.caller(turn) for turn in same}) > 1:
            return ""
        keeps_key = self.simulation.options["has_store"]
        if keeps_key and not self.checks.excuses.disk_has_failed():
            return "the key of summaries is in the store"
        return "" if len(self.simulation.fronts) > 1 else "the server has not been restarted"

    def _contradicts_length(self, refusal: _Refusal) -> str:
        options = self.simulation.options
        room = min(8192, options["kv_tokens"])
        is_alone = len(options["models"]) == 1  # it has all the memory
        prompt = max(refusal.prompts, key=len, default="")
        tokens = len(tokenizer().encode(as_tokens(prompt)).ids) + refusal.turn.max_tokens
        # a second layer, and a draft model, need as much memory again
        share = 2 * (1 + (options["second_layer"] != "none")) * (1 + options["has_draft_model"])
        return "the prompt is short" if is_alone and tokens < room // share else ""

    def _contradicts_loading(self, refusal: _Refusal) -> str | None:
        """A worker is still not there. It cannot start while the disk is full."""
        if self.checks.excuses.disk_was_full(refusal.began):
            return ""
        for worker in self.simulation.machine.workers.values():
            seconds = self.world.now - worker.ready_at
            if worker.name == refusal.turn.model and seconds > LONGEST_SILENCE:
                return f"it is ready for {seconds:.0f} s"
        return None

    def _contradicts_time(self, refusal: _Refusal) -> str:
        """A time limit counts only the time in which the machine was awake."""
        if refusal.turn.idempotency or refusal.turn.reader == "retries":
            return ""  # a retry joins an answer that began earlier
        limit = re.search(r"(?:after|within|its limit of) ([\d.]+) s\b", refusal.heard.message)
        slept = sum(
            seconds - LONGEST_TICK
            for at, seconds in self.checks.excuses.sleeps
            if at >= refusal.began
        )
        lasted = self.world.now - refusal.began - slept
        if limit and lasted < float(limit.group(1)) - 1.0:
            return f"it took {lasted:.1f} s"
        return ""

    def _contradicts_queue(self, refusal: _Refusal) -> str:
        can_be = self.simulation.options["max_queued"] < self.checks.answers.asked_choices
        return "" if can_be else "the queue cannot be full"
