"""The question `learn` of a sweep: how well a network learns with the staleness of one schedule, at one rate."""

from collections.abc import Mapping, Sequence
from typing import Any

from cdpsim.errors import RequestError, true_or_false, whole_number
from cdpsim.request import Request
from cdpsim.studies.sweep.questions import Question

from .command import LAG_OPTIONS
from .data import load_data
from .lags import learner_of
from .results import RateAnswer, answers_of
from .settings import SETTINGS_OF_NETWORK, USUAL_SETTINGS, course_of, settings_of
from .training import check_course, train_all

# Of one schedule there is no difference, and results do not depend on what is trained at once.
_SETTINGS = tuple(name for name in (*USUAL_SETTINGS, *SETTINGS_OF_NETWORK) if name not in ("margin", "max_memory"))
_FLAGS = ("like_paper", "batch_norm", "no_vmap")
_OF_SCHEDULES = ("schedule", "n", "rule", *LAG_OPTIONS)


def _learn(options: Mapping[str, Any]) -> Sequence[Any]:
    """Return what a network has learnt with a schedule: means over seeds, and half of their intervals of 95 %."""
    given = {name: _text(options[name]) for name in _SETTINGS if name in options}
    flags = {name: true_or_false(name, options[name]) for name in _FLAGS if name in options}
    settings = settings_of(given, like_paper=flags.get("like_paper", False))
    if "," in settings["lr"]:
        raise RequestError("lr", f"{settings['lr']} are several rates; give one, or make it an axis")
    data = load_data(settings["data"])
    if data.is_quadratic:
        raise RequestError("data", f"{data.name} has a loss, and no accuracy; take other data")
    batch_norm = flags.get("batch_norm", False) or flags.get("like_paper", False)
    n = whole_number("n", options["n"], at_least=1)
    course = course_of(settings, data, n, batch_norm=batch_norm, one_by_one=flags.get("no_vmap", False))
    best_of = whole_number("best-of", settings["best_of"], at_least=1)
    if best_of > course.epochs:
        raise RequestError("best-of", f"{best_of} epochs are more than a training has; give at most {course.epochs}")
    asked = {name: options[name] for name in _OF_SCHEDULES if name in options}
    warm_up = {"warm_up": options["schedule_warm_up"]} if "schedule_warm_up" in options else {}
    learner = learner_of(asked["schedule"], Request.from_builtins(asked | warm_up))
    curves = train_all([learner], course, data, check_course(course, [learner], data))
    return _cells_of(answers_of(curves, {learner.name: learner.mean}, 0.0, best_of)[0])


def _cells_of(answer: RateAnswer) -> Sequence[Any]:
    """Return the cells of an answer."""
    loss = answer.loss_at_a_tenth or (None, None)
    return [answer.schedule, answer.lag, *answer.accuracy, *loss, answer.diverged]


def _text(value: Any) -> str:
    """Return a setting as it is on a command line."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


_COLUMNS = ("schedule", "lag", "accuracy", "accuracy_half", "loss_at_a_tenth", "loss_at_a_tenth_half", "diverged")
LEARN = Question(("schedule", "n"), (*_OF_SCHEDULES, "schedule_warm_up", *_SETTINGS, *_FLAGS), _COLUMNS, _learn)
