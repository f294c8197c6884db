"""A verifiers environment in which every task does something else. Tests name it as a file."""

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Cases", "CasesEnv", "EndlessCases"]


class CaseData(vf.TaskData):
    kind: str = "single"
    answer: str = ""


class CaseTask(vf.Task[CaseData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        await asyncio.sleep(0)
        if self.data.kind == "raise":
            raise ValueError("this cannot be judged")
        return float(said(trace)[-1:] == [self.data.answer])

    @vf.reward(weight=-0.5)
    async def long(self, trace: vf.Trace) -> float:
        if self.data.kind == "infinite":
            return float("nan")
        return float(sum(map(len, said(trace))))

    @vf.reward(weight=0.0)
    async def keyed(self, trace: vf.Trace) -> dict[str, float]:
        return {"calm": float("!" not in "".join(said(trace))), "cut_off": float(trace.is_truncated)}

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.intercept
    async def rewritten(self, response: vf.Response) -> vf.Response | None:
        if self.data.kind != "rewrite":
            return None
        message = response.message.model_copy(update={"content": "something else"})
        return response.model_copy(update={"message": message})

    @vf.stop
    async def enough(self, trace: vf.Trace) -> bool:
        return self.data.kind == "stop" and trace.num_turns == 2


class CaseConfig(vf.TasksetConfig):
    kinds: tuple[str, ...] = ("single",)
    tasks: int = 100
    prompt: str | None = "{i}?"
    system: str | None = None


class Cases(vf.Taskset[CaseTask, CaseConfig]):
    def load(self) -> Iterator[CaseTask]:
        for i in range(self.config.tasks):
            kind = self.config.kinds[i % len(self.config.kinds)]
            prompt = None if self.config.prompt is None else self.config.prompt.replace("{i}", str(i))
            data = CaseData(prompt=prompt, system_prompt=self.config.system, kind=kind, answer=str(i % 10))
            yield CaseTask(data, self.config.task)


class EndlessCases(Cases):
    INFINITE = True

    def load(self) -> Iterator[CaseTask]:
        while True:
            yield from super().load()


class CasesEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig(model="somebody-else")


class CasesEnv(vf.Env[CasesEnvConfig]):
    async def run(self, task: CaseTask, agents: vf.Agents) -> None:
        kind = task.data.kind
        if kind == "exit":
            raise SystemExit("not logged in")
        if kind == "hang":
            await asyncio.Event().wait()
        if kind == "other opening":
            task = task.with_data(prompt="something else")
        if kind in ("single", "raise", "infinite", "other opening"):
            await agents.player.run(task)
            return
        if kind == "twice":
            await agents.player.run(task)
            await agents.player.run(task)
            return
        async with agents.player.interaction(task) as conversation:
            said = await conversation.turn()
            while not said.terminated:
                if said.last_reply == task.data.answer:
                    break
                if kind == "break":
                    raise RuntimeError("the board is upset")
                said = await conversation.turn(
                    [vf.UserMessage(content=f"not {said.last_reply}"), vf.UserMessage(content="!")]
                )


def said(trace: vf.Trace) -> list[str]:
    return [message.content or "" for message in trace.assistant_messages]
