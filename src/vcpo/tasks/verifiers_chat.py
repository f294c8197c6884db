"""The program that plays the policy's seat of a verifiers environment: it asks the model once and is done.

verifiers calls such a program a harness. Its own ones start a process for every answer; this one is a function call.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

HARNESS_ID = "vcpo-chat"


def register_harness(vf: Any) -> None:
    """Make the harness known to verifiers, which finds harnesses as modules."""
    name = HARNESS_ID.replace("-", "_")
    if name in sys.modules:
        return

    class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
        """One request to the model with the conversation so far."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
            tool_interception_url: str | None = None,
        ) -> Any:
            """See ``verifiers.v1.Harness``."""
            import aiohttp

            system, prompt = self.resolve_prompt(data)
            messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
            if system is not None:
                messages.insert(0, vf.SystemMessage(content=system))
            request = {
                "model": ctx.model,
                "messages": [message.model_dump(mode="json", exclude_none=True) for message in messages],
            }
            headers = {"Authorization": f"Bearer {secret}"}
            # how long a turn takes is the sampler's business
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(f"{endpoint}/chat/completions", json=request, headers=headers) as reply,
            ):
                failed = reply.status != 200
                return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=await reply.text() if failed else "")

    module = ModuleType(name)
    vars(module).update({"ChatHarness": ChatHarness, "__all__": ["ChatHarness"]})
    sys.modules[name] = module
