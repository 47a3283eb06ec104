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

// A tile of work: rows [row, row + rows) of one sequence, of each of the KV heads [kv_head, kv_head + heads), against keys
// [key_begin, key_end). Only tiles of few rows have more than one head. A shared tile has the rows of several sequences, one token
// each, that follow one another in the batch and share the blocks of these keys: every row sees all of them.
struct Tile {
    int32_t sequence, kv_head, heads, row, rows;
    int32_t key_begin, key_end;
    int32_t part, parts;  // which split of the keys this is
    bool shared;
    bool partial;     // its result is merged with others
    int64_t scratch;  // where a partial result goes: accumulators [heads * rows][D], maxima, sums
};

// What a row may see: keys in [first, last].
struct Visible {
    int32_t first, last;
};

static inline Visible visible(const AttentionArgs& a, const Tile& t, int row) {
    if (t.shared) return {t.key_begin, t.key_end - 1};
    const int sequence = t.sequence;
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

// Calls use(index, key, value, scale of the key, scale of the value) for keys [begin, begin + keys).
template <class T, int D, class Use>
static inline void for_keys(const AttentionArgs& a, const Tile& t, int begin, int keys, const Use& use) {
    for (int j = 0; j < keys;) {
        const int offset = (begin + j) % a.block_size, run = std::min(keys - j, a.block_size - offset);
        const T* k = key_block<T>(a, t, begin + j, 0);
        const T* v = key_block<T>(a, t, begin + j, 1);
        for (int i = 0; i < run; i++) {
            if constexpr (std::is_same_v<T, Int8>)
                use(j + i, k + (offset + i) * D, v + (offset + i) * D, row_scale<D>(k, a.block_size, offset)[i],
                    row_scale<D>(v, a.block_size, offset)[i]);
            else
                use(j + i, k + (offset + i) * a.kv_token, v + (offset + i) * a.kv_token, 1.0f, 1.0f);
        }
        j += run;
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

// One KV head of a tile.
static inline Tile head_of(const Tile& t, int head) {
    Tile one = t;
    one.kv_head += head;
    one.heads = 1;
    return one;
}

// The state of a tile's rows, head after head: accumulators [rows][D] (unnormalised), maxima and sums.
struct Rows {
    alignas(64) float acc[kMaxRows * 256];
    float maximum[kMaxRows];
    float sum[kMaxRows];
};

// Turns the scores of one row over `keys` keys (a multiple of 16, padded with whatever) into probabilities, in place, and folds
// the new maximum and sum into the row's state. Returns the factor by which what the row has gathered must shrink.
// (Not inlined: a build for AVX2 took a minute where it was.)
static __attribute__((noinline)) float softmax_chunk(float* scores, int keys, float scale, int first, int last, float& maximum,
                                                     float& sum) {
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

}  // namespace turnkeep
