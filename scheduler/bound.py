"""What no scheduler could exceed: the demand-bound linear programme, and a clairvoyant greedy that comes near it.

Request j has weight w_j and two pieces of work: its prefill, due at its TTFT deadline, and its decoding, due
(n - 1) tpot later, since the contract is a mean pace. Work that arrives and is due inside an interval must fit it:

    maximise  sum w_j x_j,  0 <= x_j <= 1
    for all (arrival a, due d):  sum x_j (work of j that lies wholly inside [a, d])  <=  d - a

Work is counted at its marginal cost plus the least possible part of a step's base cost (that of a full batch), and a
request that misses its contract even alone has x_j = 0. Slots, memory and floors are ignored and x_j may be a
fraction: an upper bound. (Demand bound: Baruah, Rosier, Howell 1990.) Most intervals never bind; those that are
violated are added round by round, and dropped again if they turn out not to bind; every round's optimum is itself a
valid bound and the last one is the least.

Needs scipy (`pip install 'llm-harness[replay]'`), whose HiGHS solves the programmes.

The greedy knows every length, schedules by earliest due date and, when what is there can no longer all be in time,
drops what is worth least per second. What it keeps does fit: the truth of the programme lies between the two.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scheduler.core.types import Contract, Request, TierSpec
from scheduler.simulator.profiles import Profile
from scheduler.simulator.workload import Workload

MAX_ROUNDS = 60
CUTS_PER_ROUND = 300
GRID = 500  # of the violated intervals that begin and end in the same 1/500 of the span, a round adds the worst
GRID_SHRINKS = 1.3  # per round
TOLERANCE = 1e-3  # seconds by which an interval may be overfull
GAIN = 1e-5  # relative; a round that lowers the bound by less is the last
SLACK = 0.5  # seconds; an interval with more room at the optimum does not shape it and is dropped
ROUNDING = 1e-9  # seconds: sums of step times are not exact

OnProgress = Callable[[int, int], None]  # rounds so far, of at most how many


class BoundUnavailable(Exception):
    """The solver is not installed."""


@dataclass(frozen=True, slots=True)
class Bound:
    """`value`: at most this share of the weighted requests can be attained. `greedy_value`: at least this much fits.

    `horizon`: the longest time in seconds from an arrival to its last due date; `horizons`: how many of them the
    trace spans. Under ten, the trace's ends matter. `converged` False: valid, but not the least.
    """

    value: float
    greedy_value: float
    horizon: float
    horizons: float
    converged: bool


@dataclass(frozen=True, slots=True)
class Job:
    """A request as the bound sees it. `prefill` and `decode` in engine-seconds."""

    weight: float
    arrival: float
    prefill: float
    prefill_due: float
    decode: float
    decode_due: float


def jobs_of(workload: Workload, profile: Profile) -> list[Job]:
    """The requests that could be attained at all, in order of arrival."""
    candidates = [(request, workload.tiers[request.tier]) for request in workload.requests]
    return [_job(request, tier, profile) for request, tier in candidates if attainable(request, tier, profile)]


def attainable(request: Request, tier: TierSpec, profile: Profile) -> bool:
    """Would the request keep its contract on an engine of its own?"""
    cost, chunks = profile.cost, _chunks(request, profile)
    first = chunks * cost.base + request.prompt_tokens * cost.prefill_token
    decoded = request.max_tokens - 1
    rest = decoded * (cost.base + cost.decode_seq + (request.prompt_tokens + request.max_tokens / 2) * cost.kv_token)
    if _streamed_contract(request, tier):
        return request.arrival + first <= request.deadline + ROUNDING and rest <= decoded * tier.tpot + ROUNDING
    return request.arrival + first + rest <= request.deadline + ROUNDING


def _job(request: Request, tier: TierSpec, profile: Profile) -> Job:
    cost = profile.cost
    base = cost.base / profile.capacity.max_seqs
    decoded = request.max_tokens - 1
    streamed = _streamed_contract(request, tier)
    return Job(
        weight=tier.weight,
        arrival=request.arrival,
        prefill=request.prompt_tokens * cost.prefill_token + _chunks(request, profile) * base,
        prefill_due=request.deadline,
        decode=decoded * (cost.decode_seq + (request.prompt_tokens + request.max_tokens / 2) * cost.kv_token + base),
        decode_due=request.deadline + (decoded * tier.tpot if streamed else 0.0),
    )


def _streamed_contract(request: Request, tier: TierSpec) -> bool:
    return request.stream and tier.contract is Contract.TTFT_TPOT


def _chunks(request: Request, profile: Profile) -> int:
    """Steps that its prefill takes at least."""
    return math.ceil(request.prompt_tokens / profile.capacity.step_tokens)


# --- the programme ------------------------------------------------------------------------------------------------


def compute_bound(workload: Workload, profile: Profile, on_progress: OnProgress = lambda done, total: None) -> Bound:
    """Both sides of the truth. Raises BoundUnavailable without scipy."""
    jobs = jobs_of(workload, profile)
    everything = sum(workload.tiers[request.tier].weight for request in workload.requests) or 1.0
    value, converged = optimum(jobs, on_progress)
    on_progress(MAX_ROUNDS, MAX_ROUNDS)
    horizon = max(
        (_last_due(request, workload.tiers[request.tier]) - request.arrival for request in workload.requests),
        default=0.0,
    )
    return Bound(
        value=value / everything,
        greedy_value=sum(job.weight for job in greedy(jobs)) / everything,
        horizon=horizon,
        horizons=workload.span / horizon if horizon else math.inf,
        converged=converged,
    )


def optimum(jobs: Sequence[Job], on_progress: OnProgress = lambda done, total: None) -> tuple[float, bool]:
    """The programme's greatest weight for jobs in order of arrival, and whether every interval is met.

    Raises BoundUnavailable without scipy.
    """
    return _Programme(jobs).solve(on_progress)


def _last_due(request: Request, tier: TierSpec) -> float:
    paced = (request.max_tokens - 1) * tier.tpot if _streamed_contract(request, tier) else 0.0
    return request.deadline + paced


class _Programme:
    """The linear programme and the intervals it has so far. Arrays are indexed by job, or by due date."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        try:
            import numpy
            from scipy import sparse
            from scipy.optimize import linprog
        except ImportError as error:
            raise BoundUnavailable("The bound needs scipy: pip install 'llm-harness[replay]'.") from error
        self._np, self._sparse, self._linprog = numpy, sparse, linprog
        self._span = jobs[-1].arrival - jobs[0].arrival if jobs else 0.0
        self._weight = numpy.array([job.weight for job in jobs])
        self._arrival = numpy.array([job.arrival for job in jobs])
        self._work = numpy.array([(job.prefill, job.decode) for job in jobs]).reshape(-1, 2)
        self._due = numpy.array([(job.prefill_due, job.decode_due) for job in jobs]).reshape(-1, 2)
        self._dues = numpy.unique(self._due)
        self._due_index = numpy.searchsorted(self._dues, self._due)
        self._rows: dict[tuple[int, int], tuple[Any, Any, float]] = {}  # (job, due) -> columns, work, length

    def solve(self, on_progress: OnProgress) -> tuple[float, bool]:
        """(optimal weight, whether more intervals would lower it by nothing that counts)."""
        chosen = self._np.ones(len(self._weight))
        value = float(self._weight.sum())
        for done in range(MAX_ROUNDS):
            if not self._add_violated(chosen, max(self._span / GRID / GRID_SHRINKS**done, TOLERANCE)):
                return value, True
            on_progress(done, MAX_ROUNDS)
            chosen = self._optimum()
            before, value = value, float(self._weight @ chosen)
            if before - value < GAIN * before and done:
                return value, True
        return value, False

    def _optimum(self) -> Any:
        """Each job's x under the intervals so far, of which those that have much room are dropped."""
        columns, work, lengths = zip(*self._rows.values(), strict=True)
        ends = self._np.cumsum([0, *(len(each) for each in columns)])
        matrix = self._sparse.csr_matrix(
            (self._np.concatenate(work), self._np.concatenate(columns), ends), shape=(len(columns), len(self._weight))
        )
        solution = self._linprog(
            -self._weight, A_ub=matrix, b_ub=self._np.array(lengths), bounds=(0, 1), method="highs"
        )
        assert solution.success, solution.message  # x = 0 is always a solution
        for interval, room in zip(list(self._rows), solution.slack, strict=True):
            if room > SLACK:
                del self._rows[interval]
        return self._np.clip(solution.x, 0.0, 1.0)

    def _add_violated(self, chosen: Any, grid: float) -> int:
        """Add the worst of the overfull intervals, at most one per cell of the grid; how many there were."""
        due, excess = self._fullest(chosen)
        cells: set[tuple[int, int]] = set()
        added = 0
        for job in self._np.argsort(-excess):
            if excess[job] <= TOLERANCE or added == CUTS_PER_ROUND:
                break
            cell = (int(self._arrival[job] / grid), int(self._dues[due[job]] / grid))
            if cell not in cells:
                cells.add(cell)
                added += self._add(int(job), int(due[job]))
        return added

    def _fullest(self, chosen: Any) -> tuple[Any, Any]:
        """For every arrival: the due date with which its interval is fullest, and by how many seconds overfull.

        From the last arrival to the first, `load[d]` holds the work that has come so far and is due by d, less d.
        """
        count = len(chosen)
        load = -self._dues
        due, excess = self._np.empty(count, dtype=int), self._np.empty(count)
        work = self._work * chosen[:, None]
        first = self._np.searchsorted(self._dues, self._arrival)
        for job in range(count - 1, -1, -1):
            load[self._due_index[job, 0] :] += work[job, 0]
            load[self._due_index[job, 1] :] += work[job, 1]
            fullest = first[job] + int(load[first[job] :].argmax())
            due[job], excess[job] = fullest, load[fullest] + self._arrival[job]
        return due, excess

    def _add(self, job: int, due: int) -> bool:
        """Add the interval from the job's arrival to the due date; False if it is there already."""
        if (job, due) in self._rows:
            return False
        start, end = self._arrival[job], self._dues[due]
        begin, stop = self._np.searchsorted(self._arrival, [start, end])
        work = (self._work[begin:stop] * (self._due[begin:stop] <= end)).sum(axis=1)
        inside = self._np.flatnonzero(work)
        self._rows[job, due] = (inside + begin, work[inside], end - start)
        return True


# --- the greedy ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Piece:
    """Unfinished work of one job."""

    due: float
    left: float
    job: int


def greedy(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that a clairvoyant earliest-due-date schedule keeps, all in time."""
    pieces: list[_Piece] = []  # by due date
    dropped: set[int] = set()
    now = 0.0
    for number, job in enumerate(jobs):
        _work(pieces, job.arrival - now)
        now = job.arrival
        for due, work in ((job.prefill_due, job.prefill), (job.decode_due, job.decode)):
            if work > 0:
                bisect.insort(pieces, _Piece(due, work, number), key=lambda piece: piece.due)
        while (victim := _least_worth(pieces, jobs, now)) is not None:
            dropped.add(victim)
            pieces = [piece for piece in pieces if piece.job != victim]
    return [job for number, job in enumerate(jobs) if number not in dropped]


def _work(pieces: list[_Piece], seconds: float) -> None:
    """Let time pass: the earliest due work is done first."""
    done = 0
    for piece in pieces:
        if piece.left > seconds:
            piece.left -= seconds
            break
        seconds -= piece.left
        done += 1
    del pieces[:done]


def _least_worth(pieces: Sequence[_Piece], jobs: Sequence[Job], now: float) -> int | None:
    """If some work cannot be in time: the job, of those that stand before it, whose weight per second left is least."""
    total = 0.0
    left: dict[int, float] = {}
    for piece in pieces:
        total += piece.left
        left[piece.job] = left.get(piece.job, 0.0) + piece.left
        if now + total > piece.due:
            return min(left, key=lambda job: jobs[job].weight / left[job])
    return None
