"""A search's storage: Optuna's database, which several processes and machines may share."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.errors import ConfigError, RidgelineError

if TYPE_CHECKING:
    import optuna

NAME = "search"
ATTEMPTS, PAUSE_SECONDS = 5, 0.5
MADE_TWICE = re.compile("unique|exists|duplicate", re.IGNORECASE)


def opened(storage: str, plan: dict[str, Any]) -> optuna.Study:
    """The study in a storage, made where there is none.

    Args:
        storage: an SQLAlchemy URL.
        plan: what must be alike for all that search together.

    Raises:
        ConfigError: there is another search, or a study of something else.
    """
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    for attempt in range(ATTEMPTS):
        try:
            study = optuna.create_study(study_name=NAME, storage=storage, load_if_exists=True)
            break
        except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
            # two processes that make the tables of a new storage at the same time: the slower one fails
            if attempt + 1 == ATTEMPTS or not MADE_TWICE.search(str(error.__cause__ or error)):
                raise
            time.sleep(PAUSE_SECONDS)
    _check_plan(study, plan)
    return study


def where(folder: Path) -> str:
    """The machine and folder that a trial is trained in."""
    return f"{socket.gethostname()}:{folder.resolve()}"


def requeue(study: optuna.Study, folder: Path) -> None:
    """Trials that a process of this folder left under way were cut off with it: they are tried again first."""
    import optuna

    for frozen in study.get_trials(deepcopy=False):
        if frozen.state == optuna.trial.TrialState.RUNNING and frozen.user_attrs.get("where") == where(folder):
            study.enqueue_trial(dict(frozen.params))
            study.tell(frozen.number, state=optuna.trial.TrialState.FAIL)


def _check_plan(study: optuna.Study, plan: dict[str, Any]) -> None:
    trials = study.get_trials(deepcopy=False)  # asked for before the plan: whoever shares the search sets that first
    kept = study.user_attrs.get("plan")
    if kept is None:
        if trials or study.direction.name != "MINIMIZE":
            raise ConfigError(
                f"the storage holds a study called {NAME!r} of something else; give a new --out or --storage"
            )
        study.set_user_attr("plan", plan)
        return
    odd = sorted(key for key, value in plan.items() if kept.get(key) != value)
    if odd:
        raise ConfigError(f"the storage holds another search ({', '.join(odd)} differ); give a new --out or --storage")


@contextmanager
def storage_errors(place: object) -> Iterator[None]:
    """Turns what the database says into one sentence."""
    import optuna
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError, ValueError, ImportError) as error:
        if isinstance(error, RidgelineError):
            raise
        cause = error.__cause__ or error
        cure = "install the database's driver" if isinstance(cause, ImportError) else "free it"
        reason = str(cause).splitlines()[0]
        raise RidgelineError(f"the storage {place} cannot be used ({reason}); {cure}, or give another") from error
