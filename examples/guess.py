"""A verifiers environment of several turns: find a digit with as few guesses as possible.

vcpo train RECIPE.yaml 'task={name: verifiers, environment: examples/guess.py:Guess}'   (docs/verifiers.md)
"""

import re
from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Guess", "GuessEnv"]


class GuessData(vf.TaskData):
    secret: int


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(guesses(trace)[-1:] == [self.data.secret])

    @vf.reward(weight=0.2)
    async def quick(self, trace: vf.Trace) -> float:
        return await self.found(trace) / len(guesses(trace) or [0])

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(len(guesses(trace)))


class GuessConfig(vf.TasksetConfig):
    tasks: int = 1000
    largest: int = 9


class Guess(vf.Taskset[GuessTask, GuessConfig]):
    def load(self) -> Iterator[GuessTask]:
        for number in range(self.config.tasks):
            secret = number * 7919 % (self.config.largest + 1)
            yield GuessTask(
                GuessData(prompt=f"{number:04d}: 0-{self.config.largest}?", secret=secret), self.config.task
            )


class GuessEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessEnvConfig]):
    async def run(self, task: GuessTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as conversation:
            said = await conversation.turn()
            while not said.terminated:
                guess = number_in(said.last_reply)
                if guess == task.data.secret:
                    break
                said = await conversation.turn(hint(guess, task.data.secret))


def number_in(text: str) -> int | None:
    """The last digit of a turn."""
    found = re.findall(r"[0-9]", text)
    return int(found[-1]) if found else None


def hint(guess: int | None, secret: int) -> str:
    """What is said about a wrong guess."""
    if guess is None:
        return "?"
    return "<" if secret < guess else ">"


def guesses(trace: vf.Trace) -> list[int | None]:
    """What was guessed, turn by turn."""
    return [number_in(message.content or "") for message in trace.assistant_messages]
