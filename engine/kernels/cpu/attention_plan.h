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

// Rows are cut into tiles; where that gives the threads too little to share, long contexts are cut as well.
inline Plan make_plan(const AttentionArgs& a, int threads) {
    Plan plan;
    const int group = a.num_heads / a.num_kv_heads;
    const int tile_tokens = std::max(1, kMaxRows / group);
    int64_t whole = 0;
    for (int s = 0; s < a.num_sequences; s++) {
        const int tokens = a.query_start[s + 1] - a.query_start[s];
        whole += int64_t(tokens + tile_tokens - 1) / tile_tokens * a.num_kv_heads;
    }
    const int wanted = threads > 1 ? 4 * threads : 1;
    const int split = whole > 0 && whole < wanted ? int((wanted + whole - 1) / whole) : 1;
    for (int s = 0; s < a.num_sequences; s++) {
        const int tokens = a.query_start[s + 1] - a.query_start[s];
        for (int token = 0; token < tokens; token += tile_tokens) {
            const int rows = std::min(tile_tokens, tokens - token) * group;
            const Visible from = visible(a, s, token * group), to = visible(a, s, token * group + rows - 1);
            const int begin = from.first, end = to.last + 1;
            const int parts = std::max(1, std::min(split, (end - begin) / kSplitKeys));
            const int step = ((end - begin + parts - 1) / parts + kLanes - 1) / kLanes * kLanes;
            for (int h = 0; h < a.num_kv_heads; h++) {
                for (int p = 0; p < parts; p++) {
                    const int b = std::min(end, begin + p * step), e = std::min(end, begin + (p + 1) * step);
                    plan.tiles.push_back({s, h, token * group, rows, b, e, p, parts, plan.scratch});
                    if (parts > 1) plan.scratch += int64_t(rows) * (a.head_dim + 2);
                }
            }
        }
    }
    return plan;
}

template <class T, int D>
void write_out(const AttentionArgs& a, const Tile& t, const Rows& state) {
    for (int r = 0; r < t.rows; r++) {
        IoOf<T>* out = out_row<T>(a, t, t.row + r);
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
    std::fill(state.acc, state.acc + t.rows * D, 0.0f);
    std::fill(state.maximum, state.maximum + t.rows, kNegative);
    std::fill(state.sum, state.sum + t.rows, 0.0f);
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
        std::copy(state.acc, state.acc + t.rows * D, to);
        std::copy(state.maximum, state.maximum + t.rows, to + t.rows * D);
        std::copy(state.sum, state.sum + t.rows, to + t.rows * (D + 1));
    }
}

// Merges the parts of the tile whose first part is `t`.
template <class T, int D>
void merge_parts(const AttentionArgs& a, const Tile& t, const float* scratch) {
    Rows& state = rows_of_thread();
    const int64_t stride = int64_t(t.rows) * (D + 2);
    for (int r = 0; r < t.rows; r++) {
        float maximum = kNegative, sum = 0;
        for (int p = 0; p < t.parts; p++) maximum = std::max(maximum, scratch[t.scratch + p * stride + t.rows * D + r]);
        float* acc = state.acc + r * D;
        std::fill(acc, acc + D, 0.0f);
        for (int p = 0; p < t.parts; p++) {
            const float* from = scratch + t.scratch + p * stride;
            const float factor = std::exp(from[t.rows * D + r] - maximum);
            sum += from[t.rows * (D + 1) + r] * factor;
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
