"""Finding a `verifiers` environment by name, and what of it this project can play.

The API is ``verifiers.v1`` of release 0.4: a ``Taskset`` gives tasks, a ``Task`` has rewards and metrics, an ``Env``
runs the agents of an episode, its *seats*, one of which is the policy. Imports the package only when it is called.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import sys
from types import ModuleType
from typing import Any

from vcpo.errors import UserError
from vcpo.plugins import load_object
from vcpo.records import Message
from vcpo.tasks.verifiers_chat import HARNESS_ID, register_harness


def verifiers_api() -> Any:
    """The module ``verifiers.v1``. Raises UserError when it is not installed or another release is."""
    try:
        import verifiers
    except ModuleNotFoundError as error:
        if error.name != "verifiers":
            raise
        raise UserError("task 'verifiers' needs the package verifiers: pip install 'vcpo[verifiers]'") from None
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if error.name != "verifiers.v1":
            raise
        release = getattr(verifiers, "__version__", "unknown")
        raise UserError(
            f"task 'verifiers' needs release 0.4 of the package, with verifiers.v1, but {release} is installed:"
            " pip install 'vcpo[verifiers]'"
        ) from None


class Loaded:
    """A verifiers environment, configured.

    environment: id of an installed package, as verifiers takes it, or ``module:Taskset`` or ``file.py:Taskset``.
    args: fields of the taskset's config. config: fields of the env's config.
    agent: the policy's seat; found by itself where only one has no model of its own.
    Raises UserError for whatever cannot be loaded, and for environments that cannot be played here.
    """

    def __init__(self, environment: str, args: dict[str, Any], config: dict[str, Any], agent: str | None) -> None:
        self._vf = verifiers_api()
        self._name = environment
        ident = _taskset_id(environment)
        self._config = self._tried(
            "configuring it", lambda: self._vf.resolve_env_config({**config, "taskset": {**args, "id": ident}})
        )
        self.taskset = self._tried("making its taskset", lambda: self._vf.load_taskset(self._config.taskset))
        register_harness(self._vf)
        self._seats = {
            name: self._settled(spec) for name, spec in self._config if isinstance(spec, self._vf.AgentConfig)
        }
        self.seat = self._policy_seat(agent)
        self._spec = self._seats[self.seat]
        self._check()

    def tasks(self, limit: int) -> list[Any]:
        """The first ``limit`` tasks. Raises UserError when there are none, or for one that cannot be played here."""
        found: list[Any] = self._tried("loading its tasks", lambda: list(itertools.islice(self.taskset, limit)))
        if not found:
            raise self._error("has no tasks")
        for task in found:
            if task.data.prompt is None:
                raise self._error(
                    f"task {task.data.idx} has no prompt: an environment whose user opens the conversation cannot be"
                    " played here; give its tasks a prompt"
                )
            if isinstance(self._spec.runtime, self._vf.SubprocessConfig) and (task.data.image or task.NEEDS_CONTAINER):
                raise self._error(
                    f"task {task.data.idx} needs a container: set task.config.{self.seat}.runtime.type, to docker for"
                    " example"
                )
            opening_messages(task.data, self._error)
        return found

    def env(self, base_url: str, max_turns: int) -> Any:
        """The env, its policy's seat connected to a model that is served at ``base_url``."""
        limits = [limit for limit in (self._spec.max_turns, max_turns) if limit is not None]
        policy = {
            "model": "policy",
            "client": self._vf.EvalClientConfig(base_url=base_url, api_key_var="VCPO_VERIFIERS_NO_KEY"),
            "max_turns": min(limits),
        }
        seats = {**self._seats, self.seat: self._spec.model_copy(update=policy)}
        return self._vf.load_environment(self._config.model_copy(update=seats))

    def _settled(self, spec: Any) -> Any:
        """An agent that only talks does so in this process; what is not said to run elsewhere runs on this machine."""
        update: dict[str, Any] = {}
        if spec.harness is None or spec.harness.id == "null":
            update["harness"] = self._vf.harness_config_type(HARNESS_ID)(id=HARNESS_ID)
        if "runtime" not in spec.model_fields_set:
            update["runtime"] = self._vf.SubprocessConfig()
        return spec.model_copy(update=update)

    def _policy_seat(self, agent: str | None) -> str:
        free = [name for name, spec in self._seats.items() if spec.model is None]
        if agent is None and len(free) != 1:
            raise self._error(
                f"has the agents {', '.join(self._seats)}, of which {', '.join(free) or 'none'} have no model of their"
                " own: say in task.agent which of them is trained, and give the others a model and a client in"
                " task.config"
            )
        if agent is not None and agent not in self._seats:
            raise self._error(f"has no agent {agent!r}; set task.agent to one of {', '.join(self._seats)}")
        seat = free[0] if agent is None else agent
        alone = next((name for name in free if name != seat), None)
        if alone is not None:
            raise self._error(f"agent {alone!r} has no model: give it one, and a client, in task.config.{alone}")
        return seat

    def _check(self) -> None:
        harness = self._spec.harness.id
        bundled = self._vf.default_harness_id(self._config.taskset.id)
        if harness != HARNESS_ID or bundled != "bash":
            program = harness if harness != HARNESS_ID else bundled
            raise self._error(
                f"plays agent {self.seat!r} by a program of its own (harness {program!r}); only conversations can be"
                " trained on here"
            )
        task_type = type(self.taskset).task_type()
        if task_type.toolsets(self._config.taskset.task) or self.taskset.toolsets(self._config.taskset):
            raise self._error("has toolsets, which are not supported; let its user's side make the calls")

    def _tried(self, what: str, work: Any) -> Any:
        try:
            return work()
        except UserError:
            raise
        except Exception as error:
            detail = " ".join(str(error).split())[:500]
            raise self._error(f"{what} failed: {type(error).__name__}: {detail}") from error

    def _error(self, what: str) -> UserError:
        return UserError(f"verifiers environment {self._name!r}: {what}")


def opening_messages(data: Any, error: Any = UserError) -> list[Message]:
    """The messages with which the conversation about a task begins. ``error`` makes what is raised for images."""
    prompt = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    messages = system + [m if isinstance(m, dict) else m.model_dump() for m in prompt]
    for message in messages:
        if not isinstance(message["content"], str):
            raise error(f"task {data.idx} has a message that is more than text")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _taskset_id(environment: str) -> str:
    """The id under which verifiers finds the environment's module; one is made where a class is named."""
    if ":" not in environment:
        return environment
    taskset = load_object(environment)
    if not isinstance(taskset, type):
        raise UserError(
            f"verifiers environment {environment!r} is of type {type(taskset).__name__}, not a Taskset class"
        )
    source = sys.modules[taskset.__module__]
    # verifiers takes one Taskset of a module, and its Env and Harness, from the names in __all__
    others = [name for name in getattr(source, "__all__", ()) if not _is_taskset(getattr(source, name, None))]
    name = f"vcpo_verifiers_{hashlib.sha256(f'{source.__name__}:{taskset.__qualname__}'.encode()).hexdigest()[:12]}"
    module = ModuleType(name)
    vars(module).update({other: getattr(source, other) for other in others if hasattr(source, other)})
    vars(module).update({taskset.__name__: taskset, "__all__": [taskset.__name__, *others]})
    sys.modules[name] = module
    return name


def _is_taskset(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, verifiers_api().Taskset)
