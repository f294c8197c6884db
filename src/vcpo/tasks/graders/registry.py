"""Finding a grader by name. Built-in ones have one line here; a user's own is ``module:Name`` or ``file.py:Name``."""

from __future__ import annotations

from typing import Any

from vcpo.errors import UserError, suggest
from vcpo.plugins import load_object, split_spec
from vcpo.tasks.graders.protocol import AnswerGrader
from vcpo.tasks.options import check_options

BUILT_IN: dict[str, str] = {
    "exact": "vcpo.tasks.graders.exact:ExactGrader",
    "number": "vcpo.tasks.graders.number:NumberGrader",
    "math": "vcpo.tasks.graders.mathematics:MathGrader",
    "choice": "vcpo.tasks.graders.choice:ChoiceGrader",
    "regex": "vcpo.tasks.graders.regex:RegexGrader",
    "countdown": "vcpo.tasks.graders.countdown:CountdownGrader",
}

# what verl's reward functions do for the sources of its rows, as far as these graders do the same
OF_DATA_SOURCE: dict[str, str] = {
    "openai/gsm8k": "number",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math_dapo": "math",
    "math": "math",
    "countdown": "countdown",
}


def split_grader(grader: str | dict[str, Any], where: str = "task.grader") -> tuple[str, dict[str, Any]]:
    """Name and options. Raises ValueError with one sentence when the name or a built-in grader's options are wrong.

    where: what the keys are options of, as written in a configuration.
    """
    options = {"name": grader} if isinstance(grader, str) else dict(grader)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ValueError("task.grader needs a name, such as exact or {name: regex, pattern: ...}")
    if name in BUILT_IN:
        check_options(load_object(BUILT_IN[name]).Options, options, where)
    elif ":" in name:
        split_spec(name)
    else:
        raise ValueError(f"unknown grader task.grader={name!r}{suggest(name, BUILT_IN)}")
    return name, options


def make_grader(grader: str | dict[str, Any]) -> AnswerGrader:
    """The grader. Raises UserError for a wrong name or option, and for a missing package."""
    try:
        name, options = split_grader(grader)
    except ValueError as error:
        raise UserError(str(error)) from None
    factory = load_object(BUILT_IN.get(name, name))
    try:
        made = factory(**options)
    except TypeError as error:
        raise UserError(f"grader {name!r} cannot be made with the options {options}: {error}") from None
    if not isinstance(made, AnswerGrader):
        missing = [method for method in ("gold", "answer", "grade") if not hasattr(made, method)]
        raise UserError(f"grader {name!r} made an object of type {type(made).__name__} without {', '.join(missing)}")
    return made


def source_grader(source: Any) -> str | None:
    """The name of the grader for rows of a data source (verl's column ``data_source``), if there is one."""
    if not isinstance(source, str):
        return None
    return OF_DATA_SOURCE.get(source, "math" if source.lower().startswith("aime") else None)
