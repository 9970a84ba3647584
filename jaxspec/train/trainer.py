"""The training loop: batches, gradients, evaluation, and its state on disk.

Independent of the method. The rows of a step depend only on its number, so a resumed
run ends with the same parameters as an uninterrupted one.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from jaxtyping import Array, Int
from tqdm.auto import tqdm

from jaxspec.errors import (
    ConfigError,
    check_choice,
    check_integer,
    check_number,
    wrong_argument,
)
from jaxspec.models.params import Params
from jaxspec.models.trimmed import EMBEDDING, TOKEN_IDS, head_of
from jaxspec.sharding import replicated
from jaxspec.train.losses import LOSSES, Comparison, compare, loss_of, mean
from jaxspec.train.methods import Method
from jaxspec.train.rows import shifted
from jaxspec.train.start import STREAM_SCALE, Examples, counted_examples
from jaxspec.train.target import States, Target, kept_rows, logits_of
from jaxspec.train.text import Text

# Parameters that are not trained.
FIXED = TOKEN_IDS, STREAM_SCALE
# Maximum number of tokens in rows that the start of a training is computed from.
START_TOKENS = 32_768
# (numbers of rows in the text, their tokens) -> their states
ReadStates = Callable[[np.ndarray, np.ndarray], States]


@no_type_check
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps, learning rate and loss of a run.

    Attributes:
        rows: Rows of text in a step.
        decay: Weight of a pass's loss, relative to the pass before it.
        warmup_steps: Steps in which the learning rate rises; in the others it falls, by
            half a cosine.
        eval_every, save_every: Steps between evaluations, and between checkpoints.
    """

    steps: int = 1000
    rows: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 30
    weight_decay: float = 0.0
    clip: float = 1.0
    loss: str = "lk"
    decay: float = 0.8
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "rows", "eval_every", "save_every"):
            check_integer(ConfigError, name, getattr(self, name), low=1)
        for name in ("warmup_steps", "seed"):
            check_integer(ConfigError, name, getattr(self, name), low=0)
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            check_number(ConfigError, name, value, low=0, open_low=True)
        check_number(ConfigError, "decay", self.decay, low=0, high=1, open_low=True)
        check_number(ConfigError, "weight_decay", self.weight_decay, low=0)
        check_choice(ConfigError, "loss", self.loss, LOSSES)

    def check_mesh(self, mesh: Mesh) -> None:
        """Check that devices can share the rows of a step.

        Raises:
            ConfigError: They cannot.
        """
        parts = mesh.shape["data"]
        if self.rows % parts:
            allowed = f"a multiple of {parts}, the devices that share a step's rows"
            raise wrong_argument(ConfigError, "rows", allowed, self.rows)

    def check_texts(
        self, text: Text, held_out: Text, hint: str = "give more data"
    ) -> None:
        """Check that both texts have the rows of a step.

        Args:
            hint: For the error: what gives a text more rows.

        Raises:
            ConfigError: A text has too few rows.
        """
        for name, some in (("text", text), ("held-out text", held_out)):
            if len(some) < self.rows:
                raise ConfigError(
                    f"The {name} has {len(some)} rows, but a step takes "
                    f"rows={self.rows}: {hint}, or lower rows.",
                    parameter="rows",
                    value=self.rows,
                )

    def optimizer(self) -> optax.GradientTransformation:
        """Return Adam with decoupled weight decay and clipping by global norm."""
        warmup_steps = min(self.warmup_steps, self.steps - 1)
        rate = optax.warmup_cosine_decay_schedule(
            init_value=self.learning_rate / (warmup_steps + 1),
            peak_value=self.learning_rate,
            warmup_steps=warmup_steps,
            decay_steps=self.steps,
        )
        adam = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=self.weight_decay)
        return optax.chain(optax.clip_by_global_norm(self.clip), adam)


class Rows(NamedTuple):
    """Rows of text on the devices: see `Text`."""

    tokens: Int[Array, "row token"]
    sizes: Int[Array, " row"]
    starts: Int[Array, " row"]


def compare_passes(
    method: Method,
    target_config: Any,
    params: Params,
    token_ids: Int[Array, " draft_vocab"] | None,
    shared: Params,
    batch: Rows,
    states: States,
) -> list[tuple[Comparison, Any]]:
    """Compare target and draft in each pass; also return which positions count.

    A position counts if the target wrote the token that is proposed there.
    """
    length = batch.tokens.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)[None]
    rows, head = states.rows, head_of(shared)
    if token_ids is not None:
        # All passes read the same logits, which are few.
        head = kept_rows(head, token_ids)
        flat = rows.reshape(-1, rows.shape[-1]).astype(jnp.float32)
        rows = logits_of(target_config, head, flat).reshape(*rows.shape[:2], -1)

    # The gradient recomputes logits, unless the vocabulary is trimmed: these are few
    # enough to keep.
    policy = None if token_ids is None else jax.checkpoint_policies.dots_saveable

    @partial(jax.checkpoint, static_argnums=(0,), policy=policy)
    def compare_one(number: int, params: Params, hidden: Array, rows: Array):
        ahead = method.offset + number
        wanted = shifted(rows, ahead).reshape(-1, rows.shape[-1]).astype(jnp.float32)
        if token_ids is None:
            wanted = logits_of(target_config, head, wanted)
        log_sum, best = (
            shifted(part, ahead).reshape(-1) for part in (states.log_sum, states.best)
        )
        return compare(
            method.logits(params, head, number, hidden), wanted, log_sum, best
        )

    found = []
    for number, hidden in enumerate(
        method.hidden(params, shared[EMBEDDING], batch.tokens, states)
    ):
        proposed = place + method.offset + number + 1
        is_counted = proposed >= batch.starts[:, None]
        is_counted &= proposed < batch.sizes[:, None]
        one = compare_one(number, params, hidden, rows)
        found.append((one, is_counted.reshape(-1)))
    return found


def programs_of(
    method: Method, target_config: Any, fixed: Params, schedule: Schedule
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions of a training step and of an evaluation, for one batch.

    `update(state, shared, rows, states) -> state, loss`.
    `evaluate(params, shared, rows, states)` -> for each pass, the share of drafts
    accepted at temperature 1, the share equal to the target's argmax, and the number of
    tokens that count; before these, the loss. `shared` is `Target.shared`.

    Args:
        fixed: The parameters that are not trained (`FIXED`).
    """

    def passes(params: Params, shared: Params, batch: Rows, states: States):
        token_ids = fixed.get(TOKEN_IDS)
        params = params | {name: fixed[name] for name in fixed if name != TOKEN_IDS}
        return compare_passes(
            method, target_config, params, token_ids, shared, batch, states
        )

    def loss_over(found: list[tuple[Comparison, Any]]) -> Array:
        parts = [
            schedule.decay**number * loss_of(schedule.loss, one, is_counted)
            for number, (one, is_counted) in enumerate(found)
        ]
        total = sum(schedule.decay**number for number in range(len(parts)))
        return jnp.stack(parts).sum() / total

    def loss(params: Params, *given: Any) -> Array:
        return loss_over(passes(params, *given))

    def update(state: TrainState, *given: Any) -> tuple[TrainState, Array]:
        value, gradient = jax.value_and_grad(loss)(state.params, *given)
        return state.apply_gradients(grads=gradient), value

    def evaluate(params: Params, *given: Any) -> tuple[Array, Array, Array, Array]:
        found = passes(params, *given)
        return (
            loss_over(found),
            jnp.stack([mean(one.acceptance, counted) for one, counted in found]),
            jnp.stack([mean(one.agrees.astype(jnp.float32), it) for one, it in found]),
            jnp.stack([counted.sum() for _, counted in found]),
        )

    return update, evaluate


class Trainer:
    """Trains one method on one text.

    Attributes:
        state: Parameters, the optimizer's moments, and the number of steps done.
        log: Results of each evaluation.
    """

    def __init__(
        self,
        method: Method,
        target: Target,
        text: Text,
        held_out: Text,
        *,
        schedule: Schedule,
        read_states: tuple[ReadStates, ReadStates],
        token_ids: np.ndarray | None = None,
        work: Path | None = None,
    ):
        """Start, or resume from the state in `work`.

        Args:
            held_out: Text for evaluation, not used in training.
            read_states: Readers for `text` and `held_out`.
            token_ids: The tokens of a trimmed vocabulary.
            work: Folder for the state; None saves none.
        """
        schedule.check_mesh(target.mesh)
        schedule.check_texts(text, held_out)
        self.schedule, self.log = schedule, []
        self._method, self._target, self._work = method, target, work
        self._text, self._held_out, self._read = text, held_out, read_states
        self._orders: dict[int, np.ndarray] = {}
        params = method.init(target, schedule.seed, token_ids)
        params = dict(method.warm_start(params, target, self._examples()))
        self._fixed = {name: params.pop(name) for name in FIXED if name in params}
        state = TrainState.create(
            apply_fn=compare_passes, params=params, tx=schedule.optimizer()
        )
        self.state = _placed(state, target.mesh)
        self._files, self._earlier_cpu_s = None, 0.0
        self._cpu_start = time.process_time()
        if work is not None:
            self._files = ocp.CheckpointManager(
                (work / "checkpoints").absolute(),
                options=ocp.CheckpointManagerOptions(max_to_keep=2),
            )
            self._restore()
        self._compile()

    @property
    def params(self) -> Params:
        """All parameters to write, including those that are not trained."""
        return {**self.state.params, **self._fixed}

    @property
    def step(self) -> int:
        """Number of steps done."""
        return int(self.state.step)

    def _compile(self) -> None:
        update, evaluate = programs_of(
            self._method, self._target.config, self._fixed, self.schedule
        )
        placed = jax.tree.map(lambda leaf: leaf.sharding, self.state)
        self._update = jax.jit(update, donate_argnums=0, out_shardings=(placed, None))
        self._evaluate_batch = jax.jit(evaluate)

    def run(self, progress: bool = True) -> None:
        """Train up to the last step of the schedule."""
        schedule, smooth = self.schedule, None
        self._cpu_start = time.process_time()
        bar = tqdm(
            total=schedule.steps * schedule.rows * self._text.tokens.shape[1],
            initial=self.step * schedule.rows * self._text.tokens.shape[1],
            desc="Training",
            unit="tok",
            unit_scale=True,
            disable=not progress,
        )
        with bar:
            if self.step == 0:
                self._evaluate(bar, smooth)
            while self.step < schedule.steps:
                numbers = self._rows_of(self.step)
                value = self._step(numbers)
                smooth = value if smooth is None else 0.95 * smooth + 0.05 * value
                bar.update(schedule.rows * self._text.tokens.shape[1])
                bar.set_postfix(self._shown(smooth), refresh=False)
                is_last = self.step == schedule.steps
                if is_last or self.step % schedule.eval_every == 0:
                    self._evaluate(bar, smooth)
                if is_last or self.step % schedule.save_every == 0:
                    self._save()

    def _step(self, numbers: np.ndarray) -> float:
        batch, states = self._given(self._text, self._read[0], numbers)
        self.state, value = self._update(self.state, self._target.shared, batch, states)
        if not np.isfinite(value):
            raise FloatingPointError(
                f"The loss of step {self.step} is {float(value)}: lower learning_rate="
                f"{self.schedule.learning_rate}."
            )
        return float(value)

    def _given(
        self, text: Text, read: ReadStates, numbers: np.ndarray
    ) -> tuple[Rows, States]:
        some = text.rows(numbers)
        placement = self._target.by_row()
        batch = Rows(
            *(
                jax.device_put(part, placement)
                for part in (some.tokens, some.sizes, some.starts)
            )
        )
        return batch, read(numbers, some.tokens)

    def _examples(self) -> Iterator[Examples]:
        """Yield examples for the start of the training, from the first steps' rows."""
        rows, length = self.schedule.rows, self._text.tokens.shape[1]
        norm = 1 + np.asarray(self._target.params["final_norm"], np.float32)
        most = max(1, START_TOKENS // (rows * length))
        for step in range(min(most, len(self._text) // rows)):
            batch, states = self._given(self._text, self._read[0], self._rows_of(step))
            tokens, sizes, starts = map(np.asarray, batch)
            yield counted_examples(tokens, sizes, starts, states, norm)

    def _rows_of(self, step: int) -> np.ndarray:
        """Return the indices of a step's rows; an epoch uses every row once."""
        count, rows = len(self._text), self.schedule.rows
        numbers = np.arange(step * rows, (step + 1) * rows)
        return np.array([self._order(int(at) // count)[at % count] for at in numbers])

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            random = np.random.default_rng((self.schedule.seed, epoch))
            self._orders[epoch] = random.permutation(len(self._text))
        return self._orders[epoch]

    def acceptance(self) -> dict[str, list[float]]:
        """Measure each pass's acceptance on held-out text after correct earlier drafts.

        `sampled` is the mean probability that a draft is accepted at temperature 1,
        `greedy` the share of drafts that are the target's most likely token.
        """
        return self._measure_held_out()[0]

    def _measure_held_out(self) -> tuple[dict[str, list[float]], float]:
        """Return `acceptance`, and the loss on held-out text."""
        rows, sums, count = self.schedule.rows, [0.0, 0.0], 0.0
        losses = []
        # The last rows are dropped if they do not fill a batch, as a smaller batch
        # would need another program.
        for start in range(0, len(self._held_out) - rows + 1, rows):
            numbers = np.arange(start, start + rows)
            batch, states = self._given(self._held_out, self._read[1], numbers)
            loss, *means, counts = self._evaluate_batch(
                self.state.params, self._target.shared, batch, states
            )
            losses.append(float(loss))
            counts = np.asarray(counts, np.float64)
            sums = [
                total + np.asarray(one) * counts
                for total, one in zip(sums, means, strict=True)
            ]
            count = count + counts
        names = "sampled", "greedy"
        found = {
            name: [float(one) for one in total / np.maximum(count, 1)]
            for name, total in zip(names, sums, strict=True)
        }
        return found, float(np.mean(losses))

    def _cpu_s(self) -> float:
        """Return the processor time of the run, with those before it was resumed."""
        return self._earlier_cpu_s + time.process_time() - self._cpu_start

    def _evaluate(self, bar: Any, loss: float | None) -> None:
        found, held_out_loss = self._measure_held_out()
        entry: dict[str, Any] = dict(step=self.step, time=time.time(), loss=loss)
        entry |= dict(cpu_s=self._cpu_s(), held_out_loss=held_out_loss)
        entry |= found
        self.log.append(entry)
        if self._work is not None:
            with (self._work / "log.jsonl").open("a") as log:
                log.write(json.dumps(entry) + "\n")
        if bar.disable:
            return
        shown = {
            name: " ".join(f"{value:.3f}" for value in entry[name])
            for name in ("sampled", "greedy")
        }
        loss_shown = "" if loss is None else f"loss {loss:.4f}, "
        loss_shown += f"held-out loss {entry['held_out_loss']:.4f}, "
        bar.write(
            f"step {self.step}: {loss_shown}held-out acceptance by position: sampled "
            f"{shown['sampled']}, greedy {shown['greedy']}"
        )

    def _shown(self, loss: float) -> dict[str, str]:
        shown = {"loss": f"{loss:.4f}"}
        if self.log:
            shown["accepted"] = f"{self.log[-1]['sampled'][0]:.3f}"
        return shown

    def _save(self) -> None:
        if self._files is None:
            return
        leaves = jax.tree.leaves(self.state)
        self._files.save(self.step, args=ocp.args.StandardSave({"leaves": leaves}))
        self._files.wait_until_finished()

    def _restore(self) -> None:
        assert self._files is not None and self._work is not None
        step = self._files.latest_step()
        if step is None:
            return
        leaves, structure = jax.tree.flatten(self.state)
        forms = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
            for leaf in leaves
        ]
        found = self._files.restore(
            step, args=ocp.args.StandardRestore({"leaves": forms})
        )
        self.state = jax.tree.unflatten(structure, found["leaves"])
        log = self._work / "log.jsonl"
        if log.exists():
            entries = [json.loads(line) for line in log.read_text().splitlines()]
            done = (entry for entry in entries if entry["step"] <= step)
            self._earlier_cpu_s = max(
                (one.get("cpu_s", 0.0) for one in done), default=0
            )


def _placed(state: TrainState, mesh: Mesh) -> TrainState:
    """Place all of the state on the mesh; unsplit arrays are replicated."""

    def place(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        is_there = getattr(leaf.sharding, "mesh", None) == mesh
        return leaf if is_there else jax.device_put(leaf, replicated(mesh))

    state = state.replace(step=jnp.asarray(state.step, jnp.int32))
    return jax.tree.map(place, state)
