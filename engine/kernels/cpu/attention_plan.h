// Plans the tiles of one attention call, runs them over a team of threads, and merges the splits.
#pragma once
#include <cmath>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "attention_amx.h"
#include "attention_few.h"
#include "attention_many.h"
#include "team.h"

namespace turnkeep {

constexpr int kSplitKeys = 512;     // shortest run of keys worth a split of its own
constexpr int kPrefixKeys = 256;    // shortest common prefix worth a tile of its own
constexpr int kPrefixRows = 36;     // fewer rows gain nothing (measured): the tile of many rows is mostly empty

// The partial results of one sequence and some of its KV heads: those of its own tiles, the first of which is `own`, and those of the
// shared tiles, [kv head][part], in whose rows it begins at `shared_row`.
struct Merge {
    Tile own;
    int64_t shared;
    int32_t shared_row, shared_rows, shared_parts;
};

struct Plan {
    std::vector<Tile> tiles;
    std::vector<Merge> merges;
    int64_t scratch = 0;  // floats of partial results
};

// Sequences [first, first + count) of a batch, one new token each, whose first `blocks` blocks are the same.
struct SharedPrefix {
    int32_t first, count, blocks;
};

// The prefix that sequences from `first` on share, as many as it pays for (count 1: none). As in Hydragen (arXiv 2402.05099): queries
// of many sequences against one prefix are one product of matrices.
inline SharedPrefix shared_prefix(const AttentionArgs& a, int first) {
    const int group = a.num_heads / a.num_kv_heads, most = kMaxRows / group;
    const auto tokens_of = [&](int s) { return a.query_start[s + 1] - a.query_start[s]; };
    const auto whole_blocks = [&](int s) { return (a.context_lens[s] - 1) / a.block_size; };
    const SharedPrefix none = {first, 1, 0};
    // In float32 a row's sum does not depend on its neighbours more than it must (token exactness).
    if (a.dtype == 0 || a.window > 0 || tokens_of(first) != 1) return none;
    SharedPrefix shared = {first, 1, whole_blocks(first)};
    const int32_t* table = a.block_tables + first * a.table_stride;
    for (int s = first + 1; s < a.num_sequences && tokens_of(s) == 1 && shared.count < most; s++) {
        const int32_t* other = a.block_tables + s * a.table_stride;
        const int limit = std::min(shared.blocks, whole_blocks(s));
        const int blocks = int(std::mismatch(table, table + limit, other).first - table);
        // With this one the prefix may be shorter for all of them.
        if (blocks * a.block_size < kPrefixKeys) break;
        if (shared.count > 1 && int64_t(blocks) * shared.count < int64_t(shared.blocks) * (shared.count - 1)) break;
        shared.blocks = blocks;
        shared.count++;
    }
    return shared.count * group < kPrefixRows ? none : shared;
}

// Rows are cut into tiles; where that gives the threads too little to share, long contexts are cut as well. Tiles of few rows have all
// KV heads, whose keys and values are neighbours in memory, unless the threads would then be left without work. A prefix that many
// sequences share is attended to once for all of them.
inline Plan make_plan(const AttentionArgs& a, int threads) {
    Plan plan;
    const int group = a.num_heads / a.num_kv_heads;
    const int tile_tokens = std::max(1, kMaxRows / group);
    const auto tokens_of = [&](int s) { return a.query_start[s + 1] - a.query_start[s]; };
    const auto cuts = [](int keys) { return std::max(1, keys / kSplitKeys); };
    const auto is_few = [&](int tokens) { return tokens * group <= kFewRows; };

    std::vector<SharedPrefix> prefix_of(a.num_sequences);
    for (int s = 0; s < a.num_sequences;) {
        const SharedPrefix shared = shared_prefix(a, s);
        for (int i = 0; i < shared.count; i++) prefix_of[s + i] = shared;
        s += shared.count;
    }
    const auto own_keys_from = [&](int s) { return prefix_of[s].blocks * a.block_size; };

    int64_t possible = 0;
    for (int s = 0; s < a.num_sequences; s++) {
        const int tokens = tokens_of(s), context = a.context_lens[s] - own_keys_from(s);
        const int seen = a.window > 0 ? std::min(a.window, context) : context;
        possible += int64_t(tokens + tile_tokens - 1) / tile_tokens * (is_few(tokens) ? 1 : a.num_kv_heads) * cuts(seen);
    }
    const bool together = possible >= threads;
    const auto heads_of = [&](int rows) { return together && rows <= kFewRows ? std::min(a.num_kv_heads, kMaxRows / rows) : 1; };
    int64_t whole = 0;
    for (int s = 0; s < a.num_sequences; s++) {
        const int tokens = tokens_of(s);
        if (!tokens) continue;
        const int heads = heads_of(std::min(tokens, tile_tokens) * group);
        whole += int64_t(tokens + tile_tokens - 1) / tile_tokens * ((a.num_kv_heads + heads - 1) / heads);
    }
    const int wanted = threads > 1 ? 4 * threads : 1;
    const int split = whole > 0 && whole < wanted ? int((wanted + whole - 1) / whole) : 1;

    std::vector<Tile> shared_tiles;
    for (int s = 0; s < a.num_sequences; s++) {
        const SharedPrefix& prefix = prefix_of[s];
        const int tokens = tokens_of(s), shared_keys = prefix.count > 1 ? own_keys_from(s) : 0;
        const int shared_rows = prefix.count * group;
        const int shared_parts = std::min((wanted + a.num_kv_heads - 1) / a.num_kv_heads, cuts(shared_keys));
        if (shared_keys > 0 && s == prefix.first) {
            const int step = ((shared_keys + shared_parts - 1) / shared_parts + kLanes - 1) / kLanes * kLanes;
            for (int h = 0; h < a.num_kv_heads; h++)
                for (int p = 0; p < shared_parts; p++) {
                    const int b = std::min(shared_keys, p * step), e = std::min(shared_keys, (p + 1) * step);
                    shared_tiles.push_back({s, h, 1, 0, shared_rows, b, e, p, shared_parts, true, true, plan.scratch});
                    plan.scratch += int64_t(shared_rows) * (a.head_dim + 2);
                }
        }
        const int64_t shared_scratch = shared_keys > 0 ? shared_tiles[shared_tiles.size() - a.num_kv_heads * shared_parts].scratch : 0;
        for (int token = 0; token < tokens; token += tile_tokens) {
            const int rows = std::min(tile_tokens, tokens - token) * group, heads = heads_of(rows);
            const Tile all = {s, 0, 1, 0, rows, 0, 0, 0, 1, false, false, 0};
            const int begin = std::max(visible(a, all, token * group).first, shared_keys);
            const int end = visible(a, all, token * group + rows - 1).last + 1;
            int parts = std::min(split, cuts(end - begin));
            if (whole < threads && parts > threads) parts = parts / threads * threads;  // or the last would be waited for
            const bool partial = parts > 1 || shared_keys > 0;
            const int step = ((end - begin + parts - 1) / parts + kLanes - 1) / kLanes * kLanes;
            for (int h = 0; h < a.num_kv_heads; h += heads) {
                const int own = std::min(heads, a.num_kv_heads - h);
                for (int p = 0; p < parts; p++) {
                    const int b = std::min(end, begin + p * step), e = std::min(end, begin + (p + 1) * step);
                    const Tile tile = {s, h, own, token * group, rows, b, e, p, parts, false, partial, plan.scratch};
                    plan.tiles.push_back(tile);
                    if (!partial) continue;
                    plan.scratch += int64_t(own) * rows * (a.head_dim + 2);
                    if (p == 0)
                        plan.merges.push_back({tile, shared_scratch, (s - prefix.first) * group, shared_rows, shared_keys > 0 ? shared_parts : 0});
                }
            }
        }
    }
    plan.tiles.insert(plan.tiles.end(), shared_tiles.begin(), shared_tiles.end());
    return plan;
}

template <class T, int D>
void write_out(const AttentionArgs& a, const Tile& t, const Rows& state) {
    for (int r = 0; r < t.heads * t.rows; r++) {
        IoOf<T>* out = out_row<T>(a, head_of(t, r / t.rows), t.row + r % t.rows);
        const float inverse = state.sum[r] > 0 ? 1.0f / state.sum[r] : 0.0f;
        for (int d = 0; d < D; d += kLanes) store(out + d, load(state.acc + r * D + d) * inverse);
    }
}

inline Rows& rows_of_thread() {
    thread_local std::unique_ptr<Rows> rows(new Rows);
    return *rows;
}

template <class T, int D>
void attend_tile(const AttentionArgs& a, const Tile& t, float* scratch, bool amx) {
    Rows& state = rows_of_thread();
    const int rows = t.heads * t.rows;
    std::fill(state.acc, state.acc + rows * D, 0.0f);
    std::fill(state.maximum, state.maximum + rows, kNegative);
    std::fill(state.sum, state.sum + rows, 0.0f);
    if (t.rows <= kFewRows)
        tile_few_rows<T, D>(a, t, state);
#ifdef TURNKEEP_AMX
    else if constexpr (std::is_same_v<T, BFloat16> && D % 32 == 0) {
        if (amx)
            tile_amx<D>(a, t, state);
        else
            tile_many_rows<T, D>(a, t, state);
    }
#endif
    else
        tile_many_rows<T, D>(a, t, state);
    if (!t.partial) {
        write_out<T, D>(a, t, state);
    } else {
        float* to = scratch + t.scratch;
        std::copy(state.acc, state.acc + rows * D, to);
        std::copy(state.maximum, state.maximum + rows, to + rows * D);
        std::copy(state.sum, state.sum + rows, to + rows * (D + 1));
    }
}

template <class T, int D>
void merge_parts(const AttentionArgs& a, const Merge& m, const float* scratch) {
    Rows& state = rows_of_thread();
    const Tile& t = m.own;
    const int rows = t.heads * t.rows;
    struct Partial {
        const float *acc, *maximum, *sum;
    };
    std::vector<Partial> partials(t.parts + m.shared_parts);
    for (int r = 0; r < rows; r++) {
        const auto partial = [&](int64_t at, int all, int row) {
            const float* from = scratch + at;
            return Partial{from + row * D, from + all * D + row, from + all * (D + 1) + row};
        };
        for (int p = 0; p < t.parts; p++) partials[p] = partial(t.scratch + int64_t(p) * rows * (D + 2), rows, r);
        for (int p = 0; p < m.shared_parts; p++) {
            const int64_t tile = int64_t(t.kv_head + r / t.rows) * m.shared_parts + p;
            partials[t.parts + p] = partial(m.shared + tile * m.shared_rows * (D + 2), m.shared_rows, m.shared_row + r % t.rows);
        }
        float maximum = kNegative, sum = 0;
        for (const Partial& p : partials) maximum = std::max(maximum, *p.maximum);
        float* acc = state.acc + r * D;
        std::fill(acc, acc + D, 0.0f);
        for (const Partial& p : partials) {
            const float factor = std::exp(*p.maximum - maximum);
            sum += *p.sum * factor;
            for (int d = 0; d < D; d += kLanes) store(acc + d, load(acc + d) + load(p.acc + d) * factor);
        }
        state.sum[r] = sum;
    }
    write_out<T, D>(a, t, state);
}

// Only within a pass of the team. `scratch` holds plan.scratch floats.
template <class T, int D>
void attend(Team& team, const AttentionArgs& a, const Plan& plan, float* scratch, bool amx) {
    const int64_t count = int64_t(plan.tiles.size());
    // Late tokens see more keys: the long tiles go first.
    team.run(count, [&](int64_t i) { attend_tile<T, D>(a, plan.tiles[count - 1 - i], scratch, amx); });
    if (plan.merges.empty()) return;
    team.run(int64_t(plan.merges.size()), [&](int64_t i) { merge_parts<T, D>(a, plan.merges[i], scratch); });
}

}  // namespace turnkeep
