"""The state of the installation in one sentence, in the reader's language."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from django.utils.translation import gettext, ngettext

from harness_web.console.reports import View


@dataclass(frozen=True)
class Sentence:
    """`level` is ok, warning, error or unknown; it chooses icon and colour, the text stands for itself."""

    level: str
    text: str
    hint: str = ""


def sentence(view: View) -> Sentence:
    """The worst true thing first."""
    return next(found for rule in RULES for found in rule(view))


def _no_scheduler(view: View) -> Iterator[Sentence]:
    if view.connected:
        return
    if view.age is None:
        yield Sentence(
            "error", gettext("No scheduler is connected."), gettext("Requests are refused until one is running.")
        )
    else:
        text = gettext("The scheduler is not connected. Last numbers are %(age)s s old.") % {"age": round(view.age)}
        yield Sentence("error", text, gettext("What is shown below is the past. Requests are refused meanwhile."))


def _failed_engines(view: View) -> Iterator[Sentence]:
    failed = [engine for engine in view.engines if engine.state == "failed"]
    if failed:
        text = ngettext(
            "%(count)s of %(all)s engine failed: %(names)s.",
            "%(count)s of %(all)s engines failed: %(names)s.",
            len(failed),
        )
        names = ", ".join(engine.model for engine in failed)
        values = {"count": len(failed), "all": len(view.engines), "names": names}
        yield Sentence("error", text % values, failed[0].hint or failed[0].message)


def _missed_targets(view: View) -> Iterator[Sentence]:
    missing = [tier.name for tier in view.tiers if tier.missing_target]
    if missing:
        text = ngettext(
            "%(count)s of %(all)s tiers is missing its target: %(names)s.",
            "%(count)s of %(all)s tiers are missing their target: %(names)s.",
            len(missing),
        )
        yield Sentence("error", text % {"count": len(missing), "all": len(view.tiers), "names": ", ".join(missing)})


def _silent_schedulers(view: View) -> Iterator[Sentence]:
    if view.silent:
        text = gettext("%(reporting)s of %(all)s schedulers report; silent: %(names)s.")
        values = {"reporting": view.reporting, "all": view.schedulers, "names": ", ".join(view.silent)}
        yield Sentence("warning", text % values, gettext("Sums below leave the silent ones out."))


def _no_engine(view: View) -> Iterator[Sentence]:
    if not view.engines:
        yield Sentence(
            "warning",
            gettext("No model is deployed."),
            gettext("Add a deployment with “harness apply” or in the admin."),
        )


def _starting_engines(view: View) -> Iterator[Sentence]:
    if view.totals.engines_ready == 0:
        names = ", ".join(f"{engine.model} ({engine.state})" for engine in view.engines)
        yield Sentence("warning", gettext("No engine is ready yet: %(names)s.") % {"names": names})


def _degraded(view: View) -> Iterator[Sentence]:
    if view.degradation_level > 0:
        yield Sentence("warning", gettext("Degradation level %(level)s is active.") % {"level": view.degradation_level})


def _fine(view: View) -> Iterator[Sentence]:
    judged = [tier for tier in view.tiers if tier.judged]
    if judged:
        text = ngettext(
            "%(count)s tier had requests in the last minute and meets its target.",
            "%(count)s tiers had requests in the last minute and all meet their targets.",
            len(judged),
        )
        yield Sentence("ok", text % {"count": len(judged)})
    elif view.totals.running or view.totals.waiting:
        yield Sentence("ok", gettext("Requests are running; none has been judged against its target yet."))
    else:
        yield Sentence("ok", gettext("Ready, and no requests in the last minute."))


RULES: tuple[Callable[[View], Iterator[Sentence]], ...] = (
    _no_scheduler,
    _failed_engines,
    _missed_targets,
    _silent_schedulers,
    _no_engine,
    _starting_engines,
    _degraded,
    _fine,
)
