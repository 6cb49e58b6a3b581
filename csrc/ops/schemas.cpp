// The schemas of all ops. Implementations: one file or folder per op beside this file. Fake (meta)
// implementations and the documented Python functions: specdec_ext/ops.
#include "ops/common/register.h"

namespace specdec::glue {

static const torch_abi::Library schemas(
    kLibrary,
    {
        "tree_mask(Tensor parents, Tensor root_positions) -> (Tensor ancestors, Tensor depths, "
        "Tensor positions, Tensor first_child, Tensor next_sibling, Tensor paths)",
        "build_dynamic_tree(Tensor scores, Tensor tokens, Tensor parents, Tensor root_tokens, int "
        "nodes) -> (Tensor tree_tokens, Tensor tree_parents, Tensor selected)",
        "merge_trees(Tensor[] tokens, Tensor[] parents, int nodes) -> (Tensor tokens, Tensor "
        "parents)",
        "ngram_draft(Tensor tokens, Tensor lengths, int nodes, int min_ngram, int max_ngram, int "
        "num_branches, Tensor? num_padded=None) -> (Tensor tokens, Tensor parents, Tensor "
        "match_lengths)",
        "verify_match(Tensor logits, Tensor tokens, Tensor parents, Tensor root_positions, Tensor "
        "seeds, Tensor row_ids, Tensor stochastic, Tensor(a!)? counters=None) -> Tensor",
        "sample_filter(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor "
        "min_p) -> Tensor",
        "couple_logits(Tensor logits, Tensor temperatures, Tensor seeds, Tensor row_ids, Tensor "
        "positions, Tensor? token_ids=None) -> Tensor",
        "adjust_logits(Tensor logits, Tensor tokens, Tensor parents, Tensor text, Tensor lengths, "
        "Tensor skips, Tensor penalties, Tensor ngram_sizes, Tensor adjustments, Tensor tables) -> "
        "Tensor",
        "verify_rejection(Tensor logits, Tensor draft_probs, Tensor tokens, Tensor parents, Tensor "
        "root_positions, Tensor seeds, Tensor row_ids) -> Tensor",
        "verify_recursive(Tensor logits, Tensor draft_probs, Tensor tokens, Tensor parents, Tensor "
        "root_positions, Tensor seeds, Tensor row_ids) -> Tensor",
        "verify_block(Tensor logits, Tensor draft_probs, Tensor tokens, Tensor parents, Tensor "
        "root_positions, Tensor seeds, Tensor row_ids) -> Tensor",
        "kv_compact(Tensor(a!)[] caches, Tensor path, Tensor num_accepted, Tensor source_starts, "
        "Tensor target_starts, Tensor? page_table=None) -> ()",
        "round_commit(Tensor(a!)[] caches, Tensor tokens, Tensor verdict, Tensor eos, Tensor(b!) "
        "numbers, Tensor(c!) text, Tensor(d!) new_tokens, Tensor(e!) ring, Tensor(f!) clock, "
        "Tensor[] features, Tensor(g!)? new_features=None) -> ()",
        "draft_head(Tensor[] weights, int[] layout, float[] scalars, Tensor cosines, Tensor sines, "
        "Tensor(a!) keys, Tensor(b!) values, Tensor tokens, Tensor features, Tensor counts, Tensor "
        "lengths, Tensor positions, Tensor roots, Tensor choices, int depth, int top_k, int nodes, "
        "int[] level_ends, int[] widths, Tensor[]? noise=None, Tensor(c!)? sync=None, bool "
        "phase_launches=False) -> (Tensor tokens, Tensor parents, Tensor scores)",
        "draft_head_refusal(int[] layout, int element, bool has_8_bit_weights, int depth, int "
        "top_k, int rows) -> str?",
        "decoder_layers(Tensor input, Tensor[] cosines, Tensor[] sines, Tensor[] weights, "
        "Tensor(a!)[] caches, int[] windows, Tensor? ancestors, Tensor prefix_starts, Tensor "
        "prefix_lengths, int start, int head_dim, float eps, float scale, Tensor[] scales, Tensor? "
        "levels, int? outputs, int[] tensors, int[] tables, int norm, int activation, bool "
        "interleaved, bool parallel, bool transposed, float softcap, float residual_scale, int "
        "top_k, bool normalised, bool wide_experts) -> (Tensor states, Tensor output)",
        "linear(Tensor input, Tensor weight, Tensor? bias, bool many_rows=False, Tensor? scales="
        "None, Tensor? levels=None) -> Tensor",
        "cpu_instructions() -> str",
        "tree_attention(Tensor query, Tensor key, Tensor value, Tensor ancestors, Tensor "
        "prefix_starts, Tensor prefix_lengths, Tensor block_starts, Tensor? page_table, float "
        "scale, int window, float softcap) -> Tensor",
        "tree_attention_refusal(int element, int nodes, int head_dim, int group) -> str?",
    });

}  // namespace specdec::glue
