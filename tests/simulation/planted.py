"""Planted bugs, to measure whether the search finds them: `python -m tests.simulation.planted`.

Each is applied alone to a copy of the sources, in which the ordinary search runs until its first
violation. About half revert a fix that the changelog names.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VIOLATION = re.compile(r"(?:seed|a changed scenario) .*?: ([a-z][^:]*): ")
SHRUNK = re.compile(r"shrunk from (\d+) to (\d+) actions")
WORLDS = re.compile(r"(\d+) seeds, ")
LONGEST_SHRINK_SECONDS = 20.0


@dataclass(frozen=True)
class Edit:
    """A replacement of text. file: below src/holdfast. old: a text that occurs once in it."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A realistic bug. undoes: the fix in the changelog or a document that it reverts."""

    name: str
    edits: tuple[Edit, ...]
    undoes: str = ""


def _fault(name: str, *edits: tuple[str, str, str], undoes: str = "") -> Fault:
    return Fault(name, tuple(Edit(*each) for each in edits), undoes)


FAULTS: Sequence[Fault] = (
    # -- requests and their ends, in the front
    _fault(
        "a resumed answer loses its last token",
        ("front/link/model_client.py",
         "generated_token_ids=TokenIds.of(stream.token_ids), want",
         "generated_token_ids=TokenIds.of(stream.token_ids[:-1]), want"),
    ),
    _fault(
        "a resumed answer starts over",
        ("front/link/model_client.py", "    if stream.token_ids:\n", "    if not stream.prefill_finished:\n"),
    ),
    _fault(
        "requests are not sent again after a death",
        ("front/link/model_client.py",
         "open_request.is_sent = open_request.is_paused_for_trial = False",
         "open_request.is_paused_for_trial = False"),
    ),
    _fault(
        "a request is refused after one death",
        ("front/link/model_client.py", "DEATHS_ALONE = 2 ", "DEATHS_ALONE = 1 "),
        undoes="A request that runs alone because workers died is refused only when a second",
    ),
    _fault(
        "a retry does not stop the timers of the lost answer",
        ("front/server/resumable_answers.py",
         "        answer.cancel_timers()\n        answer.clients += 1\n",
         "        answer.clients += 1\n"),
    ),
    _fault(
        "a retry misses the last event",
        ("front/server/resumable_answers.py",
         "cursor.place < self.next_place:", "cursor.place < self.next_place - 1:"),
    ),
    _fault(
        "time limits count the time in which the machine slept",
        ("machine/clocks.py",
         "return self._awake_seconds + min(self._clock() - self._ticked_at, MOST_TICK_SECONDS)",
         "return self._clock()"),
        undoes="After the machine had slept, clients, loads and uploads timed out at once",
    ),
    _fault(
        "Messages ignore cache_salt",
        ("front/server/generation.py",
         "    context = context_of(request, services, cache_salt=parsed.cache_salt)\n    requests, ",
         "    salt = None if request.url.path.endswith('/messages') else parsed.cache_salt\n"
         "    context = context_of(request, services, cache_salt=salt)\n    requests, "),
        undoes="Messages and Ollama's API ignored it",
    ),
    _fault(
        "the last token of an answer is not counted",
        ("front/answers/choice.py",
         "            self.completion_tokens += 1\n"
         "            if token_id in self._rules.stop_token_ids:\n                break\n",
         "            if token_id in self._rules.stop_token_ids:\n                break\n"
         "            self.completion_tokens += 1\n"),
        ("front/answers/choice.py",
         "        self.completion_tokens += len(token_ids)\n"
         "        if token_ids and token_ids[-1] in self._rules.stop_token_ids:\n"
         "            token_ids = token_ids[:-1]\n",
         "        if token_ids and token_ids[-1] in self._rules.stop_token_ids:\n"
         "            token_ids = token_ids[:-1]\n"
         "        self.completion_tokens += len(token_ids)\n"),
    ),
    # -- grammars and calls
    _fault(
        "a resumed answer's grammar lacks its last token",
        ("worker/engine/constraints.py",
         "        for token_id in generated:\n            constraint.add(token_id)\n        if",
         "        for token_id in generated[:-1]:\n            constraint.add(token_id)\n        if"),
    ),
    _fault(
        "a rejected draft leaves the grammar advanced",
        ("worker/engine/engine.py", "            constraint = constraint.copy()\n", "            pass\n"),
    ),
    _fault(
        "answers with the same grammar share its state",
        ("worker/engine/constraints.py", "            compiled.deep_copy(),\n", "            compiled,\n"),
    ),
    _fault(
        "a required tool does not exclude the others",
        ("front/structured/calls.py",
         "        if choice.names and name not in choice.names:\n            continue\n", ""),
    ),
    _fault(
        "the last part of a call's arguments is lost in streams of Messages",
        ("front/anthropic/answer.py",
         "        self._pieces.append(event.text)\n        if not event.text:\n",
         "        self._pieces.append(event.text)\n        if event.text in ('', '}'):\n"),
    ),
    # -- Ollama's API, conversations, limits and keys
    _fault(
        "the last piece of an Ollama answer is lost",
        ("front/ollama/answer.py",
         'text="".join([line.get("text", "") for line in lines]),',
         'text="".join([line.get("text", "") for line in lines[:-1]]),'),
    ),
    _fault(
        "an answer that fails counts as running for ever",
        ("front/server/access.py",
         "        try:\n            yield\n        finally:\n            self._average_seconds",
         "        yield\n        if True:\n            self._average_seconds"),
    ),
    _fault(
        "a limit lets one answer too many run",
        ("front/server/access.py", "        if running + answers > cap:\n", "        if running > cap:\n"),
    ),
    _fault(
        "a conversation's tenant is not checked",
        ("front/records/responses.py",
         "FROM records WHERE tenant = ? AND id = ? AND kind = ?",
         "FROM records WHERE (tenant = ? OR kind = 'conversation') AND id = ? AND kind = ?"),
    ),
    _fault(
        "a conversation loses the input of its responses",
        ("front/responses/stored.py",
         "ResponseFile.append, key, [*self._items, *output])",
         "ResponseFile.append, key, [*output])"),
    ),
    _fault(
        "a removed key stays valid",
        ("front/server/access.py",
         "self._path, self._by_hash = path, {key.sha256: key for key in keys}",
         "self._path = path\n        self._by_hash |= {key.sha256: key for key in keys}"),
    ),
    _fault(
        "a damaged key file removes all keys",
        ("front/server/access.py",
         "        except ConfigError as error:\n            raise ConfigError(f\"{error}; the API keys",
         "        except ConfigError as error:\n            self._by_hash = {}\n"
         "            raise ConfigError(f\"{error}; the API keys"),
    ),
    # -- models, places and workers
    _fault(
        "a lease is never given back",
        ("front/fleet/residency.py",
         "            slot.used_at = loop.time()\n            slot.leases.release()\n",
         "            slot.used_at = loop.time()\n"),
    ),
    _fault(
        "a model is unloaded while requests use it",
        ("front/fleet/budget.py", "and not model.leases\n        and not model.is_pinned", "and not model.is_pinned"),
        ("front/fleet/slot.py", '        assert not self.leases.held, "the model is in use"\n', ""),
    ),
    _fault(
        "requests that wait for a worker miss its start",
        ("front/fleet/slot.py",
         "        self._changed.set()\n        self._changed = asyncio.Event()\n        self._on_change()\n",
         "        self._on_change()\n"),
    ),
    _fault(
        "a worker that cannot be started is not tried again",
        ("front/fleet/supervised_worker.py",
         "            except OSError as error:  # out of memory,",
         "            except NotImplementedError as error:  # out of memory,"),
        undoes="A dead worker is also replaced … when file descriptors are short",
    ),
    _fault(
        "a silent worker is never killed",
        ("front/fleet/process.py",
         "if seconds >= limit and ran_seconds < LEAST_SHARE * seconds:",
         "if seconds > limit + ran_seconds and not self._is_serving:"),
    ),
    _fault(
        "a step of a minute is a hang",
        ("front/fleet/process.py",
         "limit = max(self._hang_seconds, PATIENCE * heartbeat.expected_seconds)",
         "limit = PATIENCE * heartbeat.expected_seconds"),
    ),
    # -- the scheduler and the worker's loop
    _fault(
        "the queue is full before it is",
        ("worker/scheduler/scheduler.py",
         "self._settings.max_queued + max(0, self._settings.max_running - len(self._running))",
         "self._settings.max_queued"),
    ),
    _fault(
        "tokens of a refused draft count as planned",
        ("worker/scheduler/scheduler.py",
         "generated_tokens=outcome.generated_tokens.get(span.request_id, 0),",
         "generated_tokens=span.tokens,"),
    ),
    _fault(
        "results of a discarded state are used",
        ("worker/loop/device_steps.py", "if sequence.attempts == attempt:", "if True:"),
    ),
    _fault(
        "parked states do not count as memory in use",
        ("worker/scheduler/admission.py",
         "self.budget_bytes - self.running_bytes - self.ending_bytes - self.live_state_bytes",
         "self.budget_bytes - self.running_bytes - self.ending_bytes"),
    ),
    _fault(
        "a step after a failed one is not repeated",
        ("worker/loop/device_steps.py",
         "                if later is not None:\n                    later.is_suspect = True\n", ""),
    ),
    _fault(
        "the state of a failed step is cached",
        ("worker/loop/cache_client.py",
         "        if results is None:\n            self._discard_uncommitted(step.sequences)\n            return\n",
         "        if results is None:\n"
         "            self._commit_step(step.pending, step.sequences)\n            return\n"),
    ),
    _fault(
        "the loop sleeps while blocks are read from disk",
        ("worker/loop/cache_client.py",
         "reasons = (WaitReason.LOOKUP, WaitReason.DISK, WaitReason.IMAGES)",
         "reasons = (WaitReason.LOOKUP, WaitReason.IMAGES)"),
    ),
    _fault(
        "a paused reader keeps its twins waiting",
        ("worker/loop/loop.py",
         "        self._cache_client.withdraw(sequence)\n        self._ledger.set_wait_reason(sequence, WaitReason.READER",
         "        self._ledger.set_wait_reason(sequence, WaitReason.READER"),
    ),
    _fault(
        "a request that was paused in the queue is not looked up again",
        ("worker/loop/loop.py",
         "        if not sequence.is_open:\n            self._collect_for_closed_sequences()\n"
         "            self._cache_client.look_up(sequence)\n\n    def _set",
         "\n    def _set"),
    ),
    _fault(
        "a forgotten session comes back with the end of its request",
        ("worker/loop/loop.py",
         "            self._detach_running(command, sessions)\n", "            pass\n"),
        undoes="A session that was closed or forgotten during an answer reappeared afterwards",
    ),
    _fault(
        "a twin whose session is forgotten waits for ever",
        ("worker/loop/loop.py",
         "if command.forget and (sequence.is_open or sequence.scheduled.is_paused):",
         "if command.forget:"),
        undoes="A request that waited for the prefill of another one never started if its session",
    ),
    # -- the prefix cache
    _fault(
        "tenants share their blocks",
        ("store/block.py", "+ model_and_form + tenant.encode())", "+ model_and_form)"),
    ),
    _fault(
        "a lost block is filled from another conversation",
        ("worker/prefix/index.py", "if is_whole and (node.key in", "if (node.key in"),
        undoes="a conversation that shared only its first tokens could store its own keys",
    ),
    _fault(
        "a lost native block is filled from quantized tokens",
        ("worker/prefix/cache.py",
         "            if live.root.form_at(start + tokens) != live.root.form:\n                continue ",
         "            if False:\n                continue "),
        undoes="docs: PrefixCache._fill_gaps",
    ),
    _fault(
        "the parked state that was used last is dropped first",
        ("worker/prefix/live_tier.py",
         "(not chain.is_stale, bool(chain.claims), chain.used)",
         "(not chain.is_stale, bool(chain.claims), -chain.used)"),
    ),
    _fault(
        "a moved state keeps the tokens after the common prefix",
        ("worker/kv/live.py", "                taken_leaf.rewind(state.tokens - tokens)\n    remaining_leaves",
         "                pass\n    remaining_leaves"),
    ),
    _fault(
        "a parked state is moved although others claim it",
        ("worker/prefix/live_tier.py", "if is_free and is_little and continues:", "if is_little and continues:"),
    ),
    _fault(
        "a block is truncated at the wrong end",
        ("worker/prefix/cache.py",
         "cut(block.end - begin, offset=begin - block.start)", "cut(block.end - begin, offset=0)"),
    ),
    _fault(
        "a state at the end of a match is not found",
        ("worker/prefix/tree.py", "            if cut <= used\n", "            if cut < used\n"),
    ),
    _fault(
        "a missing block is removed while room is made for what follows it",
        ("worker/prefix/index.py",
         "                self._evict(victim, keep=keep)\n", "                self._evict(victim)\n"),
        undoes="docs/lab-log.md: PrefixIndex._make_room",
    ),
    _fault(
        "held blocks are evicted",
        ("worker/prefix/tiers.py",
         "return key not in self._children and key not in self._holds",
         "return key not in self._children"),
    ),
    _fault(
        "a block that was saved stays held",
        ("worker/prefix/index.py",
         "                self._suspects.discard(key)\n"
         "                self.ram.release_keys((key,))\n                if key in self._holders",
         "                self._suspects.discard(key)\n                if key in self._holders"),
    ),
    _fault(
        "a key does not know the form of its block",
        ("store/block.py",
         'model_and_form = (fingerprint if form == "native" else f"{fingerprint}, KV {form}").encode()',
         "model_and_form = fingerprint.encode()"),
    ),
    _fault(
        "tokens from disk are counted twice as cached",
        ("worker/prefix/lookup.py",
         "ram_tokens=self.cached_tokens - disk_tokens", "ram_tokens=self.cached_tokens"),
    ),
    _fault(
        "a read error deletes a block and all after it",
        ("worker/prefix/cache.py",
         "            if isinstance(failure, BlockUnreadable):\n", "            if False:\n"),
        undoes="One read error on a file of the store … deleted that block and all blocks after it",
    ),
    _fault(
        "blocks beyond a lowered limit stay in RAM",
        ("worker/prefix/cache.py", "        self.live.drop_stale()\n        self.index.evict_excess()\n",
         "        self.live.drop_stale()\n"),
        undoes="Blocks in RAM that are in use when the pressure begins are freed",
    ),
    # -- the store
    _fault(
        "blocks of other weights are used",
        ("store/block.py", "def root_key(fingerprint: str,", "def root_key(_fingerprint: str,"),
        ("store/block.py", "    model_and_form = (fingerprint if", '    fingerprint = ""\n    model_and_form = (fingerprint if'),
        ("store/block.py", "blake2b(fingerprint.encode(), digest_size=8)", 'blake2b(b"", digest_size=8)'),
    ),
    _fault(
        "files of blocks are not synced",
        ("store/write_ahead.py",
         "        sync_by_name(path, flags=os.O_NOFOLLOW, sync=sync)\n", ""),
    ),
    _fault(
        "only the last file of a group is synced",
        ("store/write_ahead.py",
         "        sync_by_name(path, flags=os.O_NOFOLLOW, sync=sync)\n",
         "        if sync is sync_to_drive:\n"
         "            sync_by_name(path, flags=os.O_NOFOLLOW, sync=sync)\n"),
    ),
    _fault(
        "a block is called durable before it is",
        ("store/io_thread.py",
         "        try:\n            self._ahead.publish(group, between=self._write_arrived)\n",
         "        self._mailbox.finish([entry.block.key for entry in group], stored=True)\n"
         "        try:\n            self._ahead.publish(group, between=self._write_arrived)\n"),
    ),
    _fault(
        "folders above a new store are not synced",
        ("store/folder.py", "            _sync_ancestor(folder)\n", ""),
        undoes="After a power cut soon after the store was created, its folders could be gone",
    ),
    _fault(
        "the folder of a model's blocks is not synced",
        ("store/folder.py", "            sync_folder(folder.parent)\n", ""),
        undoes="After a power cut soon after the store was created, its folders could be gone",
    ),
    _fault(
        "a new store's own folders are not synced",
        ("store/folder.py", "        sync_folder(self.path)\n", ""),
        undoes="After a power cut soon after the store was created, its folders could be gone",
    ),
    _fault(
        "a failed deletion is not tried again",
        ("store/io_thread.py", "        self._to_remove = dict.fromkeys(undeleted_keys)\n",
         "        self._to_remove = {}\n"),
        undoes="a failed deletion was never retried, so a forgotten session could come back",
    ),
    _fault(
        "the folder of sessions is not synced",
        ("store/folder.py", "        self._store.make_durably(self._folder)\n",
         "        self._folder.mkdir(mode=0o700, exist_ok=True)\n"),
        undoes="with all blocks and session records that had been written to them",
    ),
    _fault(
        "a session's record is not synced",
        ("store/folder.py",
         "            sync_to_drive(file.fileno())\n        sync_folder(self._folder)\n",
         "            pass\n"),
    ),
    _fault(
        "the sum of a payload is not checked",
        ("store/block.py", "if _checksum(key, (payload,)) != _PREAMBLE", "if False and _checksum(key, (payload,)) != _PREAMBLE"),
    ),
    _fault(
        "a file that cannot be read goes to the quarantine",
        ("store/io_thread.py", "        if isinstance(failure, BlockUnreadable):\n            return\n", ""),
        ("store/maintenance.py",
         "        except BlockUnreadable:\n            return False\n"
         "        except BlockMissing:\n            pass\n        except BadBlock as bad:\n",
         "        except BlockMissing:\n            pass\n        except (BadBlock, BlockUnreadable) as bad:\n"),
        undoes="One read error on a file of the store (too many open files, an I/O error) deleted",
    ),
    _fault(
        "a clock that jumps ahead deletes sessions",
        ("machine/retention_clock.py", "if wall - expected > MOST_AHEAD_SECONDS:", "if False:"),
        undoes="a clock that jumped ahead deleted sessions, pins and stored responses",
    ),
    _fault(
        "pinned blocks are evicted",
        ("store/maintenance.py",
         "    kept.update(entry.block.key for entry in by_depth if entry.pinned)\n", ""),
    ),
    # -- images
    _fault(
        "the keys of an image do not depend on its content",
        ("wire/images.py", "shake_256(bytes.fromhex(layout.image))", 'shake_256(b"")'),
    ),
    _fault(
        "tenants share images",
        ("models/image_files.py", "[:_TENANT_DIGITS] if tenant else", "[:_TENANT_DIGITS] if not tenant else"),
    ),
    _fault(
        "images of the same size are taken for each other",
        ("front/images/sources.py",
         "return len(sent), hash(sent), xxhash.xxh3_128_intdigest(sent)", "return len(sent), 0, 0"),
    ),
    _fault(
        "a resumed answer loses its images",
        ("front/link/model_client.py",
         "want_prompt_logprobs=False\n        )\n    open_request",
         "want_prompt_logprobs=False, images=()\n        )\n    open_request"),
    ),
    _fault(
        "the features of other weights are used",
        ("worker/vision/feature_cache.py", "fingerprint[:_FINGERPRINT_DIGITS]", '""'),
    ),
)  # fmt: skip


def wrong_texts(root: Path = ROOT) -> list[str]:
    """The faults whose old texts do not occur exactly once in the sources."""
    found = []
    for fault in FAULTS:
        for edit in fault.edits:
            count = (root / "src/holdfast" / edit.file).read_text().count(edit.old)
            if count != 1:
                found.append(f"{fault.name}: {count} times in {edit.file}: {edit.old!r}")
    return found


# -- running them


@dataclass
class Outcome:
    """The result of a search. found_after: seconds; None: not found."""

    found_after: float | None = None
    invariant: str = ""
    worlds: int = 0
    actions: int = 0  # of the shrunk scenario


def run(fault: Fault, *, seconds: float, processes: int) -> Outcome:
    """Search for a fault in a copy of the sources."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src")
        for name in ("fakes", "simulation"):
            shutil.copytree(ROOT / "tests" / name, copy / "tests" / name)
        for edit in fault.edits:
            path = copy / "src/holdfast" / edit.file
            path.write_text(path.read_text().replace(edit.old, edit.new))
        return _search(copy, seconds=seconds, processes=processes)


def _search(copy: Path, *, seconds: float, processes: int) -> Outcome:
    environment = {**os.environ, "PYTHONPATH": f"{copy / 'src'}"}
    where = [
        sys.executable,
        "-c",
        "import holdfast, tests.simulation.worlds as _; print(holdfast.__file__)",
    ]
    imported = subprocess.check_output(where, cwd=copy, env=environment, text=True).strip()
    if not Path(imported).is_relative_to(copy):
        raise SystemExit(f"the copy is not imported, but {imported}")
    arguments = [f"--seconds={seconds}", f"--processes={processes}", "--first-violation",
                 f"--shrink={LONGEST_SHRINK_SECONDS}"]  # fmt: skip
    outcome = Outcome()
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=copy, env=environment, text=True, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if outcome.found_after is None and (violated := VIOLATION.match(line)):
                outcome.found_after = time.monotonic() - began
                outcome.invariant = violated.group(1)
            if shrunk := SHRUNK.search(line):
                outcome.actions = int(shrunk.group(2))
            if worlds := WORLDS.search(line):
                outcome.worlds = int(worlds.group(1))
        process.wait()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
    return outcome


def _row(fault: Fault, outcome: Outcome) -> str:
    if outcome.found_after is None:
        found = f"not found in {outcome.worlds} worlds"
    else:
        found = (
            f"{outcome.found_after:.0f} s, {outcome.worlds} worlds, {outcome.invariant}, "
            f"{outcome.actions} actions"
        )
    return f"| {fault.name} | {found} |"


def main() -> int:
    """Return the exit status: 1 if a fault was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.planted", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to search for each")
    parser.add_argument("--only", default="", metavar="NAME", help="those with this in their name")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    missed = 0
    for fault in FAULTS:
        if given.only in fault.name:
            outcome = run(fault, seconds=given.seconds, processes=given.processes)
            missed += outcome.found_after is None
            print(_row(fault, outcome), flush=True)  # noqa: T201
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
