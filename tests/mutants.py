"""Known bugs of speculative decoding, inserted into the code one at a time.

A mutant is a function with a known bug in one place. Its check, which is part of a
test, must fail. `python tests/mutants.py` prints the result of each and exits with 1 if
a mutant survives, which means that its check passes.
"""

import sys
import time
from collections.abc import Callable

from tests.models.test_trimmed import check_kept_logits
from tests.program.propose.test_answer_cache import (
    check_every_place,
    check_not_stored,
    check_other_salts,
)
from tests.program.propose.test_draft_model import (
    LEAVES,
    SIDE_PATHS,
    check_next_round,
    check_self_draft,
    check_tree_drafts,
)
from tests.program.propose.test_ngram import check_branches, check_chosen_texts
from tests.program.propose.test_suffix import check_chosen_suffixes
from tests.program.test_controls import check_adjust
from tests.program.test_rounds import (
    SEQS,
    play_round,
    test_joint_distribution_over_rounds,
)
from tests.program.test_rows import check_forgotten_controls
from tests.program.test_rows_append import check_append, check_truncate
from tests.program.test_token_batch import check_tree_region
from tests.program.test_verify import (
    BLOCK,
    COUPLED,
    STANDARD,
    check_groups,
    check_mixed_batch,
)
from tests.program.test_verify_distributions import check_distribution
from tests.program.tree.test_compact_kv import check_moves
from tests.program.tree.test_side_branches import (
    check_few_levels,
    check_last_slots,
    check_same_words,
)
from tests.program.tree.test_verify_distribution import check_exact_distribution
from tests.support.mutation import Mutant, is_killed


def check_rounds(rule: str) -> None:
    play_round.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]
    test_joint_distribution_over_rounds(rule, SEQS)


def check_controlled_distribution() -> None:
    check_distribution("standard")


def mutant(
    name: str,
    place: str,
    old: str,
    new: str,
    *,
    check: Callable,
    package: str = "jaxspec.program",
) -> Mutant:
    module, function = place.split(".")
    path = f"{package}.{module.replace('/', '.')}"
    return Mutant(
        name=name, module=path, function=function, old=old, new=new, check=check
    )


def trimmed(name: str, function: str, old: str, new: str) -> Mutant:
    place = f"trimmed.{function}"
    return mutant(
        name, place, old, new, check=check_kept_logits, package="jaxspec.models"
    )


MUTANTS = [
    mutant(
        "shared_uniform_accept_and_sample",
        "verify.verify",
        ".at[:, -1].set(randomness.SAMPLE)",
        ".at[:, -1].set(randomness.ACCEPT)",
        check=lambda: check_rounds("standard"),
    ),
    mutant(
        "uniforms_keyed_by_position_only",
        "sampling.draw_numbers",
        "place = jnp.concatenate([jnp.broadcast_to(start, (seqs, count)), position]",
        "index, purposes = jnp.divmod(purposes, randomness.NUM_ROLES)\n"
        "    index = jnp.broadcast_to(start + index, (seqs, count))\n"
        "    place = jnp.concatenate([index, position]",
        check=lambda: check_rounds("block"),
    ),
    mutant(
        "coupled_rows_are_rejected_from",
        "verify.verify_group",
        "rule=active.rule",
        "rule=jnp.zeros_like(active.rule)",
        check=lambda: check_mixed_batch((STANDARD, COUPLED)),
    ),
    mutant(
        "early_stop_masked_at_the_first_row_only",
        "verify.verify_group",
        "(active.num_tokens[:, None] + offset).reshape(-1)",
        "(active.num_tokens[:, None] + 10 * offset).reshape(-1)",
        check=lambda: check_mixed_batch((STANDARD, BLOCK)),
    ),
    mutant(
        "groups_read_the_draft_probabilities_of_the_first",
        "verify.verify_groups",
        "(start + index * seqs for",
        "(index * seqs for",
        check=check_groups,
    ),
    mutant(
        "draft_reuses_one_uniform",
        "sampling.sample_draft",
        "randomness.purpose(randomness.DRAFT, jnp.asarray(index))",
        "randomness.purpose(randomness.DRAFT, 0 * jnp.asarray(index))",
        check=lambda: check_rounds("standard"),
    ),
    mutant(
        "stop_inside_run_ignored",
        "rows.truncate",
        "jnp.argmax(is_end, axis=1) + 1",
        "count",
        check=check_truncate,
    ),
    mutant(
        "max_total_off_by_one",
        "rows.truncate",
        "position + 1 >= active.max_total[:, None]",
        "position >= active.max_total[:, None]",
        check=check_truncate,
    ),
    mutant(
        "min_tokens_ignored",
        "rows.truncate",
        "is_stop &= position >= active.min_total[:, None]",
        "is_stop &= position >= 0",
        check=check_truncate,
    ),
    mutant(
        "history_off_by_one",
        "rows.append",
        "active.num_tokens[:, None] + offset",
        "active.num_tokens[:, None] + offset - 1",
        check=check_append,
    ),
    mutant(
        "stale_draft",
        "propose/draft_model._next",
        "active.num_tokens + step",
        "active.num_tokens + step - 1",
        check=check_self_draft,
    ),
    mutant(
        "draft_misses_its_last_token",
        "propose/draft_model._newest",
        "jnp.broadcast_to(active.is_active[:, None], tokens.shape)",
        "active.is_active[:, None] & jnp.array([[False, True]])",
        check=check_self_draft,
    ),
    mutant(
        "penalties_ignore_the_drafts_before_the_position",
        "controls._count_drafts",
        "is_token & is_before",
        "is_token & ~is_token",
        check=check_adjust,
    ),
    mutant(
        "penalties_count_the_drafts_after_the_position",
        "controls._count_drafts",
        "index < before",
        "index <= before",
        check=check_adjust,
    ),
    mutant(
        "prompt_counted_as_output",
        "controls._spread",
        "is_known & (position >= active.num_prompt[:, None])",
        "is_known",
        check=check_adjust,
    ),
    mutant(
        "bad_word_off_by_one",
        "controls._forbid_bad_words",
        "window = before[:, None]",
        "window = jnp.maximum(before[:, None] - 1, 0)",
        check=check_adjust,
    ),
    mutant(
        "controls_after_temperature_on_the_target_only",
        "verify.verify",
        "adjust(rows, tokens)",
        "(rows + (adjust(rows, tokens) - rows) * active.temperature[0])",
        check=check_controlled_distribution,
    ),
    mutant(
        "controls_of_the_rows_last_request",
        "rows._admit_controls",
        "jnp.zeros_like(row, bool)",
        "controls.is_controlled.at[row].get(mode='clip')",
        check=check_forgotten_controls,
    ),
    mutant(
        "lookup_takes_the_earliest_match",
        "propose/ngram_match.find_matches",
        "length * size + position, 0)\n    best = _top_ranks(rank, num_matches)",
        "length * size + size - 1 - position, 0)\n"
        "    best = _top_ranks(rank, num_matches)\n"
        "    best = best // size * size + size - 1 - best % size",
        check=check_chosen_texts,
    ),
    mutant(
        "lookup_matches_the_last_token_with_itself",
        "propose/ngram_match.find_matches",
        "position < active.num_tokens[:, None] - 1",
        "position < active.num_tokens[:, None]",
        check=check_chosen_texts,
    ),
    mutant(
        "lookup_drafts_unknown_tokens",
        "propose/ngram_match.find_matches",
        "offset % num_known[:, :, None]",
        "offset",
        check=check_chosen_texts,
    ),
    mutant(
        "lookup_starts_one_late",
        "propose/ngram_match.find_matches",
        "place[:, :, None] + 1 +",
        "place[:, :, None] + 2 +",
        check=check_chosen_texts,
    ),
    mutant(
        "lookup_prefers_the_recent_to_the_long",
        "propose/ngram_match.find_matches",
        "length * size + position",
        "size + position",
        check=check_chosen_texts,
    ),
    mutant(
        "suffix_counts_one_match_twice",
        "propose/ngram_match._top_ranks",
        "rank == largest[-1][:, None]",
        "rank > largest[-1][:, None]",
        check=check_chosen_suffixes,
    ),
    mutant(
        "suffix_counts_matches_that_are_too_short",
        "propose/suffix.choose",
        "length == length[:, :1]",
        "length == length",
        check=check_chosen_suffixes,
    ),
    mutant(
        "suffix_ignores_the_expected_number_of_accepted_drafts",
        "propose/suffix.choose",
        "jnp.argmax(expected, axis=1)",
        "jnp.argmax(expected > 0, axis=1)",
        check=check_chosen_suffixes,
    ),
    mutant(
        "suffix_trusts_short_matches",
        "propose/suffix.choose",
        "(offset < limit)",
        "(offset < limit.max())",
        check=check_chosen_suffixes,
    ),
    mutant(
        "suffix_drafts_rare_continuations",
        "propose/suffix.choose",
        "(share >= min_share)",
        "(share > 0)",
        check=check_chosen_suffixes,
    ),
    mutant(
        "answer_cache_ignores_salts",
        "propose/answer_cache.find_answers",
        "(salt == own)",
        "(salt == salt)",
        check=check_other_salts,
    ),
    mutant(
        "answer_cache_stores_prompts",
        "propose/answer_cache.store_answers",
        "place >= active.num_prompt[:, None] - 1",
        "place >= -1",
        check=check_not_stored,
    ),
    mutant(
        "answer_cache_skips_tokens_of_long_rounds",
        "propose/answer_cache.store_answers",
        "count = AFTER + num_new - 1",
        "count = AFTER",
        check=check_every_place,
    ),
    mutant(
        "answer_cache_finds_an_entry_twice",
        "propose/answer_cache.find_answers",
        "(length < more)",
        "(length <= BEFORE)",
        check=check_every_place,
    ),
    mutant(
        "tree_positions_are_those_of_slots",
        "token_batch.make_token_batch",
        "jnp.array([tree.depths], jnp.int32)",
        "jnp.arange(count, dtype=jnp.int32)[None]",
        check=check_tree_region,
    ),
    mutant(
        "siblings_are_visible",
        "token_batch.make_token_batch",
        "if not tree.is_chain:",
        "if False:",
        check=lambda: check_tree_drafts(SIDE_PATHS),
    ),
    mutant(
        "accepted_leaves_are_not_moved",
        "tree/compact_kv.compact_kv",
        "(path != level)",
        "(path == 0)",
        check=check_moves,
    ),
    mutant(
        "paths_are_moved_beyond_their_ends",
        "tree/compact_kv.compact_kv",
        "(level <= jnp.asarray(tree.depths)[tree_row][:, None])",
        "(level > 0)",
        check=check_moves,
    ),
    mutant(
        "scanned_layers_use_the_first_layers_slots",
        "tree/compact_kv._layer_slots",
        "slots[None] + turn * size, turns * size)",
        "slots[None] + 0 * turn, turns * size)",
        check=lambda: check_moves(3),
    ),
    mutant(
        "token_after_a_leaf_uses_the_leafs_noise",
        "tree/side_branches.follow_branches",
        "active.num_tokens + count",
        "active.num_tokens + count - 1",
        check=lambda: check_same_words("branched"),
    ),
    mutant(
        "token_after_a_leaf_uses_the_noise_of_the_rounds_start",
        "tree/side_branches.follow_branches",
        "active.num_tokens + count",
        "active.num_tokens",
        check=lambda: check_same_words("leaves"),
    ),
    mutant(
        "token_after_a_leaf_uses_the_row_before_it",
        "tree/side_branches.follow_branches",
        "rows, row[:, None, None], axis=1",
        "rows, steps[2][:, None, None], axis=1",
        check=lambda: check_exact_distribution("leaves", "block"),
    ),
    mutant(
        "leaf_matches_any_draft_with_its_token",
        "tree/side_branches.follow_branches",
        "(parents == row[:, None])",
        "(parents >= row[:, None])",
        check=lambda: check_same_words("branched"),
    ),
    mutant(
        "leaves_are_accepted_by_the_token_after_them",
        "tree/side_branches.follow_branches",
        'tokens = tokens.at[seq, place].set(token, mode="drop")',
        "is_matched &= token % 2 == 1\n"
        "        place = jnp.where(is_matched, count, width)\n"
        "        row = jnp.where(is_matched, row, steps[2])\n"
        '        tokens = tokens.at[seq, place].set(token, mode="drop")',
        check=lambda: check_exact_distribution("leaves", "standard"),
    ),
    mutant(
        "unwanted_levels_are_accepted",
        "tree/side_branches._usable_nodes",
        "(depth <= num_valid_drafts[:, None])",
        "(depth > 0)",
        check=check_few_levels,
    ),
    mutant(
        "drafts_without_slots_are_accepted",
        "tree/side_branches._usable_nodes",
        "(slot < max_model_len)",
        "(slot < max_model_len + 2)",
        check=check_last_slots,
    ),
    mutant(
        "side_drafts_are_ranked_without_noise",
        "propose/draft_sampling._add_noise",
        "active.is_coupled[:, None, None], noisy, logits",
        "active.is_coupled[:, None, None], logits, logits",
        check=lambda: check_tree_drafts(LEAVES, rule=COUPLED),
    ),
    mutant(
        "sampled_draft_is_its_own_sibling",
        "propose/draft_sampling._top_tokens",
        "scores = jnp.where(ids == best[:, :, None], -jnp.inf, scores)",
        "scores = jnp.where(ids == vocab, -jnp.inf, scores)",
        check=lambda: check_tree_drafts(LEAVES),
    ),
    mutant(
        "accepted_side_path_is_not_moved_in_the_draft_models_pages",
        "tree/compact_kv.compact_kv",
        "run_if(is_moved.any(), move, pages)",
        "pages",
        check=check_next_round,
    ),
    mutant(
        "matches_that_differ_from_a_path_continue_it",
        "propose/ngram_match.fill_tree",
        "is_voting = agrees[:, rows] & is_known[:, None]",
        "is_voting = agrees[:, rows * 0] & is_known[:, None]",
        check=check_branches,
    ),
    mutant(
        "side_drafts_prefer_the_oldest_match",
        "propose/ngram_match.fill_tree",
        "votes * count - order",
        "votes * count + order",
        check=check_branches,
    ),
    trimmed(
        "trimmed_logits_are_shifted_by_one_token",
        "to_target_vocab",
        "at[:, params[TOKEN_IDS]]",
        "at[:, params[TOKEN_IDS] - 1]",
    ),
    trimmed(
        "removed_tokens_have_logit_zero",
        "to_target_vocab",
        "LOWEST, logits.dtype",
        "0.0, logits.dtype",
    ),
    trimmed(
        "trimmed_token_ids_are_reversed",
        "put_token_ids",
        "np.asarray(token_ids, np.int32)",
        "np.asarray(token_ids, np.int32)[::-1]",
    ),
    trimmed(
        "trimmed_head_keeps_the_first_rows",
        "with_kept_rows",
        "rows_of(tensors[name], token_ids)",
        "rows_of(tensors[name], range(len(token_ids)))",
    ),
]


def main() -> int:
    """Run all mutants; return 1 if any mutant survives its check, else 0."""
    survivors = 0
    for check in dict.fromkeys(one.check for one in MUTANTS):
        check()  # without a mutant, the check must pass
    for one in MUTANTS:
        start = time.monotonic()
        killed = is_killed(one)
        survivors += not killed
        word = "killed" if killed else "SURVIVED"
        print(f"{word:9}{one.name:42}{time.monotonic() - start:6.1f} s", flush=True)
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} mutants killed")
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main())
