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

constexpr int kSplitKeys = 512;    // shortest run of keys worth a split of its own

struct Plan {
    std::vector<Tile> tiles;
    int64_t scratch = 0;  // floats of partial results
};

// Rows are cut into tiles; where that gives the threads too little to share, long contexts are cut as well. Tiles of few rows have all
// KV heads, whose keys and values are neighbours in memory, unless the threads would then be left without work.
inline Plan make_plan(const AttentionArgs& a, int threads) {
    Plan plan;
    const int group = a.num_heads / a.num_kv_heads;
    const int tile_tokens = std::max(1, kMaxRows / group);
    const auto tokens_of = [&](int s) { return a.query_start[s + 1] - a.query_start[s]; };
    const auto cuts = [](int keys) { return std::max(1, keys / kSplitKeys); };
    const auto is_few = [&](int tokens) { return tokens * group <= kFewRows; };
    int64_t possible = 0;
    for (int s = 0; s < a.num_sequences; s++) {
        const int tokens = tokens_of(s), seen = a.window > 0 ? std::min(a.window, a.context_lens[s]) : a.context_lens[s];
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
    for (int s = 0; s < a.num_sequences; s++) {
        const int tokens = tokens_of(s);
        for (int token = 0; token < tokens; token += tile_tokens) {
            const int rows = std::min(tile_tokens, tokens - token) * group, heads = heads_of(rows);
            const Visible from = visible(a, s, token * group), to = visible(a, s, token * group + rows - 1);
            const int begin = from.first, end = to.last + 1;
            int parts = std::min(split, cuts(end - begin));
            if (whole < threads && parts > threads) parts = parts / threads * threads;  // or the last would be waited for
            const int step = ((end - begin + parts - 1) / parts + kLanes - 1) / kLanes * kLanes;
            for (int h = 0; h < a.num_kv_heads; h += heads) {
                const int own = std::min(heads, a.num_kv_heads - h);
                for (int p = 0; p < parts; p++) {
                    const int b = std::min(end, begin + p * step), e = std::min(end, begin + (p + 1) * step);
                    plan.tiles.push_back({s, h, own, token * group, rows, b, e, p, parts, plan.scratch});
                    if (parts > 1) plan.scratch += int64_t(own) * rows * (a.head_dim + 2);
                }
            }
        }
    }
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
    if (t.parts == 1) {
        write_out<T, D>(a, t, state);
    } else {
        float* to = scratch + t.scratch;
        std::copy(state.acc, state.acc + rows * D, to);
        std::copy(state.maximum, state.maximum + rows, to + rows * D);
        std::copy(state.sum, state.sum + rows, to + rows * (D + 1));
    }
}

// Merges the parts of the tile whose first part is `t`.
template <class T, int D>
void merge_parts(const AttentionArgs& a, const Tile& t, const float* scratch) {
    Rows& state = rows_of_thread();
    const int rows = t.heads * t.rows;
    const int64_t stride = int64_t(rows) * (D + 2);
    for (int r = 0; r < rows; r++) {
        float maximum = kNegative, sum = 0;
        for (int p = 0; p < t.parts; p++) maximum = std::max(maximum, scratch[t.scratch + p * stride + rows * D + r]);
        float* acc = state.acc + r * D;
        std::fill(acc, acc + D, 0.0f);
        for (int p = 0; p < t.parts; p++) {
            const float* from = scratch + t.scratch + p * stride;
            const float factor = std::exp(from[rows * D + r] - maximum);
            sum += from[rows * (D + 1) + r] * factor;
            for (int d = 0; d < D; d += kLanes) store(acc + d, load(acc + d) + load(from + r * D + d) * factor);
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
    if (!plan.scratch) return;
    team.run(count, [&](int64_t i) {
        const Tile& t = plan.tiles[i];
        if (t.parts > 1 && t.part == 0) merge_parts<T, D>(a, t, scratch);
    });
}

}  // namespace turnkeep
