// Causal attention of a ragged batch over paged KV, in tiles: rows (query tokens x the heads that share a KV head) against chunks
// of keys, with the running maximum and sum of the online softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention,
// arXiv 2205.14135). Long contexts of few rows are split over threads and merged (Flash-Decoding).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kv_rows.h"
#include "vectors.h"

namespace turnkeep {

constexpr int kChunk = 256;    // keys a tile scores before it rescales
constexpr int kFewRows = 12;   // up to here the few-rows tile is the faster one
constexpr int kMaxRows = 384;  // rows of a tile
constexpr float kNegative = -3.0e38f;

// A tile of work: rows [row, row + rows) of one sequence and KV head, against keys [key_begin, key_end).
struct Tile {
    int32_t sequence, kv_head, row, rows;
    int32_t key_begin, key_end;
    int32_t part, parts;  // which split of the keys this is
    int64_t scratch;      // where its partial result goes when parts > 1
};

// What a row may see: keys in [first, last].
struct Visible {
    int32_t first, last;
};

static inline Visible visible(const AttentionArgs& a, int sequence, int row) {
    const int group = a.num_heads / a.num_kv_heads;
    const int new_tokens = a.query_start[sequence + 1] - a.query_start[sequence];
    const int position = a.context_lens[sequence] - new_tokens + row / group;
    return {a.window > 0 ? std::max(0, position - a.window + 1) : 0, position};
}

// The kv head's part of the block that holds `key`.
template <class T>
static inline const T* key_block(const AttentionArgs& a, const Tile& t, int key, int side) {
    const int block = a.block_tables[t.sequence * a.table_stride + key / a.block_size];
    return static_cast<const T*>(a.kv) + block * a.kv_block + side * a.kv_side + t.kv_head * a.kv_head;
}

// For int8 these are codes.
template <class T>
static inline const T* key_row(const AttentionArgs& a, const Tile& t, int key, int side) {
    return key_block<T>(a, t, key, side) + (key % a.block_size) * a.kv_token;
}

// One key or value as floats.
template <class T, int D>
static inline void widen_row(const AttentionArgs& a, const Tile& t, int key, int side, float* to) {
    const T* from = key_row<T>(a, t, key, side);
    if constexpr (std::is_same_v<T, Int8>) {
        const float scale = *row_scale<D>(key_block<T>(a, t, key, side), a.block_size, key % a.block_size);
        for (int d = 0; d < D; d += kLanes) store(to + d, load(from + d) * scale);
    } else {
        for (int d = 0; d < D; d += kLanes) store(to + d, load(from + d));
    }
}

template <class T>
static inline const IoOf<T>* query_row(const AttentionArgs& a, const Tile& t, int row) {
    const int group = a.num_heads / a.num_kv_heads;
    return static_cast<const IoOf<T>*>(a.q) + (a.query_start[t.sequence] + row / group) * a.q_token +
           (t.kv_head * group + row % group) * a.q_head;
}

template <class T>
static inline IoOf<T>* out_row(const AttentionArgs& a, const Tile& t, int row) {
    const int group = a.num_heads / a.num_kv_heads;
    return static_cast<IoOf<T>*>(a.out) + (a.query_start[t.sequence] + row / group) * a.out_token +
           (t.kv_head * group + row % group) * a.out_head;
}

// The state of a tile's rows: accumulators [rows][D] (unnormalised), maxima and sums.
struct Rows {
    alignas(64) float acc[kMaxRows * 256];
    float maximum[kMaxRows];
    float sum[kMaxRows];
};

// Turns the scores of one row over `keys` keys (a multiple of 16, padded with whatever) into probabilities, in place, and folds
// the new maximum and sum into the row's state. Returns the factor by which what the row has gathered must shrink.
static inline float softmax_chunk(float* scores, int keys, float scale, int first, int last, float& maximum, float& sum) {
    const IVec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Vec top = splat(kNegative);
    for (int k = 0; k < keys; k += kLanes) {
        Vec s = load(scores + k) * scale;
        if (k < first || k + kLanes - 1 > last) {
            const IVec index = lane + k;
            const IVec hidden = (index < first) | (index > last);
            s = hidden ? splat(-INFINITY) : s;
        }
        store(scores + k, s);
        top = vmax(top, s);
    }
    const float new_maximum = std::max(maximum, max_lane(top));
    Vec total = splat(0.0f);
    for (int k = 0; k < keys; k += kLanes) {
        const Vec p = exp_nonpositive(load(scores + k) - new_maximum);
        store(scores + k, p);
        total += p;
    }
    const float shrink = maximum == new_maximum ? 1.0f : std::exp(maximum - new_maximum);
    sum = sum * shrink + sum_lanes(total);
    maximum = new_maximum;
    return shrink;
}

// Few rows: keys are widened once, each row takes its dot products token by token and sums sixteen of them at once.
template <class T, int D>
static void tile_few_rows(const AttentionArgs& a, const Tile& t, Rows& state) {
    alignas(64) float wide[kLanes * D];
    alignas(64) float scores[kFewRows * kChunk];
    const int rows = t.rows;
    for (int begin = t.key_begin; begin < t.key_end; begin += kChunk) {
        const int keys = std::min(kChunk, t.key_end - begin);
        const int padded = (keys + kLanes - 1) / kLanes * kLanes;
        for (int k = 0; k < padded; k += kLanes) {
            for (int j = 0; j < kLanes; j++) widen_row<T, D>(a, t, begin + std::min(k + j, keys - 1), 0, wide + j * D);
            for (int r = 0; r < rows; r++) {
                const IoOf<T>* q = query_row<T>(a, t, t.row + r);
                Vec query[D / kLanes], partial[kLanes];
                for (int d = 0; d < D / kLanes; d++) query[d] = load(q + d * kLanes);
                for (int j = 0; j < kLanes; j++) {
                    Vec s = query[0] * load(wide + j * D);
                    for (int d = 1; d < D / kLanes; d++) s += query[d] * load(wide + j * D + d * kLanes);
                    partial[j] = s;
                }
                store(scores + r * kChunk + k, sum_each(partial));
            }
        }
        for (int r = 0; r < rows; r++) {
            const Visible v = visible(a, t.sequence, t.row + r);
            const int first = v.first - begin, last = std::min(v.last - begin, keys - 1);
            float* acc = state.acc + r * D;
            if (last < 0 || first >= keys) {
                std::fill(scores + r * kChunk, scores + r * kChunk + padded, 0.0f);
                continue;
            }
            const float shrink =
                softmax_chunk(scores + r * kChunk, padded, a.scale, first, last, state.maximum[r], state.sum[r]);
            if (shrink != 1.0f)
                for (int d = 0; d < D; d += kLanes) store(acc + d, load(acc + d) * shrink);
        }
        for (int k = 0; k < padded; k += kLanes) {
            for (int j = 0; j < kLanes; j++) widen_row<T, D>(a, t, begin + std::min(k + j, keys - 1), 1, wide + j * D);
            for (int r = 0; r < rows; r++) {
                float* acc = state.acc + r * D;
                const float* p = scores + r * kChunk + k;
                Vec sum[D / kLanes];
                for (int d = 0; d < D / kLanes; d++) sum[d] = load(acc + d * kLanes);
                for (int j = 0; j < kLanes; j++)
                    for (int d = 0; d < D / kLanes; d++) sum[d] += p[j] * load(wide + j * D + d * kLanes);
                for (int d = 0; d < D / kLanes; d++) store(acc + d * kLanes, sum[d]);
            }
        }
    }
}

}  // namespace turnkeep
