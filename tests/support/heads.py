"""Heads for tests: random ones, ones that are always right, and an oracle of drafts.

A head can always be right if the target's next token depends only on the last one; the
attention of such a target adds nothing. The oracle, `replay`, computes the expected
drafts from whole texts with plain attention, without pages, launches, rounds or
`hidden_cache`.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxspec.engine.llm_engine import LLMEngine
from jaxspec.models.heads import dflash
from jaxspec.models.heads.config import (
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    HeadConfig,
    MedusaConfig,
)
from jaxspec.models.heads.weights import random_head
from jaxspec.models.trimmed import TOKEN_IDS
from jaxspec.models.weights import tensors_of
from jaxspec.outputs import RequestOutput
from jaxspec.sampling_params import SamplingParams
from jaxspec.sharding import make_mesh
from jaxspec.train.methods import (
    Eagle3Method,
    EagleMethod,
    MedusaMethod,
)
from jaxspec.train.target import Target
from tests.models.heads import torch_heads
from tests.support import pair
from tests.support.engines import generate, make_engine
from tests.support.programs import QUICK_COMPILER

VOCAB, HIDDEN = int(pair.SIZES["vocab_size"]), int(pair.SIZES["hidden_size"])
NUM_DRAFT = 3
KINDS = ("eagle", "eagle3", "medusa")
METHODS: dict[str, Any] = {
    "eagle": functools.partial(EagleMethod, num_passes=NUM_DRAFT),
    "eagle3": functools.partial(Eagle3Method, num_passes=NUM_DRAFT),
    "medusa": MedusaMethod,
}

# A round: the tokens known before it, and its drafts.
Round = tuple[list[int], list[int]]


def config_of(kind: str, **changes: Any) -> Any:
    """Return the config of a small head.

    EAGLE-3 and DFlash have trimmed vocabularies; a layer of DFlash has a window.
    """
    both: dict[str, Any] = dict(
        target_hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=VOCAB
    )
    if kind == "medusa":
        both |= dict(num_heads=NUM_DRAFT, lm_heads=NUM_DRAFT)
        return MedusaConfig(**both | changes)
    both |= dict(
        hidden_size=HIDDEN,
        intermediate_size=12,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
    )
    if kind == "eagle":
        both |= dict(has_embedding=True, has_bias=True)
        return EagleConfig(**both | changes)
    if kind == "dflash":
        both |= dict(
            draft_vocab_size=48,
            target_layers=(0, 1),
            block_size=NUM_DRAFT + 1,
            mask_token_id=2,
            rms_norm_eps=torch_heads.EPSILON,
            windows=(None, 6),
            has_qk_norm=True,
            has_lm_head=True,
        )
        return DFlashConfig(**both | changes)
    both |= dict(
        draft_vocab_size=48,
        target_layers=(0, 1, 2),
        norm_before_residual=True,
        has_embedding=True,
    )
    return Eagle3Config(**both | changes)


def random_params(
    config: HeadConfig,
    seed: int = 0,
    *,
    mesh: Any = None,
    dtype: str = "float32",
) -> Any:
    """Return random parameters; a trimmed vocabulary has scattered token ids."""
    options: Any = dict(dtype=jnp.dtype(dtype), mesh=mesh or make_mesh(1))
    params = random_head(config, seed=seed, **options)
    if TOKEN_IDS in params:
        ids = np.random.default_rng(5).permutation(config.vocab_size)
        ids = np.sort(ids[: config.draft_vocab_size]).astype(np.int32)
        params[TOKEN_IDS] = jax.device_put(ids, params[TOKEN_IDS].sharding)
    return params


# Rates of forced acceptance with which rounds have every length. Texts then consist of
# drafts, so that programs need not return rejected ones.
RATES = (0.9, 0.75, 0.6)
FORCED: dict[str, Any] = dict(rule="synthetic", acceptance_rates=RATES)


def forced_rounds(
    engine: LLMEngine, prompt: list[int], params: SamplingParams
) -> tuple[RequestOutput, list[Round]]:
    """Run one request of an engine with `FORCED`.

    Returns:
        Its output, and for each round the tokens known before it and the drafts that
        are part of the text.
    """
    with pair.recorded(engine) as launches:
        (output,) = generate(engine, [prompt], params)
    whole, rounds = prompt + list(output.outputs[0].token_ids), list[Round]()
    count = len(prompt) + 1  # the prompt's launch samples the first token
    for plan, _, result in launches:
        if plan.decode:
            drafts = whole[count : count + int(result.num_accepted[0])]
            rounds.append((whole[:count], drafts))
            count += int(result.num_emitted[0])
    assert count == len(whole)
    return output, rounds


@functools.cache
def target_of(kind: str) -> Any:
    """Return a target: `pair` is the pair's, `chain` one whose attention adds nothing.

    For the name of another family in `pair`, return the target of that family.
    """
    if kind == "pair":
        return pair.target()
    if kind in (pair.GEMMA2, pair.GEMMA3):
        return pair.target(kind)
    model = pair.make_model(11)
    with torch.no_grad():
        for layer in model.model.layers:
            # Gemma's norms scale by 1 + weight: attention adds nothing.
            layer.post_attention_layernorm.weight.fill_(-1)
    return model


def replay(engine: LLMEngine, rounds: list[Round]) -> list[np.ndarray]:
    """Return the expected logits of drafts in the target's vocabulary.

    The logits of a draft depend on the tokens and drafts before it. They are computed
    with the trainer's passes over whole texts, those of DFlash in torch, and indexed
    [draft][round, vocab].
    """
    runner = engine.runner
    config: Any = engine.config.head_config
    params: Any = runner.params[1][0]
    target = Target(
        name="target",
        folder=Path(),
        config=engine.config.model_config,
        params=runner.params[0],
        mesh=runner.mesh,
        dtype=jnp.dtype(engine.config.dtype),
    )
    if config.kind == "dflash":
        return _replay_blocks(config, params, target, rounds)
    method = METHODS[config.kind](config=config)
    length = max(len(known) + len(drafts) for known, drafts in rounds)
    length = -(-length // 16) * 16
    tokens = np.zeros((len(rounds), length), np.int32)
    for row, (known, drafts) in zip(tokens, rounds, strict=True):
        row[: len(known) + len(drafts)] = known + drafts
    states = target.reader(method.layers)(tokens)

    @functools.partial(jax.jit, compiler_options=QUICK_COMPILER)
    def run(params: Any, embedding: Any, tokens: Any, states: Any) -> list[Any]:
        found = method.hidden(params, embedding, tokens, states)
        return [
            method.logits(params, embedding, number, one).reshape(*tokens.shape, -1)
            for number, one in enumerate(found)
        ]

    place = np.array([len(known) - 2 for known, _ in rounds])
    made = []
    for logits in run(params, target.embedding, jnp.asarray(tokens), states):
        some = np.asarray(logits)[np.arange(len(rounds)), place]
        if TOKEN_IDS in params:
            whole = np.full((len(rounds), VOCAB), -np.inf)
            whole[:, np.asarray(params[TOKEN_IDS])] = some
            some = whole
        made.append(some)
    return made


def _replay_blocks(
    config: DFlashConfig,
    params: Any,
    target: Target,
    rounds: list[Round],
) -> list[np.ndarray]:
    """Return `replay` of DFlash; drafts depend only on the text before a round."""
    tensors = {
        name: torch.tensor(np.asarray(values))
        for name, values in tensors_of(dflash.param_specs(config), params).items()
    }
    ids = np.asarray(params[TOKEN_IDS])
    embedding = torch.tensor(np.asarray(target.embedding.rows(jnp.arange(VOCAB))))
    read = target.reader(config.target_layers)
    every = np.full((config.max_draft_tokens, len(rounds), VOCAB), -np.inf)
    length = -(-max(len(known) for known, _ in rounds) // 16) * 16
    for index, (known, _) in enumerate(rounds):
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(known)] = known
        streams = np.array(read(tokens).streams)[0, : len(known) - 1]
        context = torch.tensor(streams.reshape(len(known) - 1, -1))
        block = [known[-1]] + [config.mask_token_id] * config.max_draft_tokens
        rows = torch_heads.dflash_rows(
            tensors, context, embedding[block], config.windows
        )
        logits = rows[1:] @ tensors["lm_head.weight"].T
        every[:, index, ids] = logits.numpy()
    return list(every)


def successors(model: Any) -> np.ndarray:
    """Return the greedy token after each token, for a target of kind `chain`."""
    with torch.no_grad():
        logits = model(torch.arange(VOCAB)[:, None]).logits[:, -1]
    return logits.argmax(dim=1).numpy()


def longest_cycle(following: np.ndarray) -> list[int]:
    """Return the longest cycle of a map from tokens to tokens."""
    best: list[int] = []
    for token in range(len(following)):
        path = [token]
        while following[path[-1]] not in path:
            path.append(int(following[path[-1]]))
        cycle = path[path.index(following[path[-1]]) :]
        best = max(best, cycle, key=len)
    return best


def states_of_tokens(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return each token's residual stream after the last layer, and normalised."""
    seen = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, given, found: seen.append(
            found[0] if isinstance(found, tuple) else found
        )
    )
    with torch.no_grad():
        rows = model.model(torch.arange(VOCAB)[:, None]).last_hidden_state[:, 0]
    hook.remove()
    return seen[0].reshape(VOCAB, -1).numpy(), rows.numpy()


def classifier(rows: np.ndarray, classes: dict[int, int]) -> np.ndarray:
    """Return an output matrix whose largest logit for each row is `classes[row]`.

    The weights of row z's class are w = z / |z|: then w . z = |z|, and no other logit
    is larger, by the Cauchy-Schwarz inequality.
    """
    matrix = np.zeros((VOCAB, rows.shape[1]), np.float32)
    for row, one in classes.items():
        matrix[one] = rows[row] / np.linalg.norm(rows[row])
    assert all((rows[row] @ matrix.T).argmax() == one for row, one in classes.items())
    return matrix


def settled(
    config: HeadConfig,
    values: dict[tuple[str, ...], np.ndarray],
    ids: np.ndarray | None = None,
) -> Any:
    """Return parameters that are zero except for `values`.

    Args:
        ids: Token ids of a trimmed vocabulary.
    """
    params = jax.tree.map(np.zeros_like, jax.device_get(random_params(config)))

    def put(path: tuple[str, ...], value: np.ndarray) -> None:
        node = params
        for key in path[:-1]:
            node = node[key]
        old = node[path[-1]]
        made = np.asarray(value, np.float32)
        is_vector = len(old.shape) == 1
        node[path[-1]] = made if is_vector else type(old).of(_placed(made))

    for path, value in values.items():
        put(path, value)
    if ids is not None:
        params[TOKEN_IDS] = ids.astype(np.int32)
    return jax.tree.map(_placed, params)


def _placed(value: Any) -> Any:
    mesh = make_mesh(1)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.device_put(np.asarray(value), whole)


def right_params(kind: str, config: Any, *, is_second: bool = False) -> Any:
    """Return parameters of a head that is always right about the target `chain`.

    Args:
        is_second: Whether Medusa's first head ranks the right token second.
    """
    model = target_of("chain")
    following, (streams, rows) = successors(model), states_of_tokens(model)
    cycle = longest_cycle(following)

    def after(token: int, steps: int) -> int:
        for _ in range(steps):
            token = int(following[token])
        return token

    if kind == "medusa":
        # The blocks add nothing; head i predicts the token i + 2 positions after its
        # input.
        heads = {
            ("lm_heads", str(head)): classifier(
                rows, {token: after(token, head + 2) for token in cycle}
            )
            for head in range(config.num_heads)
        }
        others = [token for token in range(VOCAB) if token not in cycle]
        if is_second:
            first = heads["lm_heads", "0"]
            first[others[: len(cycle)]] = 1.01 * first[cycle]
        return settled(config, heads)
    if kind == "eagle":
        # The layer outputs the target's hidden state of each token.
        look_up = np.concatenate([np.eye(HIDDEN), np.zeros((HIDDEN, HIDDEN))], axis=1)
        return settled(config, {("embedding",): rows, ("fc", "weight"): look_up})
    values = {
        ("norm",): np.ones(HIDDEN),
        ("layer", "hidden_norm"): np.ones(HIDDEN),
        ("layer", "input_norm"): np.ones(HIDDEN),
    }
    # The layer adds nothing, so its output is the target's last residual stream.
    fuse = np.zeros((HIDDEN, 3 * HIDDEN), np.float32)
    fuse[:, 2 * HIDDEN :] = np.eye(HIDDEN)
    normed = streams / np.sqrt((streams**2).mean(axis=1, keepdims=True))
    matrix = classifier(normed, {token: after(token, 2) for token in cycle})
    ids = kept_tokens(config, cycle)
    return settled(config, values | {("fc",): fuse, ("lm_head",): matrix[ids]}, ids)


def kept_tokens(config: Any, cycle: list[int]) -> np.ndarray:
    """Return a trimmed vocabulary that contains the tokens of the cycle."""
    others = [token for token in range(VOCAB) if token not in cycle]
    return np.sort((cycle + others)[: config.draft_vocab_size])


def right_by_tokens(config: Any) -> Any:
    """Return parameters of an EAGLE-3 head that predicts from the last token alone.

    Each row attends almost only to itself: queries and keys are one constant vector,
    rotated by position, so that the row's score with itself is the largest.
    """
    model = target_of("chain")
    following = successors(model)
    cycle = longest_cycle(following)
    random = np.random.default_rng(4)
    # One coordinate is equal for all tokens; the others encode the token.
    codes = random.choice([-1.0, 1.0], size=(VOCAB, HIDDEN - 1))
    table = np.concatenate([np.ones((VOCAB, 1)), codes], axis=1)
    queries, head = config.num_q_heads * config.head_dim, config.head_dim
    q_proj = np.zeros((queries, 2 * HIDDEN))
    q_proj[:, 0] = 40.0
    kv_proj = np.zeros((2 * head, 2 * HIDDEN))
    kv_proj[:head, 0] = 40.0
    kv_proj[head:, 1:HIDDEN] = random.normal(size=(head, HIDDEN - 1))
    o_proj = np.zeros((HIDDEN, queries))
    o_proj[:, :head] = random.normal(size=(HIDDEN, head))
    mixed = codes @ kv_proj[head:, 1:HIDDEN].T @ o_proj[:, :head].T
    normed = mixed / np.sqrt((mixed**2).mean(axis=1, keepdims=True))
    matrix = classifier(normed, {one: int(following[one]) for one in cycle})
    attention, ids = ("layer", "attention"), kept_tokens(config, cycle)
    return settled(
        config,
        {
            ("embedding",): table,
            ("norm",): np.ones(HIDDEN),
            ("layer", "input_norm"): np.ones(HIDDEN),
            (*attention, "q_proj"): q_proj,
            (*attention, "kv_proj"): kv_proj,
            (*attention, "o_proj"): o_proj,
            ("lm_head",): matrix[ids],
        },
        ids,
    )


def make_head_engine(
    kind: str,
    *,
    config: Any = None,
    params: Any = None,
    target: str = "pair",
    **options: Any,
) -> LLMEngine:
    """Make an engine with the pair's settings and a head, by default a random one."""
    config = config or config_of(kind)
    settings: dict[str, Any] = pair.SETTINGS | dict(num_draft_tokens=NUM_DRAFT)
    if params is None:
        params = random_params(config, dtype=options.get("dtype", "float32"))
    return make_engine(target_of(target), head=(config, params), **(settings | options))
