"""Times new programs on dummy sequences, so that K is chosen by measured times."""

from jaxspec.config.engine import EngineConfig
from jaxspec.engine.loader import Sleep
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduling.launch import AsLaunchErrors
from jaxspec.engine.scheduling.scheduler import Scheduler
from jaxspec.engine.speculation.policy import SpeculationPolicy
from jaxspec.engine.speculation.step_times import RoundKind, StepTimes
from jaxspec.program.plan import TILE

# Number of tokens of the dummy sequences with which programs are timed.
CONTEXT = 256


class Calibrator:
    """Times each program once, while no launch is in flight.

    Attributes:
        timed: Kinds of rounds that were timed, or skipped because pages were lacking.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        policy: SpeculationPolicy,
        step_times: StepTimes,
        sleep: Sleep,
    ):
        self._config, self._runner, self._policy = config, runner, policy
        self._step_times, self._sleep = step_times, sleep
        self.timed: set[RoundKind] = set()
        self._version = -1

    def run_next(self, scheduler: Scheduler, *, is_busy: bool) -> bool:
        """Time one round of a new program; most calls have nothing to time.

        Nothing is timed while a program is being compiled, which slows the machine, or
        while a launch is in flight, whose time would include the calibration. Requests
        wait meanwhile, so programs of draft prefill, the longest rounds, are timed only
        by `run_all` and as they run.

        Args:
            is_busy: A launch is in flight.

        Returns:
            Whether the launch in flight must be read before another one starts: a round
            is left to time, which needs an idle device.
        """
        if not self._policy.is_adaptive:
            return False  # `set_adaptive` may change this later
        compiler = self._runner.compiler
        version = compiler.version
        if version == self._version or compiler.num_wanted:
            return False
        left = [one for one in self._left() if not one.shape.is_draft_prefill]
        if left and is_busy:
            return True
        if left:
            self._run(scheduler, left[0])
        else:
            self._version = version
        return False

    def run_all(self, scheduler: Scheduler) -> None:
        """Time all new programs."""
        for round_kind in self._left():
            self._run(scheduler, round_kind)

    def _left(self) -> list[RoundKind]:
        """Return the rounds left to time, of those that the choice of K compares."""
        if not self._policy.is_adaptive or self._sleep.level > 0:
            return []
        max_draft_tokens = self._config.max_draft_tokens
        rounds = []
        for shape in self._runner.compiler.made:
            if shape.is_draft_prefill or not (
                shape.max_prompt_tokens or shape.features.has_grammar
            ):
                # 0 drafts: programs also run while all rows wait for draft prefill.
                values_of_k = {
                    min(k, shape.num_levels) for k in (0, 1, max_draft_tokens)
                }
                rounds += [RoundKind(shape, k) for k in sorted(values_of_k)]
        return [one for one in rounds if one not in self.timed]

    def _run(self, scheduler: Scheduler, round_kind: RoundKind) -> None:
        """Time a round over dummy sequences."""
        self.timed.add(round_kind)
        pool, size = scheduler.pool, self._config.page_size
        tree = scheduler.shapes.tree(self._config.max_draft_tokens)
        lookahead = 8 * tree.max_emitted + tree.num_rows - tree.max_emitted
        context = min(CONTEXT, self._config.max_model_len - lookahead)
        count = -(-(context + lookahead) // size)
        if context < TILE or count > pool.num_free:
            return
        taken = pool.take(count)
        try:
            with AsLaunchErrors():
                seconds = self._runner.time_round(round_kind, taken, context)
        finally:
            pool.release(taken)
        num_seqs = round_kind.shape.num_seqs
        fill = min(self._config.max_num_seqs / num_seqs, 1.0) if num_seqs else 1.0
        self._step_times.seed(round_kind, seconds, fill)
        self._policy.reconsider()
