"""The question `learn` of a sweep: how well a network learns with the staleness of one schedule, at one rate."""

from collections.abc import Mapping, Sequence
from typing import Any

from cdpsim.errors import RequestError, true_or_false, whole_number
from cdpsim.request import Request
from cdpsim.studies.sweep.questions import Question

from .command import LAG_OPTIONS
from .data import load_data
from .lags import learner_of
from .results import answers_of
from .settings import SETTINGS, course_of, read_best_of, settings_of
from .training import check_course, train_all

# One schedule has no difference, and results do not depend on the number of runs trained at once.
_SETTINGS = tuple(name for name in SETTINGS if name not in ("margin", "max_memory"))
_FLAGS = ("like_paper", "batch_norm", "no_vmap")
_OF_SCHEDULES = ("schedule", "n", "rule", *LAG_OPTIONS)


def _learn(options: Mapping[str, Any]) -> Sequence[Any]:
    """Train a network with a schedule's lags; return means over seeds, and half of their intervals of 95 %."""
    texts = {name: options[name] for name in _SETTINGS if name in options}
    given = {name: ",".join(map(str, own)) if isinstance(own, list) else str(own) for name, own in texts.items()}
    flags = {name: true_or_false(name, options[name]) for name in _FLAGS if name in options}
    settings = settings_of(given, like_paper=flags.get("like_paper", False))
    if "," in settings["lr"]:
        raise RequestError("lr", f"{settings['lr']} are several rates; give one, or make it an axis")
    data = load_data(settings["data"])
    batch_norm = flags.get("batch_norm", False) or flags.get("like_paper", False)
    n = whole_number("n", options["n"], at_least=1)
    course = course_of(settings, data, n, batch_norm=batch_norm, one_by_one=flags.get("no_vmap", False))
    best_of = read_best_of(settings, course)
    asked = {name: options[name] for name in _OF_SCHEDULES if name in options}
    warm_up = {"warm_up": options["schedule_warm_up"]} if "schedule_warm_up" in options else {}
    learner = learner_of(asked["schedule"], Request.from_builtins(asked | warm_up))
    curves = train_all([learner], course, data, check_course(course, [learner], data))
    answer = answers_of(curves, {learner.name: learner.mean}, 0.0, best_of)[0]
    loss = answer.loss_at_a_tenth or (None, None)
    return [answer.schedule, answer.lag, *answer.accuracy, *loss, answer.diverged]


_COLUMNS = ("schedule", "lag", "accuracy", "accuracy_half", "loss_at_a_tenth", "loss_at_a_tenth_half", "diverged")
LEARN = Question(("schedule", "n"), (*_OF_SCHEDULES, "schedule_warm_up", *_SETTINGS, *_FLAGS), _COLUMNS, _learn)
