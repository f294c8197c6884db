"""Code run by a server that speaks the protocol of SandboxFusion: ``POST /run_code``.

The request names the language, the code, stdin, a time-out and a memory limit; the answer has a ``status``,
``Success``, ``Failed`` or ``SandboxError``, and a ``run_result`` with its own status, the exit code, stdout and stderr.
What the server cannot say for certain is a failure of the sandbox, never a result.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from vcpo.sandbox.pool import Throttle
from vcpo.sandbox.protocol import MEBIBYTE, Limits, Result, Status

_GRACE = 10.0  # seconds that the server may need beyond the run itself
_LONGEST = 16 * MEBIBYTE  # bytes of an answer


class HttpExecutor:
    """An ``Executor``. What keeps the code apart from the world is the server's business."""

    def __init__(self, url: str, limits: Limits, throttle: Throttle) -> None:
        """url: of the server, without ``/run_code``."""
        self._url = url.rstrip("/") + "/run_code"
        self._limits = limits
        self._throttle = throttle

    def run(self, code: str, stdin: str = "") -> Result:
        """See ``Executor``."""
        with self._throttle.place():
            begin = time.monotonic()
            try:
                answer = self._ask(code, stdin)
            except urllib.error.HTTPError as error:
                error.close()
                return _failure(f"the server answered with status {error.code}", begin)
            except (OSError, http.client.HTTPException):  # TimeoutError and URLError are OSErrors
                return _failure("the server did not answer", begin)
            except ValueError:
                return _failure("the server's answer is not the protocol's", begin)
            return self._result(answer, begin)

    def close(self) -> None:
        """See ``Executor``. Runs end at the server's time-out."""

    def _ask(self, code: str, stdin: str) -> Any:
        limits = self._limits
        question = {
            "code": code,
            "stdin": stdin,
            "language": "python",
            "run_timeout": limits.wall_seconds,
            "memory_limit_MB": max(1, limits.memory // MEBIBYTE),
        }
        body = json.dumps(question).encode()
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(request, timeout=limits.wall_seconds + _GRACE) as response:
            return json.loads(response.read(_LONGEST))

    def _result(self, answer: Any, begin: float) -> Result:
        run = answer.get("run_result") if isinstance(answer, dict) else None
        if isinstance(answer, dict) and answer.get("status") == "SandboxError":
            return _failure("the server reports an error of its own", begin)
        if not isinstance(run, dict) or answer.get("status") not in ("Success", "Failed"):
            return _failure("the server's answer is not the protocol's", begin)
        outputs = [run.get("stdout") or "", run.get("stderr") or ""]
        code, seconds = run.get("return_code"), time.monotonic() - begin
        if not all(isinstance(output, str) for output in outputs):
            return _failure("the server's answer is not the protocol's", begin)
        limit = self._limits.output
        cut = [output.encode(errors="replace")[:limit].decode(errors="replace") for output in outputs]
        stdout, stderr = cut
        if run.get("status") == "TimeLimitExceeded":
            return Result(Status.TIMEOUT, None, stdout, stderr, seconds, "over the limit of wall-clock seconds")
        if run.get("status") != "Finished" or type(code) is not int:
            return _failure("the server's answer is not the protocol's", begin)
        if any(len(output.encode(errors="replace")) > limit for output in outputs):
            return Result(Status.OUTPUT_LIMIT, None, stdout, stderr, seconds, "over the output limit")
        if code < 0:
            return Result(Status.KILLED, None, stdout, stderr, seconds, "ended by a signal")
        if code and stderr.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            return Result(Status.MEMORY, code, stdout, stderr, seconds, "over the memory limit")
        return Result(Status.ERROR if code else Status.OK, code, stdout, stderr, seconds)


def _failure(detail: str, begin: float) -> Result:
    return Result(Status.SANDBOX_FAILURE, None, "", "", time.monotonic() - begin, detail)
